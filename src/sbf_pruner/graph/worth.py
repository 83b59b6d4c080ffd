"""What one filter is worth: the multiply-accumulates and parameters that go when it alone goes.

A channel graph and the cost of each layer enter; numbers leave, the same that extracting the network without
that filter would save.  A filter's absence changes little, so only what it changes is computed: liveness
from its gate downwards, then need upwards from where liveness changed.
"""

from __future__ import annotations

from collections import ChainMap, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

import numpy as np

from .channels import ChannelGraph
from .masks import Flow, Mask, shrink
from .nodes import Boundary, Contract, Elementwise, Norm
from .trace import Value


@dataclass(frozen=True)
class Worth:
    """What goes with a filter."""

    macs: int
    params: int


class Appraiser:
    """Asks a channel graph what goes when a layer loses its first filter.

    >>> import torch
    >>> from torch import nn
    >>> from .build import trace
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 1, bias=False), nn.BatchNorm2d(8), nn.Conv2d(8, 2, 1))
    >>> Appraiser(trace(net, torch.zeros(1, 3, 4, 4))).first_filter("0")  # three inputs and two outputs, 16 pixels
    Worth(macs=80, params=7)
    """

    def __init__(self, graph: ChannelGraph) -> None:
        self.graph = graph
        self.whole = graph.flow({})
        self.readers: dict[Value, list[int]] = defaultdict(list)
        self.maker: dict[Value, int] = {}
        for place, node in enumerate(graph.nodes):
            for value in dict.fromkeys(node.inputs):
                self.readers[value].append(place)
            for value in node.outputs:
                self.maker[value] = place
        self.outputs = set(graph.outputs)
        self.gates: dict[str, list[int]] = defaultdict(list)
        for place, node in enumerate(graph.nodes):
            if isinstance(node, Boundary) and node.layer:
                self.gates[node.layer].append(place)

    def first_filter(self, name: str) -> Worth:
        """What goes when the layer loses its first filter and nothing else changes."""
        flow = Flow(ChainMap({}, self.whole.alive), ChainMap({}, self.whole.needed))  # type: ignore[arg-type]
        died = self._push(flow, name)
        idle = self._pull(flow, died)
        touched = {place for value in (*died, *idle) for place in (self.maker.get(value, -1), *self.readers[value])}
        macs = params = 0
        counted: set[Value] = set()
        for node in (self.graph.nodes[place] for place in sorted(touched) if place >= 0):
            if isinstance(node, (Contract, Norm)):
                before, after = _Cost.of(node, self.whole), _Cost.of(node, flow)
                macs += before.macs - after.macs
                held = node.weight if isinstance(node, Contract) else node.states[0] if node.states else None
                if held not in counted:  # a module that runs twice holds its weights once
                    params += before.params - after.params
                    counted |= {held} if held is not None else set()
        return Worth(macs, params)

    def _push(self, flow: Flow, name: str) -> list[Value]:
        keep = np.arange(self.graph.layers[name].filters) > 0
        changed: list[Value] = []
        todo = list(self.gates[name])
        for place in _in_order(todo):
            node = self.graph.nodes[place]
            node.push(flow)
            if isinstance(node, Boundary) and node.layer == name:
                node.gate(flow, keep)
            for value in node.outputs:
                if _same(flow.alive, value):
                    continue
                changed.append(value)
                for reader in self.readers[value]:
                    heappush(todo, reader)
        return changed

    def _pull(self, flow: Flow, died: Iterable[Value]) -> list[Value]:
        changed: list[Value] = []
        todo: list[int] = []
        for place in {self.maker[value] for value in died}:
            # Elsewhere a channel is dead behind a node because it was dead before it: nobody asks for it.
            node = self.graph.nodes[place]
            product = isinstance(node, Elementwise) and node.zero != "any"
            if product or (isinstance(node, Boundary) and node.layer):
                heappush(todo, -place)
        for place in _in_order(todo):
            node = self.graph.nodes[-place]
            for value in dict.fromkeys(node.inputs):
                if value not in self.maker or value not in self.whole.needed:
                    continue
                heard = _Heard(flow.needed, value)
                if value in self.outputs:
                    heard[value] = self.whole.needed[value]
                asked = Flow(flow.alive, heard)
                for reader in self.readers[value]:
                    self.graph.nodes[reader].pull(asked)
                flow.needed[value] = heard.get(value, np.zeros(self.graph.grids[value], bool))
                if not _same(flow.needed, value):
                    changed.append(value)
                    heappush(todo, -self.maker[value])
        return changed


class _Heard(dict[Value, Mask]):
    """What is needed of one value, gathered anew; of all others as it is known."""

    def __init__(self, known: Mapping[Value, Mask], target: Value) -> None:
        super().__init__()
        self.known, self.target = known, target

    def get(self, value: Value, default: Any = None) -> Any:
        return super().get(value, default) if value is self.target else self.known.get(value, default)

    def __contains__(self, value: object) -> bool:
        return super().__contains__(value) if value is self.target else value in self.known

    def __getitem__(self, value: Value) -> Mask:
        return super().__getitem__(value) if value is self.target else self.known[value]


@dataclass(frozen=True)
class _Cost:
    macs: int
    params: int

    @classmethod
    def of(cls, node: Contract | Norm, flow: Flow) -> _Cost:
        """What is left of a layer or norm: all it holds for the channels that are alive and needed."""
        wanted = node.wanted(flow)
        there = np.zeros(node.out.shape[1], bool) if wanted is None else _line(wanted, node.out)
        if isinstance(node, Norm):
            scales = sum(isinstance(v, Value) for v in node.op.args[1:3])
            return cls(0, scales * int(there.sum()))
        needed = flow.needed.get(node.x)
        read = np.zeros(node.x.shape[1], bool) if needed is None else _line(needed & flow.alive[node.x], node.x)
        rows, columns = there.reshape(node.groups, -1), read.reshape(node.groups, -1)
        # All groups that are left have equal numbers; the fullest decides.
        pairs = int(rows.any(1).sum()) * int(rows.sum(1).max()) * int(columns.sum(1).max())
        kernel = int(np.prod(node.weight.shape[2:]))
        filters = int(rows.any(1).sum()) * int(rows.sum(1).max())
        transposed = node.out_axis == 1 and len(node.weight.shape) > 2
        pixels = node.x if transposed else node.out
        moves = int(np.prod(pixels.shape)) // pixels.shape[1]
        return cls(pairs * kernel * moves, pairs * kernel + (filters if node.bias is not None else 0))


def _line(mask: Mask, value: Value) -> Mask:
    grid = tuple(n if d == 1 else 1 for d, n in enumerate(value.shape))
    return shrink(np.broadcast_to(mask, np.broadcast_shapes(mask.shape, grid)), grid).reshape(-1)


def _in_order(todo: list[int]) -> Iterator[int]:
    """The places of a heap that may grow on the way, each once."""
    last: int | None = None
    while todo:
        place = heappop(todo)
        if place != last:
            last = place
            yield place


def _same(masks: Mapping[Value, Mask], value: Value) -> bool:
    """Is a mask what it was?  If so, the note of it is taken back."""
    assert isinstance(masks, ChainMap)
    now, before = masks.maps
    if value in now and value in before and np.array_equal(now[value], before[value]):
        del now[value]
        return True
    return value not in now
