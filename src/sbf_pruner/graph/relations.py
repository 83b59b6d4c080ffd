"""How the layers of a channel graph hang together: what shares a layout, what follows, where more gates stand.

A ChannelGraph enters; its `Relations` leave.  Tensors whose channels are the same ones, seen before and after
a norm, an activation or a sum, form one *stream*; layers that write into one stream share its layout.  That
is one pass over the operators, and one pass of liveness tells the followers: layers that own no scores but
lose filters when others do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .layer_nodes import Contract, Norm, Product
from .nodes import Boundary, Elementwise, Map, Mask, Node
from .records import Value

if TYPE_CHECKING:
    from .channel_graph import ChannelGraph


ADD, MULTIPLY, CONCATENATE = "add", "multiply", "concatenate"
_MEETING = {"any": ADD, "all": MULTIPLY, "first": MULTIPLY}


@dataclass(frozen=True)
class Group:
    """Layers that meet.

    Where they are added or multiplied they write the same channels and share one layout; where they are
    concatenated they keep places of their own, side by side.
    """

    meet: tuple[str, ...]  # "add", "multiply" or "concatenate"
    layers: tuple[str, ...]


class Streams:
    """Which tensors carry the same channels: a forest, one tree per stream."""

    def __init__(self) -> None:
        self._parent: dict[Value, Value] = {}

    def of(self, value: Value) -> Value:
        """The tensor that stands for the stream."""
        while (above := self._parent.get(value, value)) is not value:
            self._parent[value] = self._parent.get(above, above)
            value = above
        return value

    def unite(self, values: Iterable[Value]) -> None:
        """These tensors carry the same channels."""
        roots = [self.of(v) for v in values]
        for root in roots[1:]:
            self._parent[self.of(root)] = self.of(roots[0])


class Relations:
    """What is coupled to what in a channel graph.

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
        """The prunable layers whose filters a tensor's channels are."""
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
        """The place in `groups` of the layers that write into a tensor's stream."""
        return self._group_at.get(self.streams.of(value))

    def _sorted(self, names: Iterable[str]) -> tuple[str, ...]:
        return tuple(sorted(set(names), key=lambda n: self._order.get(n, len(self._order))))

    def _find_writers(self) -> dict[Value, set[str]]:
        writers: dict[Value, set[str]] = {}
        for node in self.graph.nodes:
            if isinstance(node, Contract) and not _passes_on(node):
                writers.setdefault(self.streams.of(node.out), set()).add(node.layer)
        return writers

    def _find_parts(self) -> dict[Value, list[Value]]:
        """The streams whose channels were moved into another one: cut, padded, shuffled, concatenated."""
        parts: dict[Value, list[Value]] = {}
        for node in self.graph.nodes:
            if isinstance(node, Map):
                sources = [self.streams.of(v) for v in node.operands]
                for out in node.outputs:
                    parts.setdefault(self.streams.of(out), []).extend(sources)
        return parts

    def _find_followers(self) -> dict[str, tuple[str, ...]]:
        """Layers without scores that lose filters when every other layer keeps only its last ones."""
        whole = self.graph.flow({})
        part = self.graph.flow({name: _last_half(layer.filters) for name, layer in self.graph.layers.items()})
        found: dict[str, tuple[str, ...]] = {}
        for node in self.graph.nodes:
            if not isinstance(node, Contract) or (name := node.layer) in self.graph.layers:
                continue
            if node.weight.name in self._by_weight:  # another module that runs with a layer's weight
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
            if computed.intersection(node.inputs):  # what is made of stored tensors alone is nobody's filters
                computed.update(node.outputs)
            if len(met) > 1 and isinstance(node, Elementwise) and node.zero in _MEETING:
                meetings.setdefault(self.streams.of(node.outputs[0]), set()).add(_MEETING[node.zero])
            elif len(met) > 1 and isinstance(node, Product) and all(map(node.ends, met)):
                meetings.setdefault(self.streams.of(node.left), set()).add(MULTIPLY)
            elif len(met) > 1 and isinstance(node, Map):
                sides[self._sorted(n for v in met for n in self.origins(v))] = None
        groups: list[Group] = []
        self._group_at: dict[Value, int] = {}
        for stream, kinds in meetings.items():
            layers = self._sorted(n for n in self._writers.get(stream, ()) if n not in self.followers)
            if len(layers) < 2:  # what is added was concatenated or padded before: GhostNet
                layers = self._sorted((*layers, *self.origins(stream)))
            if len(layers) > 1 and any(n in self.graph.layers for n in layers):
                self._group_at[stream] = len(groups)
                groups.append(Group(tuple(sorted(kinds)), layers))
        # A dense block concatenates again and again; the last time says it all.
        sets = [set(side) for side in sides]
        for side in sides:
            if len(side) > 1 and not any(set(side) < other for other in sets):
                groups.append(Group((CONCATENATE,), side))
        return groups

    def _find_later_gates(self) -> dict[str, tuple[str, ...]]:
        """The gates without a score that a layer's channels pass on their way."""
        found: dict[str, list[str]] = {}
        for site in self.graph.sites:
            if not site.layer:
                for name in self.origins(site.edges[0].out):
                    found.setdefault(name, []).append(site.module)
        return {name: tuple(dict.fromkeys(modules)) for name, modules in found.items()}


def _streams(graph: ChannelGraph) -> Streams:
    streams = Streams()
    for node in graph.nodes:
        streams.unite(_same_channels(graph, node))
    return streams


def _same_channels(graph: ChannelGraph, node: Node) -> list[Value]:
    """The tensors at a node that carry the same channels."""
    if isinstance(node, (Norm, Boundary)):
        return [node.x, node.out]
    if isinstance(node, Contract):
        return [node.x, node.out] if _passes_on(node) else []
    if isinstance(node, Product):
        # What is summed over is one and the same on both sides; what is not, is the result's as well.
        ended = [v for v in (node.left, node.right) if node.ends(v)]
        if len(ended) == 2:
            return ended if math.prod(graph.grids[node.left]) == math.prod(graph.grids[node.right]) > 1 else []
        passed = [v for v in (node.left, node.right) if not node.ends(v)]
        return [*passed, node.out] if len(passed) == 1 else []
    if isinstance(node, Elementwise):
        size = math.prod(graph.grids[node.outputs[0]])
        return [v for v in (*node.outputs, *node.inputs) if size > 1 and math.prod(graph.grids[v]) == size]
    if isinstance(node, Map) and len(node.operands) == len(node.outputs) == 1:
        labels = node.labels[0].reshape(-1)
        size = math.prod(graph.grids[node.operands[0]])
        if labels.size == size and np.array_equal(labels, np.arange(size)):
            return [node.operands[0], node.outputs[0]]
    return []


def _passes_on(node: Contract) -> bool:
    """Depthwise, one filter per channel: what comes out are the channels that went in."""
    return node.depthwise and node.filters == node.x.shape[1]


def _last_half(filters: int) -> Mask:
    return np.arange(filters) >= filters // 2
