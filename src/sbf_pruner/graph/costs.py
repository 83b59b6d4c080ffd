"""What a network would cost if it kept the given filters, without extracting it.

A channel graph and masks enter; parameters, multiply-accumulates and stored bytes leave, counted on the layout
that surgery would cut, so that they are those of the extracted network: with products of activations, and with
parameters that nothing reads.  Where the model's own code insists on sizes, surgery
keeps more than that: how much, is known from the cuts that were made in this graph before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from .channels import ChannelGraph
from .layout import solve, vanished
from .masks import Flow, Layout, Mask
from .owners import owner
from .records import Op, Trace, Value
from .weighted import Contract, Product


@dataclass(frozen=True)
class Cost:
    """Parameters, multiply-accumulates of one pass on the example inputs in evaluation mode, and the bytes of
    the parameters and buffers that are used."""

    params: int
    macs: int
    size: int = 0


def cost(graph: ChannelGraph, keep: Mapping[str, Mask]) -> Cost:
    """What is left when each layer keeps only the given filters.

    >>> import numpy as np, torch
    >>> from torch import nn
    >>> from .build import trace
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 4, 1, bias=False))
    >>> cost(trace(net, torch.rand(1, 3, 5, 5)), {"0": np.arange(8) < 2})
    Cost(params=16, macs=350, size=64)
    """
    return cost_of(graph, lay_out(graph, keep))


@dataclass(frozen=True)
class Laid:
    """What a choice of filters would leave: filters, channels alive, channels there, and modules that are not."""

    keep: dict[str, Mask]
    flow: Flow
    layout: Layout
    gone: set[str]


def lay_out(graph: ChannelGraph, keep: Mapping[str, Mask]) -> Laid:
    """Lay a network out as surgery would cut it, or larger: what a cut insisted on before counts for all."""
    left, flow = graph.settled(keep)
    layout = solve(graph, flow, graph.pinned.positions, graph.pinned.whole)
    return Laid(left, flow, layout, vanished(graph, flow))


def cost_of(graph: ChannelGraph, laid: Laid) -> Cost:
    """What a network that is laid out costs."""
    macs = _fixed_macs(graph)
    for node in graph.nodes:
        if node.op.position in graph.trace.added:
            continue
        if isinstance(node, Product) and not node.op.inside(laid.gone):
            macs += math.prod(laid.layout.sizes(node.out)) * laid.layout.sizes(node.left)[2]
        elif isinstance(node, Contract) and owner(node.op) not in laid.gone:
            pixels = (node.x if node.transposed else node.out).shape[2:]
            macs += node.out.shape[0] * _products(node, laid.layout) * math.prod(pixels)
    params, size = graph.trace.unused, 0
    for name, entries in entries_left(graph, laid).items():
        value = graph.trace.states[name]
        params += entries if value.trained else 0
        size += entries * (value.data.element_size() if value.data is not None else 0)
    return Cost(params, macs, size)


def whole_cost(graph: ChannelGraph) -> Cost:
    """What the network costs as it is, with layers that lead nowhere, which a cut leaves out.

    >>> import torch
    >>> from torch import nn
    >>> from .build import trace
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 4, 1, bias=False))
    >>> whole_cost(trace(net, torch.rand(1, 3, 5, 5)))
    Cost(params=64, macs=1400, size=256)
    """
    trace, params, size = graph.trace, graph.trace.unused, 0
    for value in trace.states.values():
        entries = math.prod(value.shape)
        params += entries if value.trained else 0
        size += entries * (value.data.element_size() if value.data is not None else 0)
    return Cost(params, sum(_macs(op) for op in trace.ops if op.position not in trace.added), size)


def entries_left(graph: ChannelGraph, laid: Laid) -> dict[str, int]:
    """How many numbers there are in every parameter and buffer that is left."""
    grouped = {
        node.weight: node
        for node in graph.nodes
        if isinstance(node, Contract) and node.groups > 1 and node.stored and owner(node.op) not in laid.gone
    }
    return {
        name: _products(grouped[value], laid.layout) if value in grouped else _size(value, laid.layout)
        for name, value in graph.trace.states.items()
        if name.rpartition(".")[0] not in laid.gone
    }


def _products(node: Contract, layout: Layout) -> int:
    """The products that a layer sums up for one pixel of all its outputs: the entries of its weight."""
    per_group = layout.sizes(node.x)[1] // groups_left(node, layout)
    return per_group * layout.sizes(node.out)[1] * math.prod(node.weight.shape[2:])


# Of the operators that torch can count, those that are counted by their shapes alone.
_PRODUCTS = {f"aten.{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "convolution")}
_PRODUCTS |= {f"aten._scaled_dot_product_{name}_attention" for name in ("efficient", "flash", "cudnn")}
_FIXED: WeakKeyDictionary[Trace, int] = WeakKeyDictionary()


def _fixed_macs(graph: ChannelGraph) -> int:
    """Multiply-accumulates of what all channels stay for, such as attention head by head."""
    if graph.trace not in _FIXED:
        counted = {node.op.position for node in graph.nodes if isinstance(node, (Contract, Product))}
        counted |= graph.trace.added
        _FIXED[graph.trace] = sum(_macs(op) for op in graph.trace.ops if op.position not in counted)
    return _FIXED[graph.trace]


def _macs(op: Op) -> int:
    formula = flop_registry.get(getattr(op.overload, "overloadpacket", None))
    if formula is None or op.name not in _PRODUCTS:
        return 0

    def shape(held: Any) -> Any:
        return held.shape if isinstance(held, Value) else held

    args, kwargs, outputs = pytree.tree_map(shape, (op.args, op.kwargs, op.outputs))
    return int(formula(*args, **kwargs, out_val=outputs[0])) // 2


def _size(value: Value, layout: Layout) -> int:
    # A dimension that nothing refers to, like those of a kernel, is as it was.
    return math.prod(left or full for left, full in zip(layout.sizes(value), value.shape, strict=True))


def groups_left(node: Contract, layout: Layout) -> int:
    """How many of its groups a convolution still has."""
    return int(node.grouped(layout.line(node.x, 1)).any(1).sum())
