"""Figures as parts of a page: SVG whose text is text and whose colours are the page's, and values to point at.

A line, band or error bar with a label is a series: pointing at it tells its values, and clicking its name in a legend
hides it. `gid`s, below, mark what has no label of its own. `page.js` does the rest; without it a figure is a picture.
"""

import hashlib
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.transforms import Transform

from feddure.reports import style

ALONG_Y = "along-y"
"""The gid of axes whose values are read row by row."""
MAP = "map"
"""The gid of a map in one hue whose light cells hold little: on a dark page these are dark."""

_SERIES, _VALUES, _BETWEEN = "series ", "values ", "¦"
_MOST_POINTS = 400  # of a line, that can be pointed at
_NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
# matplotlib writes a bubble as eight curves from its top through its bottom.
_CIRCLE = re.compile(
    r'<path d="M (?P<x>\S+) (?P<top>\S+) \n(?:C [-\d. ]+\n){3}C (?:\S+ ){4}(?P=x) (?P<bottom>\S+) \n'
    r'(?:C [-\d. ]+\n){4}z\n"(?= style=)'
)


def part_of(series: str) -> str:
    """The gid of what is shown and hidden with a series: its band, or its single rounds."""
    return _SERIES + series


def saying(texts: Iterable[str]) -> str:
    """The gid of a collection whose members each say a text when they are pointed at."""
    return _VALUES + _BETWEEN.join(text.replace(_BETWEEN, " ") for text in texts)


def svg(figure: Figure) -> str:
    """The figure as SVG; what belongs to a series has its place in `values(figure)["names"]` as `data-series`."""
    # As XML reads them: lines of an attribute are one, and some signs there cannot be.
    marks = (" ".join(_NOT_XML.sub("\ufffd", _SERIES + name).splitlines()) for name in _mark(figure))
    places = {mark: str(place) for place, mark in enumerate(marks)}
    text = style.render(figure, "svg", own_font=False).decode(errors="replace")
    root = ElementTree.fromstring(_NOT_XML.sub("\ufffd", _CIRCLE.sub(_circle, text)))
    prefix = hashlib.sha256(text.encode()).hexdigest()[:8]  # a page has many figures
    used = set(re.findall(r'(?:href="|url\()#([^")]+)', text))
    for parent in root.iter():
        for child in [child for child in parent if child.tag.endswith(("}metadata", "}style"))]:
            parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        element.tail = None
        element.text = element.text if element.tag == "text" else None
        name = element.attrib.pop("id", "")
        if name in used:
            element.set("id", f"{prefix}-{name}")
        elif name in places:
            element.set("data-series", places[name])
        elif name == MAP or name.startswith("legend_"):
            element.set("class", name.partition("_")[0])
        if name not in used and "fill:" not in element.get("style", "fill:"):  # matplotlib leaves out black
            element.set("style", f"fill: #000000; {element.get('style')}")
        element.attrib = {key.rpartition("}")[2]: _brief(key, value, prefix) for key, value in element.items()}
        if name.startswith(_VALUES):
            shapes = [shape for child in element for shape in ([child] if not len(child) else child)]
            for shape, said in zip(shapes, name.removeprefix(_VALUES).split(_BETWEEN), strict=False):
                ElementTree.SubElement(shape, "title").text = said
    view = root.get("viewBox", "")
    root.attrib = {"viewBox": view}
    return ElementTree.tostring(root, encoding="unicode")


def values(figure: Figure) -> dict[str, Any]:
    """What pointing at a figure tells, once it is drawn: the values of its series, and where its axes lie."""
    names = _mark(figure)
    panels = [_panel(axes, names, figure.transFigure.inverted()) for axes in figure.get_axes()]
    return {"names": names, "panels": list(filter(None, panels))}


def _panel(axes: Axes, names: list[str], share_of: Transform) -> dict[str, Any] | None:
    along_y = axes.get_gid() == ALONG_Y
    lines: dict[str, dict[str, Any]] = {}
    for name, (line, *_) in _labelled(axes):
        if isinstance(line, Line2D):
            series = names.index(str(line.get_gid()).removeprefix(_SERIES))
            about = {
                "series": series,
                "name": name.replace(r"\$", "$"),
                "color": style.themed(to_hex(_colour(line))),
                "points": [],
            }
            found = np.array(line.get_xydata(), dtype=float)
            found = found[np.isfinite(found).all(axis=1)]
            places = [*style.thinned(len(found), _MOST_POINTS), *range(len(found))[-1:]]
            kept = [[float(f"{value:.6g}") for value in found[place]] for place in dict.fromkeys(places)]
            lines.setdefault(name, about)["points"] += kept
    if not any(line["points"] for line in lines.values()):
        return None
    box = axes.bbox.transformed(share_of)
    rows = axes.get_yticks() if along_y else ()
    ticks = zip(rows, axes.yaxis.get_major_formatter().format_ticks(list(rows)), strict=True)
    return {
        "box": [round(share, 5) for share in (box.x0, 1 - box.y1, box.x1, 1 - box.y0)],
        "x": [*map(float, axes.get_xlim())],
        "y": [*map(float, axes.get_ylim())],
        "log": [axes.get_xscale() == "log", axes.get_yscale() == "log"],
        "along": "y" if along_y else "x",
        "label": axes.get_xlabel(),
        "ticks": {f"{place:g}": text for place, text in ticks},
        "lines": list(lines.values()),
    }


def _mark(figure: Figure) -> list[str]:
    """Mark all parts of each series, in legends too; returns the names of the series."""
    found: dict[str, None] = {}
    for axes in figure.get_axes():
        for name, artists in _labelled(axes):
            gid = artists[0].get_gid() or _SERIES + name
            found[gid] = None
            for artist in artists:
                artist.set_gid(gid)
        marked = (str(artist.get_gid()) for artist in axes.get_children())
        found |= {gid: None for gid in marked if gid.startswith(_SERIES)}
    for legend in figure.findobj(Legend):
        assert isinstance(legend, Legend)
        for handle, text in zip(legend.legend_handles, legend.get_texts(), strict=True):
            gid = _SERIES + text.get_text()
            for artist in (handle, text) if gid in found else ():
                if artist is not None:
                    artist.set_gid(gid)
    return [gid.removeprefix(_SERIES) for gid in found]


def _labelled(axes: Axes) -> Iterator[tuple[str, list[Any]]]:
    """The name and the artists of each labelled line or band, a line first; matplotlib's own names have a _ ahead."""
    every = [(artist.get_label(), [artist]) for artist in (*axes.lines, *axes.collections)]
    for container in axes.containers:
        if isinstance(container, ErrorbarContainer) and container.lines[0] is not None:
            line, caps, bars = container.lines
            every.append((container.get_label(), [line, *caps, *bars]))
    return ((str(name), artists) for name, artists in every if name and not str(name).startswith("_"))


def _colour(line: Line2D) -> Any:
    """Of an empty marker without a line, that of its edge."""
    return line.get_markeredgecolor() if line.get_linestyle() == "None" else line.get_color()


def _brief(key: str, value: str, prefix: str) -> str:
    """An attribute without digits that nobody sees, with ids of this figure alone and colours of the page."""
    if key == "d":
        return re.sub(r"(\.\d\d)\d+", r"\1", value).replace("\n", "")
    if key == "style":
        value = re.sub(r"font-family: [^;]*;? ?", "", value)
        return re.sub("#[0-9a-f]{6}", lambda colour: style.themed(colour[0]), value)
    if key.endswith("href") or key == "clip-path":
        return re.sub(r"^(url\()?#", rf"\g<1>#{prefix}-", value) if len(value) < 99 else value
    return value


def _circle(match: re.Match[str]) -> str:
    top, bottom = float(match["top"]), float(match["bottom"])
    return f'<circle cx="{match["x"]}" cy="{(top + bottom) / 2:.2f}" r="{abs(top - bottom) / 2:.2f}"'
