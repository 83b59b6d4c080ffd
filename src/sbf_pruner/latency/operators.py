"""From a channel graph to the operators that a deployed network runs.

A graph enters; its layers leave, each with the tensors that decide its widths, and the other operators that cost
time.  As `deploy` writes networks: a norm behind a layer is folded into it; a layer reads the whole stream before
it (columns of zeros stand for what it does not need); a branch with fewer filters than the stream it is added to
either computes the whole stream (rows of zeros) or has its channels moved.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

from ..graph.boundary import Boundary
from ..graph.channels import ChannelGraph
from ..graph.costs import Laid
from ..graph.nodes import Elementwise, Map, Node
from ..graph.owners import owner
from ..graph.records import Value
from ..graph.weighted import Contract, Norm
from .shapes import Site

FREE = ("aten.view", "aten._unsafe_view", "aten.t", "aten.detach", "aten.alias", "aten.expand", "aten.slice")


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer with weights, as it runs once."""

    node: Contract
    site: Site
    before: Value
    """what it reads, before anything is left out for it"""
    behind: Value
    """what it gives, put into the layout of those it is added to"""

    def widths(self, laid: Laid) -> tuple[int, int, int]:
        """Channels it reads, filters it has in the layout of the stream, and filters of its own."""
        sizes = laid.layout.sizes
        return sizes(self.before)[1], sizes(self.behind)[1], sizes(self.node.out)[1]

    def runs(self, laid: Laid) -> bool:
        """Is it still there?"""
        return owner(self.node.op) not in laid.gone

    @cached_property
    def pixels(self) -> int:
        """Numbers per channel and sample that it gives."""
        return math.prod(self.node.out.shape[2:])


class Operators:
    """All that a network runs."""

    def __init__(self, graph: ChannelGraph) -> None:
        self.graph = graph
        self.samples = graph.trace.samples
        self._readers: dict[Value, list[Node]] = defaultdict(list)
        self._maker: dict[Value, Node] = {}
        for node in graph.nodes:
            for value in dict.fromkeys(node.inputs):
                self._readers[value].append(node)
            for value in node.outputs:
                self._maker[value] = node
        self.layers = [self._layer(node) for node in graph.nodes if isinstance(node, Contract)]
        self.joins = [node for node in graph.nodes if isinstance(node, Elementwise) and self._joins(node)]
        joined = set(map(id, self.joins))  # to compare nodes would compare all they know
        self.rest = [node for node in graph.nodes if id(node) not in joined and self._costs(node)]

    def elements(self, value: Value, laid: Laid) -> float:
        """How many numbers of a tensor there are, per sample."""
        return math.prod(laid.layout.sizes(value)) / self.samples

    @staticmethod
    def alive(value: Value, laid: Laid) -> bool:
        """Is any of it computed for anybody?"""
        needed = laid.flow.needed.get(value)
        return needed is not None and bool((needed & laid.flow.alive[value]).any())

    def _layer(self, node: Contract) -> Layer:
        before = self._outside(node.x)
        behind, reader = node.out, self._only_reader(node.out)
        while isinstance(reader, Boundary | Norm) or (isinstance(reader, Elementwise) and not self._joins(reader)):
            behind = reader.outputs[0]
            reader = self._only_reader(behind)
        return Layer(node, Site.of(node, self.samples), before, behind)

    def _outside(self, value: Value) -> Value:
        """A tensor as it was before the edges of modules that it has passed."""
        while isinstance(edge := self._maker.get(value), Boundary):
            value = edge.x
        return value

    def _only_reader(self, value: Value) -> Node | None:
        readers = self._readers[value]
        return readers[0] if len(readers) == 1 and value not in self.graph.outputs else None

    @staticmethod
    def _joins(node: Elementwise) -> bool:
        """Do two maps meet in it?"""
        return sum(v.roots is None for v in dict.fromkeys(node.inputs)) > 1

    def _costs(self, node: Node) -> bool:
        """Does it take any time of its own?"""
        if isinstance(node, Contract | Boundary) or not node.outputs or node.op.name in FREE:
            return False
        if isinstance(node, Map) and len(node.inputs) == 1 and node.op.name.endswith(("reshape", "flatten")):
            return False
        if isinstance(node, Norm):  # folded into the layer before it
            return not isinstance(self._maker.get(self._outside(node.x)), Contract)
        return any(v.roots is None for v in node.inputs)
