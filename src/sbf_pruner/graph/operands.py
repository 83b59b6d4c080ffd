"""Does an operator of a network that was cut read what it read in the whole one?

Two recordings of the same code enter, operator by operator; a mismatch leaves.  Shapes alone do not tell: a
forward that chooses by a width (`a if a.shape[1] > 8 else b`) may do the same to another tensor.
"""

from __future__ import annotations

from collections.abc import Mapping

from .records import Op, Value


class Operands:
    """Which tensor of the small network is which of the large one, as far as both are known."""

    def __init__(self, now: Mapping[Value, Value], then: Mapping[Value, Value]) -> None:
        self._now, self._then = now, then  # what only hands a tensor on, in either network: result -> operand
        self._same: dict[Value, Value] = {}  # small -> large
        self._paired: set[Value] = set()

    def agree(self, now: Op, then: Op) -> bool:
        """Do two operators read the same tensors?  If so, what they give is the same from now on."""
        for mine, other in zip(now.inputs, then.inputs, strict=False):
            mine, other = _origin(mine, self._now), _origin(other, self._then)
            known = self._same.get(mine)
            if known is not None and other in self._paired and known is not other:
                return False
            if (mine.kind == "input" and other in self._paired) or (other.kind == "input" and known is not None):
                return False
        pairs = [(a, b) for a, b in zip(now.outputs, then.outputs, strict=False) if a is not None and b is not None]
        self._same |= dict(pairs)
        self._paired |= {b for _, b in pairs}
        return True


def _origin(value: Value, handed_on: Mapping[Value, Value]) -> Value:
    while value in handed_on:
        value = handed_on[value]
    return value
