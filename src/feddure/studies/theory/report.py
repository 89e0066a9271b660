"""What the measured numbers say about the two theorems: slopes beside a control's, verdicts in words, figure and files.

Every verdict follows from the fitted slopes and their errors by the rules below; none is written in advance.
"""

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from feddure import environment
from feddure.errors import ConfigError
from feddure.files import write_whole
from feddure.reports import page, style
from feddure.reports.page import Section, Text
from feddure.studies.theory import measure
from feddure.studies.theory.measure import EAGER, FIXED, FROZEN_BOTH, FROZEN_THETA, MOVING, PAPER, SMALLEST, Study

FILES = ("theory.csv", "theory.json", "theory.md", "theory.png", "theory.html")

RATE = -0.5
"""The exponent of Theorem 1's bound."""
LEVEL = 0.1
"""Slopes nearer to zero than this, or than two of their errors, count as level."""

_META, _H_L = "min_t ‖∇_θ L_s(φ_{t+1}(θ_t))‖²", "‖∇_φ H·L‖²"

Pace = Literal["fast", "about", "slow", "level", "grows"]
_PACES: dict[Pace, str] = {
    "fast": "falls at least as fast as 1/√{}",
    "about": "falls about as fast as 1/√{}",
    "slow": "falls, but more slowly than 1/√{}",
    "level": "stays level",
    "grows": "grows",
}
_QUICK: tuple[Pace, Pace] = ("fast", "about")

MEANING = (
    "Trivial by construction: ∇_θ L_s(φ_{t+1}(θ)) = −η_s (∂²(H·L)/∂φ∂θ)ᵀ ∇L_s(φ_{t+1}), so with η_s = e/T its square "
    "carries T⁻² whatever θ does.",
    "Bound by construction: under the theorems' steps θ goes at most T · c/√T · e/T · G = c·e·G/√T and φ at most k·G, "
    "where G bounds the gradients: the larger T is, the less θ can move, while φ's way cannot grow with T.",
    "Not shown: anything about mini-batches, Adam, ReLU, batch normalisation, hard labels, several clients, or "
    "accuracy; and a finite range of T says nothing certain about a limit.",
)
"""What needs no measurement to be known, and what this measurement does not touch."""


class Fit(NamedTuple):
    """The exponent of a power law, and its standard error where there are enough points."""

    slope: float
    error: float | None

    def __str__(self) -> str:
        error = "–" if self.error is None else f"{self.error:.2f}"
        return f"{self.slope:+.2f} ± {error}".replace("-", "−")


class Series(NamedTuple):
    """A quantity against T or t: one row of values per seed."""

    x: np.ndarray
    values: np.ndarray

    @property
    def mean(self) -> np.ndarray:
        """Geometric mean over seeds."""
        return np.exp(np.log(self.values).mean(axis=0))

    @property
    def fit(self) -> Fit:
        """Least squares of log value on log x: one slope for all seeds, an intercept for each."""
        x = np.log(self.x) - np.log(self.x).mean()
        y = np.log(self.values)
        y = y - y.mean(axis=1, keepdims=True)
        weight = len(y) * (x @ x)
        slope = float((y @ x).sum() / weight)
        freedom = y.size - len(y) - 1
        if freedom < 1:
            return Fit(slope, None)
        return Fit(slope, float(math.sqrt(((y - slope * x) ** 2).sum() / freedom / weight)))


def at_end(study: Study, schedule: str, arm: str, column: str) -> Series:
    """A quantity at the end of every run, against T."""
    found = study.records
    return _series(found[(found.schedule == schedule) & (found.arm == arm) & (found.step == found.horizon)], column)


def along(study: Study, arm: str, column: str, least: int = SMALLEST) -> Series:
    """A quantity along the longest run at a fixed η_s, against t."""
    found = _longest(study, arm)
    return _series(found[found.step >= least], column)


def findings(study: Study) -> list[dict[str, Any]]:
    """The table: both theorems as written, then what is left without the trivial part."""

    def finding(
        theorem: int, quantity: str, measured: Series, control: str, beside: Series, verdict: str
    ) -> dict[str, Any]:
        return {
            "theorem": theorem,
            "quantity": quantity,
            "against": "t" if "along t" in quantity else "T",
            "first": float(measured.mean[0]),
            "last": float(measured.mean[-1]),
            "fit": measured.fit._asdict(),
            "control": control,
            "control_fit": beside.fit._asdict(),
            "verdict": verdict,
        }

    def theorem_1(quantity: str, schedule: str, column: str) -> dict[str, Any]:
        measured, control = (at_end(study, schedule, arm, column) for arm in (MOVING, FROZEN_THETA))
        first, last = (control.mean / measured.mean)[[0, -1]]
        effect = f"Moving θ divides it by {first:.3g} at T = {SMALLEST} and by {last:.3g} at T = {study.largest}."
        verdict = f"{bound_verdict(measured.fit, control.fit)} {effect}"
        return finding(1, quantity, measured, "θ frozen", control, verdict)

    way, way_fixed = (at_end(study, schedule, MOVING, "theta_moved") for schedule in (PAPER, FIXED))
    start = _at_start(study)
    ends, ends_control = (at_end(study, PAPER, arm, "c_reg_gradient") for arm in (MOVING, FROZEN_BOTH))
    first, last = (ends.mean / ends_control.mean)[[0, -1]]
    as_written = (
        f"{limit_verdict(ends.fit, ends_control.fit, float(ends.mean[-1] / start), 'T')} "
        f"It is {first:.2f} times the control at T = {SMALLEST}, {last:.2f} times at T = {study.largest}."
    )
    run, run_control = (along(study, arm, "c_reg_gradient") for arm in (MOVING, FROZEN_BOTH))
    fixed = limit_verdict(run.fit, run_control.fit, float(run.mean[-1] / start), "t")
    eager, unweighted = (along(study, EAGER, column) for column in ("c_reg_gradient", "unweighted_gradient"))
    eager_verdict = weights_verdict(eager.fit, unweighted.fit)
    both = "θ and w frozen"
    return [
        theorem_1(f"{_META}, η_s = e/T: as written", PAPER, "smallest_meta_gradient"),
        theorem_1(f"{_META} / η_s², η_s = e/T", PAPER, "scaled"),
        theorem_1(f"{_META}, η_s fixed", FIXED, "smallest_meta_gradient"),
        finding(1, "‖θ_T − θ_0‖ / ‖θ_0‖, η_s = e/T", way, "η_s fixed", way_fixed, way_verdict(way.fit, way_fixed.fit)),
        finding(2, f"{_H_L} at t = T, η_s = k/T: as written", ends, both, ends_control, as_written),
        finding(2, f"{_H_L} along t, η_s fixed", run, both, run_control, fixed),
        finding(2, f"{_H_L} along t, η_s fixed, F-reg eager", eager, "‖∇_φ L‖² there", unweighted, eager_verdict),
    ]


def notes(study: Study) -> list[str]:
    """What else the numbers show, in sentences that follow from them."""
    calm = [p for p in study.perturbations if p.flips == 0]
    largest_hard = max(p.hard for p in study.perturbations)
    least = study.perturbations[0]
    hard = (
        f"Hard pseudo labels: moving θ in {measure.DIRECTIONS * study.seeds} random directions changes "
        f"L_s(φ_{{t+1}}(θ)) by {'exactly 0' if largest_hard == 0 else f'up to {largest_hard:.1e}'} wherever no label "
        f"flips"
        + (f" (up to a distance of {calm[-1].radius:g} none does)" if calm else "")
        + f"; soft ones change it by up to {least.soft:.1e} at a distance of {least.radius:g}. So ∂φ/∂θ is "
        + (
            "zero almost everywhere under Eq. 1 as written, and Theorem 1 holds there without content."
            if largest_hard == 0
            else "not zero here, against expectation."
        )
    )
    product, constants = study.step_times_curvature, study.constants
    condition = (
        f"Step sizes: e = k = {constants.e:g}; L = {constants.L_theta:.3g} for θ and {constants.L_losses:.3g} for the "
        f"losses; c = {constants.c_theta:.3g} for η and {constants.c_w:.3g} for η_w. The largest η times curvature met "
        f"is {product:.2f}: the theorem's condition (at most 1) {'held' if product <= 1 else 'was broken'}."
    )

    def ends(arm: str, column: str) -> tuple[float, float]:
        """The mean over seeds at both ends of the longest run."""
        found = _longest(study, arm).groupby("step")[column].mean()
        return found.loc[0], found.loc[study.largest]

    loss, last_loss = ends(MOVING, "labelled_loss")
    weight, eager = (ends(arm, "mean_weight") for arm in (MOVING, EAGER))
    better = (
        f"Labelled loss of C-reg along the longest run at a fixed η_s: {loss:.2f} at t = 0, {last_loss:.2f} at "
        f"t = {study.largest}: a vanishing gradient on pseudo labels is "
        f"{'not' if last_loss >= loss else 'here also'} a better model."
    )
    closing = (
        f"Mean weight H over the same steps: {weight[0]:.2f} to {weight[1]:.2f}; with the eager F-reg, whose "
        f"steps are as large as the curvature of w ↦ L_s(φ⁻(w)) allows (c = {constants.c_eager:.3g}), "
        f"{eager[0]:.2f} to {eager[1]:.2f}."
    )
    return [hard, condition, better, closing]


def pace(measured: Fit) -> Pace:
    """A slope in one word, allowing for two standard errors."""
    slope, tolerance = measured.slope, 2 * (measured.error or 0.0)
    if abs(slope) <= max(LEVEL, tolerance):
        return "level"
    if slope > 0:
        return "grows"
    if slope + tolerance <= RATE:
        return "fast"
    return "slow" if slope - tolerance > RATE else "about"


def bound_verdict(measured: Fit, control: Fit) -> str:
    """Theorem 1: is the rate there, and does it need θ to move?"""
    kept, kept_by_control = (pace(each) in _QUICK for each in (measured, control))
    if kept and kept_by_control:
        return "The rate is kept, and with θ frozen it is kept too: trivial."
    if kept:
        return "The rate is kept, and with θ frozen it is not: θ's movement earns it."
    frozen = "keeps the rate" if kept_by_control else _how(control)
    return f"The rate is not there: it {_how(measured)}; with θ frozen it {frozen}."


def limit_verdict(measured: Fit, control: Fit, left: float, against: str) -> str:
    """Theorem 2: does the gradient tend to zero, and does that need F-reg? A slow fall settles nothing."""
    remaining = f"{100 * left:.2g} % of the value at t = 0 is left at the largest {against}"
    if pace(measured) not in _QUICK:
        judged = "Whether it tends to zero is open" if pace(measured) == "slow" else "It does not tend to zero"
        frozen = f"with θ and w frozen it {_how(control, against)}"
        return f"{judged}: it {_how(measured, against)}, and {remaining}; {frozen}."
    if pace(control) in _QUICK:
        return f"It tends to zero ({remaining}), and with θ and w frozen too: plain gradient descent does it."
    return f"It tends to zero ({remaining}), and with θ and w frozen it does not: F-reg or θ does it."


def weights_verdict(weighted: Fit, without: Fit) -> str:
    """Theorem 2 under a fast F-reg: does C-reg fit its pseudo labels, or do the weights hide that it does not?"""
    if pace(weighted) not in _QUICK:
        return f"It {_how(weighted, 't')}."
    if pace(without) in ("level", "grows"):
        return "It tends to zero while the unweighted gradient does not: F-reg's weights do it, not a fit."
    return "It tends to zero, and the unweighted gradient falls too: C-reg fits its pseudo labels."


def way_verdict(measured: Fit, fixed: Fit) -> str:
    """How far θ gets under the theorem's step sizes."""
    less = pace(measured) not in ("level", "grows")
    words = "θ moves less the larger T is" if less else "θ does not move less as T grows"
    return f"{words}; with η_s fixed its way {_how(fixed)}."


def _how(measured: Fit, against: str = "T") -> str:
    return _PACES[pace(measured)].format(against)


def _series(records: pd.DataFrame, column: str) -> Series:
    """Against T where each record ends a run of its own T, else against t; both are the record's step.

    Columns are those of the records and `scaled`: Theorem 1's left side over η_s², the factor that the gradient
    carries whatever θ does.
    """
    scaled = records.smallest_meta_gradient / records.eta_s**2
    table = records.assign(scaled=scaled).pivot(index="seed", columns="step", values=column)
    return Series(table.columns.to_numpy(), table.to_numpy())


def _longest(study: Study, arm: str) -> pd.DataFrame:
    found = study.records
    return found[(found.schedule == FIXED) & (found.arm == arm) & (found.horizon == study.largest)]


def _at_start(study: Study) -> float:
    """Theorem 2's left side at t = 0, where all runs of a seed are equal."""
    return float(along(study, MOVING, "c_reg_gradient", least=0).mean[0])


# Files.


def summary(study: Study) -> dict[str, Any]:
    """Findings, notes and settings as plain values."""
    return {
        "environment": environment.describe(),
        "settings": {
            "dataset": "fashion-mini",
            "labelled": measure.LABELLED,
            "unlabelled": measure.UNLABELLED,
            "hidden_units": measure.HIDDEN,
            "largest": study.largest,
            "seeds": study.seeds,
            **study.constants._asdict(),
        },
        "findings": findings(study),
        "notes": notes(study),
        "meaning": list(MEANING),
        "step_times_curvature": study.step_times_curvature,
        "perturbations": [perturbation._asdict() for perturbation in study.perturbations],
    }


def write(study: Study, folder: Path, report: dict[str, Any]) -> None:
    """Write the five files into the folder, each whole or not at all, and touch nothing else there."""
    numbers = study.records.to_csv(index=False, lineterminator="\n").encode()
    write_whole(folder / "theory.csv", numbers, ConfigError)
    write_whole(folder / "theory.json", (json.dumps(report, indent=2, ensure_ascii=False) + "\n").encode(), ConfigError)
    write_page(folder, report, partial(figure, study))


def write_page(folder: Path, report: dict[str, Any], draw: Callable[[], Figure] | None = None) -> Path:
    """The findings to read, as Markdown and HTML."""
    verdicts = [f"Theorem {found['theorem']}, {found['quantity']}: {found['verdict']}" for found in report["findings"]]
    numbers = page.table(table(report))
    sections = [
        Section("In numbers", parts=[numbers, Text(reading(report), "fact")]),
        Section("Verdicts", parts=[Text(one) for one in verdicts]),
        Section("What it means", parts=[Text(one) for one in (*report["notes"], *report["meaning"])]),
    ]
    lead = "Both theorems on a small smooth network and full batches, each quantity beside a control that learns less."
    about = report["environment"]
    footer = [f"Measured on {about['cpu']}, {about['cores']} cores, with torch {about['torch']}."]
    title = "The two theorems, measured"
    return page.write(folder, "theory", "feddure theory", title, lead, sections, footer=footer, draw=draw)


def read(folder: Path) -> dict[str, Any]:
    """The summary that was written into a folder; nothing where there is none."""
    try:
        found = json.loads((folder / "theory.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def table(report: dict[str, Any]) -> pd.DataFrame:
    """The findings of a summary as they are printed."""
    return pd.DataFrame(
        {
            "theorem": str(found["theorem"]),
            "quantity": found["quantity"],
            "first": f"{found['first']:.1e}",
            "last": f"{found['last']:.1e}",
            "slope ± se": str(Fit(**found["fit"])),
            "control": found["control"],
            "its slope ± se": str(Fit(**found["control_fit"])),
        }
        for found in report["findings"]
    )


def reading(report: dict[str, Any]) -> str:
    """What the numbers of the table are."""
    settings = report["settings"]
    return (
        f"First and last: geometric means over the seeds ({settings['seeds']}) at {SMALLEST} and "
        f"{settings['largest']}. Slopes: least squares of logarithms over that range, one intercept per seed."
    )


# The figure: on the left as written, on the right without what is trivial.


def figure(study: Study) -> Figure:
    """Four panels; lines are geometric means over seeds, bands reach from the least seed to the largest."""
    with style.applied():
        drawing = style.new_figure(10, 7.6)
        panels = drawing.subplots(2, 2)
        _theorem_1(study, *panels[0])
        _theorem_2(study, *panels[1])
        for axes in panels.flat:
            low, high = axes.get_ylim()
            axes.set_ylim(low * (low / high) ** 0.35, high)  # room for the legend below the lines
            axes.legend(loc="lower left", handlelength=3.2)
        seeds = f"Mean and range of {study.seeds} seeds" if study.seeds > 1 else "One seed"
        about = "Fashion-MNIST at 7 × 7 pixels, soft pseudo labels, float64, whole-set gradients."
        drawing.supxlabel(f"{seeds}, slopes from {SMALLEST} on. {about}", x=0.01, ha="left", color=style.MUTED, size=8)
    return drawing


def _theorem_1(study: Study, left: Axes, right: Axes) -> None:
    _label(left, "Theorem 1 as written: η_s = e/T", "T", _META)
    _label(right, "Theorem 1 without its factor η_s²", "T", f"{_META} / η_s²")
    arms = ((MOVING, "θ moves", style.BLUE, "o"), (FROZEN_THETA, "θ frozen", style.VERMILION, "s"))
    for arm, name, colour, marker in arms:
        series = at_end(study, PAPER, arm, "smallest_meta_gradient")
        _draw(left, series, name, colour, marker)
    rate = series.mean[0] * np.power(series.x / series.x[0], RATE)
    left.plot(series.x, rate, ":", color=style.MUTED, linewidth=1.2, label="1/√T, the bound's rate")
    for schedule, eta_s, line in ((PAPER, "η_s = e/T", "-"), (FIXED, "η_s fixed", "--")):
        for arm, name, colour, marker in arms:
            _draw(right, at_end(study, schedule, arm, "scaled"), f"{name}, {eta_s}", colour, marker, line)


def _theorem_2(study: Study, left: Axes, right: Axes) -> None:
    _label(left, "Theorem 2 as written: η_s = k/T", "T", f"{_H_L} at t = T")
    _label(right, "Theorem 2 with η_s fixed", "t", _H_L)
    for arm, name, colour, marker in (
        (MOVING, "θ and F-reg move", style.BLUE, "o"),
        (FROZEN_BOTH, "θ and F-reg frozen", style.VERMILION, "s"),
    ):
        _draw(left, at_end(study, PAPER, arm, "c_reg_gradient"), name, colour, marker)
        _draw(right, along(study, arm, "c_reg_gradient", least=1), name, colour, marker)
    start = _at_start(study)
    left.axhline(start, color=style.MUTED, linestyle=":", linewidth=1.2, label="at t = 0")
    left.set_ylim(min(left.get_ylim()[0], 1e-2 * start), 2 * start)
    _draw(right, along(study, EAGER, "c_reg_gradient", least=1), "eager F-reg", style.GREEN, "^")
    without = "eager F-reg, without H: ‖∇_φ L‖²"
    _draw(right, along(study, EAGER, "unweighted_gradient", least=1), without, style.GREEN, "^", "--")


def _draw(axes: Axes, series: Series, name: str, colour: str, marker: str, line: str = "-") -> None:
    late = series.x >= SMALLEST
    slope = f"{Series(series.x[late], series.values[:, late]).fit.slope:+.2f}".replace("-", "−")
    filled = colour if line == "-" else "white"
    marks: dict[str, Any] = {"marker": marker, "markersize": 4, "markerfacecolor": filled}
    axes.plot(series.x, series.mean, line, color=colour, label=f"{name}: slope {slope}", **marks)
    low, high = series.values.min(axis=0), series.values.max(axis=0)
    axes.fill_between(series.x, low, high, color=colour, alpha=0.15, linewidth=0)


def _label(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set(title=title, xlabel=x, ylabel=y, yscale="log")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
