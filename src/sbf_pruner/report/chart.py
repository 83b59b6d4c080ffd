"""The parts that every figure is made of: tables of numbers, scales, lines, and the figure's frame.

Places across a figure are percentages and places down it are pixels, so a picture fits any width while its
text keeps its size; curves stretch in frames of their own.  A figure is a picture with marks and a table with
one row for each mark: what a mark says when it is asked stands in its row, and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ..drawing.markup import NOTHING, Content, Markup, element, together

_RAISED = str.maketrans("-0123456789", "\u207b\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079")
WIDE = 1000.0  # units across a frame of curves


@dataclass(frozen=True)
class Table:
    """The numbers of a figure: a heading, rows, and which columns hold words."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1  # how many columns from the left

    def html(self) -> Markup:
        """The table as HTML; the first cell of a row names it."""
        rows = []
        for first, *rest in self.rows:
            kinds = ("w" if place < self.words - 1 else None for place in range(len(rest)))
            cells = (element("td", cell, class_=kind) for cell, kind in zip(rest, kinds, strict=True))
            rows.append(element("tr", element("th", first, scope="row"), cells))
        head = element("tr", (element("th", cell, scope="col") for cell in self.head))
        return element("table", element("thead", head), element("tbody", rows))


@dataclass(frozen=True)
class Figure:
    """One part of a page."""

    key: str
    title: str
    caption: str = ""  # one paragraph
    picture: Markup = NOTHING  # with an element of class "hit" and data-row for each row of the table
    table: Table | None = None
    legend: Sequence[tuple[str, str]] = field(default=())  # class of the sign, words
    missing: str = ""  # why there is no picture
    wide: bool = False  # it takes the whole width of the page
    text: Markup = NOTHING  # whole paragraphs and lists

    def html(self) -> Markup:
        """What stands inside the figure's section."""
        name = f"{self.key}-title"
        parts = [element("h2", self.title, id=name)]
        if self.missing:
            return together(parts, element("p", self.missing, class_="missing"))
        if self.caption:
            parts.append(element("p", self.caption, class_="caption"))
        if self.text:
            parts.append(element("div", self.text, class_="caption"))
        if self.legend:
            signs = (element("li", element("i", class_=sign), words) for sign, words in self.legend)
            parts.append(element("ul", signs, class_="legend"))
        if self.picture:
            parts.append(element("figure", self.picture, data_marks="", aria_labelledby=name))
        if self.table is not None:
            scrolled = scroll(self.table.html(), f"{self.title}: the numbers")
            summary = element("summary", "The numbers")
            parts.append(element("details", summary, scrolled, data_key=f"{self.key}-numbers"))
        return together(parts)


def scroll(inside: Content, label: str) -> Markup:
    """A part of the page that may be wider than it and is scrolled on its own."""
    return element("div", inside, class_="scroll", tabindex=0, role="region", aria_label=label)


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


def grid(scale: Scale, top: float, unit: str = "", most: int = 5) -> Markup:
    """Lines across a figure, with their values at the left."""
    parts = []
    for value in scale.ticks(most):
        y = top + scale(value)
        parts.append(element("line", class_="grid", x1=0, x2="100%", y1=y, y2=y))
        parts.append(element("text", f"{tick(value)}{unit}", class_="tick", x=-8, y=y + 3.5))
    return together(parts)


def tick(value: float) -> str:
    """A value beside a scale.

    >>> tick(20.0), tick(0.001), tick(2000.0), tick(1e-6), tick(1e6), tick(2e6)
    ('20', '0.001', '2,000', '10⁻⁶', '10⁶', '2,000,000')
    """
    if value > 0 and not 1e-3 <= value < 1e6 and math.log10(value).is_integer():
        return f"10{str(round(math.log10(value))).translate(_RAISED)}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"


def curve(kind: str, points: Sequence[tuple[float, float]]) -> Markup:
    """A line through points: units across a frame, pixels down.  A single point is a dot."""
    if not points:
        return NOTHING
    return element("path", class_=f"curve {kind}", d=f"{way(points, 1)}{'h.01' if len(points) == 1 else ''}")


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


def frame(top: float, height: float, *inside: Content) -> Markup:
    """A part of the figure that stretches with its width; what goes beyond it is cut off."""
    return element(
        "svg",
        *inside,
        y=f"{top:.0f}",
        width="100%",
        height=f"{height:.0f}",
        viewBox=f"0 0 {WIDE:.0f} {height:.0f}",
        preserveAspectRatio="none",
    )


def picture(kind: str, height: float, label: str, *inside: Content) -> Markup:
    """A whole figure, as wide as there is room; below it there is room for one line of text."""
    return element("svg", *inside, class_=f"plot {kind}", height=f"{height:.0f}", role="group", aria_label=label)


def column(kind: str, row: int, left: float, width: float, top: float, height: float) -> Markup:
    """The mark of a table's row: a column of the figure, in percent across and pixels down."""
    return element(
        "rect",
        class_=f"hit {kind}".rstrip(),
        data_row=row,
        x=f"{left:.2f}%",
        y=f"{top:.0f}",
        width=f"{width:.2f}%",
        height=f"{height:.0f}",
    )


def parts_of_the_network(names: Sequence[str], height: float) -> Markup:
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
        left, right, y = each * (first + 0.12), each * (end - 0.12), f"{height + 5:.0f}"
        found.append(element("line", class_="axis", x1=f"{left:.3f}%", x2=f"{right:.3f}%", y1=y, y2=y))
        if right - left > 9:
            at = f"{(left + right) / 2:.3f}%"
            found.append(element("text", part, class_="tick middle", x=at, y=f"{height + 18:.0f}"))
    return together(found)


def pairs(told: Iterable[tuple[str, str]]) -> Markup:
    """Names with what is said of each."""
    rows = ((element("dt", name), element("dd", said)) for name, said in told)
    return element("dl", (part for row in rows for part in row), class_="pairs")
