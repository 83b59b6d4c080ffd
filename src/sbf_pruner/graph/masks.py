"""What is known of every tensor, each as a small boolean array that broadcasts to its shape.

A tensor's *grid* is its shape with 1 in the dimensions along which channels do not differ.  Over it stand
*alive* (may this channel be anything but zero?), *needed* (does any output depend on it?) and, one mask per
dimension, the *layout*: which channels are physically there in the extracted network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, reduce

import numpy as np
from numpy.typing import NDArray

from .records import Value

Mask = NDArray[np.bool_]
Grid = tuple[int, ...]
Grids = dict[Value, Grid]
End = tuple[Value, int]  # a tensor and one of its dimensions


def along(dim: int, shape: Sequence[int]) -> Grid:
    """The grid of a tensor whose channels differ along one dimension alone.

    >>> along(1, (8, 16, 4, 4))
    (1, 16, 1, 1)
    """
    return tuple(n if d == dim else 1 for d, n in enumerate(shape))


@dataclass
class Flow:
    """What is alive and needed under one choice of gates."""

    alive: dict[Value, Mask] = field(default_factory=dict)
    needed: dict[Value, Mask] = field(default_factory=dict)
    reached: set[Value] = field(default_factory=set)  # what is alive and depends on the network's inputs

    def need(self, value: Value, mask: Mask, grid: Grid) -> None:
        """Add to what is needed of a value; `mask` may be larger than the value's grid (broadcasting)."""
        mask = mask if mask.shape == grid else shrink(mask, grid)
        before = self.needed.get(value)
        self.needed[value] = mask if before is None else before | mask


class Layout:
    """Which channels of every tensor are there, one mask per dimension; `None` stands for all of them."""

    def __init__(self, grids: Grids) -> None:
        self.grids = grids
        self.masks: dict[Value, list[Mask | None]] = {}
        self.changed: set[Value] = set()  # what has grown since somebody looked

    def start(self, value: Value, present: Mask) -> None:
        """Begin with the hull of the given channels: the smallest box of whole rows that holds them."""
        self.masks[value] = _hull(present, self.grids[value])

    def start_empty(self, value: Value) -> None:
        """Begin with no channel; large weights are never laid out for this."""
        self.masks[value] = [_nothing(n) if n > 1 else None for n in self.grids[value]]

    def joint(self, value: Value) -> Mask:
        """The channels that are there, over the value's grid."""
        grid = self.grids[value]
        result = np.ones(grid, bool)
        for dim, mask in enumerate(self.masks[value]):
            if mask is not None and grid[dim] > 1:
                result &= mask.reshape(along(dim, grid))
        return result

    def grow(self, value: Value, present: Mask) -> None:
        """Add the hull of the given channels."""
        for dim, mask in enumerate(_hull(present, self.grids[value])):
            self.add(value, dim, mask)

    def add(self, value: Value, dim: int, mask: Mask | None) -> None:
        """Add channels along one dimension; `None` adds all."""
        mine = self.masks[value][dim]
        if mine is None or mine is mask:
            return
        grown = np.ones_like(mine) if mask is None else mine | mask
        if np.count_nonzero(grown) > np.count_nonzero(mine):
            self.masks[value][dim] = grown
            self.changed.add(value)

    def tie(self, ends: Sequence[End]) -> None:
        """Make the given dimensions of the given values hold the same channels."""
        masks = [self.masks[value][dim] for value, dim in ends]
        if all(mask is masks[0] for mask in masks):
            return
        known = [mask for mask in masks if mask is not None]
        if len(known) < len(masks):
            for value, dim in ends:
                self.add(value, dim, None)
            return
        total = reduce(np.logical_or, known)
        count = np.count_nonzero(total)
        for (value, dim), mask in zip(ends, known, strict=True):
            if np.count_nonzero(mask) < count:
                self.changed.add(value)
            self.masks[value][dim] = total  # one array for all of them, by which they are known to be tied

    def fill(self, value: Value) -> None:
        """All channels of a value are there."""
        self.fill_other(value, -1)

    def fill_other(self, value: Value, dim: int) -> None:
        """All is there along every dimension but one."""
        for other, mask in enumerate(self.masks[value]):
            if mask is not None and other != dim:
                self.add(value, other, None)

    def sizes(self, value: Value) -> tuple[int, ...]:
        """The shape of the value in the extracted network."""
        masks = self.masks[value]
        return tuple(n if m is None else int(np.count_nonzero(m)) for n, m in zip(value.shape, masks, strict=True))

    def line(self, value: Value, dim: int) -> Mask:
        """The channels that are there along one dimension, as a mask."""
        mask = self.masks[value][dim]
        return np.ones(value.shape[dim], bool) if mask is None else mask

    def indices(self, value: Value, dim: int) -> list[int]:
        """The channels that are there along one dimension."""
        mask = self.masks[value][dim]
        return list(range(value.shape[dim])) if mask is None else np.flatnonzero(mask).tolist()


@cache
def _nothing(size: int) -> Mask:
    return np.broadcast_to(np.False_, (size,))  # which cannot be written to


def _hull(present: Mask, grid: Grid) -> list[Mask | None]:
    present = spread(present, grid)
    if present.size == max(grid, default=1):  # along one dimension at most
        return [present.reshape(n) if n > 1 else None for n in grid]
    axes = range(len(grid))
    return [some(present, tuple(a for a in axes if a != d)) if grid[d] > 1 else None for d in axes]


def some(mask: Mask, axes: int | tuple[int, ...], keepdims: bool = False) -> Mask:
    """Where any element along the axes is set, as an array even when nothing is left to index."""
    return np.asarray(mask.any(axes, keepdims=keepdims))


def shrink(mask: Mask, grid: Grid) -> Mask:
    """Fit a mask to a grid: where that is smaller, a channel is in if any of its elements is."""
    if mask.shape == grid:
        return mask
    extra = mask.ndim - len(grid)
    if extra > 0:
        mask = some(mask, tuple(range(extra)))
    mask = mask.reshape((1,) * -extra + mask.shape)
    axes = tuple(d for d, n in enumerate(grid) if n == 1 and mask.shape[d] > 1)
    return spread(some(mask, axes, keepdims=True) if axes else mask, grid)


def spread(mask: Mask, grid: Grid) -> Mask:
    """A mask over a larger grid; it is not written to, and may be the same array."""
    return mask if mask.shape == grid else np.broadcast_to(mask, grid)


def whole_groups(mask: Mask, size: int) -> Mask:
    """Add to a mask over channels the rest of every group of which one is in."""
    if size == 1:
        return mask
    return np.repeat(mask.reshape(-1, size).any(1), size).reshape(mask.shape)


def level(rows: Mask, there: Mask) -> Mask:
    """Fill the rows of the groups that are there up to the fullest one, lowest channels first."""
    counts = rows.sum(1)
    missing = np.where(there, max(int(counts.max()), 1) - counts, 0)
    absent = ~rows
    return np.asarray(rows | (absent & (absent.cumsum(1) <= missing[:, None])))
