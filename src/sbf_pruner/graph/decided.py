"""What of a network depends on the numbers it sees: sizes of tensors, and numbers read off them.

Two recordings of the same code enter, of the whole network and of what was cut from it; whether a size or a
number that differs may do so leaves.  Without a channel the numbers are others, so other boxes pass a threshold
and another maximum is divided by; neither says anything about widths.  What holds: a dimension that was cut has
to be as wide as the layout promises, wherever it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .records import Op, Value

# Operators whose results are as large as the numbers make them.
_BY_VALUE = {
    f"aten.{name}"
    for name in (
        *("nonzero", "index", "masked_select", "bincount", "repeat_interleave"),
        *("_unique", "_unique2", "unique_dim", "unique_consecutive"),
    )
} | {"torchvision.nms"}
_COMMON = (-1, 0, 1)  # dimensions and flags are such numbers, too


class Decided:
    """What may differ between the small network (now) and the large one (then)."""

    def __init__(self, now: Sequence[Op], then: Sequence[Op]) -> None:
        self._now, self._then = _told(now), _told(then)
        self._sizes: set[Value] = set()
        for op in then:
            if op.name in _BY_VALUE or self.touches(op) or any(n in self._then for n in _numbers_in(op)):
                self._sizes.update(value for value in op.outputs if value is not None)

    def touches(self, op: Op) -> bool:
        """Does an operator of the large network read or give a tensor whose size the numbers decide?"""
        return any(value in self._sizes for value in (*op.inputs, *op.outputs) if value is not None)

    def fits(self, now: Value, then: Value, promised: tuple[int, ...]) -> bool:
        """Has a tensor the promised size, but for dimensions that were not cut and depend on numbers?"""
        if now.shape == promised:
            return True
        if then not in self._sizes or len(now.shape) != len(promised):
            return False
        sizes = zip(now.shape, promised, then.shape, strict=True)
        return all(found == asked or asked == whole for found, asked, whole in sizes)

    def same(self, op: Op, now: Sequence[Any], then: Sequence[Any]) -> bool:
        """Are an operator's numbers the same, but for those that were read off tensors?

        Beside a tensor whose size depends on numbers, whole numbers may be such a size.
        """
        free = int if self.touches(op) else ()
        return len(now) == len(then) and all(
            a == b
            or (a != a and b != b)  # neither is a number
            or (a in self._now and b in self._then)
            or (isinstance(a, free) and isinstance(b, free))
            for a, b in zip(now, then, strict=True)
        )


def _told(ops: Sequence[Op]) -> set[float]:
    """The numbers that were read off tensors, and what is left of them as whole numbers."""
    found = {op.told for op in ops if op.told is not None and math.isfinite(op.told)}
    return (found | {int(number) for number in found}) - set(_COMMON)


def _numbers_in(op: Op) -> list[float]:
    return [a for a in (*op.args, *op.kwargs.values()) if isinstance(a, (int, float)) and not isinstance(a, bool)]
