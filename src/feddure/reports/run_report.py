"""One HTML file that shows what runs did: headline numbers, curves, classes, partition, configuration.

The file needs nothing beside itself, no network and no script; equal runs give equal files.
"""

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from matplotlib.figure import Figure

from feddure import config
from feddure.errors import RunError
from feddure.files import write_whole
from feddure.reports import diagnostics_figures, diagnostics_summary, figures
from feddure.reports.participation import participation
from feddure.reports.text import first, images_of, in_words, title
from feddure.tracking import summary
from feddure.tracking.records import Record, Run, read_run
from feddure.tracking.summary import NOTHING, Summary, percent, points, spoken
from feddure.version import VERSION

_ALWAYS_COLUMNS = ("method", "partition.setting", "seed")
_OTHER_COLUMNS = (*_ALWAYS_COLUMNS, "rounds")  # fields that the table of runs shows anyway
_MARKERS = {"o": "●", "s": "■", "^": "▲", "D": "◆", "v": "▼"}
_MOST_COLUMNS = 4  # further fields in the table of runs; the configuration shows them all


class Picture(NamedTuple):
    """A figure as the page embeds it."""

    source: str  # a data URI
    alt: str
    width: int
    height: int
    caption: str = ""


class Table(NamedTuple):
    """Column names, and rows whose first cell names them; `marked` rows are highlighted."""

    columns: list[str]
    rows: list[list[str]]
    marked: frozenset[str] = frozenset()


class Opening(NamedTuple):
    """What a comparison of methods says before the runs one by one."""

    methods: Table
    methods_note: str
    pairs: Table
    pairs_note: str
    charts: Sequence[tuple[Figure, str]]  # with their alternative texts
    every_run: bool  # whether runs have more to tell than the methods


def write_report(run_folders: Sequence[Path], out: Path, opening: Opening | None = None) -> Path:
    """Write the report of one or several runs, whole or not at all; returns where it lies."""
    if not run_folders:
        raise RunError("no run was given: name one or more run folders")
    runs = [read_run(folder) for folder in run_folders]
    if out.is_dir():
        raise RunError(f"{out}: a folder was given for the report; expected a file such as {out / 'report.html'}")
    if not out.parent.is_dir():
        raise RunError(f"{out}: the folder {out.parent} does not exist; make it first")
    write_whole(out, render(runs, opening).encode(), RunError)
    return out


def render(runs: Sequence[Run], opening: Opening | None = None) -> str:
    """The report as HTML."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("feddure.reports"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    charts = [embed(*chart) for chart in opening.charts] if opening else []
    return environment.get_template("report.html.j2").render(_page(runs) | {"opening": opening, "charts": charts})


def embed(figure: Figure, alt: str, caption: str = "") -> Picture:
    """A figure as a page can hold it."""
    across, up = figure.get_size_inches()
    encoded = base64.b64encode(figures.svg(figure).encode()).decode()
    return Picture(f"data:image/svg+xml;base64,{encoded}", alt, round(100 * across), round(100 * up), caption)


def _page(runs: Sequence[Run]) -> dict[str, Any]:
    summaries = [summary.summarise(run.metrics, run.timing) for run in runs]
    labels = summary.labels([run.experiment for run in runs], [run.name for run in runs])
    by_label = {label: run.metrics for label, run in zip(labels, runs, strict=True)}
    diagnostics = _diagnostics(runs, by_label)
    return {
        "title": title(runs),
        "sentences": in_words(runs),
        "several": len(runs) > 1,
        "notes": _notes(runs),
        "cards": _cards(runs[0], summaries[0]) if len(runs) == 1 else [],
        "comparison": _comparison(runs, summaries) if len(runs) > 1 else None,
        "swatches": [_swatch(place) for place in range(len(runs))],
        "repeats": _repeats(runs),
        "curves": _curves(by_label),
        "classes": _classes(runs, by_label),
        "confusions": _confusions(runs, labels),
        "partitions": _partitions(runs, labels),
        "sites": _sites(runs, labels),
        "diagnostics": diagnostics,
        "training": _training(by_label, drawn=diagnostics_summary.TRAINING if diagnostics else ()),
        "changes": _changes(runs, labels),
        "configuration": _configuration(runs),
        "environment": _environment(runs, labels),
        "replays": [_replay(run, label) for run, label in zip(runs, labels, strict=True)],
        "version": VERSION,
    }


def _notes(runs: Sequence[Run]) -> list[str]:
    """What a reader must know before the numbers: what is missing and what went wrong."""
    kinds: dict[str, list[str]] = {
        "Unfinished": [],
        "Not evaluated yet": [],
        "Updates left out, not finite": [],
        "Updates of sites left out, see Sites": [],
    }
    unfinished, unevaluated, left_out, left_out_sites = kinds.values()
    for run in runs:
        subject = f"{run.name}: " if len(runs) > 1 else ""
        if not run.finished:
            unfinished.append(f"{subject}{run.rounds} of {run.experiment.rounds} rounds")
        if not summary.evaluations(run.metrics, "accuracy"):
            due = min(run.experiment.evaluate_every, run.experiment.rounds)
            unevaluated.append(f"{subject}the first evaluation follows round {due}")
        if lost := summary.summarise(run.metrics).left_out:
            updates = sum(len(record.get("clients", ())) for record in run.metrics)
            (left_out_sites if participation(run) else left_out).append(f"{subject}{lost:,} of {updates:,}")
    return [
        f"{kind}{'. ' if len(runs) > 1 else ': '}{'; '.join(first(found, most=4))}."
        for kind, found in kinds.items()
        if found
    ]


def _cards(run: Run, found: Summary) -> list[tuple[str, str, str]]:
    """(what, value, note) of the headline numbers."""
    last = summary.evaluations(run.metrics, "accuracy")[-1:]
    cards = [
        (
            "Test accuracy",
            percent(found.accuracy_last10, 1),
            found.mean_of + " evaluations" * (found.evaluations > 1),
        ),
        ("Last evaluation", percent(found.accuracy_last, 1), f"round {last[0][0]}" if last else "none yet"),
    ]
    if found.accuracy_ema_last10 is not None:
        note = f"{percent(found.accuracy_ema_last, 1)} at the last"
        cards.append(("Averaged model", percent(found.accuracy_ema_last10, 1), note))
    return [
        *cards,
        ("Rounds", f"{found.rounds:,}", "all done" if run.finished else f"of {run.experiment.rounds:,}"),
        (
            "Local steps",
            f"{found.local_steps:,}",
            f"{summary.number(found.mean_local_steps, 1)} per client and round",
        ),
        (
            "Time",
            summary.duration(found.seconds),
            f"{summary.number(found.clients_per_second, 1)} clients per second",
        ),
    ]


def _comparison(runs: Sequence[Run], summaries: Sequence[Summary]) -> Table:
    """A row for each run: what sets it apart, then its numbers; the page adds the colours."""
    apart = summary.differences([run.experiment for run in runs])
    further = [key for key in apart if key not in _OTHER_COLUMNS and not key.startswith("engine.")][:_MOST_COLUMNS]
    averaged = any(found.accuracy_ema_last10 is not None for found in summaries)
    columns = [
        "run",
        "method",
        "setting",
        "seed",
        *map(summary.field_name, further),
    ]
    columns += ["rounds", "last", "last 10", *(["averaged model"] if averaged else [])]
    rows = []
    for run, found in zip(runs, summaries, strict=True):
        tree = summary.flat(run.experiment)
        rows.append(
            [
                run.name,
                spoken(tree["method"]),
                *(_shown(tree[key]) for key in (*_ALWAYS_COLUMNS[1:], *further)),
                f"{found.rounds}" if run.finished else f"{found.rounds} of {run.experiment.rounds}",
                points(found.accuracy_last),
                points(found.accuracy_last10),
                *([points(found.accuracy_ema_last10)] if averaged else []),
                f"{found.local_steps:,}",
                summary.number(found.mean_local_steps, 1),
                summary.duration(found.seconds),
            ]
        )
    return Table([*columns, "local steps", "per client", "time"], rows)


def _repeats(runs: Sequence[Run]) -> Table | None:
    rows = [
        [
            found.label,
            ", ".join(map(str, found.seeds)) if len(found.seeds) <= 6 else f"{len(found.seeds)} seeds",
            *(f"{100 * mean:.2f} ± {100 * spread:.2f}" for mean, spread in (found.last, found.last10)),
        ]
        for found in summary.over_seeds(runs)
    ]
    return Table(["runs", "seeds", "last", "last 10"], rows) if rows else None


def _swatch(place: int) -> tuple[str, str]:
    look = figures.look(place)
    return look["color"], _MARKERS[look["marker"]]


def _curves(by_label: figures.Runs) -> list[Picture]:
    if not any(summary.evaluations(metrics, "accuracy") for metrics in by_label.values()):
        return []
    ends = "; ".join(
        f"{label} ends at {percent(points[-1][1], 1)}"
        for label, metrics in by_label.items()
        if (points := summary.evaluations(metrics, "accuracy"))
    )
    pictures = [embed(figures.accuracy(by_label), f"Test accuracy against rounds: {ends}")]
    if any(summary.evaluations(metrics, "loss") for metrics in by_label.values()):
        pictures.append(embed(figures.loss(by_label), "Test loss against rounds"))
    return pictures


def _classes(runs: Sequence[Run], by_label: figures.Runs) -> list[Picture]:
    """The accuracy of each class, where all runs have the same ones."""
    found = {label: summary.evaluations(metrics, "per_class") for label, metrics in by_label.items()}
    evaluated = [run for run, points in zip(runs, found.values(), strict=True) if points]
    names = {_class_names(run) for run in evaluated}
    if len(names) != 1:
        return []
    classes = names.pop()
    pictures = [embed(figures.per_class(by_label, classes), "Accuracy of each class at the last evaluation")]
    if len(runs) == 1:
        history = figures.class_history(runs[0].metrics, classes)
        pictures.append(embed(history, "Accuracy of each class over the rounds"))
    return pictures


def _confusions(runs: Sequence[Run], labels: Sequence[str]) -> list[Picture]:
    pictures = []
    for run, label in zip(runs, labels, strict=True):
        found = summary.evaluations(run.metrics, "confusion")
        if found:
            last_round, counts = found[-1]
            alt = f"Confusion matrix of {label} at round {last_round}"
            caption = label if len(runs) > 1 else ""
            pictures.append(embed(figures.confusion(counts, _class_names(run)), alt, caption))
    return pictures


def _partitions(runs: Sequence[Run], labels: Sequence[str]) -> list[tuple[Picture, str]]:
    """Each different partition once, with what is known about it."""
    users: dict[str, list[int]] = {}
    for place, run in enumerate(runs):
        if run.partition.keys() >= {"classes", "labelled", "unlabelled", "parameters"}:
            users.setdefault(str(run.partition.get("sha256", place)), []).append(place)
    found = []
    for places in users.values():
        partition = runs[places[0]].partition
        moved = sum(repair["number"] for repair in partition.get("repairs") or ())
        labelled, unlabelled = images_of(partition)
        facts = [
            f"{labelled / len(partition['labelled']):,.0f} labelled and "
            f"{unlabelled / len(partition['labelled']):,.0f} unlabelled images in the mean client.",
            f"{moved:,} images were moved so that no client has too few." if moved else "",
            f"SHA-256 {partition['sha256'][:16]}…" if "sha256" in partition else "",
        ]
        picture = figures.ownership(partition, spoken(runs[places[0]].experiment.dataset))
        caption = "; ".join(labels[place] for place in places) if len(users) > 1 else ""
        alt = "Number of labelled and unlabelled images of each class on each client"
        found.append((embed(picture, alt, caption), " ".join(filter(None, facts))))
    return found


def _sites(runs: Sequence[Run], labels: Sequence[str]) -> list[tuple[str, Table, list[str]]]:
    """For each run over real sites: its label where there are several, who took part, and what went wrong."""
    several = len(runs) > 1
    return [
        (label if several else "", Table(found.columns, found.rows), found.notes)
        for run, label in zip(runs, labels, strict=True)
        if (found := participation(run)) is not None
    ]


def _diagnostics(runs: Sequence[Run], by_label: figures.Runs) -> dict[str, Any] | None:
    """What pseudo labels were worth: figures with their sentences, and numbers to compare runs by."""
    names = {tuple(run.partition.get("classes", ())) for run in runs}
    charts = diagnostics_figures.draw(by_label, names.pop() if len(names) == 1 else ())
    if not charts:
        return None
    columns, rows = diagnostics_summary.table(by_label)
    return {
        "charts": [(embed(chart.figure, chart.title, chart.title), chart) for chart in charts],
        "table": Table(["run", *columns], [[label, *cells] for label, cells in rows.items()]),
        "swatches": [_swatch(place) for place, label in enumerate(by_label) if label in rows],
        "rounds": diagnostics_summary.LAST_ROUNDS,
    }


def _training(by_label: figures.Runs, drawn: Sequence[str]) -> Picture | None:
    """What methods recorded while training, but for what is drawn elsewhere."""

    def rest(record: Record) -> Record:
        return {**record, "train": {k: v for k, v in record.get("train", {}).items() if k not in drawn}}

    figure = figures.training({label: list(map(rest, metrics)) for label, metrics in by_label.items()})
    return embed(figure, "Quantities recorded while training, against rounds") if figure else None


def _changes(runs: Sequence[Run], labels: Sequence[str]) -> Table:
    """What differs from the defaults, or between runs."""
    if len(runs) == 1:
        every = _configuration(runs)
        return Table(every.columns, [row for row in every.rows if row[0] in every.marked])
    keys = summary.differences([run.experiment for run in runs])
    trees = [summary.flat(run.experiment) for run in runs]
    rows = [[label, *(_shown(tree[key]) for key in keys)] for label, tree in zip(labels, trees, strict=True)]
    return Table(["run", *keys], rows if keys else [])


def _configuration(runs: Sequence[Run]) -> Table:
    """Every field with its value, default and meaning; marked where it is not the default or differs."""
    experiments = [run.experiment for run in runs]
    marked = summary.differences(experiments) if len(runs) > 1 else summary.changed(experiments[0])
    tree = summary.flat(experiments[0])
    rows = [
        [
            key,
            "(differs)" if len(runs) > 1 and key in marked else _shown(tree[key]),
            default or NOTHING,
            meaning.replace("`", ""),
        ]
        for key, default, meaning in config.fields()
    ]
    return Table(["field", "value", "default", "meaning"], rows, frozenset(marked))


def _environment(runs: Sequence[Run], labels: Sequence[str]) -> list[Table]:
    """Where the runs were made: what they share, then what differs."""
    keys = list(dict.fromkeys(key for run in runs for key in run.environment))
    values = {key: [_shown(run.environment.get(key)) for run in runs] for key in keys}
    shared = [[key, found[0]] for key, found in values.items() if len(set(found)) == 1]
    apart = [key for key in keys if len(set(values[key])) > 1]
    each = [[label, *(values[key][place] for key in apart)] for place, label in enumerate(labels)]
    tables = [Table(["", ""], shared), Table(["run", *apart], each if apart else [])]
    return [table for table in tables if table.rows]


def _replay(run: Run, label: str) -> dict[str, str]:
    text = run.experiment.to_yaml()
    encoded = base64.b64encode(text.encode()).decode()
    return {"label": label, "name": run.name, "yaml": text, "file": f"data:application/yaml;base64,{encoded}"}


def _class_names(run: Run) -> tuple[str, ...]:
    """Names of the classes of a run's last evaluation."""
    size = len(summary.evaluations(run.metrics, "per_class")[-1][1])
    names = tuple(map(str, run.partition.get("classes", ())))[:size]
    return names if len(names) == size else tuple(f"class {number}" for number in range(size))


def _shown(value: Any) -> str:
    return NOTHING if value in (None, "", {}) else str(value)
