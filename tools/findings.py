"""Fills the tables of README.md, docs/findings.md, docs/appendix.md and docs/performance.md from results/, and draws
FedTutor's figure.

`python tools/findings.py` (or `make findings`) writes; a test holds the committed pages to it, so that no number of
theirs can differ from the cells. A table stands between `<!-- table: NAME -->` and `<!-- end -->`.
"""

import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import performance
import yaml
from matplotlib.lines import Line2D

from feddure import experiments
from feddure.reports import frame, style
from feddure.reports.frame import by_seed, paired
from feddure.reports.names import data_size
from feddure.studies.grid.store import Cell, Store
from feddure.studies.paper.numbers import printed
from feddure.tracking.summary import LAST, signed

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
PAGES = (ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("findings", "appendix", "performance")))
FIGURE = ROOT / "docs" / "images" / "fedtutor.png"

SETTINGS = ("iid-iid", "iid-dir", "dir-dir")
METHODS = {"fedavg-matched": "labels only", "fedavg-fixmatch": "FixMatch", "feddure": "FedDure", "fedtutor": "FedTutor"}
TABLE1 = {
    "fedavg": "FedAvg*, labels only", "fedavg-matched": "the same, matched steps", "fedavg-uda": "FedAvg-UDA",
    "fedprox-uda": "FedProx-UDA", "fedavg-fixmatch": "FedAvg-FixMatch", "fedprox-fixmatch": "FedProx-FixMatch",
    "fedmatch": "FedMatch", "feddure": "FedDure", "fedavg-sl": "FedAvg-SL, every label",
    "fedprox-sl": "FedProx-SL, every label",
}  # fmt: skip
TABLE2 = {
    "fedavg-fixmatch": "Baseline (FixMatch)", "baseline+maml": "Baseline + MAML", "f-reg": "F-reg alone",
    "avg-f-reg": "F-reg averaged over clients", "c-reg": "C-reg alone", "avg-c-reg": "C-reg averaged over clients",
    "feddure": "FedDure, both",
}  # fmt: skip
RELEASED = "d with the released code's sign"
HALF = "every pseudo label at half weight"
LAST10, AVERAGED = "accuracy_last10", "averaged"
NOTHING = "–"

Runs = pd.DataFrame
Line = Sequence[str]


# --- cells ---------------------------------------------------------------------------------------------------
class _Measured(dict):
    """Measurements by hash as `frame.of_cells` looks for them: also of examples whose code has changed since."""

    def find(self, cell: Cell) -> Any:
        return self[cell.hash]


@cache
def runs(study: str) -> Runs:
    """The cells of a study, a row a run; `averaged` is the averaged model's mean over the last ten evaluations."""
    cells, measured = [], _Measured()
    for found in Store(RESULTS / study).measurements():
        cells.append(Cell(study, "", experiments.build(found.experiment)))
        measured[cells[-1].hash] = found
    rows = frame.of_cells(cells, measured)
    rows[AVERAGED] = [_mean(averaged for *_, averaged in curve[-LAST:]) for curve in rows["curve"]]
    rows["best"] = [max(accuracy for _, accuracy, _ in curve) for curve in rows["curve"]]
    rows["gamma"] = [cell.experiment.partition.gamma for cell in cells]
    rows["labels"] = [100 * (cell.experiment.partition.label_fraction or 0.1) for cell in cells]
    rows["labels_per_class"] = [cell.experiment.partition.labels_per_class for cell in cells]
    rows["fine"] = [cell.experiment.local_steps == "epoch" for cell in cells]
    rows["attack"] = [cell.experiment.attack.kind for cell in cells]
    rows["case"] = [_case(study, experiments.flat(cell.experiment)) for cell in cells]
    return rows


@cache
def cases(study: str) -> dict[str, dict[str, Any]]:
    """What the cases of a sweep change, in its order."""
    file = RESULTS / study / "sweep.yaml"
    found = yaml.safe_load(file.read_text(encoding="utf-8")).get("cases", []) if file.exists() else []
    return {one["name"]: {key: value for key, value in one.items() if key != "name"} for one in found}


def _case(study: str, fields: Mapping[str, Any]) -> str:
    """The case that says most of what an experiment is."""
    told = {name: {k: v for k, v in one.items() if k not in ("about", "against")} for name, one in cases(study).items()}
    fit = [name for name, one in told.items() if all(fields.get(key) == value for key, value in one.items())]
    return max(fit, key=lambda name: len(told[name]), default="")


def pick(rows: Runs, **wanted: Any) -> Runs:
    """The rows with these values."""
    for column, value in wanted.items():
        rows = rows[rows[column] == value]
    return rows


def pick_cases(study: str, names: Iterable[str]) -> dict[str, Runs]:
    """The runs of these cases, as far as they are measured."""
    every = runs(study)
    return {name: rows for name in names if len(rows := pick(every, case=name))}


def table1(dataset: str = "cifar10", fine: bool = False) -> Runs:
    """The runs of the paper's own set-up."""
    return pick(runs("reproduction"), dataset=dataset, fine=fine, gamma=0.5, labels=10.0)


# --- texts ---------------------------------------------------------------------------------------------------
def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None and value == value]
    return statistics.fmean(known) if known else None


def mean(rows: Runs, column: str = LAST10, digits: int = 1) -> str:
    """The mean over runs; a dash where there is none."""
    found = _mean(rows[column])
    return NOTHING if found is None else f"{found:.{digits}f}"


def spread(rows: Runs, column: str = LAST10) -> str:
    return str(frame.mean_sd(rows[column]) or NOTHING)


def both(rows: Runs) -> str:
    """The last ten evaluations, in brackets those of the averaged model."""
    return NOTHING if rows.empty else f"{mean(rows)} ({mean(rows, AVERAGED)})"


def gain(ours: Runs, theirs: Runs, column: str = LAST10) -> str:
    """The paired difference with its interval."""
    return str(paired(by_seed(ours, column), by_seed(theirs, column)) or NOTHING)


def told(rows: Runs, name: str, digits: int = 2, scale: float = 1.0) -> str:
    """A diagnostic's mean over runs."""
    found = _mean(one.get(name) for one in rows["diagnostics"])
    return NOTHING if found is None else f"{scale * found:.{digits}f}".replace("-", "−")


def per_cent(rows: Runs, name: str, digits: int = 0) -> str:
    return told(rows, name, digits, 100)


def triple(values: Iterable[str]) -> str:
    return " / ".join(values)


def paper(study: str, dataset: str, method: str) -> str:
    """What the paper prints in the three settings."""
    found = printed(study)
    return triple(f"{found[place]:.2f}" if (place := (dataset, s, method)) in found else NOTHING for s in SETTINGS)


def table(head: Line, lines: Iterable[Line], numbers_from: int = 1) -> str:
    """Markdown; columns from `numbers_from` on are aligned to the right."""
    marks = ["---" if place < numbers_from else "---:" for place in range(len(head))]
    return "\n".join(f"|{'|'.join(line)}|" for line in [head, marks, *lines])


def by_setting(first: str, rows: Mapping[str, Callable[[str], str]], settings: Sequence[str] = SETTINGS) -> str:
    """A line for each name, a column for each setting."""
    head = [first, *(setting.upper() for setting in settings)]
    return table(head, [[name, *map(text, settings)] for name, text in rows.items()])


def seeds(rows: Runs) -> str:
    found = sorted(set(rows["seed"]))
    return f"seed {found[0]}" if len(found) == 1 else f"seeds {found[0]} to {found[-1]}"


# --- the tables of the pages ---------------------------------------------------------------------------------
def fedtutor() -> str:
    every = runs("tutor")
    lines = {}
    for method, name in METHODS.items():
        name = f"**{name}**" if method == "fedtutor" else name
        lines[f"{name}, {seeds(pick(every, method=method))}"] = lambda s, m=method: both(
            pick(every, method=m, setting=s)
        )
    return by_setting("last ten (averaged)", lines)


def gains() -> str:
    every, found = runs("tutor"), {}
    for column, kind in ((LAST10, "last ten"), (AVERAGED, "averaged")):
        for rival in ("fedavg-matched", "fedavg-fixmatch", "feddure"):

            def text(setting: str, rival: str = rival, column: str = column) -> str:
                here = pick(every, setting=setting)
                return gain(pick(here, method="fedtutor"), pick(here, method=rival), column)

            found[f"− {METHODS[rival]}, {kind}"] = text
    return by_setting("FedTutor", found)


def scarce() -> str:
    every = pick(runs("scarce-labels"), labels=2.0)

    def line(setting: str) -> Line:
        ours, theirs = (pick(every, setting=setting, method=m) for m in ("fedtutor", "fedavg-matched"))
        return setting.upper(), both(theirs), both(ours), gain(ours, theirs), gain(ours, theirs, AVERAGED)

    head = ("2 % labels", "labels only", "FedTutor", "last ten", "averaged")
    return table(head, [line(s) for s in SETTINGS[1:]])


def labellers() -> str:
    shown = ("labels only", "FixMatch", "FedTutor", "true labels on u")
    every = pick_cases("controls", shown)
    lines = [
        (
            name,
            f"{per_cent(rows, 'probe_own_accuracy')} / {per_cent(rows, 'probe_own_confidence')}",
            f"{per_cent(rows, 'probe_averaged_accuracy')} / {per_cent(rows, 'probe_averaged_confidence')}",
            told(rows, "probe_drift", 3),
            f"{per_cent(rows, 'probe_test_clients')} → {per_cent(rows, 'probe_test_aggregated')}",
        )
        for name, rows in every.items()
    ]
    head = (seeds(pd.concat(every.values())), "own: right / sure", "averaged model", "drift", "clients → together")
    return table(head, lines)


CONTROLS = (
    "FedTutor", "FedTutor with weight 0", "FedTutor, labels shuffled", "tutor on labelled images alone",
    "labels only, FedProx 1", "Fashion-MNIST as u, FedTutor", "averaged model, hard 0.95", "true labels on u",
)  # fmt: skip


def controls(shown: Sequence[str] = CONTROLS, about: bool = False) -> str:
    every, lines = pick_cases("controls", shown), []
    for name, rows in every.items():
        told = cases("controls")[name]
        theirs = pick(runs("controls"), case=told.get("against", "labels only"))
        beyond = [gain(rows, theirs, column) for column in (LAST10, AVERAGED)]
        own = [told.get("about", ""), ", ".join(map(str, sorted(rows["seed"])))] if about else []
        lines.append((name, *own, both(rows), *(beyond if name != "labels only" else [NOTHING] * 2)))
    head = ["last ten (averaged)", "beyond labels only", "averaged"]
    if about:
        return table(["control", "why", "seeds", *head], lines, 3)
    return table([seeds(pd.concat(every.values())), *head], lines)


def price() -> str:
    lines = []
    for method, name in METHODS.items():
        study = "tutor" if method == "feddure" else "controls"  # times compare within a command alone
        ours, fixmatch = (pick(runs(study), method=m) for m in (method, "fedavg-fixmatch"))
        ours = pick(ours, case=name) if study == "controls" else ours
        sizes = [_mean(ours[f"bytes_{way}"] / ours["rounds"] / ours["clients_per_round"]) for way in ("down", "up")]
        shared = by_run(ours).keys() & by_run(fixmatch).keys()
        times = _mean(by_run(ours)[key] / by_run(fixmatch)[key] for key in shared)
        lines.append((name, *(data_size(size or 0) for size in sizes), f"{times:.2f}"))
    return table(("a client and round", "down", "up", "time, FixMatch = 1"), lines)


def by_run(rows: Runs) -> dict[tuple[str, int], float]:
    """Seconds by setting and seed."""
    places = zip(rows["setting"], rows["seed"], strict=True)
    return dict(zip(places, rows["seconds"], strict=True))


def from_paper() -> str:
    lines = []
    for method in ("fedavg", "fedavg-fixmatch", "fedmatch", "feddure", "fedavg-sl"):
        line = [TABLE1[method]]
        for dataset in ("cifar10", "fashion-mnist"):
            rows = pick(table1(dataset), method=method)
            line += [triple(mean(pick(rows, setting=s)) for s in SETTINGS), paper("table1", dataset, method)]
        lines.append(line)
    return table(("IID-IID / IID-DIR / DIR-DIR", "CIFAR-10", "paper", "Fashion-MNIST", "paper"), lines)


def regulators() -> str:
    every, lines = runs("regulators-cifar10"), []
    of_paper = {"FixMatch": "fedavg-fixmatch", "FedDure": "feddure", "F-reg alone": "f-reg", "C-reg alone": "c-reg"}
    for name in ("labels only", "FixMatch", HALF, "F-reg alone", "C-reg alone", f"C-reg alone, {RELEASED}", "FedDure",
                 f"FedDure, {RELEASED}"):  # fmt: skip
        rows = pick(every, case=name)
        knows = NOTHING if name in ("labels only", HALF) else told(rows, "weight_auroc")
        theirs = paper("table2", "cifar10", of_paper[name]) if name in of_paper else NOTHING
        lines.append((name.replace(RELEASED, "released sign"),
                      triple(mean(pick(rows, setting=s)) for s in SETTINGS), theirs, knows))  # fmt: skip
    return table(("5 steps, last ten", "ours", "paper", "AUROC of weights"), lines)


def few_labels() -> str:
    every = runs("few-labels")
    shown = [(s, n) for s in ("iid-iid", "dir-dir") for n in (1, 8)]
    lines = []
    for name in ("FixMatch", "FedDure"):
        line = [f"{name} − labels only"]
        for setting, count in shown:
            here = pick(every, setting=setting, labels_per_class=count)
            line.append(gain(pick(here, case=name), pick(here, case="labels only")))
        lines.append(line)
    return table(("labels a class and client", *(f"{s.upper()}, {n}" for s, n in shown)), lines)


def averaging() -> str:
    five, fine = table1(), runs("tutor")
    lines = []
    for method, name in METHODS.items():
        line = [name]
        for rows in (pick(five, method=method), pick(fine, method=method)):
            line += [triple(_rise(pick(rows, setting=s)) for s in SETTINGS)]
        lines.append(line)
    return table(("averaged − last ten, three settings", "5 steps", "45 steps"), lines)


def _rise(rows: Runs) -> str:
    found = _mean(rows[AVERAGED] - rows[LAST10])
    return NOTHING if found is None else signed(found)


ATTACKS = {"none": "none", "scale": "× 10", "sign-flip": "sign flip", "noise": "noise", "label-flip": "label flip",
           "lie-about-counts": "false counts"}  # fmt: skip


def attacks(setting: str = "dir-dir", column: str = "accuracy_ema") -> str:
    every = pick(runs("attacks"), setting=setting)
    lines = [
        (name, *(mean(pick(every, case=name, attack=kind), column) for kind in ATTACKS)) for name in cases("attacks")
    ]
    return table((setting.upper(), *ATTACKS.values()), lines)


# --- the tables of the appendix ------------------------------------------------------------------------------
def _accuracies(
    every: Runs, methods: Mapping[str, str], settings: Sequence[str] = SETTINGS, against: str = "fedavg-matched",
    dataset: str = "",
) -> str:  # fmt: skip
    """Accuracies, and differences from labels only, of both models."""
    lines, differences = [], []
    for method, name in methods.items():
        here = [pick(every, method=method, setting=setting) for setting in settings]
        theirs = [pick(every, method=against, setting=setting) for setting in settings]
        of_paper = [paper("table1", dataset, method)] if dataset else []
        lines.append([name, *map(spread, here), *(spread(rows, AVERAGED) for rows in here), *of_paper])
        if method != against:
            pairs = list(zip(here, theirs, strict=True))
            differences.append([name, *(gain(a, b) for a, b in pairs), *(gain(a, b, AVERAGED) for a, b in pairs)])
    names = [s.upper() for s in settings]
    head = ["", *names, *(f"averaged, {name}" for name in names)]
    first = table([*head, "paper"] if dataset else head, lines)
    return f"{first}\n\nBeyond labels only with as many steps:\n\n{table(head, differences)}"


def _probes() -> str:
    lines = []
    for name, rows in pick_cases("controls", cases("controls")).items():
        line = [name]
        for who in ("own", "global", "averaged"):
            parts = [per_cent(rows, f"probe_{who}_{what}") for what in ("accuracy", "confidence", "calibration_error")]
            line.append(triple(parts))
        line += [told(rows, "probe_drift", 3), told(rows, "probe_cosine", 3)]
        lines.append(
            [*line, *(per_cent(rows, f"probe_test_{who}", 1) for who in ("received", "clients", "aggregated"))]
        )
    head = ("", "own", "received", "averaged", "drift", "cosine", "test: received", "clients", "aggregated")
    return table(head, lines)


def _quarters(every: Runs) -> str:
    def quarter(setting: str, method: str) -> str:
        def means(name: str) -> list[float]:
            curves = [[a for _, a, _ in curve] for curve in pick(every, method=name, setting=setting)["curve"]]
            points = [statistics.fmean(column) for column in zip(*curves, strict=True)]
            size = len(points) // 4
            return [statistics.fmean(points[place : place + size]) for place in range(0, len(points), size)]

        return ", ".join(signed(a - b) for a, b in zip(means(method), means("fedavg-matched"), strict=True))

    shown = {"FedDure": "feddure", "FixMatch": "fedavg-fixmatch"}
    return by_setting("", {name: lambda s, m=m: quarter(s, m) for name, m in shown.items()})


def _best() -> str:
    first = pick(runs("reproduction"), dataset="cifar10", fine=False, gamma=0.5, labels=10.0)
    released, lines = runs("regulators-cifar10"), []
    shown = [("FedDure", pick(first, method="feddure"), "table1", "feddure"),
             ("FedDure, released sign", pick(released, case=f"FedDure, {RELEASED}"), "table1", "feddure"),
             ("F-reg alone", pick(first, method="f-reg"), "table2", "f-reg"),
             ("C-reg alone, released sign", pick(released, case=f"C-reg alone, {RELEASED}"), "table2", "c-reg"),
             ("FedMatch", pick(first, method="fedmatch"), "table1", "fedmatch"),
             ("FedAvg*", pick(first, method="fedavg"), "table1", "fedavg")]  # fmt: skip
    for name, rows, study, method in shown:
        theirs = printed(study)
        lines.append(
            [name]
            + [
                triple(
                    signed((_mean(pick(rows, setting=s)[column]) or 0) - theirs["cifar10", s, method]) for s in SETTINGS
                )
                for column in (LAST10, "best")
            ]
        )
    return table(("IID-IID / IID-DIR / DIR-DIR", "last ten", "best of forty"), lines)


def _ablation() -> str:
    every, lines = table1(), []
    for method, name in TABLE2.items():
        here = [pick(every, method=method, setting=setting) for setting in SETTINGS]
        lines.append([name, *map(spread, here), *(spread(rows, AVERAGED) for rows in here),
                      paper("table2", "cifar10", method)])  # fmt: skip
    names = [s.upper() for s in SETTINGS]
    return table(["", *names, *(f"averaged, {name}" for name in names), "paper"], lines)


def _of_cases(study: str, settings: Sequence[str]) -> str:
    every = runs(study)
    return by_setting("", {n: lambda s, n=n: spread(pick(every, case=n, setting=s)) for n in cases(study)}, settings)


PAIRS_CIFAR10 = (
    ("FedDure", "F-reg alone"), (f"FedDure, {RELEASED}", "F-reg alone"), (f"FedDure, {RELEASED}", "FedDure"),
    (f"FedDure, {RELEASED}", f"C-reg alone, {RELEASED}"), ("FedDure", HALF), (f"FedDure, {RELEASED}", HALF),
    ("F-reg alone", "FixMatch"), (f"C-reg alone, {RELEASED}", "FixMatch"), (f"C-reg alone, {RELEASED}", HALF),
    ("F-reg alone", HALF), (HALF, "FixMatch"), (HALF, "labels only"),
)  # fmt: skip
PAIRS_DEMO = (
    ("FedDure", HALF), ("FedDure", "F-reg alone"), ("F-reg alone", HALF), ("C-reg alone", "FixMatch"),
    ("C-reg alone, d on confident pseudo labels", "C-reg alone"), ("FedDure, F-reg remembered", "FedDure"),
    ("FedDure", "FixMatch"), ("FedDure", "labels only"),
)  # fmt: skip


def _pairs(study: str, settings: Sequence[str], pairs: Iterable[tuple[str, str]]) -> str:
    every = runs(study)

    def text(setting: str, ours: str, theirs: str) -> str:
        here = pick(every, setting=setting)
        return gain(pick(here, case=ours), pick(here, case=theirs))

    return by_setting("", {f"{a} − {b}": lambda s, a=a, b=b: text(s, a, b) for a, b in pairs}, settings)


def _diagnostics() -> str:
    parts = []
    for preset, every in (("aaai24", table1()), ("aaai24-fine", table1(fine=True))):
        full = {s: pick(every, method="feddure", setting=s) for s in SETTINGS}
        fix = {s: pick(every, method="fedavg-fixmatch", setting=s) for s in SETTINGS}
        lines: dict[str, Callable[[str], str]] = {
            "F-reg's weight m, 10th to 90th percentile": lambda s, f=full: (
                f"{told(f[s], 'weight_p10')} to {told(f[s], 'weight_p90')}"
            ),
            "AUROC of m for “this pseudo label is right”": lambda s, f=full: told(f[s], "weight_auroc"),
            "pseudo labels right, plain / weighted by m, %": lambda s, f=full: (
                f"{per_cent(f[s], 'pseudo_accuracy', 1)} / {per_cent(f[s], 'pseudo_accuracy_weighted', 1)}"
            ),
            "FixMatch's threshold: AUROC; right among those that pass, %": lambda s, f=fix: (
                f"{told(f[s], 'weight_auroc')}; {per_cent(f[s], 'pseudo_accuracy_weighted')}"
            ),
            "C-reg's reward d (lowest to highest in a round)": lambda s, f=full: (
                f"{told(f[s], 'd_mean')} ({told(f[s], 'd_lowest')} to {told(f[s], 'd_highest')})"
            ),
            "steps away from the pseudo labels, %": lambda s, f=full: per_cent(f[s], "ascent_share", 1),
        }
        parts.append(by_setting(f"`{preset}`", lines))
    return "\n\n".join(parts)


def _signs() -> str:
    every, lines = runs("regulators-cifar10"), {}
    for case in ("C-reg alone", f"C-reg alone, {RELEASED}", "FedDure", f"FedDure, {RELEASED}"):
        rows = {s: pick(every, case=case, setting=s) for s in SETTINGS}
        name = case.replace(RELEASED, "released sign")
        lines |= {
            f"**{name}**": lambda s, r=rows: mean(r[s]),
            f"{name}: d, mean": lambda s, r=rows: told(r[s], "d_mean"),
            f"{name}: weight of a pseudo label": lambda s, r=rows: told(r[s], "weight_mean"),
            f"{name}: steps away, %": lambda s, r=rows: per_cent(r[s], "ascent_share", 1),
            f"{name}: loss on pseudo labels": lambda s, r=rows: told(r[s], "loss_unlabelled", 1),
        }
    return by_setting("", lines)


def _slim() -> str:
    lines = [
        (n, mean(rows), per_cent(rows, "ascent_share"))
        for n, rows in pick_cases("regulators-slim", cases("regulators-slim")).items()
    ]
    return table(("`resnet9-slim`, IID-DIR, 100 rounds, seed 0", "last ten", "steps away, %"), lines)


def _chart(axis: str, values: Sequence[float]) -> str:
    every = pick(runs("reproduction"), dataset="cifar10", fine=False, seed=0)
    every = pick(every, **({"gamma": 0.5} if axis == "labels" else {"labels": 10.0}))
    lines = []
    for setting in SETTINGS[1:]:
        for method in ("fedavg-matched", "fedavg-fixmatch", "fedmatch", "feddure"):
            here = pick(every, method=method, setting=setting)
            name = METHODS.get(method, TABLE1[method])
            lines.append([f"{setting.upper()}, {name}", *(both(here[(here[axis] - v).abs() < 1e-9]) for v in values)])
    return table(["", *(f"{value:g} %" if axis == "labels" else f"γ = {value:g}" for value in values)], lines)


def _few() -> str:
    every, lines = runs("few-labels"), []
    shown = [(s, n) for s in ("iid-iid", "dir-dir") for n in (1, 2, 8)]
    for name in cases("few-labels"):
        here = [pick(every, case=name, setting=s, labels_per_class=n) for s, n in shown]
        lines.append([name, *map(spread, here)])
    for name in list(cases("few-labels"))[1:]:
        line = [f"{name} − labels only"]
        for setting, count in shown:
            place = pick(every, setting=setting, labels_per_class=count)
            line.append(gain(pick(place, case=name), pick(place, case="labels only")))
        lines.append(line)
    return table(["", *(f"{s.upper()}, {n}" for s, n in shown)], lines)


def _repeats() -> str:
    older = pd.read_csv(RESULTS / "accuracy.csv", keep_default_na=False)
    older = older[(older["dataset"] == "cifar10") & (older["options"] == "") & (older["rounds"].astype(int) == 200)]
    lines = []
    for (preset, method, setting), rows in older.groupby(["preset", "method", "setting"], sort=False):
        now = by_seed(pick(table1(fine=preset == "aaai24-fine"), method=method, setting=setting))
        shared = [(seed, then) for seed, then in zip(rows["seed"], rows["accuracy_last10"], strict=True) if seed in now]
        if shared:
            lines.append((f"{method}, `{preset}`, {setting.upper()}", ", ".join(str(seed) for seed, _ in shared),
                          ", ".join(f"{float(then):.2f}" for _, then in shared),
                          ", ".join(f"{now[seed]:.2f}" for seed, _ in shared)))  # fmt: skip
    return table(("", "seeds", "then", "now"), lines, 2)


def _origins() -> str:
    lines = []
    for study in sorted(path.parent.name for path in RESULTS.glob("*/cells.jsonl")):
        rows = runs(study)
        commands: dict[tuple[str, str, str], int] = {}
        for about in rows["environment"]:
            key = (
                about.get("command", ""),
                about.get("commit", ""),
                about.get("gpu") or f"{about.get('cores')} CPU cores",
            )
            commands[key] = commands.get(key, 0) + 1
        lines += [(study, f"`{command}`", commit, where, str(n)) for (command, commit, where), n in commands.items()]
    return table(("study", "command", "commit", "hardware", "cells"), lines, 4)


# --- pages ---------------------------------------------------------------------------------------------------
def _scarce_tables() -> str:
    every = runs("scarce-labels")
    there = {method: name for method, name in METHODS.items() if method in set(every["method"])}
    return "\n\n".join(
        f"{labels:g} % labels, {seeds(rows)}:\n\n{_accuracies(rows, there, SETTINGS[1:])}"
        for labels, rows in every.groupby("labels")
    )


def _fine() -> str:
    every = table1(fine=True)
    return _accuracies(every, {m: n for m, n in TABLE1.items() if m in set(every["method"])})


DEMO = ("iid-iid", "dir-dir")

TABLES: dict[str, Callable[[], str]] = {
    "fedtutor": fedtutor,
    "gains": gains,
    "scarce": scarce,
    "labellers": labellers,
    "controls": controls,
    "price": price,
    "paper": from_paper,
    "regulators": regulators,
    "few-labels": few_labels,
    "averaging": averaging,
    "attacks": attacks,
    "all-fedtutor": lambda: _accuracies(runs("tutor"), METHODS),
    "all-scarce": _scarce_tables,
    "all-controls": lambda: controls(tuple(cases("controls")), about=True),
    "probes": _probes,
    "attacks-iid": lambda: attacks("iid-iid"),
    "attacks-iid-last": lambda: attacks("iid-iid", LAST10),
    "attacks-dir-last": lambda: attacks("dir-dir", LAST10),
    "table1-cifar10": lambda: _accuracies(table1(), TABLE1, dataset="cifar10"),
    "table1-fashion": lambda: _accuracies(table1("fashion-mnist"), TABLE1, dataset="fashion-mnist"),
    "table1-fine": _fine,
    "quarters": lambda: _quarters(table1(fine=True)),
    "best": _best,
    "table2": _ablation,
    "all-regulators": lambda: _of_cases("regulators-cifar10", SETTINGS),
    "regulator-pairs": lambda: _pairs("regulators-cifar10", SETTINGS, PAIRS_CIFAR10),
    "diagnostics": _diagnostics,
    "signs": _signs,
    "slim": _slim,
    "demo-regulators": lambda: _of_cases("regulators", DEMO),
    "demo-pairs": lambda: _pairs("regulators", DEMO, PAIRS_DEMO),
    "chart-labels": lambda: _chart("labels", (2, 4, 10, 15, 20)),
    "chart-gamma": lambda: _chart("gamma", (0.3, 0.5, 0.7, 1.0)),
    "all-few-labels": _few,
    "repeats": _repeats,
    "origins": _origins,
    **performance.TABLES,
}

_PLACE = re.compile(r"(?<=<!-- table: )(?P<name>[\w-]+) -->\n.*?(?=<!-- end -->)", re.DOTALL)


def filled(page: str) -> str:
    """A page with its tables made anew."""
    return _PLACE.sub(lambda place: f"{place['name']} -->\n{TABLES[place['name']]()}\n\n", page)


# --- the figure ----------------------------------------------------------------------------------------------
DASHED = (0, (3, 1.5))
FAIR = 50
"""Averages of older cells begin at the initial weights; from this round on that makes no difference."""


def draw() -> bytes:
    """Learning curves of the four methods under the three settings, as a PNG."""
    every = runs("tutor")
    formats = style.line_styles((method, "") for method in METHODS)
    with style.applied():
        figure = style.new_figure(9, 3.5)
        for panel, setting in zip(figure.subplots(1, 3, sharey=True), SETTINGS, strict=True):
            for method in METHODS:
                curves = pick(every, method=method, setting=setting)["curve"]
                rounds = [number for number, *_ in curves.iloc[0]]
                fmt = {"color": formats[method, ""]["color"], "linewidth": 2.2 if method == "fedtutor" else 1.4}
                for place, line, first in ((1, "-", 0), (2, DASHED, FAIR)):
                    means = [statistics.fmean(point[place] for point in points) for points in zip(*curves, strict=True)]
                    begin = rounds.index(first) if first else 0
                    panel.plot(rounds[begin:], means[begin:], linestyle=line, **fmt)
            panel.set(title=setting.upper(), xlabel="round", xlim=(0, 200), ylim=(40, 85))
        figure.axes[0].set_ylabel("test accuracy, %")
        handles = [Line2D([], [], color=formats[method, ""]["color"], linewidth=2) for method in METHODS]
        handles += [Line2D([], [], color=style.INK), Line2D([], [], color=style.INK, linestyle=DASHED)]
        names = [*METHODS.values(), "the model itself", "averaged over rounds"]
        figure.legend(handles, names, loc="outside lower center", ncols=6)
        return style.render(figure, "png")


def main() -> None:
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
    FIGURE.write_bytes(draw())


if __name__ == "__main__":
    main()
