"""Rows of cells in; a position for every cell and a path for every wire, out.

A tall network is cut into columns, like a newspaper, where few wires cross.  Within a column every row is
moved to where its neighbours pull it, as far as the cells beside leave room (a least-squares problem with
ordered unknowns, solved exactly by pooling); a few passes down and up straighten the drawing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log

from .rows import SIDE, Cell, Wire, lay_rows
from .scene import Box

GAP_X, GAP_Y, MARGIN, LANE = 18.0, 20.0, 24.0, 7.0
_PASSES = 12
_TALL = 1300.0  # a drawing lower than this stays one column
_SHAPE = 1.5  # the width to height that columns aim at


@dataclass(frozen=True)
class Picture:
    """Where everything is."""

    width: float
    height: float
    cells: list[Cell]  # the boxes only
    wires: list[tuple[Wire, str]]  # with their SVG paths


def arrange(boxes: Sequence[Box], size: Callable[[Box], tuple[float, float]]) -> Picture:
    """Place the boxes, whose sizes `size` knows, and route the wires."""
    rows, wires = lay_rows(boxes, {box: size(box) for box in boxes})
    columns = [_Column(rows[first:last], first, last) for first, last in _columns(rows, _heights(rows))]
    top = MARGIN + max(column.room for column in columns)
    left = MARGIN
    for column in columns:
        column.put(left, top)
        left = column.right + 30 + column.room
    around = {ends: path for column in columns for ends, path in column.around(top).items()}
    return Picture(
        width=columns[-1].right + MARGIN,
        height=max(column.bottom + column.room for column in columns) + MARGIN,
        cells=[cell for row in rows for cell in row if cell.box is not None],
        wires=[(wire, _path(wire, around)) for wire in wires],
    )


class _Column:
    """Rows below each other; wires leave it at the bottom and go on at the top of the next."""

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
                if cell.box is None:  # a wire passes the whole row
                    cell.height = tall
                cell.y = top + (tall - cell.height) / 2
            self.bottom = top + tall
            top += tall + GAP_Y
        self.right = max(c.x + c.width / 2 for row in self.rows for c in row)

    def around(self, top: float) -> dict[tuple[Cell, Cell], str]:
        """The ways to the next column."""
        found = {}
        for lane, upper in enumerate(self.leaving):
            # The leftmost wire goes outside, below the others and above them again, so that none cross.
            down = self.bottom + 4 + LANE * (len(self.leaving) - lane)
            up = top - 4 - LANE * (lane + 1)
            aside = self.right + 15 + LANE * (len(self.leaving) - lane - 1)
            start = [(upper.x, upper.y + upper.height), (upper.x, down), (aside, down), (aside, up)]
            for lower, _ in upper.below:
                found[upper, lower] = _rounded([*start, (lower.x, up), (lower.x, lower.y)])
        return found


def _heights(rows: Sequence[Sequence[Cell]]) -> list[float]:
    return [max((cell.height for cell in row if cell.box is not None), default=0.0) for row in rows]


def _columns(rows: Sequence[Sequence[Cell]], heights: Sequence[float]) -> list[tuple[int, int]]:
    """Ranges of rows that stand below each other."""
    ends, total = [], 0.0
    for tall in heights:
        total += tall + GAP_Y
        ends.append(total)
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
            cuts.append(min(cost, key=lambda place: cost[place]))
    return list(zip(cuts, [*cuts[1:], len(rows)], strict=True))


def _straighten(rows: Sequence[list[Cell]], inside: range) -> None:
    for row in rows:
        at = 0.0
        for cell in row:
            cell.x = at + cell.width / 2
            at += cell.width + GAP_X
        for cell in row:
            cell.x -= at / 2
    for turn in range(_PASSES):
        down = turn % 2 == 1  # the last pass goes down, so that what can be straight is
        for row in rows if down else reversed(rows):
            _settle(row, [_wish(cell, down, inside) for cell in row])
    _straighten_lanes(rows)


def _wish(cell: Cell, down: bool, inside: range) -> tuple[float, float]:
    """Where the wires that pull hardest would have a cell, and how hard they pull."""
    neighbours = cell.above if down else cell.below
    if cell.box is None:  # a wire passing by minds both its ends, so that it stays straight
        neighbours = [*cell.above, *cell.below]
    near = [(other.x, pull) for other, pull in neighbours if other.row in inside]
    hardest = max((pull for _, pull in near), default=0.0)
    places = [x for x, pull in near if pull == hardest]
    return (sum(places) / len(places), hardest) if places else (cell.x, SIDE)


def _straighten_lanes(rows: Sequence[list[Cell]]) -> None:
    """Give a wire that passes several rows one place in all of them, where there is room."""
    beside: dict[Cell, tuple[float, float]] = {}
    lanes: dict[Cell, list[Cell]] = {}
    for row in rows:
        for cell in row:
            if cell.box is None:
                above = cell.above[0][0]
                lanes[cell] = lanes.get(above, [])
                lanes[cell].append(cell)
    unique = {id(lane): lane for lane in lanes.values()}.values()
    # The outermost first: where it makes way, those inside can follow.
    for side in (1, -1):
        for lane in sorted(unique, key=lambda lane: -side * max(side * cell.x for cell in lane)):
            wish = side * max(side * cell.x for cell in lane)
            for cell in lane:
                row = rows[cell.row - rows[0][0].row]
                near = [row[i] for i in (cell.place - 1, cell.place + 1) if 0 <= i < len(row)]
                beside[cell] = (
                    max((n.x + n.width / 2 for n in near if n.x < cell.x), default=float("-inf")),
                    min((n.x - n.width / 2 for n in near if n.x > cell.x), default=float("inf")),
                )
            if all(beside[c][0] + GAP_X / 2 <= wish <= beside[c][1] - GAP_X / 2 for c in lane):
                for cell in lane:
                    cell.x = wish


def _settle(row: Sequence[Cell], wishes: Sequence[tuple[float, float]]) -> None:
    """Each cell as near to its wish as the order and the room between cells allow."""
    offset, before = 0.0, 0.0
    blocks: list[tuple[float, float, int]] = []  # wish, weight, how many cells
    offsets: list[float] = []
    for cell, (wish, weight) in zip(row, wishes, strict=True):
        offset += (before + cell.width) / 2 + GAP_X if offsets else 0.0
        before = cell.width
        offsets.append(offset)
        blocks.append((wish - offset, weight, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (one, w1, n1), (two, w2, n2) = blocks[-2:]
            blocks[-2:] = [((one * w1 + two * w2) / (w1 + w2), w1 + w2, n1 + n2)]
    place = 0
    for wish, _, count in blocks:
        for cell, offset in zip(row[place : place + count], offsets[place : place + count], strict=True):
            cell.x = wish + offset
        place += count


def _path(wire: Wire, around: dict[tuple[Cell, Cell], str]) -> str:
    words = []
    for upper, lower in zip(wire.cells, wire.cells[1:], strict=False):
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
    """Straight lines with rounded corners."""
    words = [f"M{points[0][0]:.1f} {points[0][1]:.1f}"]
    for (x0, y0), (x1, y1), (x2, y2) in zip(points, points[1:], points[2:], strict=False):
        before, after = abs(x1 - x0) + abs(y1 - y0), abs(x2 - x1) + abs(y2 - y1)
        r = min(radius, before / 2, after / 2)
        enter = (x1 - (x1 - x0) / before * r, y1 - (y1 - y0) / before * r) if before else (x1, y1)
        leave = (x1 + (x2 - x1) / after * r, y1 + (y2 - y1) / after * r) if after else (x1, y1)
        words.append(f"L{enter[0]:.1f} {enter[1]:.1f}Q{x1:.1f} {y1:.1f} {leave[0]:.1f} {leave[1]:.1f}")
    words.append(f"L{points[-1][0]:.1f} {points[-1][1]:.1f}")
    return "".join(words)
