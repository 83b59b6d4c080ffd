"""Draw the channel graph of an inspected model, as an SVG file or as an HTML page with pan, zoom and search.

`lay_rows` puts every box in a row below all its sources, gives a wire a cell in each row that it passes, and sorts
each row by the mean positions of its neighbors, keeping the order with the fewest crossings. `layout_graph` splits
a tall drawing into columns and sets the positions within each row by isotonic regression, which is solved exactly.
The SVG has an inline style sheet for light and dark mode and no script, so that any browser can show it. The HTML
page embeds the same drawing.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise, repeat
from math import inf, log, log2
from statistics import fmean
from typing import Any

from .html import HUES, SHAPES, Markup, color_rules, concat, document, element, svg_file
from .inspection import FOLLOWER, GATE, INPUT, JOINT, LAYER, OPAQUE, OUTPUT, SKIPPED, Box, Inspection, to_boxes

_SWEEPS = 8
MAIN, STRAIGHT, SIDE = 1.0, 0.1, 0.001  # weights of wires when cells are aligned with their neighbors
_BRANCHES = 3  # if at least this many wires enter (or leave) a box, they have the weight MAIN


@dataclass(eq=False)
class Cell:
    """A slot in a row, for a box or for a passing wire (`box` is None)."""

    row: int
    box: Box | None
    width: float
    height: float
    above: list[tuple[Cell, float]] = field(default_factory=list, repr=False)  # neighbors and wire weights
    below: list[tuple[Cell, float]] = field(default_factory=list, repr=False)
    place: int = 0  # index in the row
    x: float = 0.0  # position of the center
    y: float = 0.0  # position of the top edge


Wire = tuple[Cell, ...]  # cells along the connection of two boxes, including those of the boxes


def lay_rows(boxes: Sequence[Box], sizes: dict[Box, tuple[float, float]]) -> tuple[list[list[Cell]], list[Wire]]:
    """Return the ordered rows, from top to bottom, and the wires between the boxes.

    Wires that leave the same box share the cells in the rows that they pass.
    """
    depth, slack = _depths(boxes)
    readers = Counter(source for box in boxes for source in box.sources)
    lanes = {box: [Cell(depth[box], box, *sizes[box])] for box in boxes}
    rows: list[list[Cell]] = [[] for _ in range(max(depth.values()) + 1)]
    wires = []
    for box in boxes:
        rows[depth[box]].append(lanes[box][0])
    for box in boxes:
        into = MAIN if len(box.sources) >= _BRANCHES else SIDE
        for source in box.sources:
            out = MAIN if readers[source] >= _BRANCHES else SIDE
            lane = lanes[source]
            span = depth[box] - depth[source]
            while len(lane) < span:
                passing = Cell(lane[-1].row + 1, None, 8, 0)
                _join(lane[-1], passing, STRAIGHT if lane[-1].box is None else out)
                rows[passing.row].append(passing)
                lane.append(passing)
            main = span == 1 and not slack[box] and not slack[source]
            end = lanes[box][0]
            _join(lane[span - 1], end, MAIN if main else max(into, out) if span == 1 else into)
            wires.append((*lane[:span], end))
    _order(rows)
    return rows, wires


def _join(upper: Cell, lower: Cell, weight: float) -> None:
    upper.below.append((lower, weight))
    lower.above.append((upper, weight))


def _depths(boxes: Sequence[Box]) -> tuple[dict[Box, int], dict[Box, int]]:
    """Return the row of each box and its slack: by how many rows it could move down."""
    readers: dict[Box, list[Box]] = {box: [] for box in boxes}
    depth: dict[Box, int] = {}
    for box in boxes:
        depth[box] = 1 + max((depth[source] for source in box.sources), default=-1)
        for source in box.sources:
            readers[source].append(box)
    lowest: dict[Box, int] = {}
    for box in reversed(boxes):
        lowest[box] = min((lowest[reader] - 1 for reader in readers[box]), default=max(depth.values()))
        if not box.sources and readers[box]:  # an input is placed in the row above its first reader
            depth[box] = min(depth[reader] for reader in readers[box]) - 1
    return depth, {box: lowest[box] - depth[box] for box in boxes}


def _order(rows: list[list[Cell]]) -> None:
    _number(*rows)
    best, fewest = [list(row) for row in rows], _crossings(rows)
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        for row in rows if down else reversed(rows):
            row.sort(key=lambda cell: _middle(cell, cell.above if down else cell.below))
            _number(row)
        if (crossings := _crossings(rows)) < fewest:
            best, fewest = [list(row) for row in rows], crossings
    rows[:] = best
    _number(*rows)


def _number(*rows: Sequence[Cell]) -> None:
    for row in rows:
        for place, cell in enumerate(row):
            cell.place = place


def _middle(cell: Cell, neighbors: Sequence[tuple[Cell, float]]) -> float:
    return fmean(other.place for other, _ in neighbors) if neighbors else cell.place


def _crossings(rows: Sequence[Sequence[Cell]]) -> int:
    total = 0
    for row in rows:
        ends: list[int] = []
        for cell in row:
            places = sorted(lower.place for lower, _ in cell.below)
            total += sum(len(ends) - bisect_right(ends, place) for place in places)
            for place in places:
                insort(ends, place)
    return total


GAP_X, GAP_Y, MARGIN, LANE = 18.0, 20.0, 24.0, 7.0
_PASSES = 12
_TALL = 1300.0  # pixels; a drawing up to this height is one column
_SHAPE = 1.5  # target ratio of width to height of a drawing in columns


@dataclass(frozen=True)
class Picture:
    """Positions of the boxes and paths of the wires."""

    width: float
    height: float
    cells: list[Cell]  # boxes only
    wires: list[tuple[Wire, str]]  # with their SVG paths


def layout_graph(boxes: Sequence[Box], size: Callable[[Box], tuple[float, float]]) -> Picture:
    """Place the boxes and route the wires; `size` returns the width and height of a box."""
    rows, wires = lay_rows(boxes, {box: size(box) for box in boxes})
    columns = [_Column(rows[first:last], first, last) for first, last in _columns(rows)]
    top = MARGIN + max(column.room for column in columns)
    left = MARGIN
    around: dict[tuple[Cell, Cell], str] = {}
    for column in columns:
        column.put(left, top)
        left = column.right + 30 + column.room
    for column in columns:
        around |= column.around(top)
    height = max(column.bottom + column.room for column in columns) + MARGIN
    cells = [cell for cell in chain(*rows) if cell.box is not None]
    return Picture(columns[-1].right + MARGIN, height, cells, [(wire, _path(wire, around)) for wire in wires])


class _Column:
    """Consecutive rows drawn as one column; wires to the next column run from its bottom to the top of that one."""

    def __init__(self, rows: Sequence[list[Cell]], first: int, last: int) -> None:
        self.rows = rows
        self.inside = range(first, last)
        self.leaving = [cell for cell in rows[-1] if any(lower.row == last for lower, _ in cell.below)]
        self.room = LANE * len(self.leaving) + 8 if self.leaving else 0.0
        self.right = self.bottom = 0.0

    def put(self, left: float, top: float) -> None:
        _straighten(self.rows, self.inside)
        shift = left - min(c.x - c.width / 2 for row in self.rows for c in row)
        for row, tall in zip(self.rows, _heights(self.rows), strict=True):
            for cell in row:
                cell.x += shift
                if cell.box is None:  # a passing wire spans the height of its row
                    cell.height = tall
                cell.y = top + (tall - cell.height) / 2
            self.bottom = top + tall
            top += tall + GAP_Y
        self.right = max(c.x + c.width / 2 for row in self.rows for c in row)

    def around(self, top: float) -> dict[tuple[Cell, Cell], str]:
        """Return the SVG paths of the wires to the next column."""
        found = {}
        for lane, upper in enumerate(self.leaving):
            # Lanes are nested so that wires do not cross: the leftmost wire has the lowest lane below the column,
            # the rightmost lane to its right, and the lowest lane above the next column.
            down = self.bottom + 4 + LANE * (len(self.leaving) - lane)
            up = top - 4 - LANE * (lane + 1)
            aside = self.right + 15 + LANE * (len(self.leaving) - lane - 1)
            start = [(upper.x, upper.y + upper.height), (upper.x, down), (aside, down), (aside, up)]
            for lower, _ in upper.below:
                found[upper, lower] = _rounded([*start, (lower.x, up), (lower.x, lower.y)])
        return found


def _heights(rows: Sequence[Sequence[Cell]]) -> list[float]:
    return [max((cell.height for cell in row if cell.box is not None), default=0.0) for row in rows]


def _columns(rows: Sequence[Sequence[Cell]]) -> list[tuple[int, int]]:
    """Return the ranges of rows that form columns, of about equal height and cut where few wires cross."""
    ends = list(accumulate(tall + GAP_Y for tall in _heights(rows)))
    total = ends[-1]
    if total <= _TALL:
        return [(0, len(rows))]
    wide = max(sum(cell.width + GAP_X for cell in row) for row in rows) + 40
    number = min(range(1, 40), key=lambda n: abs(log(n * wide / (total / n) / _SHAPE)))
    leaving = [sum(bool(cell.below) for cell in row) for row in rows]
    cuts = [0]
    for column in range(1, number):
        ideal, reach = total * column / number, total / number
        cost = {
            place + 1: abs(ends[place] - ideal) / reach + 0.25 * leaving[place]
            for place in range(cuts[-1], len(rows) - 1)
            if abs(ends[place] - ideal) < 0.45 * reach
        }
        if cost:
            cuts.append(min(cost, key=cost.__getitem__))
    return list(pairwise([*cuts, len(rows)]))


def _straighten(rows: Sequence[list[Cell]], inside: range) -> None:
    for row in rows:
        at = 0.0
        for cell in row:
            cell.x = at + cell.width / 2
            at += cell.width + GAP_X
        for cell in row:
            cell.x -= at / 2
    for turn in range(_PASSES):
        down = turn % 2 == 1  # the last pass goes down, to leave wires as straight as possible
        for row in rows if down else reversed(rows):
            _place_row(row, [_preferred_x(cell, down, inside) for cell in row])
    _straighten_lanes(rows)


def _preferred_x(cell: Cell, down: bool, inside: range) -> tuple[float, float]:
    """Return the mean x position of the neighbors whose wires have the largest weight, and that weight."""
    neighbors = cell.above if down else cell.below
    if cell.box is None:  # both ends of a passing wire count, so that it stays straight
        neighbors = [*cell.above, *cell.below]
    near = [(other.x, weight) for other, weight in neighbors if other.row in inside]
    if not near:
        return cell.x, SIDE
    largest = max(weight for _, weight in near)
    places = [x for x, weight in near if weight == largest]
    return sum(places) / len(places), largest


def _straighten_lanes(rows: Sequence[list[Cell]]) -> None:
    """Give a wire the same x position in all rows that it passes, if every one of them has room."""
    lanes: dict[Cell, list[Cell]] = {}
    for cell in chain(*rows):
        if cell.box is None:
            lanes[cell] = lanes.get(cell.above[0][0], [])
            lanes[cell].append(cell)
    unique = {id(lane): lane for lane in lanes.values()}.values()

    def fits(cell: Cell, x: float) -> bool:
        row = rows[cell.row - rows[0][0].row]
        near = [row[i] for i in (cell.place - 1, cell.place + 1) if 0 <= i < len(row)]
        left = max((other.x + other.width / 2 for other in near if other.x < cell.x), default=-inf)
        right = min((other.x - other.width / 2 for other in near if other.x > cell.x), default=inf)
        return left + GAP_X / 2 <= x <= right - GAP_X / 2

    # Start with the outermost wires, because moving them outward makes room for the others.
    for side in (1, -1):
        for lane in sorted(unique, key=lambda lane: -side * max(side * cell.x for cell in lane)):
            outermost = side * max(side * cell.x for cell in lane)
            if all(fits(cell, outermost) for cell in lane):
                for cell in lane:
                    cell.x = outermost


def _place_row(row: Sequence[Cell], targets: Sequence[tuple[float, float]]) -> None:
    """Move each cell as close to its target position as order and spacing allow (weighted isotonic regression)."""
    offsets = list(accumulate(((a.width + b.width) / 2 + GAP_X for a, b in pairwise(row)), initial=0.0))
    blocks: list[tuple[float, float, int]] = []  # target, weight, number of cells
    for offset, (target, weight) in zip(offsets, targets, strict=True):
        blocks.append((target - offset, weight, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (one, w1, n1), (two, w2, n2) = blocks[-2:]
            blocks[-2:] = [((one * w1 + two * w2) / (w1 + w2), w1 + w2, n1 + n2)]
    starts = chain.from_iterable(repeat(start, count) for start, _, count in blocks)
    for cell, start, offset in zip(row, starts, offsets, strict=True):
        cell.x = start + offset


def _path(wire: Wire, around: dict[tuple[Cell, Cell], str]) -> str:
    words = []
    for upper, lower in pairwise(wire):
        if upper.box is None:
            words.append(f"M{upper.x:.1f} {upper.y:.1f}V{upper.y + upper.height:.1f}")
        if (upper, lower) in around:
            words.append(around[upper, lower])
            continue
        start, end = upper.y + upper.height, lower.y
        words.append(f"M{upper.x:.1f} {start:.1f}")
        if abs(upper.x - lower.x) < 0.5:
            words.append(f"V{end:.1f}")
        else:
            half = (start + end) / 2
            words.append(f"C{upper.x:.1f} {half:.1f} {lower.x:.1f} {half:.1f} {lower.x:.1f} {end:.1f}")
    return "".join(words)


def _rounded(points: Sequence[tuple[float, float]], radius: float = 6.0) -> str:
    """Return an SVG path of straight lines with rounded corners."""
    words = [f"M{points[0][0]:.1f} {points[0][1]:.1f}"]
    for (x0, y0), (x1, y1), (x2, y2) in zip(points, points[1:], points[2:], strict=False):
        before, after = abs(x1 - x0) + abs(y1 - y0), abs(x2 - x1) + abs(y2 - y1)
        r = min(radius, before / 2, after / 2)
        enter = (x1 - (x1 - x0) / before * r, y1 - (y1 - y0) / before * r) if before else (x1, y1)
        leave = (x1 + (x2 - x1) / after * r, y1 + (y2 - y1) / after * r) if after else (x1, y1)
        words.append(f"L{enter[0]:.1f} {enter[1]:.1f}Q{x1:.1f} {y1:.1f} {leave[0]:.1f} {leave[1]:.1f}")
    words.append(f"L{points[-1][0]:.1f} {points[-1][1]:.1f}")
    return "".join(words)


LAYOUT = "layout"
_LONGEST = 30  # maximum number of characters shown of a name
_HEAD = 62.0
_NARROWEST = 610.0  # width of the heading
_LEGEND = (
    (LAYER, "prunable (bluer: more filters)", 214),
    (FOLLOWER, "follows another layer", 138),
    (SKIPPED, "left alone", 78),
    (GATE, "gate", 48),
    (LAYOUT, "shares a layout", 90),
)


def draw(seen: Inspection, ending: str) -> str:
    """Return the drawing as the text of a file with the given ending, ".svg" or ".html"."""
    body, width, height = drawing(to_boxes(seen))
    facts = seen.facts
    if ending == ".html":
        return _page(body, width, height, facts)
    aside = max(_NARROWEST - width, 0) / 2
    width, height = width + 2 * aside, height + _HEAD
    style = f"{SHAPES}{color_rules('')}@media (prefers-color-scheme:dark){{{color_rules('', dark=True)}}}"
    picture = element("g", body, transform=f"translate({aside:.0f} {_HEAD:.0f})")
    return svg_file(heading(facts), width, height, style, _head(facts), picture)


def _page(body: Markup, width: float, height: float, facts: Mapping[str, Any]) -> str:
    model, _, rest = heading(facts).partition(": ")
    swatches = []
    for sign, words, _ in legend(2.0):
        swatch = element("svg", element("g", sign, transform="translate(0 -38)"), width=20, height=18)
        swatches.append(element("p", swatch, words, class_="key"))
    style = SHAPES + color_rules("") + color_rules(':root[data-theme="dark"]', dark=True)
    content = {"title": f"{model}: channel graph", "model": model, "heading": rest, "body": body}
    size = {"width": f"{width:.0f}", "height": f"{height:.0f}"}
    return document("graph_page", style=style, legend=swatches, **content, **size)


def heading(facts: Mapping[str, Any]) -> str:
    """Return one line with the model's name, layers, filters, parameters and MACs."""
    counts = f"{len(facts['layers'])} prunable layers with {facts['filters']:,} filters"
    return f"{facts['model']}: {counts}; {facts['params']:,} parameters, {facts['macs']:,} MACs"


def drawing(boxes: Sequence[Box]) -> tuple[Markup, float, float]:
    """Return the SVG elements of the drawing, its width and its height."""
    picture = layout_graph(boxes, _size)
    number = {box: place for place, box in enumerate(boxes)}
    most = max((box.filters for box in boxes if box.kind == LAYER), default=1)
    parts = []
    for wire, path in picture.wires:
        upper, lower = wire[0].box, wire[-1].box
        assert upper is not None and lower is not None
        hue = _hue(upper.group) if upper.group == lower.group else ""
        kind = f"wire{hue}{' gone' if 0 in (upper.kept, lower.kept) else ''}"
        parts.append(element("path", class_=kind, data_ends=f"{number[upper]} {number[lower]}", d=path))
    parts += [_box(cell.box, cell, number[cell.box], most) for cell in picture.cells if cell.box is not None]
    return concat(parts), picture.width, picture.height


def _size(box: Box) -> tuple[float, float]:
    letters = len(shorten_name(box.label))
    if box.kind == JOINT:
        return (18.0, 18.0) if len(box.label) == 1 else (14 + 6.0 * len(box.label), 18.0)
    if box.kind in (INPUT, OUTPUT):
        return 6.9 * letters + 22, 22.0
    if box.kind in (GATE, OPAQUE):
        return 5.9 * letters + 28, 18.0
    return max(6.9 * letters + 24, 5.0 * len(box.note) + 24, 64 + 12 * log2(max(box.filters, 1))), 36.0


def _box(box: Box, cell: Cell, number: int, most: int) -> Markup:
    title = element("title", "\n".join(box.tip))
    shape = _shape(box, cell.x - cell.width / 2, cell.y, cell.width, cell.height, most)
    kind = f"{box.kind}{' gone' if box.kept == 0 else ''}{_hue(box.group)}"
    return element("g", title, shape, class_=f"box {kind}", id=f"b{number}", data_group=box.group)


def _shape(box: Box, x: float, y: float, w: float, h: float, most: int) -> Markup:
    middle, label = x + w / 2, shorten_name(box.label)
    where = {"x": x, "y": y, "width": w, "height": h}
    if box.kind in (JOINT, INPUT, OUTPUT):
        shape = element("rect", class_="shape", **where, rx=h / 2, stroke_width="1.4")
        return concat(shape, element("text", box.label, x=middle, y=y + h / 2 + 3.8))
    if box.kind == GATE:
        back = element("rect", class_="back pill", **where, rx=9)
        shape = element("path", class_="shape", d=_diamond(x + 9.5, y + 9, 4.5))
        return concat(back, shape, element("text", label, class_="note", x=middle + 7, y=y + 12.5))
    if box.kind == OPAQUE:
        back = element("rect", class_="back", **where, rx=4)
        shape = element("rect", class_="shape", **where, rx=4, fill_opacity=".25")
        return concat(back, shape, element("text", label, class_="note", x=middle, y=y + 12.5))
    if box.kept is not None:
        strength = 0.07  # the kept part is drawn on top
    elif box.kind == LAYER:
        strength = 0.06 + 0.54 * (box.filters / most) ** 0.5
    else:
        strength = 0.18 if box.kind == SKIPPED else 0.06
    parts = [
        element("rect", class_="back", **where, rx=6),
        element("rect", class_="shape", **where, rx=6, fill_opacity=f"{min(strength, 0.62):.2f}"),
    ]
    if box.kept:
        left = {**where, "width": w * box.kept / box.filters}
        parts.append(element("rect", class_="kept", **left, rx=6, fill_opacity=".38"))
    if box.group is not None:
        parts.append(element("rect", class_="stripe", x=x, y=y + 5, width=4, height=h - 10, rx=2))
    parts.append(element("text", label, class_="name", x=middle, y=y + 15))
    parts.append(element("text", box.note, class_="note", x=middle, y=y + 28))
    if box.gate:
        kind = "mark" if box.gate == "affine" else "mark map"
        parts.append(element("path", class_=kind, d=_diamond(middle, y + h, 4.5)))
    return concat(parts)


def _diamond(x: float, y: float, r: float) -> str:
    return f"M{x - r:.1f} {y:.1f}l{r:.1f} {-r:.1f} {r:.1f} {r:.1f} {-r:.1f} {r:.1f}z"


def _head(facts: Mapping[str, Any]) -> Markup:
    name, _, rest = heading(facts).partition(": ")
    parts = [
        element("text", name, class_="title", x=f"{MARGIN:.0f}", y=26),
        element("text", rest, class_="note left", x=f"{MARGIN + 9 * len(name) + 14:.0f}", y=26),
    ]
    x = MARGIN
    for sign, words, width in legend():
        text = element("text", words, class_="note left", x=21, y=50.5)
        parts.append(element("g", sign, text, transform=f"translate({x:.0f} 0)"))
        x += width
    return concat(parts)


def legend(x: float = 0.0) -> list[tuple[Markup, str, float]]:
    """Return the entries of the legend: symbol, drawn at position `x`, its meaning, and the width of the entry."""
    found = []
    for kind, words, room in _LEGEND:
        if kind == GATE:
            sign = element("g", element("path", class_="shape", d=_diamond(x + 8, 47, 5)), class_="gate")
        elif kind == LAYOUT:
            stripe = element("rect", class_="stripe", x=f"{x + 8:.0f}", y=40, width=4, height=14, rx=2)
            sign = element("g", stripe, class_="g0")
        else:
            opacity = {LAYER: ".45", FOLLOWER: ".06"}.get(kind, ".2")
            at = {"x": f"{x:.0f}", "y": 41, "width": 16, "height": 12}
            sign = element("g", element("rect", class_="shape", **at, rx=3, fill_opacity=opacity), class_=kind)
        found.append((sign, words, float(room)))
    return found


def _hue(group: int | None) -> str:
    return "" if group is None else f" g{group % len(HUES)}"


def shorten_name(name: str) -> str:
    """Shorten a long module name from the left.

    >>> shorten_name("features.denseblock4.denselayer32.conv2")
    '…denselayer32.conv2'
    """
    if len(name) <= _LONGEST:
        return name
    while "." in name and len(name) > _LONGEST - 1:
        name = name.partition(".")[2]
    return "…" + name[-_LONGEST + 1 :]
