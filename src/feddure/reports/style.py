"""One style for every figure: colours that colour-blind readers can tell apart, and text that can be read.

Figures are plain `matplotlib.figure.Figure` objects drawn by Agg; nothing touches pyplot's global state.
"""

import io
from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cycler import cycler

from feddure.errors import ConfigError
from feddure.files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette without its yellow, too pale for lines; neighbours differ in lightness too.
BLUE, ORANGE, GREEN, SKY = "#0072B2", "#E69F00", "#009E73", "#56B4E9"
VERMILION, PURPLE, BLACK = "#D55E00", "#CC79A7", "#000000"
PALETTE = (BLUE, ORANGE, GREEN, SKY, VERMILION, PURPLE, BLACK)
# Beside the palette, no less apart from it for colour-blind readers than its own colours are from each other.
INDIGO, WINE, BROWN = "#332288", "#882255", "#7A4A2A"

INK, MUTED, GRID = "#222222", "#666666", "#E4E4E4"

ON_LIGHT, ON_DARK = "#232323", "#FEFEFE"
"""For numbers in the cells of a map."""

DARK = {
    INK: "#E7E9EB", MUTED: "#9AA3AD", GRID: "#31373E", ON_LIGHT: "#E7E9EC", ON_DARK: "#14171B", "#FFFFFF": "#1E2227",
    BLUE: "#4BA6E0", GREEN: "#19BF92", VERMILION: "#F2803C", PURPLE: "#DD9CC0", BLACK: "#F4F4F4",
    INDIGO: "#9D92F0", WINE: "#DB7BA2", BROWN: "#C79468",
}  # fmt: skip
"""What a page shows in the place of these colours where its reader's screen is dark; the others stay."""

FORMATS = ("png", "svg", "pdf")

LineStyle = dict[str, Any]
"""Colour, marker and line, as matplotlib's lines take them."""

_FAMILIES = (BLACK, ORANGE, PURPLE, GREEN, VERMILION, BLUE, BROWN, SKY, INDIGO, WINE)
_MARKERS = ("v", "P", "D", "^", "s", "o", ">", "X", "p", "*")
_LINES: tuple[Any, ...] = ("-", "--", "-.", (0, (7, 1.5, 1.5, 1.5, 1.5, 1.5)))

_SETTINGS: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so figures are alike everywhere
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
    "figure.titlesize": 11,
    "figure.titleweight": "bold",
    "grid.color": GRID,
    "image.interpolation": "nearest",
    "grid.linewidth": 0.7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
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


def line_styles(methods: Iterable[str]) -> dict[str, LineStyle]:
    """The colour, marker and line of each method.

    Every family of registered methods has its own colour and marker, the same in all figures; a method that extends
    the one registered before it is of its family and dashed, as FedProx beside FedAvg. Other methods take what is
    free.
    """
    found: dict[str, LineStyle] = {}
    known = _registered()
    for method in methods:
        if method not in known:
            known[method] = _family(len({fmt["color"] + fmt["marker"] for fmt in known.values()}))
        found[method] = known[method]
    return found


def run_line_styles(methods: Iterable[str]) -> list[LineStyle]:
    """The same of runs by their methods: in the method's colour, or where there is only one method each in its own.

    Runs of the same colour differ in their markers.
    """
    methods = list(methods)
    if len(set(methods)) == 1:
        places = [divmod(place, len(PALETTE)) for place in range(len(methods))]
        return [{"color": PALETTE[place], "marker": "os^Dv"[again % 5]} for again, place in places]
    every, again, found = line_styles(methods), Counter[str](), []
    for method in methods:
        fmt = every[method]
        markers = [fmt["marker"], *(marker for marker in "os^DvPX*" if marker != fmt["marker"])]
        found.append(fmt | {"marker": markers[again[fmt["color"]] % len(markers)]})
        again[fmt["color"]] += 1
    return found


def _registered() -> dict[str, LineStyle]:
    from feddure.methods import METHODS  # and with them PyTorch, which the live page does without

    found: dict[str, LineStyle] = {}
    family, member = -1, 0
    before: type | None = None
    for name, method in METHODS.items():
        family, member = (family, member + 1) if before and issubclass(method, before) else (family + 1, 0)
        found[name] = _family(family) | ({"linestyle": _LINES[member % len(_LINES)]} if member else {})
        before = method
    return found


def _family(place: int) -> LineStyle:
    """Beyond the colours they come again with other markers and lines."""
    again, place = divmod(place, len(_FAMILIES))
    marker = _MARKERS[(place + 3 * again) % len(_MARKERS)]
    return {"color": _FAMILIES[place], "marker": marker, "linestyle": _LINES[-again % len(_LINES)]}


def applied(**changes: Any) -> AbstractContextManager[None]:
    """A context in which matplotlib draws in this project's style."""
    from matplotlib import style  # in functions alone: the live page needs colours, and not to wait for it

    return style.context(_SETTINGS | changes)


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure of this size in inches, laid out by matplotlib; build it inside `applied()`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def legend(figure: "Figure", names: Iterable[str], handles: Iterable[Any]) -> None:
    """Names below all panels, in as many columns as fit."""
    names = list(names)
    room = 14 * figure.get_size_inches()[0] / (max(map(len, names), default=0) + 6)
    figure.legend(list(handles), names, loc="outside lower left", ncols=max(1, min(int(room), 5)))


def bare(axes: "Axes") -> "Axes":
    """Axes for a map of cells: without lines, ticks and frame."""
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.grid(False)
    return axes


def short(text: str, longest: int) -> str:
    """A text for a figure, or its two ends where it is too long: paths and numbered names differ at the end."""
    if len(text) > longest:
        tail = longest // 2
        text = f"{text[: longest - tail - 1]}…{text[-tail:]}"
    return text.replace("$", r"\$")  # matplotlib would read a formula


def thinned(count: int, most: int) -> range:
    """Places of at most so many, evenly spaced from the first."""
    return range(0, count, max(1, -(-count // most)))


def render(figure: "Figure", ending: str, dots_per_inch: int = 150, own_font: bool = True) -> bytes:
    """The figure as the bytes of a png, svg or pdf file; an svg may leave the font of its text to its reader."""
    buffer = io.BytesIO()
    with applied(**{} if own_font else {"svg.fonttype": "none"}):
        figure.savefig(buffer, format=ending, dpi=dots_per_inch, metadata=_METADATA[ending])
    return buffer.getvalue()


def themed(colour: str) -> str:
    """A colour as CSS that a dark page may replace."""
    return f"var(--{colour[1:].lower()},{colour.lower()})" if colour.upper() in DARK else colour


def save(figure: "Figure", path: Path) -> None:
    """Write the figure in the format of the file's ending, whole or not at all."""
    ending = path.suffix.lower().removeprefix(".")
    if ending not in FORMATS:
        raise ConfigError(f"{path}: expected the name of a figure to end in .png, .svg or .pdf")
    write_whole(path, render(figure, ending), ConfigError)
