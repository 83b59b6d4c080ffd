"""Does an operator of a network that was cut read what it read in the whole one?

Two recordings of the same code enter, operator by operator; a mismatch leaves.  Shapes alone do not tell: a
forward that chooses by a width (`a if a.shape[1] > 8 else b`) may do the same to another tensor, or with another
module's weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Set

from torch import nn

from ..layers import plain_names
from .records import Op, Value

Names = Mapping[str, Set[str]]  # of a stored tensor, by one of them


class Operands:
    """Which tensor of the small network is which of the large one, as far as both are known."""

    def __init__(
        self, now: Mapping[Value, Value], then: Mapping[Value, Value], names: tuple[Names, Names] = ({}, {})
    ) -> None:
        self._now, self._then = now, then  # what only hands a tensor on, in either network: result -> operand
        self._names = names
        self._same: dict[Value, Value] = {}  # small -> large
        self._paired: set[Value] = set()

    def agree(self, now: Op, then: Op) -> bool:
        """Do two operators read the same tensors?  If so, what they give is the same from now on."""
        for mine, other in zip(now.inputs, then.inputs, strict=False):
            mine, other = _origin(mine, self._now), _origin(other, self._then)
            if mine.kind == other.kind == "state" and not self._same_name(mine, other):
                return False
            known = self._same.get(mine)
            if known is not None and other in self._paired and known is not other:
                return False
            if (mine.kind == "input" and other in self._paired) or (other.kind == "input" and known is not None):
                return False
        pairs = [(a, b) for a, b in zip(now.outputs, then.outputs, strict=False) if a is not None and b is not None]
        self._same |= dict(pairs)
        self._paired |= {b for _, b in pairs}
        return True

    def _same_name(self, mine: Value, other: Value) -> bool:
        now, then = (held.get(value.name) for held, value in zip(self._names, (mine, other), strict=True))
        return now is None or then is None or bool(now & then)


def names_of(model: nn.Module) -> Names:
    """All names of every parameter and buffer, by the one that it is recorded under.

    They are those that it had before a module was put between remaps.

    >>> tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    >>> tied[1].weight = tied[0].weight
    >>> sorted(names_of(tied)["0.weight"])
    ['0.weight', '1.weight']
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    plain = plain_names(modules)
    found: dict[int, set[str]] = defaultdict(set)
    for path, module in modules.items():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            found[id(tensor)].add(f"{plain[path]}.{name}".lstrip("."))
    return {name: found[id(tensor)] for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def _origin(value: Value, handed_on: Mapping[Value, Value]) -> Value:
    while value in handed_on:
        value = handed_on[value]
    return value
