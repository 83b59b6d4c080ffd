"""Seconds per layer, as measured on one machine in one runtime.

Measured points enter; for any widths seconds leave, between points by interpolation.  What holds: a narrower layer
never takes longer than a wider one, because it can be filled up with zeros to that width; where a runtime computes
in blocks, widths count as the next multiple.  The table is plain data, and so is its file.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Any

from .shapes import Site, stepped

Widths = tuple[int, int]  # inputs, filters


class Table:
    """Measured layers: site -> widths -> seconds.

    >>> table = Table({Site("linear", size=(1,)): {(8, 8): 1.0, (16, 8): 2.0, (8, 16): 2.0, (16, 16): 4.0}})
    >>> table.seconds(Site("linear", size=(1,)), 12, 8)
    1.5
    """

    def __init__(self, points: Mapping[Site, Mapping[Widths, float]] | None = None, blocks: bool = False) -> None:
        self.points = {site: dict(held) for site, held in (points or {}).items()}
        self.blocks = blocks
        """do the inputs, too, count in blocks?  Filters do everywhere."""
        self._grids: dict[Site, tuple[list[int], list[int], dict[Widths, float]]] = {}
        self._known: dict[tuple[Site, int, int], float] = {}

    def missing(self, wanted: Mapping[Site, Iterable[Widths]]) -> dict[Site, list[Widths]]:
        """What is asked for and not there yet."""
        found = {s: [w for w in widths if w not in self.points.get(s, {})] for s, widths in wanted.items()}
        return {site: widths for site, widths in found.items() if widths}

    def of(self, wanted: Mapping[Site, Iterable[Widths]]) -> Table:
        """The part of it that one network asks for: other networks' widths would leave gaps in the grid."""
        return Table(
            {site: {w: self.points[site][w] for w in widths} for site, widths in wanted.items()}, self.blocks
        )

    def add(self, site: Site, seconds: Mapping[Widths, float]) -> None:
        """Take in what was measured."""
        self.points.setdefault(site, {}).update(seconds)
        self._grids.pop(site, None)
        self._known = {key: value for key, value in self._known.items() if key[0] != site}

    def seconds(self, site: Site, inputs: int, filters: int) -> float:
        """How long a layer of these widths takes."""
        key = site, inputs, filters
        if key not in self._known:
            self._known[key] = self._between(site, inputs, filters)
        return self._known[key]

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {str(site): [[*w, s] for w, s in sorted(held.items())] for site, held in self.points.items()}

    @classmethod
    def from_dict(cls, written: Mapping[str, Any], blocks: bool = False) -> Table:
        """What `to_dict` wrote; a ValueError where it is something else."""
        points = {Site.parse(name): dict(_point(*row) for row in held) for name, held in written.items()}
        if not all(points.values()):
            raise ValueError("a layer without any time")
        return cls(points, blocks)

    def _grid(self, site: Site) -> tuple[list[int], list[int], dict[Widths, float]]:
        if site not in self._grids:
            held = self.points[site]
            rows, columns = sorted({i for i, _ in held}), sorted({o for _, o in held})
            if site.groups == 0:  # depthwise: it has as many filters as inputs
                least = {(n, n): min(s for (i, _), s in held.items() if i >= n) for n in rows}
                full = {(i, o): least[max(i, o), max(i, o)] for i in rows for o in columns}
            else:
                full = {}
                for i in reversed(rows):
                    for o in reversed(columns):
                        wider = [full[w] for w in ((_next(rows, i), o), (i, _next(columns, o))) if w in full]
                        full[i, o] = min([held[i, o], *wider])
            self._grids[site] = rows, columns, full
        return self._grids[site]

    def _between(self, site: Site, inputs: int, filters: int) -> float:
        rows, columns, full = self._grid(site)
        if self.blocks:
            inputs = _stepped(inputs, rows)
        filters = _stepped(filters, columns)
        (i0, i1, a), (o0, o1, b) = _bracket(rows, inputs), _bracket(columns, filters)
        near, far = (full[i, o0] + b * (full[i, o1] - full[i, o0]) for i in (i0, i1))
        return near + a * (far - near)


def _point(inputs: Any, filters: Any, seconds: Any) -> tuple[Widths, float]:
    if not (isinstance(inputs, int) and isinstance(filters, int) and 0 < float(seconds) < math.inf):
        raise ValueError(f"no widths with their time: {inputs}, {filters}, {seconds}")
    return (inputs, filters), float(seconds)


def _stepped(width: int, known: list[int]) -> int:
    """The width a block-wise runtime computes; the full one is what it is."""
    return min(stepped(width), known[-1])


def _bracket(known: list[int], width: int) -> tuple[int, int, float]:
    """The measured widths around one, and how far it is from the first to the second."""
    place = bisect_left(known, width)
    if place == 0:
        return known[0], known[0], 0.0  # below the narrowest: a layer is not free because it is thin
    if place == len(known):
        return known[-1], known[-1], 0.0
    low, high = known[place - 1], known[place]
    return low, high, (width - low) / (high - low)


def _next(known: list[int], width: int) -> int:
    place = known.index(width) + 1
    return known[place] if place < len(known) else -1
