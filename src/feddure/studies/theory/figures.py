"""One figure for both theorems: on the left as written, on the right without what is trivial."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from feddure.reports import style
from feddure.studies.theory import findings
from feddure.studies.theory.findings import RATE, Series
from feddure.studies.theory.measure import EAGER, FIXED, FROZEN_BOTH, FROZEN_THETA, MOVING, PAPER, SMALLEST, Study

_MEASURED, _CONTROL, _OTHER = style.BLUE, style.VERMILION, style.GREEN
_META = r"\min_t\ \|\nabla_{\!\theta}\, L_s(\phi_{t+1}(\theta_t))\|^2"
_C_REG = r"\|\nabla_{\!\phi}\, H\!\cdot\! L\|^2"


def figure(study: Study) -> Figure:
    """Four panels; lines are geometric means over seeds, bands reach from the least seed to the largest."""
    with style.applied():
        drawing = style.new_figure(10, 7.6)
        panels = drawing.subplots(2, 2)
        _theorem_1(study, panels[0, 0], panels[0, 1])
        _theorem_2(study, panels[1, 0], panels[1, 1])
        for panel in panels.flat:
            _legend(panel)
        seeds = f"Mean and range of {study.seeds} seeds" if study.seeds > 1 else "One seed"
        about = (
            f"{seeds}, slopes from {SMALLEST} on. "
            "Fashion-MNIST at 7 × 7 pixels, soft pseudo labels, float64, whole-set gradients."
        )
        drawing.text(0.01, 0.008, about, color=style.MUTED, fontsize=8)
        drawing.tight_layout(rect=(0, 0.025, 1, 1), h_pad=2.0, w_pad=2.0)
    return drawing


def _theorem_1(study: Study, left: Axes, right: Axes) -> None:
    arms = ((MOVING, "θ moves", _MEASURED, "o"), (FROZEN_THETA, "θ frozen", _CONTROL, "s"))
    for arm, name, colour, marker in arms:
        _draw(left, findings.across(study, PAPER, arm, findings.smallest), name, colour, marker)
    _guide(left, findings.across(study, PAPER, FROZEN_THETA, findings.smallest), r"$1/\sqrt{T}$, the bound's rate")
    _label(left, r"Theorem 1 as written: $\eta_s = e/T$", "T", f"${_META}$")
    for schedule, spoken, line in ((PAPER, r"$\eta_s = e/T$", "-"), (FIXED, r"$\eta_s$ fixed", "--")):
        for arm, name, colour, marker in arms:
            series = findings.across(study, schedule, arm, findings.smallest_scaled)
            _draw(right, series, f"{name}, {spoken}", colour, marker, line)
    _label(right, r"Theorem 1 without its factor $\eta_s^2$", "T", rf"${_META}\ /\ \eta_s^2$")


def _theorem_2(study: Study, left: Axes, right: Axes) -> None:
    for arm, name, colour, marker in (
        (MOVING, "θ and F-reg move", _MEASURED, "o"),
        (FROZEN_BOTH, "θ and F-reg frozen", _CONTROL, "s"),
    ):
        _draw(left, findings.across(study, PAPER, arm, findings.c_reg), name, colour, marker)
        _draw(right, findings.along(study, arm, findings.c_reg, least=1), name, colour, marker)
    start = findings.at_start(study, findings.c_reg)
    left.axhline(start, color=style.MUTED, linestyle=":", linewidth=1.2, label="at t = 0")
    _label(left, r"Theorem 2 as written: $\eta_s = k/T$", "T", f"${_C_REG}$ at t = T")
    left.set_ylim(min(left.get_ylim()[0], 1e-2 * start), 2 * start)
    eager = findings.along(study, EAGER, findings.c_reg, least=1)
    unweighted = findings.along(study, EAGER, findings.unweighted, least=1)
    _draw(right, eager, "eager F-reg", _OTHER, "^")
    _draw(right, unweighted, r"eager F-reg, without H: $\|\nabla_{\!\phi}\, L\|^2$", _OTHER, "^", "--")
    _label(right, r"Theorem 2 with $\eta_s$ fixed", "t", f"${_C_REG}$")


def _draw(axes: Axes, series: Series, name: str, colour: str, marker: str, line: str = "-") -> None:
    late = series.x >= SMALLEST
    slope = findings.fit(Series(series.x[late], series.values[:, late])).slope
    label = f"{name}: slope " + f"{slope:+.2f}".replace("-", "−")
    filled = colour if line == "-" else "white"
    axes.plot(
        series.x, series.mean, line, color=colour, marker=marker, markersize=4, markerfacecolor=filled, label=label
    )
    low, high = series.values.min(axis=0), series.values.max(axis=0)
    axes.fill_between(series.x, low, high, color=colour, alpha=0.15, linewidth=0)


def _guide(axes: Axes, beside: Series, name: str) -> None:
    line = beside.mean[0] * np.power(beside.x / beside.x[0], RATE)
    axes.plot(beside.x, line, ":", color=style.MUTED, linewidth=1.2, label=name)


def _label(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel(x)
    axes.set_ylabel(y)


def _legend(axes: Axes) -> None:
    """Below the lines, in room made for it."""
    low, high = axes.get_ylim()
    axes.set_ylim(low * (low / high) ** 0.35, high)
    axes.legend(loc="lower left", handlelength=3.2)
