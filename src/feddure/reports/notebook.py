"""What objects of the API show of themselves in a notebook: small tables and a curve, without a request to anywhere."""

from collections.abc import Iterable, Sequence
from html import escape

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 420, 170, 44, 22, 10  # pixels
_COLOURS = ("#0072b2", "#d55e00")


def table(head: Sequence[str], rows: Iterable[Sequence[object]], caption: str = "") -> str:
    """A table of texts, whatever is in them."""
    left = ' style="text-align:left"'
    lines = "".join(f"<tr>{''.join(f'<td{left}>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    names = f"<tr>{''.join(f'<th{left}>{escape(name)}</th>' for name in head)}</tr>" if head else ""
    return f"<table><caption{left}>{escape(caption)}</caption>{names}{lines}</table>"


def curves(named: dict[str, list[tuple[int, float]]], title: str) -> str:
    """Shares of 1 against rounds as an inline SVG; nothing where no curve has two points."""
    shown = {name: points for name, points in named.items() if len(points) > 1}
    if not shown:
        return ""
    rounds = [number for points in shown.values() for number, _ in points]
    values = [value for points in shown.values() for _, value in points]
    (first, last), (low, high) = (min(rounds), max(rounds)), (min(values), max(values))

    def x(number: int) -> float:
        return _LEFT + (number - first) / (last - first or 1) * (_WIDTH - _LEFT - 10)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (value - low) / (high - low or 1) * (_HEIGHT - _BOTTOM - _TOP)

    def text(left: float, top: float, said: str, anchor: str, colour: str = "currentColor") -> str:
        return f'<text x="{left:.0f}" y="{top:.0f}" text-anchor="{anchor}" fill="{colour}">{escape(said)}</text>'

    parts = [
        f'<path d="M{_LEFT} {_TOP}V{_HEIGHT - _BOTTOM}H{_WIDTH - 10}" stroke="currentColor" opacity=".4" fill="none"/>',
        *(text(_LEFT - 4, y(value) + 4, f"{100 * value:.1f}\u202f%", "end") for value in dict.fromkeys((low, high))),
        text(_LEFT + 6, _TOP + 6, title, "start"),
        text(x(first), _HEIGHT - 6, f"round {first}", "start"),
        text(x(last), _HEIGHT - 6, f"round {last}", "end"),
    ]
    for place, (name, points) in enumerate(shown.items()):
        colour = _COLOURS[place % len(_COLOURS)]
        way = " ".join(f"{x(number):.1f},{y(value):.1f}" for number, value in points)
        parts.append(f'<polyline points="{way}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if len(shown) > 1:
            parts.append(text(_WIDTH - 14, _HEIGHT - _BOTTOM - 8 - 14 * place, name, "end", colour))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
        f'role="img" font-size="11" font-family="sans-serif"><title>{escape(title)}</title>{"".join(parts)}</svg>'
    )
