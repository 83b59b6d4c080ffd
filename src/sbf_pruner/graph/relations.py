"""Coupling between the layers of a channel graph: shared layouts, followers and gates further on.

Tensors that carry the same channels, such as those before and after a norm, an activation or a sum, form one
*stream*; layers that write into one stream share its layout. Streams take one pass over the operators. One pass of
liveness finds the followers: layers without scores that lose filters when others do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .nodes import Alive, Boundary, ChannelMove, Elementwise, Mask, Node
from .operators.layers import LayerNode, Norm, Product
from .records import Value

if TYPE_CHECKING:
    from .channel_graph import ChannelGraph


ADD, MULTIPLY, CONCATENATE = "add", "multiply", "concatenate"
_MEETING = {Alive.ANY: ADD, Alive.ALL: MULTIPLY, Alive.QUOTIENT: MULTIPLY}


@dataclass(frozen=True)
class Group:
    """Layers whose outputs are added, multiplied or concatenated.

    Outputs that are added or multiplied have the same channels and share one layout. Concatenated outputs keep
    channels of their own, side by side.
    """

    meet: tuple[str, ...]  # "add", "multiply" or "concatenate"
    layers: tuple[str, ...]


class ChannelSets:
    """Disjoint sets of tensors that carry the same channels, one set per stream (union-find)."""

    def __init__(self) -> None:
        self._parent: dict[Value, Value] = {}

    def of(self, value: Value) -> Value:
        """Return the tensor that represents the stream of a tensor."""
        while (above := self._parent.get(value, value)) is not value:
            self._parent[value] = self._parent.get(above, above)
            value = above
        return value

    def unite(self, values: Iterable[Value]) -> None:
        """Merge the streams of the given tensors."""
        roots = [self.of(v) for v in values]
        for root in roots[1:]:
            self._parent[self.of(root)] = self.of(roots[0])


class Relations:
    """Which layers of a channel graph are coupled, and how.

    >>> import torch
    >>> from torch import nn
    >>> from .build import trace
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, groups=8), nn.ReLU(), nn.Conv2d(8, 2, 1))
    >>> trace(net, torch.zeros(1, 3, 8, 8)).relations.followers
    {'1': ('0',)}
    """

    def __init__(self, graph: ChannelGraph) -> None:
        self.graph = graph
        self.streams = _streams(graph)
        self._by_weight = {layer.weight: name for name, layer in graph.layers.items()}
        self._order = {name: place for place, name in enumerate((*graph.layers, *graph.unscored))}
        self._writers = self._find_writers()
        self._parts = self._find_parts()
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
        """Return the index in `groups` of the layers that write into the stream of a tensor, or None."""
        return self._group_at.get(self.streams.of(value))

    def _sorted(self, names: Iterable[str]) -> tuple[str, ...]:
        return tuple(sorted(set(names), key=lambda n: self._order.get(n, len(self._order))))

    def _find_writers(self) -> dict[Value, set[str]]:
        writers: dict[Value, set[str]] = {}
        for node in self.graph.nodes:
            if isinstance(node, LayerNode) and not _passes_on(node):
                writers.setdefault(self.streams.of(node.out), set()).add(node.layer)
        return writers

    def _find_parts(self) -> dict[Value, list[Value]]:
        """For every stream, those whose channels are moved into it: sliced, padded, shuffled or concatenated."""
        parts: dict[Value, list[Value]] = {}
        for node in self.graph.nodes:
            if isinstance(node, ChannelMove):
                sources = [self.streams.of(v) for v in node.operands]
                for out in node.outputs:
                    parts.setdefault(self.streams.of(out), []).extend(sources)
        return parts

    def _find_followers(self) -> dict[str, tuple[str, ...]]:
        """Layers without scores that lose filters when every other layer keeps only the second half of its own."""
        whole = self.graph.flow({})
        part = self.graph.flow({name: _last_half(layer.filters) for name, layer in self.graph.layers.items()})
        found: dict[str, tuple[str, ...]] = {}
        for node in self.graph.nodes:
            if not isinstance(node, LayerNode) or (name := node.layer) in self.graph.layers:
                continue
            if node.weight.name in self._by_weight:  # it shares its weight with a prunable layer
                found[name] = (self._by_weight[node.weight.name],)
            elif node.depthwise or node.fed(part).all():
                before, after = node.wanted(whole), node.wanted(part)
                if before is not None and (after is None or (before & ~after).any()):
                    leaders = tuple(n for n in self.origins(node.out) if n != name)
                    if leaders:
                        found[name] = leaders
        return found

    def _find_groups(self) -> list[Group]:
        meetings: dict[Value, set[str]] = {}
        sides: dict[tuple[str, ...], None] = {}
        computed = set(self.graph.trace.inputs)
        for node in self.graph.nodes:
            met = [
                v for v in dict.fromkeys(node.inputs) if v in computed and max(self.graph.grids[v], default=1) > 1
            ]
            if computed.intersection(node.inputs):  # stored tensors alone are no layer's filters
                computed.update(node.outputs)
            if len(met) > 1 and isinstance(node, Elementwise) and node.alive_if in _MEETING:
                meetings.setdefault(self.streams.of(node.out), set()).add(_MEETING[node.alive_if])
            elif len(met) > 1 and isinstance(node, Product) and all(map(node.ends, met)):
                meetings.setdefault(self.streams.of(node.left), set()).add(MULTIPLY)
            elif len(met) > 1 and isinstance(node, ChannelMove):
                sides[self._sorted(n for v in met for n in self.origins(v))] = None
        groups: list[Group] = []
        self._group_at: dict[Value, int] = {}
        for stream, kinds in meetings.items():
            layers = self._sorted(n for n in self._writers.get(stream, ()) if n not in self.followers)
            if len(layers) < 2:  # the operands were concatenated or padded, as in GhostNet
                layers = self._sorted((*layers, *self.origins(stream)))
            if len(layers) > 1 and any(n in self.graph.layers for n in layers):
                self._group_at[stream] = len(groups)
                groups.append(Group(tuple(sorted(kinds)), layers))
        # A dense block concatenates repeatedly; the last, largest set contains the others.
        sets = [set(side) for side in sides]
        for side in sides:
            if len(side) > 1 and not any(set(side) < other for other in sets):
                groups.append(Group((CONCATENATE,), side))
        return groups

    def _find_later_gates(self) -> dict[str, tuple[str, ...]]:
        """For every layer, the modules with gates without a score that its channels pass."""
        found: dict[str, list[str]] = {}
        for site in self.graph.sites:
            if not site.layer:
                for name in self.origins(site.edges[0].out):
                    found.setdefault(name, []).append(site.module)
        return {name: tuple(dict.fromkeys(modules)) for name, modules in found.items()}


def _streams(graph: ChannelGraph) -> ChannelSets:
    streams = ChannelSets()
    for node in graph.nodes:
        streams.unite(_same_channels(graph, node))
    return streams


def _same_channels(graph: ChannelGraph, node: Node) -> list[Value]:
    """Return the tensors at a node that carry the same channels."""
    if isinstance(node, (Norm, Boundary)):
        return [node.x, node.out]
    if isinstance(node, LayerNode):
        return [node.x, node.out] if _passes_on(node) else []
    if isinstance(node, Product):
        # Channels that are summed over are the same on both sides; all others are also those of the result.
        ended = [v for v in (node.left, node.right) if node.ends(v)]
        if len(ended) == 2:
            return ended if math.prod(graph.grids[node.left]) == math.prod(graph.grids[node.right]) > 1 else []
        passed = [v for v in (node.left, node.right) if not node.ends(v)]
        return [*passed, node.out] if len(passed) == 1 else []
    if isinstance(node, Elementwise):
        size = math.prod(graph.grids[node.out])
        return [v for v in (*node.outputs, *node.inputs) if size > 1 and math.prod(graph.grids[v]) == size]
    if isinstance(node, ChannelMove) and len(node.operands) == len(node.outputs) == 1:
        labels = node.labels[0].reshape(-1)
        size = math.prod(graph.grids[node.operands[0]])
        if labels.size == size and np.array_equal(labels, np.arange(size)):
            return [node.operands[0], node.out]
    return []


def _passes_on(node: LayerNode) -> bool:
    """Return True for a depthwise convolution with one filter per channel: its channels are those of its input."""
    return node.depthwise and node.filters == node.x.shape[1]


def _last_half(filters: int) -> Mask:
    return np.arange(filters) >= filters // 2
