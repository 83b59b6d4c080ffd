"""Accuracy against size: points in; a figure for a page out, or a picture that stands alone.

Any number of networks may be points; those that belong together can be joined by a line.  The parts of the
picture are well-formed XML as well as HTML, so that the same drawing serves both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..drawing.colours import tones
from ..drawing.markup import Markup, element, together
from .chart import WIDE, Figure, Scale, Table, curve, frame, grid, picture
from .numbers import count, percent, short

Spell = Callable[[float], str]
_HEIGHT = 250.0
_WIDTH, _LEFT, _TOP, _BELOW = 760, 66, 104, 54  # of a picture that stands alone


@dataclass(frozen=True)
class Point:
    """A network: what its row is called, how often it is right, how large it is, and how it is drawn."""

    name: str
    accuracy: float
    size: float
    kind: str  # classes of the mark
    sign: str = ""  # what is written above it
    beside: bool = False  # the sign stands to its right and below, where a line that rises leaves room


def against(
    key: str,
    words: str,
    points: Sequence[Point],
    caption: str,
    *,
    first: str = "run",
    joined: Sequence[tuple[str, Sequence[Point]]] = (),
    legend: Sequence[tuple[str, str]] = (),
    spelled: tuple[Spell, Spell] = (short, count),
) -> Figure:
    """Accuracy against what `words` names; `joined` are lines, each with its class and its points in order.

    `spelled` says how sizes are written, beside the scale and in the table.
    """
    title = f"Accuracy against {words}"
    if not points:
        return Figure(key, title, missing="No accuracy has been taken yet.")
    accuracies = [point.accuracy for point in points]
    room = max(0.4, (max(accuracies) - min(accuracies)) * 0.15)
    down = Scale(min(accuracies) - room, min(100.0, max(accuracies) + room), _HEIGHT)
    widest = max(point.size for point in points) * 1.08
    parts = [grid(down, 0, " %")]
    for value in Scale(0, widest, 1).ticks(5):
        at = f"{100 * value / widest:.2f}%"
        parts.append(element("line", class_="grid", x1=at, x2=at, y1=0, y2=f"{_HEIGHT:.0f}"))
        parts.append(element("text", spelled[0](value), class_="tick middle", x=at, y=f"{_HEIGHT + 16:.0f}"))
    lines = [curve(kind, [(WIDE * p.size / widest, down(p.accuracy)) for p in line]) for kind, line in joined]
    if lines:
        parts.append(frame(0, _HEIGHT, lines))
    above = _shared(points, down, widest)
    for row, point in enumerate(points):
        x, y = f"{100 * point.size / widest:.2f}%", down(point.accuracy)
        parts.append(element("circle", class_=f"hit point {point.kind}", data_row=row, cx=x, cy=y, r=6))
        sign = above[row] if not point.beside else "" if _crowded(points[:row], point, down, widest) else point.sign
        if sign and point.beside:
            parts.append(element("text", sign, class_="sign beside", dx=8, y=y + 15, x=x))
        elif sign:
            parts.append(element("text", sign, class_="sign", y=y - 10, x=x))
    rows = [[point.name, percent(point.accuracy), spelled[1](point.size)] for point in points]
    drawn = picture("against", _HEIGHT, title, parts)
    return Figure(key, title, caption, drawn, Table([first, "accuracy", words], rows), legend)


def _shared(points: Sequence[Point], down: Scale, widest: float) -> list[str]:
    """What is written above each point: one of several in the same place has the signs of all of them."""
    first: dict[int, list[str]] = {}
    for row, point in enumerate(points):
        near = (
            other
            for other in first
            if abs(point.size - points[other].size) < 0.02 * widest
            and abs(down(point.accuracy) - down(points[other].accuracy)) < 12
        )
        first.setdefault(next(near, row), []).append(point.sign)
    return [", ".join(filter(None, first.get(row, []))) for row in range(len(points))]


def _crowded(before: Sequence[Point], point: Point, down: Scale, widest: float) -> bool:
    """Would a sign beside the point run into that of one before it?"""
    return any(
        abs(point.size - other.size) < 0.07 * widest and abs(down(point.accuracy) - down(other.accuracy)) < 14
        for other in before
    )


def standalone(figure: Figure, title: str, axis: str) -> str:
    """A figure of this kind as an SVG file: light and dark, without a script."""
    height = _TOP + _HEIGHT + _BELOW
    signs = [element("text", title, class_="title", x=_LEFT, y=28)]
    for number, (sign, words) in enumerate(figure.legend):
        x, y = _LEFT + 5 + 220 * (number // 2), 48 + 17 * (number % 2)
        signs.append(element("circle", class_=f"point {sign.rpartition(' ')[2]}", cx=x, cy=y, r=5))
        signs.append(element("text", words, class_="start", x=x + 11, y=y + 4))
    plot = {"x": _LEFT, "y": _TOP, "width": _WIDTH - _LEFT - 24, "height": f"{_HEIGHT:.0f}"}
    across, down = f"{(_LEFT + _WIDTH - 24) / 2:.0f}", f"{height - 14:.0f}"
    return together(
        element(
            "svg",
            element("style", Markup(_style())),
            element("rect", class_="paper", width="100%", height="100%"),
            signs,
            element("svg", figure.picture, class_="plot", **plot),
            element("text", axis, class_="middle", x=across, y=down),
            xmlns="http://www.w3.org/2000/svg",
            viewBox=f"0 0 {_WIDTH} {height:.0f}",
            width=_WIDTH,
            height=f"{height:.0f}",
            role="img",
            aria_label=title,
        ),
        "\n",
    )


def _style() -> str:
    shapes = (
        "text{font:11px ui-sans-serif,system-ui,'Segoe UI',Roboto,Helvetica,Arial,sans-serif;text-anchor:end}"
        ".middle,.sign{text-anchor:middle}.start,.title,.beside{text-anchor:start}.title{font-size:14px;font-weight:600}"
        ".sign{font-weight:600}.plot{overflow:visible}.curve{fill:none;stroke-width:2;vector-effect:non-scaling-stroke}"
        ".curve.dashed{stroke-dasharray:4 4}.point{stroke-width:2}"
    )
    return f"{shapes}{_colours(dark=False)}@media (prefers-color-scheme:dark){{{_colours(dark=True)}}}"


def _colours(*, dark: bool) -> str:
    tone = tones(dark=dark)
    rules = {
        ".paper": f"fill:{tone['paper']}",
        "text": f"fill:{tone['soft']}",
        ".title,.sign": f"fill:{tone['ink']}",
        ".grid": f"stroke:{tone['wire']};stroke-opacity:.35",
        ".curve.accent": f"stroke:{tone['fill']}",
        ".curve.dashed": f"stroke:{tone['gate']}",
        ".point.chosen": f"fill:{tone['fill']};stroke:{tone['fill']}",
        ".point.whole": f"fill:{tone['paper']};stroke:{tone['ink']}",
        ".point.own": f"fill:{tone['paper']};stroke:{tone['gate']}",
        ".point.tuned": f"fill:{tone['gate']};stroke:{tone['gate']}",
    }
    return "".join(f"{key}{{{rule}}}" for key, rule in rules.items())
