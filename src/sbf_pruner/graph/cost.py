"""Compute parameters, MACs and bytes of the extracted network, and of one filter, without extracting it.

Costs are computed from the layout that surgery uses, so they equal those of the extracted network, including
products of activations and unused parameters. Where the model's own code fixes sizes, surgery keeps more channels;
these are counted only if an earlier extraction with the same graph found them (`ChannelGraph.pinned`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from weakref import WeakKeyDictionary

import numpy as np
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from .channel_graph import ChannelGraph, solve_layout, vanished
from .nodes import Boundary, Elementwise, Flow, Layout, Mask, Node, along, shrink, some, whole_groups
from .operators.layers import LayerNode, Norm, Product, weight_owner
from .records import Op, Trace, Value


@dataclass(frozen=True)
class Cost:
    """Number of parameters, MACs and bytes of a network."""

    params: int
    macs: int  # of one pass over the example inputs in evaluation mode
    size: int = 0  # bytes of the parameters and buffers that are used


def network_cost(graph: ChannelGraph, keep: Mapping[str, Mask]) -> Cost:
    """Return the cost of the network when each layer keeps only the given filters.

    >>> import numpy as np, torch
    >>> from torch import nn
    >>> from .build import trace
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 4, 1, bias=False))
    >>> network_cost(trace(net, torch.rand(1, 3, 5, 5)), {"0": np.arange(8) < 2})
    Cost(params=16, macs=350, size=64)
    """
    return cost_of(graph, lay_out(graph, keep))


@dataclass(frozen=True)
class LaidOut:
    """Layout of the extracted network for a choice of filters."""

    keep: dict[str, Mask]  # the result of `ChannelGraph.settle`
    flow: Flow
    layout: Layout
    gone: set[str]  # the result of `vanished`


def lay_out(graph: ChannelGraph, keep: Mapping[str, Mask]) -> LaidOut:
    """Compute the layout that surgery uses, or a larger one: sizes that any earlier extraction found stay fixed."""
    left, flow = graph.settled(keep)
    return LaidOut(left, flow, solve_layout(graph, flow, graph.pinned), vanished(graph, flow))


def cost_of(graph: ChannelGraph, laid: LaidOut) -> Cost:
    """Return the cost of the network with the given layout."""
    macs = _fixed_macs(graph)
    for node in graph.nodes:
        if node.op.position in graph.trace.added:
            continue
        if isinstance(node, Product) and not node.op.inside(laid.gone):
            macs += math.prod(laid.layout.sizes(node.out)) * laid.layout.sizes(node.left)[2]
        elif isinstance(node, LayerNode) and weight_owner(node.op) not in laid.gone:
            pixels = (node.x if node.transposed else node.out).shape[2:]
            macs += node.out.shape[0] * _products(node, laid.layout) * math.prod(pixels)
    return _cost(graph.trace, entries_left(graph, laid), macs)


def _cost(trace: Trace, entries: Mapping[str, int], macs: int) -> Cost:
    params, size = trace.unused, 0
    for name, count in entries.items():
        value = trace.states[name]
        params += count if value.trained else 0
        size += count * (value.data.element_size() if value.data is not None else 0)
    return Cost(params, macs, size)


def whole_cost(graph: ChannelGraph) -> Cost:
    """Return the cost of the unpruned network, including layers that no output depends on (surgery omits them).

    >>> import torch
    >>> from torch import nn
    >>> from .build import trace
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 4, 1, bias=False))
    >>> whole_cost(trace(net, torch.rand(1, 3, 5, 5)))
    Cost(params=64, macs=1400, size=256)
    """
    trace = graph.trace
    entries = {name: math.prod(value.shape) for name, value in trace.states.items()}
    return _cost(trace, entries, sum(_macs(op) for op in trace.ops if op.position not in trace.added))


def entries_left(graph: ChannelGraph, laid: LaidOut) -> dict[str, int]:
    """Return the number of entries of every parameter and buffer of the extracted network."""
    layers = [node for node in graph.nodes if isinstance(node, LayerNode) and node.groups > 1 and node.stored]
    grouped = {node.weight: node for node in layers}
    found: dict[str, int] = {}
    for name, value in graph.trace.states.items():
        if name.rpartition(".")[0] in laid.gone:
            continue
        if value in grouped:
            found[name] = _products(grouped[value], laid.layout)
        else:
            # A dimension to which no constraint refers, such as a kernel's, has an empty mask and keeps its size.
            sizes = zip(laid.layout.sizes(value), value.shape, strict=True)
            found[name] = math.prod(left or full for left, full in sizes)
    return found


def _products(node: LayerNode, layout: Layout) -> int:
    """Return the multiplications of a layer per output pixel, which are as many as the entries of its weight."""
    per_group = layout.sizes(node.x)[1] // groups_left(node, layout)
    return per_group * layout.sizes(node.out)[1] * math.prod(node.weight.shape[2:])


# Operators whose FLOPs torch's counter computes from shapes alone.
_PRODUCTS = {f"aten.{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "convolution")}
_PRODUCTS |= {f"aten._scaled_dot_product_{name}_attention" for name in ("efficient", "flash", "cudnn")}
_FIXED: WeakKeyDictionary[Trace, int] = WeakKeyDictionary()


def _fixed_macs(graph: ChannelGraph) -> int:
    """Return the MACs of operators that keep all channels, such as attention over several heads."""
    if graph.trace not in _FIXED:
        counted = {node.op.position for node in graph.nodes if isinstance(node, (LayerNode, Product))}
        counted |= graph.trace.added
        _FIXED[graph.trace] = sum(_macs(op) for op in graph.trace.ops if op.position not in counted)
    return _FIXED[graph.trace]


def _macs(op: Op) -> int:
    formula = flop_registry.get(getattr(op.overload, "overloadpacket", None))
    if formula is None or op.name not in _PRODUCTS:
        return 0

    args, kwargs = pytree.tree_map_only(Value, lambda v: v.shape, (op.args, op.kwargs))
    return int(formula(*args, **kwargs, out_val=op.results[0].shape)) // 2


def groups_left(node: LayerNode, layout: Layout) -> int:
    """Return the number of groups that a convolution keeps."""
    return int(node.grouped(layout.line(node.x, 1)).any(1).sum())


@dataclass(frozen=True)
class Savings:
    """MACs and parameters that removing a filter saves."""

    macs: int
    params: int


class FilterCosts:
    """Compute the MACs and parameters that removing a single filter saves.

    They are the difference between the networks extracted with the filters `keep` and with all of these but one.
    Modules that surgery leaves unchanged, and products of activations whose result is added to other tensors, are
    counted from liveness and need, without a layout.

    >>> import torch
    >>> from torch import nn
    >>> from .build import trace
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 1, bias=False), nn.BatchNorm2d(8), nn.Conv2d(8, 2, 1))
    >>> FilterCosts(trace(net, torch.zeros(1, 3, 4, 4))).first_filter("0")  # three inputs, two outputs, 16 pixels
    Savings(macs=80, params=7)
    """

    def __init__(self, graph: ChannelGraph, keep: Mapping[str, Mask] | None = None) -> None:
        self.graph = graph
        self.keep = keep or {}
        self._whole = graph.flow(self.keep)
        self._outputs = set(graph.outputs)
        self._gates: dict[str, list[int]] = defaultdict(list)  # layer -> indices of nodes, as below
        self._readers: dict[Value, list[int]] = defaultdict(list)
        self._makers: dict[Value, int] = {}
        for index, node in enumerate(graph.nodes):
            if isinstance(node, Boundary):
                self._gates[node.layer].append(index)
            for value in node.inputs:
                self._readers[value].append(index)
            self._makers.update(dict.fromkeys(node.outputs, index))
        # A module that is called several times has one weight, with the channels that any of its calls needs.
        self._runs: dict[Hashable, list[Node]] = defaultdict(list)
        for node in graph.nodes:
            self._runs[self._owner(node)].append(node)
        self._before = {module: filter_cost_of_runs(runs, self._whole) for module, runs in self._runs.items()}

    def first_filter(self, name: str) -> Savings:
        """Return what removing the first filter of a layer saves if all other layers keep theirs."""
        return self.filter(name, 0)

    def filter(self, name: str, place: int) -> Savings:
        """Return what removing the filter at index `place` of a layer saves if all other layers keep theirs."""
        layer = self.graph.layers[name]
        reads_inputs = any(self.graph.grids[node.x][1] < node.x.shape[1] for node in layer.nodes)
        in_group = layer.groups > 1 and (layer.filters > layer.groups or reads_inputs)
        if in_group or layer.unit > 1:  # groups keep equal sizes or share statistics, so none is removed alone
            return Savings(0, 0)
        left = self.keep.get(name, np.ones(layer.filters, bool)).copy()
        left[place] = False
        flow, changed = self._flow({**self.keep, name: left}, name)
        touched = {index for value in changed for index in (self._makers.get(value, -1), *self._readers[value])}
        macs = params = 0
        for module in {self._owner(self.graph.nodes[index]) for index in touched - {-1}}:
            before, after = self._before[module], filter_cost_of_runs(self._runs[module], flow)
            macs += before.macs - after.macs
            params += before.params - after.params
        return Savings(macs, params)

    def _flow(self, keep: Mapping[str, Mask], name: str) -> tuple[Flow, set[Value]]:
        """Return the flow for `keep`, which differs from `self.keep` in layer `name` only, and the changed tensors.

        The flow equals that of `ChannelGraph.flow`, but only the masks that change are computed.
        """
        nodes, whole, changed = self.graph.nodes, self._whole, set[Value]()
        flow = Flow(dict(whole.alive), dict(whole.needed))
        stale: set[Value] = set()  # tensors whose needed channels have to be computed again
        todo = list(self._gates[name])
        for index in _in_order(todo):
            node = nodes[index]
            stale.update(node.inputs)
            node.push(flow)
            if isinstance(node, Boundary) and node.layer in keep:
                node.gate(flow, keep[node.layer])
            for value in node.outputs:
                if not np.array_equal(flow.alive[value], whole.alive[value]):
                    changed.add(value)
                    for reader in self._readers[value]:
                        heappush(todo, reader)
        todo = sorted(-self._makers[value] for value in stale if value in self._makers)
        for index in _in_order(todo):
            node = nodes[-index]
            for value in stale.intersection(node.outputs):
                before = flow.needed.pop(value, None)
                if value in self._outputs:
                    flow.needed[value] = whole.needed[value]
                for reader in self._readers[value]:
                    nodes[reader].pull(flow)  # does not change the needed channels of its other inputs
                if before is not None and not np.array_equal(before, flow.needed.get(value, False)):
                    changed.add(value)
                    stale.update(node.inputs)
                    for made in self._makers.keys() & node.inputs:
                        heappush(todo, -self._makers[made])
        return flow, changed

    @staticmethod
    def _owner(node: Node) -> Hashable:
        if isinstance(node, LayerNode):
            return node.weight
        if isinstance(node, Product) and (stored := _stored(node)):
            return "product", stored[0][0]
        return node.states[:1] or id(node) if isinstance(node, Norm) else id(node)


def _in_order(todo: list[int]) -> Iterator[int]:
    """Pop and yield the entries of a heap in ascending order, each once; larger ones may be pushed meanwhile."""
    last: int | None = None
    while todo:
        index = heappop(todo)
        if index != last:
            yield index
        last = index


def filter_cost_of_runs(runs: Sequence[Node], flow: Flow) -> Savings:
    """Return the cost of a layer, norm or elementwise parameter in all its calls, for alive and needed channels."""
    first = runs[0]
    if isinstance(first, Elementwise):
        wanted = first.wanted(flow)
        stored = [v for v in first.inputs if v.kind == "state" and len(v.shape) == 1]
        return Savings(0, 0 if wanted is None else sum(int(shrink(wanted, first.grids[v]).sum()) for v in stored))
    if isinstance(first, Product):
        return _filter_cost_of_products([run for run in runs if isinstance(run, Product)], flow)
    if not isinstance(first, (LayerNode, Norm)):
        return Savings(0, 0)
    written = _channels([run.out for run in runs], flow)
    if isinstance(first, Norm):
        scales = sum(isinstance(v, Value) for v in first.op.args[1:3])
        return Savings(0, scales * int(whole_groups(written, first.per_group).sum()))
    calls = [run for run in runs if isinstance(run, LayerNode)]
    read = _channels([run.x for run in calls], flow)
    rows, columns = written.reshape(first.groups, -1), read.reshape(first.groups, -1)
    # All remaining groups have as many filters as the largest one.
    filters = int(rows.any(1).sum()) * int(rows.sum(1).max())
    # A computed weight keeps all its inputs, because it may be normalized over them.
    inputs = int(columns.sum(1).max()) if first.stored or not filters else columns.shape[1]
    entries = filters * inputs * math.prod(first.weight.shape[2:])
    maps = [run.x.shape if run.transposed else run.out.shape for run in calls]
    pixels = sum(math.prod(shape) // shape[1] for shape in maps)
    own = entries if first.weight.trained else 0
    if not first.stored:  # its parameters have one slice per filter
        own = sum(math.prod(v.shape) for v in first.weight.roots or () if v.trained) * filters // first.filters
    biases = filters if first.bias is not None and (first.bias.trained or first.bias.kind != "state") else 0
    return Savings(entries * pixels, own + biases)


def _filter_cost_of_products(nodes: Sequence[Product], flow: Flow) -> Savings:
    """Return the MACs of matrix products, and the parameters among their operands."""
    macs, stored = 0, dict[Value, int]()
    for node in nodes:
        sides = {value: _sizes(value, flow) for value in (node.left, node.right)}
        (_, rows, terms), (_, others, columns) = sides[node.left], sides[node.right]
        macs += node.out.shape[0] * rows * min(terms, others) * columns
        for root, value in _stored(node):  # the operand may be a reshaped or repeated parameter
            left = math.prod(root.shape) * math.prod(sides[value]) // math.prod(value.shape)
            stored[root] = max(stored.get(root, 0), left)
    return Savings(macs, sum(stored.values()))


def _stored(node: Product) -> list[tuple[Value, Value]]:
    """Return the parameters that a product multiplies by, each with the operand computed from it."""
    return [(root, value) for value in (node.left, node.right) for root in value.roots or () if root.trained]


def _sizes(value: Value, flow: Flow) -> list[int]:
    """Return how many entries of a tensor are alive and needed along each dimension."""
    wanted = flow.wanted(value)
    if wanted is None or not wanted.any():
        return [0] * len(value.shape)
    lines = [some(wanted, tuple(d for d in range(wanted.ndim) if d != dim)) for dim in range(wanted.ndim)]
    return [n if len(line) < n else int(line.sum()) for n, line in zip(value.shape, lines, strict=True)]


def _channels(values: Sequence[Value], flow: Flow) -> Mask:
    """Return the mask `(channels,)` of the channels that are alive and needed in any of these tensors."""
    masks = [np.zeros(values[0].shape[1], bool)]
    for value in values:
        if (wanted := flow.wanted(value)) is not None:
            grid = along(1, value.shape)
            masks.append(shrink(np.broadcast_to(wanted, np.broadcast_shapes(wanted.shape, grid)), grid).reshape(-1))
    return np.logical_or.reduce(masks)
