"""What a module does with the channels of its one operator before they leave it.

The node of that operator and those behind it in the same call enter; along which dimension of the module's result
the channels lie, each in its own place, leaves.  A module may pool, activate or turn its map and still be its
layer; one that moves or mixes the channels is not, because a gate behind it would close others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .boundary import Boundary
from .masks import Flow
from .nodes import Elementwise, Map, Node
from .owners import PRODUCTS
from .records import Op, Value
from .weighted import Contract, Norm

Numbers = NDArray[np.int64]  # over a tensor's grid: which of the operator's channels stands there, or -1 for none


@dataclass(frozen=True)
class Leaving:
    """How the channels of a module's operator leave it."""

    dim: int | None  # of the module's result; None if they are not all there, once each and in their order
    closed: bool  # a channel that is zero behind the operator is zero behind the module, whatever it meets there
    odd: Op | None  # what first moves or mixes them, if anything does


def leaving(main: Contract | Norm, out: Value, behind: Sequence[Node]) -> Leaving:
    """Follow the channels of a module's operator through what the module runs behind it, to its result."""
    if out is main.out:
        return Leaving(1, True, None)
    grids, filters = main.grids, main.out.shape[1]
    numbers: dict[Value, Numbers] = {main.out: np.arange(filters).reshape(grids[main.out])}
    mixed: set[Value] = set()
    nothing = Flow({main.out: np.zeros(grids[main.out], bool)})
    odd = None
    for node in behind:
        for value in node.inputs:
            nothing.alive.setdefault(value, np.ones(grids[value], bool))
        node.push(nothing)
        if mixed.isdisjoint(node.inputs):
            if numbers.keys().isdisjoint(node.inputs):
                continue
            found = _numbers(node, numbers)
            if found is not None:
                numbers |= found
                if odd is None and any(_line(held, filters) is None for held in found.values()):
                    odd = node.op
                continue
        mixed.update(node.outputs)
        odd = odd or node.op
    dims = _line(numbers[out], filters) if out in numbers else None
    if dims is None:
        return Leaving(None, False, odd)
    # A single channel lies where a layer has them.
    dim = dims[0] if dims else len(out.shape) - 1 if main.op.name in PRODUCTS else 1
    fits = dim < len(out.shape) and out.shape[dim] == filters
    return Leaving(dim if fits else None, not nothing.alive[out].any(), None)


def _line(numbers: Numbers, filters: int) -> list[int] | None:
    """The dimension along which all channels stand in their order, as a list, which is empty for a single one."""
    dims = [dim for dim, size in enumerate(numbers.shape) if size > 1]
    in_order = len(dims) <= 1 and np.array_equal(numbers.reshape(-1), np.arange(filters))
    return dims if in_order else None


def _numbers(node: Node, numbers: Mapping[Value, Numbers]) -> dict[Value, Numbers] | None:
    """Where the channels are behind a node; None where they were mixed, or nothing is known."""
    if isinstance(node, Map):
        held = [numbers[v] if v in numbers else np.full(node.grids[v], -1) for v in node.operands]
        flat = np.concatenate([*(n.reshape(-1) for n in held), [-1]])
        return {value: flat[labels] for value, labels in zip(node.outputs, node.labels, strict=True)}
    carried = [numbers[v] for v in node.inputs if v in numbers]
    if isinstance(node, Boundary) and node.labels is not None:
        if carried[0].shape != node.line(node.x):
            return None
        return {node.out: np.append(carried[0].reshape(-1), -1)[node.labels]}
    alone = isinstance(node, (Boundary, Elementwise)) or (isinstance(node, Norm) and node.per_group == 1)
    if not alone:
        return None
    found = {}
    for value in node.outputs:
        spread = [np.broadcast_to(held, node.grids[value]) for held in carried]
        if any(not np.array_equal(spread[0], other) for other in spread[1:]):
            return None  # different channels meet
        found[value] = spread[0]
    return found
