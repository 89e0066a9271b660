"""Fills the tables of README.md and of pages in docs/ from results/, and draws figures for them.

`python tools/findings.py` (or `make findings`) writes; a test holds the committed pages to it, so that no number of
theirs can differ from the cells. A table stands between `<!-- table: NAME -->` and `<!-- end -->`.
"""

import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import performance
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from performance import table

from feddure import experiments
from feddure.flower.app.ledger import epsilon_of
from feddure.methods import title
from feddure.reports import frame, style
from feddure.reports.frame import by_seed, paired
from feddure.reports.names import data_size
from feddure.simulation import dp
from feddure.studies.grid.store import Cell, Store
from feddure.studies.paper.plan import printed
from feddure.tracking.summary import signed

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
PAGES = (
    ROOT / "README.md",
    *(ROOT / "docs" / f"{name}.md" for name in ("findings", "appendix", "performance", "privacy", "security")),
)

IMAGES = ROOT / "docs" / "images"

SETTINGS = ("iid-iid", "iid-dir", "dir-dir")
METHODS = {"fedavg-matched": "labels only", "fedavg-fixmatch": "FixMatch", "feddure": "FedDure", "fedtutor": "FedTutor"}
TABLE1, TABLE2 = (
    {method: title(method) for method in methods.split()}
    for methods in (
        "fedavg fedavg-matched fedavg-uda fedprox-uda fedavg-fixmatch fedprox-fixmatch fedmatch feddure "
        "fedavg-sl fedprox-sl",
        "fedavg-fixmatch baseline+maml f-reg avg-f-reg c-reg avg-c-reg feddure",
    )
)
RELEASED = "d with the released code's sign"
HALF = "every pseudo label at half weight"
LAST10, AVERAGED = "accuracy_last10", "accuracy_ema_last10"
NOTHING = "–"
DEMO = ("iid-iid", "dir-dir")
DATASETS = ("cifar10", "fashion-mnist")
RIGHT_SURE = ("accuracy", "confidence")

Runs = pd.DataFrame


# --- cells ---------------------------------------------------------------------------------------------------
class _Measured(dict):
    """Measurements by hash as `frame.of_cells` looks for them: also of examples whose code has changed since."""

    def find(self, cell: Cell) -> Any:
        return self[cell.hash]

    def failures(self) -> dict[str, Any]:
        return {}


@cache
def runs(study: str) -> Runs:
    """The cells of a study, a row a run."""
    cells, measured = [], _Measured()
    for found in Store(RESULTS / study).measurements():
        cells.append(Cell(study, "", experiments.build(found.experiment)))
        measured[cells[-1].hash] = found
    rows = frame.of_cells(cells, measured)
    rows["best"] = [max(accuracy for _, accuracy, _ in curve) for curve in rows["curve"]]
    rows["gamma"] = [cell.experiment.partition.gamma for cell in cells]
    rows["labels"] = [100 * (cell.experiment.partition.label_fraction or 0.1) for cell in cells]
    rows["labels_per_class"] = [cell.experiment.partition.labels_per_class for cell in cells]
    rows["fine"] = [cell.experiment.local_steps == "epoch" for cell in cells]
    rows["norm"] = [cell.experiment.norm for cell in cells]
    rows["attack"] = [cell.experiment.attack.kind for cell in cells]
    rows["experiment"] = [cell.experiment for cell in cells]
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


def by_three(rows: Runs, text: Callable[[Runs], str] = mean) -> str:
    """A text for each of the three settings."""
    return triple(text(pick(rows, setting=setting)) for setting in SETTINGS)


def paper(study: str, dataset: str, method: str) -> str:
    """What the paper prints in the three settings."""
    found = printed(study)
    return triple(f"{found[place]:.2f}" if (place := (dataset, s, method)) in found else NOTHING for s in SETTINGS)


def grid(first: str, rows: Mapping[str, Any], text: Callable[[Any, Any], str], columns: Mapping[str, Any]) -> str:
    """A text for each row and column, by their names."""
    lines = ([name, *(text(row, column) for column in columns.values())] for name, row in rows.items())
    return table([first, *columns], lines)


def named(settings: Iterable[str]) -> dict[str, str]:
    return {setting.upper(): setting for setting in settings}


def seeds(rows: Runs) -> str:
    found = sorted(set(rows["seed"]))
    if not found:
        return "no seed"
    return f"seed {found[0]}" if len(found) == 1 else f"seeds {found[0]} to {found[-1]}"


def _seeds(rows: Runs) -> str:
    """The same for a column of seeds; those that are not all between the first and the last one by one."""
    found = sorted(set(rows["seed"]))
    whole = len(found) > 2 and found == list(range(found[0], found[-1] + 1))
    return f"{found[0]} to {found[-1]}" if whole else ", ".join(map(str, found))


# --- the tables of the pages ---------------------------------------------------------------------------------
def fedtutor() -> str:
    every = runs("tutor")
    bold = METHODS | {"fedtutor": "**FedTutor**"}
    rows = {f"{name}, {seeds(pick(every, method=method))}": method for method, name in bold.items()}
    return grid("last ten (averaged)", rows, lambda m, s: both(pick(every, method=m, setting=s)), named(SETTINGS))


def gains() -> str:
    def text(row: tuple[str, str], setting: str) -> str:
        here = pick(runs("tutor"), setting=setting)
        return gain(pick(here, method="fedtutor"), pick(here, method=row[0]), row[1])

    kinds, rivals = {LAST10: "last ten", AVERAGED: "averaged"}, list(METHODS)[:3]
    rows = {f"− {METHODS[rival]}, {kind}": (rival, column) for column, kind in kinds.items() for rival in rivals}
    return grid("FedTutor", rows, text, named(SETTINGS))


def scarce() -> str:
    """By the share of labels, with 5 steps."""
    every, lines = pd.concat([runs("scarce-labels"), runs("few-steps")]), []
    for labels, setting in product((2.0, 4.0, 10.0), SETTINGS[1:]):
        here = pick(every, labels=labels, setting=setting)
        ours, theirs = (pick(here, method=method) for method in ("fedtutor", "fedavg-matched"))
        beyond = gain(ours, theirs), gain(ours, theirs, AVERAGED)
        lines.append((f"{labels:g} %, {setting.upper()}", both(theirs), both(ours), *beyond))
    return table(("labels", "labels only", "FedTutor", "last ten", "averaged"), lines)


def labellers() -> str:
    wanted = ("labels only", "FixMatch", "FedTutor", "true labels on u")
    every = {name: pick(rows, seed=3) for name, rows in pick_cases("controls", wanted).items()}
    columns: dict[str, Callable[[Runs], str]] = {
        "own: right / sure": lambda rows: triple(per_cent(rows, f"probe_own_{what}") for what in RIGHT_SURE),
        "averaged model": lambda rows: triple(per_cent(rows, f"probe_averaged_{what}") for what in RIGHT_SURE),
        "drift": lambda rows: told(rows, "probe_drift", 3),
        "clients → together": lambda rows: (
            f"{per_cent(rows, 'probe_test_clients')} → {per_cent(rows, 'probe_test_aggregated')}"
        ),
    }
    return grid(seeds(pd.concat(every.values())), every, lambda rows, text: text(rows), columns)


CONTROLS = (
    "FedTutor", "labels only", "FedTutor with weight 0", "FedTutor, labels shuffled", "tutor on labelled images alone",
    "Fashion-MNIST as u, FedTutor", "own model, soft", "received model, soft", "averaged model, hard 0.95",
    "labels only, 300 rounds", "45 steps, FedTutor, 10 % of u", "true labels on u",
)  # fmt: skip


def controlled(study: str) -> Runs:
    """The runs of a study of controls; on CIFAR-10 also those of the main table, which are the same but for probes."""
    every = runs(study)
    if study != "controls":
        return every
    main = runs("tutor")[lambda rows: (rows["setting"] == "dir-dir") & rows["seed"].isin((3, 4, 5))]
    main = main.assign(case=main["method"].map(METHODS))
    return pd.concat([every, main]).drop_duplicates(["case", "seed"])


def controls() -> str:
    """What FedTutor adds to each control, on the control's seeds."""
    every, lines = controlled("controls"), []
    ours = pick(every, case="FedTutor")
    for name in CONTROLS:
        rows = pick(every, case=name)
        beyond = [gain(ours, rows, column) for column in (LAST10, AVERAGED)] if name != "FedTutor" else [NOTHING] * 2
        lines.append((name, _seeds(rows), both(rows), *beyond))
    return table(("control", "seeds", "last ten (averaged)", "FedTutor − it", "averaged"), lines, 2)


def all_controls(study: str) -> str:
    """Each control beyond labels only under the same conditions."""
    every, lines = controlled(study), []
    for name, told in cases(study).items():
        if (rows := pick(every, case=name)).empty:
            continue
        theirs = pick(every, case=told.get("against", "labels only"))
        beyond = [gain(rows, theirs, column) for column in (LAST10, AVERAGED)]
        shown = beyond if name != "labels only" else [NOTHING] * 2
        lines.append((name, told.get("about", ""), _seeds(rows), both(rows), *shown))
    return table(("control", "why", "seeds", "last ten (averaged)", "beyond labels only", "averaged"), lines, 3)


PRINTED = {"ProxyFL": 88.56, "SAGE": 87.05, "FedDure": 84.60}
"""CIFAR-10, 10 % labels, α = 0.1: from Table 1 of ProxyFL (arXiv:2602.21078)."""


def rivals() -> str:
    """The runs of SAGE's protocol to its end, and what their papers' authors measured."""
    every = pick_cases("sage-300", cases("sage-300"))
    columns: dict[str, Callable[[str], str]] = {
        "last (averaged)": lambda name: _last(every[name]) if name in every else NOTHING,
        "last ten (averaged)": lambda name: both(every[name]) if name in every else NOTHING,
        "minutes": lambda name: f"{every[name]['seconds'].mean() / 60:.0f}" if name in every else NOTHING,
        "printed": lambda name: f"{PRINTED[name]:.2f}" if name in PRINTED else NOTHING,
    }
    every_run = pd.concat(every.values())
    names = dict.fromkeys([*every, *PRINTED])
    first = f"{seeds(every_run)}, round {every_run['rounds'].max()}"
    return grid(first, {name: name for name in names}, lambda name, text: text(name), columns)


def _last(rows: Runs) -> str:
    own, averaged = (statistics.fmean(curve[-1][place] for curve in rows["curve"]) for place in (1, 2))
    return f"{own:.1f} ({averaged:.1f})"


def sage() -> str:
    every = pick_cases("sage-protocol", cases("sage-protocol"))

    def last(rows: Runs, column: int) -> float:
        return statistics.fmean(curve[-1][column] for curve in rows["curve"])

    def beyond(rows: Runs, column: int) -> str:
        return signed(last(rows, column) - last(every["SAGE"], column))

    columns: dict[str, Callable[[Runs], str]] = {
        "last (averaged)": _last,
        "− SAGE, last": lambda rows: beyond(rows, 1),
        "− SAGE, averaged": lambda rows: beyond(rows, 2),
    }
    every_run = pd.concat(every.values())
    first = f"{seeds(every_run)}, round {every_run['rounds'].max()}"
    return grid(first, every, lambda rows, text: text(rows), columns)


def beyond_labels_only(study: str, column: str, columns: Mapping[str, str]) -> str:
    """A study's cases, and how much better they are than labels only."""
    every = runs(study)

    def text(name: str, value: str) -> str:
        ours, theirs = (pick(every, **{column: value}, case=case) for case in (name, "labels only"))
        return both(ours) + ("" if name == "labels only" or ours.empty else f", {gain(ours, theirs)}")

    return grid(seeds(every), {name: name for name in cases(study)}, text, columns)


def price() -> str:
    """Bytes of runs; time and memory of whole rounds alone on a GPU."""
    alone, lines = performance.rounds("aaai24-fine"), []
    for method, name in METHODS.items():
        ours = pick(runs("tutor"), method=method)
        sizes = [_mean(ours[f"bytes_{way}"] / ours["rounds"] / ours["clients_per_round"]) for way in ("down", "up")]
        ms, fixmatch = (alone[m]["ms_per_round"]["median"] for m in (method, "fedavg-fixmatch"))
        used = f"{alone[method]['memory_mb'] / 1000:.1f} GB"
        lines.append((name, *(data_size(size or 0) for size in sizes), f"{ms / fixmatch:.2f}", used))
    return table(("a client and round", "down", "up", "time, FixMatch = 1", "GPU memory of five"), lines)


def privacy() -> str:
    every = runs("privacy")
    order = sorted(cases("privacy"), key=lambda name: name != "no privacy")
    rows = {name: pick(every, case=name) for name in order}
    columns: dict[str, Callable[[Runs], str]] = {"ε at δ = 1e-5": lambda rows: epsilon(rows)[1]}
    columns |= {METHODS[m]: lambda rows, m=m: both(pick(rows, method=m)) for m in ("fedavg-matched", "fedtutor")}
    return grid(f"{seeds(every)}, last ten (averaged)", rows, lambda rows, text: text(rows), columns)


def site_privacy() -> str:
    rounds = {f"{number} rounds": number for number in (10, 50, 200)}

    def text(noise: int, times: int) -> str:
        return f"{epsilon_of({float(noise): times}, dp.DELTA):.1f}"

    return grid("`--dp-noise`", {str(noise): noise for noise in (4, 8, 16, 32)}, text, rounds)


def epsilon(rows: Runs) -> tuple[float, str]:
    """Of a client after all rounds of such a run, as a number and as a text."""
    found = next(iter(rows["experiment"]))
    if not found.server.dp_clip or not found.server.dp_noise:
        return math.inf, "∞"
    rate = found.clients_per_round / found.partition.clients
    value = dp.epsilon([(found.server.dp_noise, rate, found.rounds)])
    return value, f"{value:.1f}"


def from_paper() -> str:
    lines = []
    for method in ("fedavg", "fedavg-fixmatch", "fedmatch", "feddure", "fedavg-sl"):
        ours = [by_three(pick(table1(dataset), method=method)) for dataset in DATASETS]
        theirs = [paper("table1", dataset, method) for dataset in DATASETS]
        lines.append((TABLE1[method], ours[0], theirs[0], ours[1], theirs[1]))
    return table(("IID-IID / IID-DIR / DIR-DIR", "CIFAR-10", "paper", "Fashion-MNIST", "paper"), lines)


def regulators() -> str:
    every, lines = runs("regulators-cifar10"), []
    of_paper = {"FixMatch": "fedavg-fixmatch", "FedDure": "feddure", "F-reg alone": "f-reg", "C-reg alone": "c-reg"}
    for name in ("labels only", "FixMatch", HALF, "F-reg alone", "C-reg alone", f"C-reg alone, {RELEASED}", "FedDure",
                 f"FedDure, {RELEASED}"):  # fmt: skip
        rows = pick(every, case=name)
        knows = NOTHING if name in ("labels only", HALF) else told(rows, "weight_auroc")
        theirs = paper("table2", "cifar10", of_paper[name]) if name in of_paper else NOTHING
        lines.append((name.replace(RELEASED, "released sign"), by_three(rows), theirs, knows))
    return table(("5 steps, last ten", "ours", "paper", "AUROC of weights"), lines)


def few_labels() -> str:
    """Accuracies, then differences from labels only."""
    every = runs("few-labels")
    columns = {f"{s.upper()}, {n}": {"setting": s, "labels_per_class": n} for s in DEMO for n in (1, 2, 8)}

    def text(names: tuple[str, ...], column: Mapping[str, Any]) -> str:
        found = [pick(every, case=name, **column) for name in names]
        return spread(*found) if len(found) == 1 else gain(*found)

    names = list(cases("few-labels"))
    rows: dict[str, tuple[str, ...]] = {name: (name,) for name in names}
    rows |= {f"{name} − labels only": (name, "labels only") for name in names[1:]}
    return grid("", rows, text, columns)


def averaging() -> str:
    def rise(rows: Runs) -> str:
        found = _mean(rows[AVERAGED] - rows[LAST10])
        return NOTHING if found is None else signed(found)

    columns = {f"5 steps, {seeds(runs('few-steps'))}": runs("few-steps"), "45 steps": runs("tutor")}
    rows = {name: method for method, name in METHODS.items()}
    first = "averaged − last ten, three settings"
    return grid(first, rows, lambda method, every: by_three(pick(every, method=method), rise), columns)


ATTACKS = {"none": "none", "× 10": "scale", "sign flip": "sign-flip", "noise": "noise", "label flip": "label-flip",
           "false counts": "lie-about-counts"}  # fmt: skip


def attacks(setting: str = "dir-dir", column: str = "accuracy_ema") -> str:
    every = pick(runs("attacks"), setting=setting)
    rows = {name: name for name in cases("attacks")}
    return grid(setting.upper(), rows, lambda n, kind: mean(pick(every, case=n, attack=kind), column), ATTACKS)


# --- the tables of the appendix ------------------------------------------------------------------------------
def _spreads(every: Runs, methods: Mapping[str, str], settings: Sequence[str] = SETTINGS, study: str = "",
             dataset: str = "cifar10") -> str:  # fmt: skip
    """Accuracies of both models, and what the paper prints in a study."""
    lines = []
    for method, name in methods.items():
        here = [pick(every, method=method, setting=setting) for setting in settings]
        of_paper = [paper(study, dataset, method)] if study else []
        lines.append([name, *map(spread, here), *(spread(rows, AVERAGED) for rows in here), *of_paper])
    return table([*_both_models(settings), *(["paper"] if study else ())], lines)


def _both_models(settings: Sequence[str]) -> list[str]:
    return ["", *named(settings), *(f"averaged, {name}" for name in named(settings))]


def _accuracies(every: Runs, methods: Mapping[str, str], settings: Sequence[str] = SETTINGS, **about: str) -> str:
    """Accuracies, and differences from labels only, of both models; of the methods that there are."""
    methods = {method: name for method, name in methods.items() if method in set(every["method"])} or methods
    lines = []
    for method in (method for method in methods if method != "fedavg-matched"):
        pairs = [[pick(every, method=m, setting=s) for m in (method, "fedavg-matched")] for s in settings]
        lines.append([methods[method], *(gain(*pair, column) for column in (LAST10, AVERAGED) for pair in pairs)])
    differences = table(_both_models(settings), lines)
    return f"{_spreads(every, methods, settings, **about)}\n\nBeyond labels only with as many steps:\n\n{differences}"


def _of_methods(study: str, settings: Sequence[str] = SETTINGS, **wanted: Any) -> str:
    """The four methods in a study; one on other seeds than labels only has them beside its name."""
    every = pick(runs(study), **wanted)
    found = {method: seeds(pick(every, method=method)) for method in METHODS}
    usual = {found["fedavg-matched"], seeds(every[:0])}
    names = {m: name if found[m] in usual else f"{name}, {found[m]}" for m, name in METHODS.items()}
    return _accuracies(every, names, settings)


def _scarce_tables() -> str:
    return "\n\n".join(
        f"{labels:g} % labels, {seeds(pick(rows, method='fedavg-matched'))}:\n\n"
        f"{_of_methods('scarce-labels', SETTINGS[1:], labels=labels)}"
        for labels, rows in runs("scarce-labels").groupby("labels")
    )


OTHER_IMAGES = "controls:fashion_unlabelled"
"""No label of its unlabelled images is right."""


def _probes() -> str:
    lines = []
    for name, rows in pick_cases("controls", cases("controls")).items():
        if set(rows["dataset"]) == {OTHER_IMAGES}:
            continue
        what = (*RIGHT_SURE, "calibration_error")
        right = [triple(per_cent(rows, f"probe_{who}_{one}") for one in what) for who in ("own", "global", "averaged")]
        far = [told(rows, f"probe_{name}", 3) for name in ("drift", "cosine")]
        tests = [per_cent(rows, f"probe_test_{who}", 1) for who in ("received", "clients", "aggregated")]
        lines.append([name, _seeds(rows), *right, *far, *tests])
    head = ("", "seeds", "own", "received", "averaged", "drift", "cosine", "test: received", "clients", "aggregated")
    return table(head, lines, 2)


def _quarters() -> str:
    def means(method: str, setting: str) -> list[float]:
        every = pick(table1(fine=True), method=method, setting=setting)["curve"]
        points = [statistics.fmean(column) for column in zip(*([a for _, a, _ in one] for one in every), strict=True)]
        size = len(points) // 4
        return [statistics.fmean(points[place : place + size]) for place in range(0, len(points), size)]

    def text(method: str, setting: str) -> str:
        pairs = zip(means(method, setting), means("fedavg-matched", setting), strict=True)
        return ", ".join(signed(a - b) for a, b in pairs)

    return grid("", {"FedDure": "feddure", "FixMatch": "fedavg-fixmatch"}, text, named(SETTINGS))


def _best() -> str:
    first, released = table1(), runs("regulators-cifar10")
    rows = {
        "FedDure": (pick(first, method="feddure"), "table1", "feddure"),
        "FedDure, released sign": (pick(released, case=f"FedDure, {RELEASED}"), "table1", "feddure"),
        "F-reg alone": (pick(first, method="f-reg"), "table2", "f-reg"),
        "C-reg alone, released sign": (pick(released, case=f"C-reg alone, {RELEASED}"), "table2", "c-reg"),
        "FedMatch": (pick(first, method="fedmatch"), "table1", "fedmatch"),
        "FedAvg*": (pick(first, method="fedavg"), "table1", "fedavg"),
    }

    def text(row: tuple[Runs, str, str], column: str) -> str:
        found, study, method = row
        means = {setting: _mean(pick(found, setting=setting)[column]) or 0 for setting in SETTINGS}
        return triple(signed(mean - printed(study)["cifar10", s, method]) for s, mean in means.items())

    return grid("IID-IID / IID-DIR / DIR-DIR", rows, text, {"last ten": LAST10, "best of forty": "best"})


def _of_cases(study: str, settings: Sequence[str]) -> str:
    rows = {name: name for name in cases(study)}
    return grid("", rows, lambda n, s: spread(pick(runs(study), case=n, setting=s)), named(settings))


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
    def text(pair: tuple[str, str], setting: str) -> str:
        return gain(*(pick(runs(study), setting=setting, case=case) for case in pair))

    return grid("", {" − ".join(pair): pair for pair in pairs}, text, named(settings))


def _diagnostics() -> str:
    full: dict[str, tuple[str, Callable[[Runs], str]]] = {
        "F-reg's weight m, 10th to 90th percentile": ("feddure", lambda r: (
            f"{told(r, 'weight_p10')} to {told(r, 'weight_p90')}")),
        "AUROC of m for “this pseudo label is right”": ("feddure", lambda r: told(r, "weight_auroc")),
        "pseudo labels right, plain / weighted by m, %": ("feddure", lambda r: triple(
            per_cent(r, name, 1) for name in ("pseudo_accuracy", "pseudo_accuracy_weighted"))),
        "FixMatch's threshold: AUROC; right among those that pass, %": ("fedavg-fixmatch", lambda r: (
            f"{told(r, 'weight_auroc')}; {per_cent(r, 'pseudo_accuracy_weighted')}")),
        "C-reg's reward d (lowest to highest in a round)": ("feddure", lambda r: (
            f"{told(r, 'd_mean')} ({told(r, 'd_lowest')} to {told(r, 'd_highest')})")),
        "steps away from the pseudo labels, %": ("feddure", lambda r: per_cent(r, "ascent_share", 1)),
    }  # fmt: skip
    return "\n\n".join(
        grid(f"`{preset}`", full, lambda row, s, e=every: row[1](pick(e, method=row[0], setting=s)), named(SETTINGS))
        for preset, every in (("aaai24", table1()), ("aaai24-fine", table1(fine=True)))
    )


def _signs() -> str:
    shown: dict[str, Callable[[Runs], str]] = {
        "**{}**": mean,
        "{}: d, mean": lambda rows: told(rows, "d_mean"),
        "{}: weight of a pseudo label": lambda rows: told(rows, "weight_mean"),
        "{}: steps away, %": lambda rows: per_cent(rows, "ascent_share", 1),
        "{}: loss on pseudo labels": lambda rows: told(rows, "loss_unlabelled", 1),
    }
    every = ("C-reg alone", f"C-reg alone, {RELEASED}", "FedDure", f"FedDure, {RELEASED}")
    rows = {
        name.format(case.replace(RELEASED, "released sign")): (case, text)
        for case in every
        for name, text in shown.items()
    }
    found = runs("regulators-cifar10")
    return grid("", rows, lambda row, s: row[1](pick(found, case=row[0], setting=s)), named(SETTINGS))


def _slim() -> str:
    every = pick_cases("regulators-slim", cases("regulators-slim"))
    lines = [(name, mean(rows), per_cent(rows, "ascent_share")) for name, rows in every.items()]
    return table(("`resnet9-slim`, IID-DIR, 100 rounds, seed 0", "last ten", "steps away, %"), lines)


def _chart(axis: str, columns: Mapping[str, float], **fixed: float) -> str:
    every = pick(runs("reproduction"), dataset="cifar10", fine=False, seed=0, **fixed)

    def text(row: Mapping[str, str], value: float) -> str:
        here = pick(every, **row)
        return both(here[(here[axis] - value).abs() < 1e-9])

    methods = {m: METHODS.get(m, TABLE1[m]) for m in ("fedavg-matched", "fedavg-fixmatch", "fedmatch", "feddure")}
    rows = {f"{s.upper()}, {name}": {"setting": s, "method": m} for s in SETTINGS[1:] for m, name in methods.items()}
    return grid("", rows, text, columns)


def _repeats() -> str:
    older = pd.read_csv(RESULTS / "accuracy.csv", keep_default_na=False)
    older = older[(older["dataset"] == "cifar10") & (older["options"] == "") & (older["rounds"].astype(int) == 200)]
    lines = []
    for (preset, method, setting), rows in older.groupby(["preset", "method", "setting"], sort=False):
        now = by_seed(pick(table1(fine=preset == "aaai24-fine"), method=method, setting=setting))
        rows = rows[rows["seed"].isin(now)]
        if len(rows):
            then = (f"{value:.2f}" for value in rows[LAST10].astype(float))
            texts = (map(str, rows["seed"]), then, (f"{now[seed]:.2f}" for seed in rows["seed"]))
            lines.append((f"{method}, `{preset}`, {setting.upper()}", *map(", ".join, texts)))
    return table(("", "seeds", "then", "now"), lines, 2)


def _origins() -> str:
    lines = []
    for study in sorted(path.parent.name for path in RESULTS.glob("*/cells.jsonl")):
        every = runs(study)["environment"]
        commits = dict.fromkeys(about.get("commit", "") for about in every)
        where = dict.fromkeys(about.get("gpu") or f"{about.get('cores')} CPU cores" for about in every)
        lines.append((study, ", ".join(where), ", ".join(commits), str(len(every))))
    return table(("study", "hardware", "commits", "cells"), lines, 3)


def insiders() -> str:
    """What one competent insider leaves of the averaged model, and in how many rounds it is named."""
    found = performance.read("insider")
    cells: dict[str, dict[str, list[Any]]] = {}
    for run in found["runs"]:
        cells.setdefault(run["insider"], {}).setdefault(run["aggregation"], []).append(run)

    def entry(seeds: Sequence[Any], insider: str) -> str:
        accuracy = statistics.mean(100 * run["accuracy"]["averaged"] for run in seeds)
        named = statistics.mean(run["rounds_named"] for run in seeds)
        return f"{accuracy:.1f}" + ("" if insider == "nobody" else f" ({named:.0f})")

    ways = list(cells["nobody"])
    lines = [(insider, *(entry(by[way], insider) for way in ways)) for insider, by in cells.items()]
    return table(("its update", *ways), lines)


# --- pages ---------------------------------------------------------------------------------------------------
TABLES: dict[str, Callable[[], str]] = {
    "fedtutor": fedtutor,
    "gains": gains,
    "scarce": scarce,
    "labellers": labellers,
    "controls": controls,
    "price": price,
    "privacy": privacy,
    "site-privacy": site_privacy,
    "sage": sage,
    "rivals": rivals,
    "alike": lambda: beyond_labels_only("alike", "norm", {"dealt evenly": "batch"}),
    "all-alike": lambda: beyond_labels_only("alike", "norm", {f"{norm} norm": norm for norm in ("batch", "group")}),
    "recommended": lambda: beyond_labels_only("recommended", "setting", named(DEMO)),
    "thousand-clients": lambda: beyond_labels_only("many-clients", "setting", named(DEMO)),
    "paper": from_paper,
    "regulators": regulators,
    "averaging": averaging,
    "attacks": attacks,
    "all-fedtutor": lambda: _accuracies(runs("tutor"), METHODS),
    "all-scarce": _scarce_tables,
    "all-controls": lambda: all_controls("controls"),
    "all-controls-demo": lambda: all_controls("controls-demo"),
    "few-steps": lambda: _of_methods("few-steps"),
    "fashion": lambda: _of_methods("fashion"),
    "probes": _probes,
    "attacks-iid": lambda: attacks("iid-iid"),
    "attacks-iid-last": lambda: attacks("iid-iid", LAST10),
    "attacks-dir-last": lambda: attacks("dir-dir", LAST10),
    "table1-cifar10": lambda: _accuracies(table1(), TABLE1, study="table1"),
    "table1-fashion": lambda: _accuracies(table1(DATASETS[1]), TABLE1, study="table1", dataset=DATASETS[1]),
    "table1-fine": lambda: _accuracies(table1(fine=True), TABLE1),
    "quarters": _quarters,
    "best": _best,
    "table2": lambda: _spreads(table1(), TABLE2, study="table2"),
    "all-regulators": lambda: _of_cases("regulators-cifar10", SETTINGS),
    "regulator-pairs": lambda: _pairs("regulators-cifar10", SETTINGS, PAIRS_CIFAR10),
    "diagnostics": _diagnostics,
    "signs": _signs,
    "slim": _slim,
    "demo-regulators": lambda: _of_cases("regulators", DEMO),
    "demo-pairs": lambda: _pairs("regulators", DEMO, PAIRS_DEMO),
    "chart-labels": lambda: _chart("labels", {f"{share} %": share for share in (2, 4, 10, 15, 20)}, gamma=0.5),
    "chart-gamma": lambda: _chart("gamma", {f"γ = {gamma:g}": gamma for gamma in (0.3, 0.5, 0.7, 1.0)}, labels=10.0),
    "all-few-labels": few_labels,
    "insiders": insiders,
    "repeats": _repeats,
    "origins": _origins,
    **performance.TABLES,
}

_PLACE = re.compile(r"(?<=<!-- table: )(?P<name>[\w-]+) -->\n.*?(?=<!-- end -->)", re.DOTALL)


def filled(page: str) -> str:
    """A page with its tables made anew."""
    return _PLACE.sub(lambda place: f"{place['name']} -->\n{TABLES[place['name']]()}\n\n", page)


# --- the figures ---------------------------------------------------------------------------------------------
DASHED = (0, (3, 1.5))
FAIR = 50
"""Averages of older cells begin at the initial weights; from this round on that makes no difference."""


def draw_fedtutor() -> Figure:
    """Learning curves of the four methods under the three settings."""
    every, formats = runs("tutor"), style.line_styles(METHODS)
    figure = style.new_figure(9, 3.5)
    for panel, setting in zip(figure.subplots(1, 3, sharey=True), SETTINGS, strict=True):
        for method in METHODS:
            width = 2.2 if method == "fedtutor" else 1.4
            _curves(panel, pick(every, method=method, setting=setting), FAIR, formats[method]["color"], width)
        panel.set(title=setting.upper(), xlabel="round", xlim=(0, 200), ylim=(40, 85))
    figure.axes[0].set_ylabel("test accuracy, %")
    _legend(figure, {METHODS[method]: formats[method]["color"] for method in METHODS})
    return figure


def draw_rivals() -> Figure:
    """SAGE's protocol to its end."""
    every = pick_cases("sage-300", cases("sage-300"))
    colors = dict(zip(every, (style.line_styles(["fedtutor"])["fedtutor"]["color"], *style.PALETTE), strict=False))
    figure = style.new_figure(6, 3.2)
    panel = figure.subplots()
    for name, rows in every.items():
        _curves(panel, rows, 0, colors[name], 1.6)
    panel.set(xlabel="round", ylabel="test accuracy, %", xlim=(0, 300), ylim=(70, 90))
    _legend(figure, colors)
    return figure


def _curves(panel: Axes, rows: Runs, fair: int, color: str, width: float) -> None:
    """The mean over seeds of a model's accuracy, and of its average over rounds from a round on."""
    rounds = [number for number, *_ in rows.iloc[0]["curve"]]
    for place, line, first in ((1, "-", 0), (2, DASHED, fair)):
        means = [statistics.fmean(point[place] for point in points) for points in zip(*rows["curve"], strict=True)]
        begin = rounds.index(first) if first else 0
        panel.plot(rounds[begin:], means[begin:], linestyle=line, color=color, linewidth=width)


def _legend(figure: Figure, colors: Mapping[str, str]) -> None:
    handles = [Line2D([], [], color=color, linewidth=2) for color in colors.values()]
    handles += [Line2D([], [], color=style.INK), Line2D([], [], color=style.INK, linestyle=DASHED)]
    names = [*colors, "the model itself", "averaged over rounds"]
    figure.legend(handles, names, loc="outside lower center", ncols=6)


def draw_privacy() -> Figure:
    """Accuracy against ε, and what there is without noise."""
    every, figure = runs("privacy"), style.new_figure(6, 3.2)
    panel = figure.subplots()
    for method in ("fedavg-matched", "fedtutor"):
        color = style.line_styles([method])[method]["color"]
        noisy = {name: pick(every, case=name, method=method) for name in cases("privacy") if name.startswith("noise")}
        points = sorted((epsilon(rows)[0], _mean(rows[LAST10])) for rows in noisy.values())
        panel.plot(*zip(*points, strict=True), marker="o", color=color, label=METHODS[method])
        for name, line in (("clipped alone", DASHED), ("no privacy", (0, (1, 1.5)))):
            without = _mean(pick(every, case=name, method=method)[LAST10])
            panel.axhline(without, color=color, linestyle=line, linewidth=1.2, label=f"{METHODS[method]}, {name}")
    panel.set(xscale="log", xlabel="ε of a client after 50 rounds (smaller tells less)", ylabel="test accuracy, %")
    panel.set_xticks([1, 2, 5, 10, 25], ["1", "2", "5", "10", "25"])
    figure.legend(loc="outside right center")
    return figure


FIGURES = {"fedtutor.png": draw_fedtutor, "rivals.png": draw_rivals, "privacy.png": draw_privacy}


def drawn(draw: Callable[[], Figure]) -> bytes:
    """A figure as a PNG."""
    with style.applied():
        return style.render(draw(), "png")


def main() -> None:
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
    for name, draw in FIGURES.items():
        (IMAGES / name).write_bytes(drawn(draw))


if __name__ == "__main__":
    main()
