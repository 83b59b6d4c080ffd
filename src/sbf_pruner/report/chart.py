"""The parts that every figure is made of: tables of numbers, scales, lines, and the figure's frame.

Places across a figure are percentages and places down it are pixels, so a picture fits any width while its
text keeps its size; curves stretch in frames of their own.  A figure is a picture with marks and a table with
one row for each mark: what a mark says when it is asked stands in its row, and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise

_RAISED = str.maketrans("-0123456789", "\u207b\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079")
WIDE = 1000.0  # units across a frame of curves


@dataclass(frozen=True)
class Table:
    """The numbers of a figure: a heading, rows, and which columns hold words."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1  # how many columns from the left

    def html(self) -> str:
        """The table as HTML; the first cell of a row names it."""
        head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in self.head)
        rows = []
        for first, *rest in self.rows:
            cells = "".join(
                f"<td class=w>{escape(cell)}</td>" if place < self.words - 1 else f"<td>{escape(cell)}</td>"
                for place, cell in enumerate(rest)
            )
            rows.append(f"<tr><th scope=row>{escape(first)}</th>{cells}</tr>")
        return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


@dataclass(frozen=True)
class Figure:
    """One part of a page."""

    key: str
    title: str
    caption: str = ""  # HTML of one paragraph
    picture: str = ""  # HTML or SVG, with an element of class "hit" and data-row for each row of the table
    table: Table | None = None
    legend: Sequence[tuple[str, str]] = field(default=())  # class of the sign, words
    missing: str = ""  # why there is no picture
    wide: bool = False  # it takes the whole width of the page
    text: str = ""  # HTML of whole paragraphs and lists

    def html(self) -> str:
        """What stands inside the figure's section."""
        parts = [f'<h2 id="{self.key}-title">{escape(self.title)}</h2>']
        if self.missing:
            return f'{parts[0]}<p class="missing">{escape(self.missing)}</p>'
        if self.caption:
            parts.append(f"<p class=caption>{self.caption}</p>")
        if self.text:
            parts.append(f"<div class=caption>{self.text}</div>")
        if self.legend:
            signs = "".join(f'<li><i class="{sign}"></i>{escape(words)}</li>' for sign, words in self.legend)
            parts.append(f"<ul class=legend>{signs}</ul>")
        if self.picture:
            parts.append(f'<figure data-marks aria-labelledby="{self.key}-title">{self.picture}</figure>')
        if self.table is not None:
            label = f'tabindex=0 role=region aria-label="{escape(self.title)}: the numbers"'
            parts.append(
                f'<details data-key="{self.key}-numbers"><summary>The numbers</summary>'
                f"<div class=scroll {label}>{self.table.html()}</div></details>"
            )
        return "".join(parts)


@dataclass(frozen=True)
class Scale:
    """Values onto pixels, the least at the bottom."""

    low: float
    high: float
    height: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        """How far down a value stands."""
        low, high, at = float(self.low), float(self.high), float(value)
        if self.logarithmic:
            low, high, at = math.log(low), math.log(high), math.log(max(value, self.low))
        return self.height * (1 - (at - low) / (high - low if high > low else 1))

    def ticks(self, most: int = 5) -> list[float]:
        """Round values to write beside the scale.

        >>> Scale(0, 70, 100).ticks(), Scale(0.002, 3, 100, True).ticks()
        ([0.0, 20.0, 40.0, 60.0], [0.01, 0.1, 1.0])
        """
        if self.logarithmic:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            each = max(1, -(-(last - first + 1) // most))
            return [10.0**power for power in range(first, last + 1, each)]
        rough = (self.high - self.low) / most
        size = math.pow(10.0, math.floor(math.log10(rough))) if rough > 0 else 1.0
        step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        return [n * step for n in range(first, math.floor(self.high / step + 1e-9) + 1)]


def grid(scale: Scale, top: float, unit: str = "", most: int = 5) -> str:
    """Lines across a figure, with their values at the left."""
    parts = []
    for value in scale.ticks(most):
        y = top + scale(value)
        parts.append(f'<line class="grid" x1="0" x2="100%" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="-8" y="{y + 3.5:.1f}">{tick(value)}{unit}</text>')
    return "".join(parts)


def tick(value: float) -> str:
    """A value beside a scale.

    >>> tick(20.0), tick(0.001), tick(2000.0), tick(1e-6), tick(1e6), tick(2e6)
    ('20', '0.001', '2,000', '10⁻⁶', '10⁶', '2,000,000')
    """
    if value > 0 and not 1e-3 <= value < 1e6 and math.log10(value).is_integer():
        return f"10{str(round(math.log10(value))).translate(_RAISED)}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"


def curve(kind: str, points: Sequence[tuple[float, float]]) -> str:
    """A line through points: units across a frame, pixels down.  A single point is a dot."""
    if not points:
        return ""
    return f'<path class="curve {kind}" d="{way(points, 1)}{"h.01" if len(points) == 1 else ""}"/>'


def way(points: Sequence[tuple[float, float]], digits: int = 0) -> str:
    """The words of a path through points, each told from the one before, which takes few letters.

    >>> way([(0, 10), (5.2, 10), (10.4, 7)], 1)
    'M0 10l5.2 0 5.2 -3'
    """
    unit = 10**digits
    places = [(round(x * unit), round(y * unit)) for x, y in points]

    def spelled(place: tuple[int, int]) -> str:
        return " ".join(f"{number / unit:g}" for number in place)

    steps = [(x - x0, y - y0) for (x0, y0), (x, y) in pairwise(places)]
    return f"M{spelled(places[0])}" + (f"l{' '.join(map(spelled, steps))}" if steps else "")


def frame(top: float, height: float, inside: str) -> str:
    """A part of the figure that stretches with its width; what goes beyond it is cut off."""
    box = f'viewBox="0 0 {WIDE:.0f} {height:.0f}" preserveAspectRatio="none"'
    return f'<svg y="{top:.0f}" width="100%" height="{height:.0f}" {box}>{inside}</svg>'


def picture(kind: str, height: float, inside: str, label: str) -> str:
    """A whole figure, as wide as there is room; below it there is room for one line of text."""
    return (
        f'<svg class="plot {kind}" height="{height:.0f}" role="group" aria-label="{escape(label)}">{inside}</svg>'
    )


def column(kind: str, row: int, left: float, width: float, top: float, height: float) -> str:
    """The mark of a table's row: a column of the figure, in percent across and pixels down."""
    place = f'x="{left:.2f}%" y="{top:.0f}" width="{width:.2f}%" height="{height:.0f}"'
    return f'<rect class="hit{kind and " "}{kind}" data-row={row} {place}/>'


def parts_of_the_network(names: Sequence[str], height: float) -> str:
    """Below a figure with a column per name: which of them belong together, as modules are nested."""
    spans: list[tuple[str, int, int]] = []
    for place, name in enumerate(names):
        part = name.partition(".")[0]
        if spans and spans[-1][0] == part:
            spans[-1] = part, spans[-1][1], place + 1
        else:
            spans.append((part, place, place + 1))
    found, each = [], 100 / len(names)
    for part, first, end in spans:
        left, right, y = each * (first + 0.12), each * (end - 0.12), height + 5
        found.append(f'<line class=axis x1="{left:.3f}%" x2="{right:.3f}%" y1="{y:.0f}" y2="{y:.0f}"/>')
        if right - left > 9:
            at = f'x="{(left + right) / 2:.3f}%" y="{height + 18:.0f}"'
            found.append(f'<text class="tick middle" {at}>{escape(part)}</text>')
    return "".join(found)
