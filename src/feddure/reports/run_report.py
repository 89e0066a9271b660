"""One HTML file that shows what runs did: headline numbers, curves, classes, partition, configuration.

The file needs nothing beside itself and no network, and reads without script; equal runs give equal files.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from feddure import experiments, methods
from feddure.config import DIRICHLET, Experiment
from feddure.errors import RunError
from feddure.files import write_whole
from feddure.reports import diagnostics, figures, frame, partition_figure, quality, style
from feddure.reports.figures import Line, Shown
from feddure.reports.names import axis, data_size, listed
from feddure.reports.names import labels as labels_of
from feddure.reports.page import Code, Files, Group, Section, Table, Text, embed, page, table
from feddure.tracking import summary
from feddure.tracking.metrics import TITLES
from feddure.tracking.records import Run, read_run
from feddure.tracking.summary import NOTHING, Summary, display_name, percent, points

_SETTINGS = {
    "iid-iid": "Labelled and unlabelled images are spread evenly over the clients",
    "iid-dir": "Labelled images are spread evenly, unlabelled ones by a Dirichlet draw per class",
    "dir-dir": "Labelled and unlabelled images are spread by separate Dirichlet draws per class",
    "fedmatch": "Labelled images are spread evenly, unlabelled ones in FedMatch's class mixes",
    "pairs": "Every two clients divide a random chunk of the images by a Dirichlet draw per class, as in SAGE",
    "sites": "A site's images train its own client alone",
}
_COLUMNS = ("method", "partition.setting", "seed")  # of the table of runs, whether they differ or not
_SEEDS = ("seed", "partition.seed")
_MOST_COLUMNS = 4  # further fields in the table of runs; the configuration shows them all


def write_report(
    run_folders: Sequence[Path], out: Path, opening: Sequence[Section] = (), metric: str | None = None
) -> Path:
    """Write the report of one or several runs, whole or not at all; returns where it lies.

    A comparison's `opening` stands before the runs one by one, and its `metric` ranks in place of the runs' own.
    """
    if not run_folders:
        raise RunError("no run was given: name one or more run folders")
    runs = [read_run(folder) for folder in run_folders]
    if out.is_dir():
        raise RunError(f"{out}: a folder was given for the report; expected a file such as {out / 'report.html'}")
    if not out.parent.is_dir():
        raise RunError(f"{out}: the folder {out.parent} does not exist; make it first")
    write_whole(out, render(runs, opening, metric).encode(errors="replace"), RunError)
    return out


def render(runs: Sequence[Run], opening: Sequence[Section] = (), metric: str | None = None) -> str:
    """The report as HTML."""
    metric = metric or frame.metric_of(frame.of_runs(runs))
    labels = labels_of([run.experiment for run in runs], [run.name for run in runs])
    formats = style.run_line_styles(run.experiment.method for run in runs)
    shown = [
        Shown(run, summary.summarise(run.metrics, run.timing, metric), Line(label, run.metrics, fmt))
        for run, label, fmt in zip(runs, labels, formats, strict=True)
    ]
    one_a_method = len({run.experiment.method for run in runs}) == len(runs)
    sections = [
        *opening,
        *(_runs(shown, bool(opening)) if not (opening and one_a_method) else ()),
        *_curves(shown, metric),
        *quality.sections(shown),
        *_classes(shown),
        *_pseudo_labels(shown),
        *_probes(runs),
        *_partitions(shown),
        *_sites(shown),
        *_configuration(shown),
        *_environment(runs),
        _again(runs),
    ]
    return page(
        "Comparison of runs" if len(runs) > 1 else "Run report",
        _title(runs),
        [("", " ".join(_in_words(runs)))],
        sections,
        notes=_notes(shown),
        cards=_cards(runs[0], shown[0].summary) if len(runs) == 1 else (),
    )


# --- what comes first --------------------------------------------------------------------------------------
def _title(runs: Sequence[Run]) -> str:
    names = list(dict.fromkeys(methods.title(run.experiment.method) for run in runs))
    datasets = list(dict.fromkeys(_short(run.experiment.dataset) for run in runs))
    text = f"{listed(names, 4)} on {listed(datasets, 4)}"
    return text if len(runs) == 1 else f"{text}, {len(runs)} runs"


def _short(dataset: str) -> str:
    """A data set's name; of own images the folder's or file's, as the configuration has the rest."""
    own = dataset.startswith(("folder:", "npz:"))
    return Path(dataset.partition(":")[2].partition("?")[0]).name if own else display_name(dataset)


def _in_words(runs: Sequence[Run]) -> Iterator[str]:
    """What the runs have in common, in sentences, and what sets them apart."""
    experiment, partition = runs[0].experiment, runs[0].experiment.partition
    apart = experiments.differences([run.experiment for run in runs])
    if not {"partition.clients", "clients_per_round", "rounds"} & set(apart):
        clients = len(runs[0].partition.get("labelled", ())) or partition.clients
        drawn = min(experiment.clients_per_round, clients)
        yield f"{drawn} of {clients} clients train in each of {experiment.rounds} rounds."
    if not {"partition.setting", "partition.gamma"} & set(apart):
        gamma = f" (γ = {partition.gamma:g})" if partition.setting in DIRICHLET else ""
        yield f"{_SETTINGS[partition.setting]}{gamma}."
    counts = {frame.images_of(run.partition) for run in runs}
    if len(counts) == 1 and all(sum(pair) for pair in counts):
        labelled, unlabelled = counts.pop()
        held = runs[0].partition.get("validation") or 0
        also = f"; {held:,} more are set aside for validation" if held and "validation" not in apart else ""
        if partition.labelled_as_unlabelled:
            others = f"{unlabelled:,} count as unlabelled, labelled ones among them"
        else:
            others = f"{unlabelled:,} do not"
        yield f"{labelled:,} images carry a label, {others}{also}."
    if "model" not in apart:
        yield f"Network: {display_name(experiment.model)}."
    if len(runs) == 1:
        yield f"Seed: {experiment.seed}."
    elif apart:
        yield f"The runs differ in {listed([axis(key) for key in apart], most=5)}."


def _notes(shown: Sequence[Shown]) -> list[str]:
    """What a reader must know before the numbers: what is missing and what went wrong."""
    notes: dict[str, list[str]] = {}

    def note(run: Run, kind: str, text: str) -> None:
        notes.setdefault(kind, []).append(f"{run.name}: {text}" if len(shown) > 1 else text)

    for run, found, _ in shown:
        if not run.finished:
            note(run, "Unfinished", f"{run.rounds} of {run.experiment.rounds} rounds")
        if not found.evaluations and found.score.validation_last is None:
            due = min(run.experiment.evaluate_every, run.experiment.rounds)
            note(run, "Not evaluated yet", f"the first evaluation follows round {due}")
        for text in run.partition.get("notes") or ():
            note(run, "Images", str(text))
        if damaged := run.partition.get("damaged"):
            note(run, "Damaged files, left out and listed in partition.json", f"{len(damaged):,}")
        if found.left_out:
            updates = sum(len(record.get("clients", ())) for record in run.metrics)
            kind = "Updates of sites left out, see Sites" if participation(run) else "Updates left out, not finite"
            note(run, kind, f"{found.left_out:,} of {updates:,}")
        suspects = Counter(int(client) for record in run.metrics for client in record.get("suspicious", {}))
        names = dict(enumerate(run.federation.get("names", ())))
        if suspects:
            often = [f"{names.get(c, f'client {c}')} in {rounds} rounds" for c, rounds in suspects.most_common()]
            note(run, "Updates that looked hostile", listed(often, 6))
    return [f"{kind}: {listed(found, 4, '; ')}." for kind, found in notes.items()]


def _cards(run: Run, found: Summary) -> list[tuple[str, str, str]]:
    """(what, value, note) of the headline numbers."""
    row = frame.of_runs([run]).iloc[0]
    mean_of = found.mean_of + " evaluations" * (found.evaluations > 1)
    last = f"round {row.curve[-1][0]}" if row.curve else "none yet"
    test, score = f"Test {TITLES[found.metric]}", found.score
    tested, validated = found.evaluations or score.best_round is None, score.best_round is not None
    steps, speed = summary.number(found.mean_local_steps, 1), summary.number(found.clients_per_second, 1)
    best = f"{percent(score.best, 1)} test, round {score.best_round}"
    exported = summary.model_to_use(run, found)
    cards = [
        *([(True, "The model to use", percent(exported[0], 1), exported[1])] if exported else []),
        (tested, test, percent(score.last10, 1), mean_of),
        (tested and found.evaluations != 1, "Last evaluation", percent(score.last, 1), last),
        (score.ema_last is not None, "Averaged model", percent(score.ema_last10, 1),
         f"{mean_of}; {percent(score.ema_last, 1)} at the last"),
        (validated, "Best validation", percent(score.validation_best, 1), best),
        (True, "Rounds", f"{found.rounds:,}", "all done" if run.finished else f"of {run.experiment.rounds:,}"),
        (True, "Local steps", f"{found.local_steps:,}", f"{steps} per client and round"),
        (row.bytes_down >= 0, "Communication", data_size(row.bytes_down),
         f"sent by the server; {data_size(row.bytes_up)} by clients"),
        (True, "Time", summary.duration(found.seconds), f"{speed} clients per second"),
        (found.privacy is not None, "Differential privacy", found.privacy or "",
         "of a client with all its images, over all rounds"),
    ]  # fmt: skip
    return [(what, value, note) for known, what, value, note in cards if known]


def _runs(shown: Sequence[Shown], beside: bool) -> list[Section]:
    """A row for each run: what sets it apart, then its numbers; and means of runs that differ in their seeds alone."""
    if len(shown) == 1:
        return []
    runs, summaries = [one.run for one in shown], [one.summary for one in shown]
    apart = experiments.differences([run.experiment for run in runs])
    fields = [key for key in apart if key not in (*_COLUMNS, "rounds") and not key.startswith("engine.")]
    fields = [*_COLUMNS[1:], *fields[:_MOST_COLUMNS]]
    mean = summary.mean_heading(found.evaluations for found in summaries)
    scores = {"last": "last"} | ({mean: "last10"} if mean else {})
    if any(found.score.ema_last is not None for found in summaries):
        scores["averaged model"] = "ema_last10"
    if any(found.score.best_round is not None for found in summaries):
        scores |= {"validation": "validation_last10", "best": "validation_best", "test there": "best"}
    private = any(found.privacy for found in summaries)
    columns = ["run", "method", *map(axis, fields), "rounds", *scores]
    columns += ["local steps", "per client", "time", *([summary.PRIVACY] if private else ())]
    rows = []
    for run, found, _ in shown:
        tree = experiments.flat(run.experiment)
        rows.append(
            [
                run.name,
                methods.title(tree["method"]),
                *(_text(tree[key]) for key in fields),
                f"{found.rounds}" if run.finished else f"{found.rounds} of {run.experiment.rounds}",
                *(points(getattr(found.score, name)) for name in scores.values()),
                f"{found.local_steps:,}",
                summary.number(found.mean_local_steps, 1),
                summary.duration(found.seconds),
                *([found.privacy or NOTHING] if private else ()),
            ]
        )
    parts: list[Any] = [Table(columns, rows, numbers_from=columns.index("rounds"), formats=_formats(shown))]
    metric = summaries[0].metric
    repeats = [] if beside else _over_seeds(runs, metric)
    if repeats:
        parts.append(Text("Mean and standard deviation over seeds", "heading"))
        columns = ["runs", "seeds", "last", *([mean] if mean else ())]
        parts.append(Table(columns, [row[: len(columns)] for row in repeats], numbers_from=2))
    text = f"Test {TITLES[metric]} in per cent, at the last evaluation"
    text += f" and as the mean of the last {summary.LAST} or fewer." if mean else "."
    if "best" in scores:
        text += f" Validation: the same on images set aside; its best round, and the test {TITLES[metric]} there."
    return [Section("Run by run" if beside else "Runs", text, parts)]


def _over_seeds(runs: Sequence[Run], metric: str) -> list[list[str]]:
    """Runs that differ in nothing but the seed, where there are any."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(f"{_but_for_seeds(run)} {run.rounds}", []).append(run)
    labels = labels_of([group[0].experiment for group in groups.values()], ignore=_SEEDS)
    rows = []
    for label, group in zip(labels, groups.values(), strict=True):
        found = frame.measured(frame.of_runs(group, metric))
        if len(found) == len(group) == found["seed"].nunique() > 1:
            seeds = ", ".join(map(str, sorted(found["seed"])))
            spreads = [frame.mean_sd(found[f"{metric}_{which}"]) for which in ("last", "last10")]
            rows.append([label, seeds, *map(str, spreads)])
    return rows


# --- what was learned --------------------------------------------------------------------------------------
def _curves(shown: Sequence[Shown], metric: str) -> list[Section]:
    """The metric that ranks and the loss against rounds; what was tested on different data has axes of its own."""

    def ends(lines: Sequence[Line], model: str) -> str:
        found = ((line.label, summary.evaluations(line.metrics, metric, model)) for line in lines)
        return "; ".join(f"{label} ends at {percent(values[-1][1], 1)}" for label, values in found if values)

    groups: dict[str, list[Line]] = {}
    for one in shown:
        groups.setdefault(one.run.experiment.dataset, []).append(one.line)
    parts: list[Any] = []
    for name, lines in groups.items():
        data = f" on {display_name(name)}" if len(groups) > 1 else ""
        pictures = []
        for on in ("test", "validation"):
            if said := ends(lines, on):
                alt = f"{on.capitalize()} {TITLES[metric]}{data} against rounds: {said}"
                pictures.append(embed(figures.evaluated(lines, metric, on, data), alt))
        if pictures and any(summary.evaluations(line.metrics, "loss") for line in lines):
            pictures.append(embed(figures.evaluated(lines, "loss", data=data), f"Test loss{data} against rounds"))
        parts += pictures
    text = "The global model on the whole test set after each evaluated round."
    return [Section("Learning curves", text, parts)] if parts else []


def _classes(shown: Sequence[Shown]) -> list[Section]:
    """Which classes the last model knows, where all runs have the same ones, and which it confuses."""
    shares = [summary.evaluations(one.run.metrics, "per_class") for one in shown]
    names = {_class_names(one.run) for one, found in zip(shown, shares, strict=True) if found}
    parts: list[Any] = []
    if len(names) == 1:
        (classes,) = names
        last = {"Accuracy of each class, %, last evaluation": [found[-1][1] if found else [] for found in shares]}
        parts.append(embed(figures.by_class(_lines(shown), last, classes), "Accuracy of each class"))
    confusions = []
    for run, _, line in shown:
        for number, counts in summary.evaluations(run.metrics, "confusion")[-1:]:
            alt = f"Confusion matrix of {line.label} at round {number}"
            drawn = figures.confusion(counts, _class_names(run))
            confusions.append(embed(drawn, alt, line.label if len(shown) > 1 else "Confusion matrix of the last model"))
    if len(shown) == 1 and parts:
        title = "Accuracy of each class over the rounds"
        values = pd.DataFrame(dict(shares[0])).T
        parts = [Group([*parts, *confusions]), embed(figures.over_rounds({title: values}, classes, 1), title)]
    elif confusions:
        parts.append(Group([Group(confusions)], "Confusion matrix of each run", opened=len(confusions) <= 4))
    text = "Which classes the model of the last evaluation knows, and which it confuses."
    return [Section("Classes", text, parts)] if parts else []


def _pseudo_labels(shown: Sequence[Shown]) -> list[Section]:
    """What pseudo labels were worth, and what else methods recorded while training."""
    lines = _lines(shown)
    names = {tuple(one.run.partition.get("classes", ())) for one in shown}
    classes = names.pop() if len(names) == 1 else ()
    charts = figures.pseudo_labels(lines, classes)
    sections = []
    if charts:
        rows = diagnostics.table({line.label: line.metrics for line in lines})
        formats = [line.fmt for line in lines if line.label in set(rows["run"])] if len(lines) > 1 else ()
        pictures = [embed(chart.figure, chart.title, chart.title, chart.reading) for chart in charts]
        parts = [
            table(rows, numbers_from=1, formats=formats),
            Group([one for one in pictures if one.width <= 700]),
            *(one for one in pictures if one.width > 700),
        ]
        worth, shares = "What the method made of them; their true classes are not known.", ""
        if "right" in rows:
            worth = "What they were worth and what the method made of them; it never sees the true classes itself."
            shares = ": right pseudo labels, also weighted by m, and steps of gradient ascent in per cent"
        text = (
            f"{worth} The table has means of the last {diagnostics.LAST_ROUNDS} rounds{shares}. "
            "Faint lines are single rounds, strong ones running means."
        )
        sections.append(Section("Pseudo labels", text, parts))
    drawn = figures.training(lines, leave_out=diagnostics.TRAINING if charts else ())
    if drawn:
        text = "Means over all local steps of a round as the method recorded them; the strong line is a moving average."
        picture = embed(drawn, "Quantities recorded while training, against rounds")
        sections.append(Section("Inside the training", text, [picture]))
    return sections


def _probes(runs: Sequence[Run]) -> list[Section]:
    """Who labels, and how far clients drift: one line for runs that differ in their seeds alone."""
    groups: dict[str, dict[str, list[Run]]] = {}
    for run in runs:
        if len(diagnostics.probes(run.metrics)):
            groups.setdefault(run.experiment.partition.setting, {}).setdefault(_but_for_seeds(run), []).append(run)
    if not groups:
        return []
    every = (group[0].experiment.method for alike in groups.values() for group in alike.values())
    formats = iter(style.run_line_styles(every))
    found = []
    for setting, alike in groups.items():
        firsts = [group[0].experiment for group in alike.values()]
        labels = labels_of(firsts, ignore=_SEEDS)
        for first, label, group in zip(firsts, labels, alike.values(), strict=True):
            source = getattr(methods.make(first), "source", "")
            values = pd.concat([diagnostics.probes(run.metrics) for run in group]).groupby(level=0).mean()
            found.append(figures.Probed(setting.upper(), label, next(formats), source, values))
    text = (
        "A client labels its images while it drifts from the model that it received. Left, whose labels are right; "
        "middle, how much surer labels are than they are right; right, what clients' models know of the test images, "
        "and what the model that they are aggregated to does. Drift: how far a client's model moves in a round, "
        f"relative to the model's length. Middle and right are means of the last {diagnostics.LAST_PROBES} probes."
    )
    picture = embed(figures.probes(found), "Right labels, overconfidence, and test accuracy around aggregation")
    return [Section("Who labels, and how far clients drift", text, [picture])]


# --- where and with what -----------------------------------------------------------------------------------
def _partitions(shown: Sequence[Shown]) -> list[Section]:
    """Each different partition once, with what is known about it."""
    users: dict[str, list[Shown]] = {}
    for place, one in enumerate(shown):
        if one.run.partition.keys() >= {"classes", "labelled", "unlabelled", "parameters"}:
            users.setdefault(str(one.run.partition.get("sha256", place)), []).append(one)
    parts: list[Any] = []
    for alike in users.values():
        run = alike[0].run
        partition, clients = run.partition, len(run.partition["labelled"])
        moved = sum(repair["number"] for repair in partition.get("repairs") or ())
        labelled, unlabelled = (f"{count / clients:,.0f}" for count in frame.images_of(partition))
        facts = f"{labelled} labelled and {unlabelled} unlabelled images in the mean client."
        facts += f" {moved:,} images were moved so that no client has too few." if moved else ""
        facts += f" SHA-256 {partition['sha256'][:16]}…" if "sha256" in partition else ""
        drawn = partition_figure.figure(partition, display_name(run.experiment.dataset))
        caption = "; ".join(one.line.label for one in alike) if len(users) > 1 else ""
        alt = "Number of labelled and unlabelled images of each class on each client"
        parts += [embed(drawn, alt, caption), Text(facts, "fact")]
    if len(users) > 2:
        parts = [*parts[:4], Group(parts[4:], f"{len(users) - 2} more partitions")]
    text = (
        "The images of each client by class. Internal imbalance compares a client's labelled with its unlabelled "
        "images, external imbalance compares clients; 0 is none, 1 the most."
    )
    return [Section("Who owns what", text, parts)] if parts else []


def _sites(shown: Sequence[Shown]) -> list[Section]:
    """For each run over real sites: who took part, and what went wrong."""
    parts: list[Any] = []
    for run, _, line in shown:
        if found := participation(run):
            rows, remarks = found
            parts += [Text(line.label, "heading")] if len(shown) > 1 else []
            parts += [rows, *(Text(remark, "fact") for remark in remarks)]
    text = (
        "Numbers of images as each site reported them, and rounds: drawn, took part, away when drawn, and failed (the "
        "update could not be used). “Own test” is the last received model on the site's own test images, if it has "
        "some."
    )
    return [Section("Sites", text, parts)] if parts else []


def participation(run: Run) -> tuple[Table, list[str]] | None:
    """How often each site was drawn, answered and failed, and what went wrong; None for a run without real sites."""
    rounds = [record["federation"] for record in run.metrics if "federation" in record]
    if not rounds or run.experiment.partition.setting != "sites":
        return None
    about = {site["site"]: site for site in run.federation.get("sites", ())}
    drawn: dict[str, list[dict[str, Any]]] = {name: [] for name in (*run.federation.get("names", ()), *about)}
    away: Counter[str] = Counter()
    for found in rounds:
        away.update(found["drawn_but_away"])
        for entry in found["sites"]:
            drawn.setdefault(entry["site"], []).append(entry)
    kinds = ("labelled", "unlabelled", "unreadable")
    rows, notes = [], [f"{name} was never connected." for name in drawn if name not in about]
    for name, entries in drawn.items():
        problems = [entry["problem"] for entry in entries if "problem" in entry]
        tests = [entry["test_of_received_model"] for entry in entries if "test_of_received_model" in entry]
        counts = [f"{about[name][kind]:,}" if kind in about.get(name, ()) else NOTHING for kind in kinds]
        taken = (len(entries), len(entries) - len(problems), away[name], len(problems) - away[name])
        tested = percent(tests[-1].get("accuracy") if tests else None, 1)
        rows.append([name, *counts, *(f"{count:,}" for count in taken), tested])
        notes += [f"Last problem of {name}: {problems[-1]}"] if problems and problems[-1] else []
    notes += [f"Refused: {reason}" for reason in dict.fromkeys(why for found in rounds for why in found["refused"])]
    columns = ["site", *kinds, "drawn", "took part", "away", "failed", "own test"]
    return Table(columns, rows, numbers_from=1), notes


def _configuration(shown: Sequence[Shown]) -> list[Section]:
    """Every field with its value, default and meaning, and first those that are not the default or differ."""
    several = len(shown) > 1
    configured = [one.run.experiment for one in shown]
    trees = [experiments.flat(experiment) for experiment in configured]
    marked = experiments.differences(configured if several else [Experiment(), *configured])
    every = []
    for field in experiments.fields():
        value = "(differs)" if several and field.key in marked else _text(trees[0][field.key])
        every.append([field.key, value, field.default or NOTHING, field.meaning.replace("`", "")])
    columns = ["field", "value", "default", "meaning"]
    if several:
        rows = [[one.line.label, *(_text(tree[key]) for key in marked)] for one, tree in zip(shown, trees, strict=True)]
        changes = Table(["run", *marked], rows, formats=_formats(shown), kind="fields")
    else:
        changes = Table(columns, [row for row in every if row[0] in marked], kind="fields")
    whole = Table(columns, every, frozenset(marked), kind="fields")
    parts = [changes if marked else Text("None.", "fact"), Group([whole], f"All {len(every)} fields")]
    text = "The fields in which the runs differ." if several else "The fields that differ from their defaults."
    return [Section("Configuration", text, parts)]


def _environment(runs: Sequence[Run]) -> list[Section]:
    """Where the runs were made; what differs between them is said in their order."""
    keys = dict.fromkeys(key for run in runs for key in run.environment)
    found = {key: dict.fromkeys(_text(run.environment.get(key)) for run in runs) for key in keys}
    rows = [[key, "; ".join(values)] for key, values in found.items()]
    text = f"Where {'the runs were' if len(runs) > 1 else 'the run was'} made."
    return [Section("Environment", text, [Table(["", ""], rows, kind="fields")])] if rows else []


def _again(runs: Sequence[Run]) -> Section:
    single = len(runs) == 1
    files = {"config.yaml" if single else f"{run.name}.yaml": experiments.to_yaml(run.experiment) for run in runs}
    commands = "\n".join(f"feddure run --config {name}" for name in files)
    parts: list[Any] = [Code(commands), Files("Save from this page:", files)]
    parts += [Group([Code(files["config.yaml"])], "config.yaml")] if single else []
    return Section(
        "Run it again",
        "The configuration, the data set and the kind of machine determine every number above but times.",
        parts,
    )


def _lines(shown: Sequence[Shown]) -> list[Line]:
    return [one.line for one in shown]


def _formats(shown: Sequence[Shown]) -> list[style.LineStyle]:
    return [one.line.fmt for one in shown]


def _but_for_seeds(run: Run) -> str:
    """What runs have in common that differ in their seeds alone."""
    return repr(experiments.flat(run.experiment) | dict.fromkeys(_SEEDS))


def _class_names(run: Run) -> tuple[str, ...]:
    """Names of the classes of a run's last evaluation."""
    size = len(summary.evaluations(run.metrics, "per_class")[-1][1])
    return tuple(diagnostics.class_names(run.partition.get("classes", ()), size))


def _text(value: Any) -> str:
    return NOTHING if value in (None, "", {}) else str(value)
