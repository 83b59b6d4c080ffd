"""A channel graph in; its residual blocks out: additions of a branch of layers with a way around it.

The two tensors an addition joins have a last common origin; the one with more layers on its way from there
is the branch `f(x)`, the other the shortcut `x`.  Where both sides have equally many layers (parallel
branches) there is no way around, and the addition is no residual block.  Names play no part in it.
"""

from __future__ import annotations

from dataclasses import dataclass

from .boundary import Boundary
from .channels import ChannelGraph
from .nodes import Elementwise, Node
from .records import Op, Value
from .weighted import Contract, Norm

ADDITIONS = ("aten.add", "aten.add_")


@dataclass(frozen=True)
class ResidualBlock:
    """One addition of a branch and a shortcut."""

    name: str  # the module in whose forward the addition stands
    addition: int  # its place among all additions of two tensors, in the order in which they run
    branch: int  # which operand is the branch: 0 or 1
    layer: str  # the prunable layer whose filters the branch's channels are; "" where there is no single one
    layers: tuple[str, ...] = ()  # all prunable layers of the branch, in the order in which they run


def residual_blocks(graph: ChannelGraph) -> list[ResidualBlock]:
    """The residual blocks of a network, in the order in which they run.

    >>> import torch
    >>> from .build import trace
    >>> from ..models import resolve
    >>> found = residual_blocks(trace(resolve("resnet20"), torch.zeros(1, 3, 32, 32)))
    >>> [block.name for block in found][:3], found[0].layer, len(found)
    (['layer1.0', 'layer1.1', 'layer1.2'], 'layer1.0.conv2', 9)
    """
    places = {op.position: place for place, op in enumerate(additions(graph.trace.ops))}
    walk = _Walk(graph)
    found: list[ResidualBlock] = []
    taken: dict[str, int] = {}
    for node in graph.nodes:
        op = node.op
        if op.position not in places or not isinstance(node, Elementwise) or len(op.inputs) != 2:
            continue
        counts = walk.layers_since_fork(*op.inputs)
        if counts is None or counts[0] == counts[1]:
            continue
        branch = int(counts[1] > counts[0])
        layer = walk.owner(op.inputs[branch])
        name = (op.call.module if op.call is not None else "") or layer or op.where
        taken[name] = taken.get(name, 0) + 1
        again = f" ({taken[name]})" if taken[name] > 1 else ""
        inside = walk.layers_of(op.inputs[branch], op.inputs[1 - branch])
        found.append(ResidualBlock(name + again, places[op.position], branch, layer, inside))
    return found


def additions(ops: list[Op]) -> list[Op]:
    """The operators that add two feature maps, as `is_addition` knows them when they run."""
    return [op for op in ops if len(op.inputs) == 2 and is_addition(op.name, *(v.shape for v in op.inputs))]


def is_addition(name: str, first: tuple[int, ...], second: tuple[int, ...]) -> bool:
    """Is it the addition of two maps with as many pixels?"""
    return name in ADDITIONS and len(first) == len(second) > 2 and first[2:] == second[2:]


class _Walk:
    """Ways back through the graph."""

    def __init__(self, graph: ChannelGraph) -> None:
        self.graph = graph
        self.maker: dict[Value, int] = {}
        for place, node in enumerate(graph.nodes):
            for value in node.outputs:
                self.maker.setdefault(value, place)

    def layers_since_fork(self, first: Value, second: Value) -> tuple[int, int] | None:
        """How many layers either tensor has passed since both were one; None if they never were."""
        above = [self._above(value) for value in (first, second)]
        shared = above[0] & above[1]
        fork = max(shared, default=None)
        if fork is None:
            inputs = [v in self.graph.trace.inputs for v in (first, second)]
            if not any(inputs):
                return None
        one, two = (sum(isinstance(self.graph.nodes[p], Contract) for p in places - shared) for places in above)
        return one, two

    def layers_of(self, branch: Value, shortcut: Value) -> tuple[str, ...]:
        """The prunable layers a branch has passed that the shortcut has not."""
        places = sorted(self._above(branch) - self._above(shortcut))
        names = [node.layer for place in places if isinstance(node := self.graph.nodes[place], Contract)]
        return tuple(name for name in dict.fromkeys(names) if name in self.graph.layers)

    def owner(self, value: Value) -> str:
        """The prunable layer whose filters a tensor's channels are, with nothing but per-channel steps since."""
        while value in self.maker:
            node: Node = self.graph.nodes[self.maker[value]]
            if isinstance(node, Contract):
                return node.layer if node.layer in self.graph.layers else ""
            if isinstance(node, (Norm, Boundary)):
                value = node.x
            elif isinstance(node, Elementwise):
                maps = [v for v in node.inputs if v.shape == value.shape and v.roots is None]
                if len(maps) != 1:
                    return ""
                value = maps[0]
            else:
                return ""
        return ""

    def _above(self, value: Value) -> set[int]:
        """The places of all nodes a tensor comes from."""
        found: set[int] = set()
        todo = [value]
        while todo:
            place = self.maker.get(todo.pop())
            if place is not None and place not in found:
                found.add(place)
                todo += self.graph.nodes[place].inputs
        return found
