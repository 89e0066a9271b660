"""One look for every figure: colours that colour-blind readers can tell apart, and text that can be read.

Figures are plain `matplotlib.figure.Figure` objects drawn by Agg; nothing touches pyplot's global state.
"""

import io
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from cycler import cycler
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from feddure.errors import ConfigError
from feddure.files import write_whole

# Okabe and Ito's palette without its yellow, too pale for lines; neighbours differ in lightness too.
BLUE, ORANGE, GREEN, SKY, VERMILION, PURPLE, BLACK = PALETTE = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#56B4E9",
    "#D55E00",
    "#CC79A7",
    "#000000",
)
LABELLED = BLUE
UNLABELLED = VERMILION

INK = "#222222"
MUTED = "#666666"
GRID = "#E4E4E4"

LABELLED_MAP, UNLABELLED_MAP = "Blues", "Oranges"
"""For quantities: one hue each, told apart by lightness alone; dark is much."""

FORMATS = ("png", "svg", "pdf")

_SETTINGS: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so figures look alike everywhere
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.prop_cycle": cycler(color=PALETTE),
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "svg.fonttype": "path",
    "svg.hashsalt": "feddure",
    "pdf.fonttype": 42,
}

# Without dates, equal figures are equal files.
_METADATA: dict[str, dict[str, Any]] = {
    "png": {},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}


class PercentTicks(PercentFormatter):
    """Shares as per cent with as many decimals as the ticks need: 45 % and 50 %, but 42.5 % and 45.0 %."""

    def __init__(self) -> None:
        super().__init__(1.0, decimals=0)

    def format_ticks(self, values: list[float]) -> list[str]:
        self.decimals = next((d for d in (0, 1) if all(abs(100 * v - round(100 * v, d)) < 1e-6 for v in values)), 2)
        return super().format_ticks(values)


def applied() -> AbstractContextManager[None]:
    """A context in which matplotlib draws in this project's style."""
    return style.context(_SETTINGS)


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of this size in inches; build it inside `applied()`."""
    figure = Figure(figsize=(width, height), facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def inches(figure: Figure, left: float, bottom: float, width: float, height: float) -> Axes:
    """Axes at a place given in inches, for charts whose marks must fit their cells exactly."""
    across, up = figure.get_size_inches()
    return figure.add_axes((left / across, bottom / up, width / across, height / up))


def render(figure: Figure, ending: str, dots_per_inch: int = 150) -> bytes:
    """The figure as the bytes of a png, svg or pdf file."""
    buffer = io.BytesIO()
    with applied():
        figure.savefig(buffer, format=ending, dpi=dots_per_inch, metadata=_METADATA[ending])
    return buffer.getvalue()


def save(figure: Figure, path: Path) -> None:
    """Write the figure in the format of the file's ending, whole or not at all."""
    ending = path.suffix.lower().removeprefix(".")
    if ending not in FORMATS:
        raise ConfigError(f"{path}: expected the name of a figure to end in .png, .svg or .pdf")
    write_whole(path, render(figure, ending), ConfigError)
