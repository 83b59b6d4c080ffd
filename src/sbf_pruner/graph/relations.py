"""Coupling between the layers of a channel graph: shared layouts, followers, and gates in later modules.

Tensors that carry the same channels, such as those before and after a norm, an activation or a sum, form one
*stream*; layers whose filters are the channels of one stream share its layout. One pass over the operators finds
the streams. Comparing need and liveness with half of the filters to those with all filters finds the followers:
layers without scores that lose filters with other layers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .nodes import Alive, Boundary, ChannelMove, Elementwise, Node
from .operators.layers import LayerNode, Norm, Product
from .records import Value

if TYPE_CHECKING:
    from .channel_graph import ChannelGraph


ADD, MULTIPLY, CONCATENATE = "add", "multiply", "concatenate"
_COMBINES = {Alive.ANY: ADD, Alive.ALL: MULTIPLY, Alive.QUOTIENT: MULTIPLY}


@dataclass(frozen=True)
class Group:
    """Layers whose outputs are added, multiplied or concatenated.

    Outputs that are added or multiplied have the same channels and share one layout. Concatenated outputs each
    keep their own channels.
    """

    meet: tuple[str, ...]  # how outputs are combined: "add", "multiply" or "concatenate"
    layers: tuple[str, ...]


class Streams:
    """Disjoint sets of tensors that carry the same channels (union-find)."""

    def __init__(self, graph: ChannelGraph) -> None:
        self._parent: dict[Value, Value] = {}
        for node in graph.nodes:
            roots = [self.of(v) for v in _same_channels(graph, node)]
            for root in roots[1:]:
                self._parent[self.of(root)] = self.of(roots[0])

    def of(self, value: Value) -> Value:
        """Return the tensor that represents the stream of a tensor."""
        while (above := self._parent.get(value, value)) is not value:
            self._parent[value] = self._parent.get(above, above)
            value = above
        return value


class Relations:
    """Coupling between the layers of a channel graph.

    >>> import torch
    >>> from torch import nn
    >>> from .build import trace
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, groups=8), nn.ReLU(), nn.Conv2d(8, 2, 1))
    >>> trace(net, torch.zeros(1, 3, 8, 8)).relations.followers
    {'1': ('0',)}
    """

    def __init__(self, graph: ChannelGraph) -> None:
        self.graph = graph
        self.streams = Streams(graph)
        self._order = {name: place for place, name in enumerate((*graph.layers, *graph.unscored))}
        self._writers: dict[Value, set[str]] = defaultdict(set)  # stream -> layers whose filters are its channels
        # Stream -> streams whose channels are moved into it: sliced, padded, shuffled or concatenated.
        self._parts: dict[Value, list[Value]] = defaultdict(list)
        for node in graph.nodes:
            if isinstance(node, LayerNode) and not _passes_on(node):
                self._writers[self.streams.of(node.out)].add(node.layer)
            elif isinstance(node, ChannelMove):
                for out in node.outputs:
                    self._parts[self.streams.of(out)] += map(self.streams.of, node.operands)
        self.followers = self._find_followers()
        self.groups = self._find_groups()
        self.later_gates = self._find_later_gates()

    def origins(self, value: Value) -> tuple[str, ...]:
        """Return the prunable layers whose filters are the channels of a tensor."""
        found: set[str] = set()
        seen: set[Value] = set()
        todo = [self.streams.of(value)]
        while todo:
            stream = todo.pop()
            if stream not in seen:
                seen.add(stream)
                found |= {n for n in self._writers.get(stream, ()) if n in self.graph.layers}
                todo += self._parts.get(stream, ())
        return self._sorted(found)

    def group_of(self, value: Value) -> int | None:
        """Return the index in `groups` of the layers that write to the stream of a tensor, None if in no group."""
        return self._group_at.get(self.streams.of(value))

    def _sorted(self, names: Iterable[str]) -> tuple[str, ...]:
        return tuple(sorted(set(names), key=lambda n: self._order.get(n, len(self._order))))

    def _find_followers(self) -> dict[str, tuple[str, ...]]:
        """Return the layers without scores that lose filters if all scored layers keep only their second half."""
        layers = self.graph.layers
        whole = self.graph.flow({})
        part = self.graph.flow({n: np.arange(lr.filters) >= lr.filters // 2 for n, lr in layers.items()})
        by_weight = {layer.weight: name for name, layer in layers.items()}
        found: dict[str, tuple[str, ...]] = {}
        for node in self.graph.nodes:
            if not isinstance(node, LayerNode) or (name := node.layer) in layers:
                continue
            if node.weight.name in by_weight:  # it shares its weight with a prunable layer
                found[name] = (by_weight[node.weight.name],)
            elif node.depthwise or node.fed(part).all():
                before, after = node.wanted(whole), node.wanted(part)
                if before is not None and (after is None or (before & ~after).any()):
                    leaders = tuple(n for n in self.origins(node.out) if n != name)
                    if leaders:
                        found[name] = leaders
        return found

    def _find_groups(self) -> list[Group]:
        combined: dict[Value, set[str]] = defaultdict(set)  # stream -> how its tensors are combined
        sides: dict[tuple[str, ...], None] = {}
        computed = set(self.graph.trace.inputs)
        for node in self.graph.nodes:
            operands = {v for v in node.inputs if v in computed and max(self.graph.grids[v], default=1) > 1}
            if not computed.isdisjoint(node.inputs):  # results of stored tensors alone have no filters
                computed.update(node.outputs)
            if len(operands) < 2:
                continue
            if isinstance(node, Elementwise) and node.alive_if in _COMBINES:
                combined[self.streams.of(node.out)].add(_COMBINES[node.alive_if])
            elif isinstance(node, Product) and all(map(node.ends, operands)):
                combined[self.streams.of(node.left)].add(MULTIPLY)
            elif isinstance(node, ChannelMove):
                sides[self._sorted(n for v in operands for n in self.origins(v))] = None
        groups: list[Group] = []
        self._group_at: dict[Value, int] = {}
        for stream, kinds in combined.items():
            layers = self._sorted(n for n in self._writers.get(stream, ()) if n not in self.followers)
            if len(layers) < 2:  # the operands were concatenated or padded, as in GhostNet
                layers = self._sorted((*layers, *self.origins(stream)))
            if len(layers) > 1 and any(n in self.graph.layers for n in layers):
                self._group_at[stream] = len(groups)
                groups.append(Group(tuple(sorted(kinds)), layers))
        # A dense block concatenates repeatedly; of these sets, only the largest is kept.
        sets = [set(side) for side in sides]
        for side in sides:
            if len(side) > 1 and not any(set(side) < other for other in sets):
                groups.append(Group((CONCATENATE,), side))
        return groups

    def _find_later_gates(self) -> dict[str, tuple[str, ...]]:
        """Map every layer to the modules that its channels pass and that have a gate without a score."""
        found: dict[str, dict[str, None]] = defaultdict(dict)
        for site in self.graph.sites:
            for name in () if site.layer else self.origins(site.edges[0].out):
                found[name][site.module] = None
        return {name: tuple(modules) for name, modules in found.items()}


def _same_channels(graph: ChannelGraph, node: Node) -> list[Value]:
    """Return those inputs and outputs of a node that carry the same channels."""
    if isinstance(node, (Norm, Boundary)):
        return [node.x, node.out]
    if isinstance(node, LayerNode):
        return [node.x, node.out] if _passes_on(node) else []
    if isinstance(node, Product):
        # Channels that are summed over are the same in both operands; all others are channels of the result.
        passed = [v for v in (node.left, node.right) if not node.ends(v)]
        if not passed:
            same = math.prod(graph.grids[node.left]) == math.prod(graph.grids[node.right]) > 1
            return [node.left, node.right] if same else []
        return [*passed, node.out] if len(passed) == 1 else []
    if isinstance(node, Elementwise):
        size = math.prod(graph.grids[node.out])
        return [v for v in (*node.outputs, *node.inputs) if size > 1 and math.prod(graph.grids[v]) == size]
    if isinstance(node, ChannelMove) and len(node.operands) == len(node.outputs) == 1:
        size = math.prod(graph.grids[node.operands[0]])
        if np.array_equal(node.labels[0].reshape(-1), np.arange(size)):
            return [node.operands[0], node.out]
    return []


def _passes_on(node: LayerNode) -> bool:
    """Return True for a depthwise convolution with one filter per input channel."""
    return node.depthwise and node.filters == node.x.shape[1]
