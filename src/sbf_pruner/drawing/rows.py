"""Boxes in; rows of cells out, in an order with few crossings.

Every box gets a row below all its sources.  A wire that passes several rows gets a cell in each of them, so
that it has room there; wires that leave the same box share these cells.  Rows are then sorted by where
their neighbours stand, down and up, and the order with the fewest crossings is kept.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from .scene import Box

_SWEEPS = 8
MAIN, STRAIGHT, SIDE = 1.0, 0.1, 0.001  # how hard wires pull
_BRANCHES = 3  # where so many wires meet or part, none of them is the main one


@dataclass(eq=False)
class Cell:
    """A place in a row: a box's, or that of a wire passing by."""

    row: int
    box: Box | None
    width: float
    height: float
    above: list[tuple[Cell, float]] = field(default_factory=list, repr=False)  # with how hard the wire pulls
    below: list[tuple[Cell, float]] = field(default_factory=list, repr=False)
    place: int = 0
    x: float = 0.0  # of the middle
    y: float = 0.0  # of the top


@dataclass(frozen=True)
class Wire:
    """From one box to another, by the cells on its way."""

    cells: tuple[Cell, ...]


def lay_rows(boxes: Sequence[Box], sizes: dict[Box, tuple[float, float]]) -> tuple[list[list[Cell]], list[Wire]]:
    """The rows from top to bottom, and the wires between them."""
    depth, slack = _depths(boxes)
    readers = Counter(source for box in boxes for source in box.sources)
    cells = {box: Cell(depth[box], box, *sizes[box]) for box in boxes}
    lanes: dict[Box, list[Cell]] = {box: [cells[box]] for box in boxes}
    rows: list[list[Cell]] = [[] for _ in range(max(depth.values()) + 1)]
    wires = []
    for box in boxes:
        rows[depth[box]].append(cells[box])
    for box in boxes:
        meet = MAIN if len(box.sources) >= _BRANCHES else SIDE
        for source in box.sources:
            part = MAIN if readers[source] >= _BRANCHES else SIDE
            lane = lanes[source]
            need = depth[box] - depth[source]
            while len(lane) < need:
                passing = Cell(lane[-1].row + 1, None, 8, 0)
                _join(lane[-1], passing, STRAIGHT if lane[-1].box is None else part)
                rows[passing.row].append(passing)
                lane.append(passing)
            main = need == 1 and not slack[box] and not slack[source]
            _join(lane[need - 1], cells[box], MAIN if main else max(meet, part) if need == 1 else meet)
            wires.append(Wire((*lane[:need], cells[box])))
    _order(rows)
    return rows, wires


def _join(upper: Cell, lower: Cell, pull: float) -> None:
    upper.below.append((lower, pull))
    lower.above.append((upper, pull))


def _depths(boxes: Sequence[Box]) -> tuple[dict[Box, int], dict[Box, int]]:
    """The row of each box, and by how many rows it could stand lower."""
    readers: dict[Box, list[Box]] = {box: [] for box in boxes}
    depth: dict[Box, int] = {}
    for box in boxes:
        depth[box] = 1 + max((depth[source] for source in box.sources), default=-1)
        for source in box.sources:
            readers[source].append(box)
    lowest: dict[Box, int] = {}
    for box in reversed(boxes):
        lowest[box] = min((lowest[reader] - 1 for reader in readers[box]), default=max(depth.values()))
        if not box.sources and readers[box]:  # a second input stands where it is needed
            depth[box] = min(depth[reader] for reader in readers[box]) - 1
    return depth, {box: lowest[box] - depth[box] for box in boxes}


def _order(rows: list[list[Cell]]) -> None:
    def number() -> None:
        for row in rows:
            for place, cell in enumerate(row):
                cell.place = place

    number()
    best, fewest = [list(row) for row in rows], _crossings(rows)
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        for row in rows if down else reversed(rows):
            row.sort(key=lambda cell: _middle(cell, [n.place for n, _ in (cell.above if down else cell.below)]))
            for place, cell in enumerate(row):
                cell.place = place
        crossings = _crossings(rows)
        if crossings < fewest:
            best, fewest = [list(row) for row in rows], crossings
    rows[:] = best
    number()


def _middle(cell: Cell, places: list[int]) -> float:
    return sum(places) / len(places) if places else cell.place


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
