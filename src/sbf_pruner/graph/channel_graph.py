"""The channel graph: the prunable layers, the sites of their gates, and why the other layers have no score.

`build.trace` builds the graph of a model. `solve_layout` computes which channels of every tensor the extracted
network has. `residual_blocks` finds the additions of a branch and a shortcut.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np

from ..errors import PlanError
from .nodes import Boundary, Elementwise, Flow, Grids, Layout, Mask, Node, Sum, equalize_groups, some, whole_groups
from .operators.layers import LayerNode, Norm, Product
from .records import ZEROS, Call, Op, Trace, Value
from .relations import Relations


@dataclass(frozen=True)
class Site:
    """Where in the model a gate is applied.

    `kind` says what the gate is multiplied with: "affine" (the module's scale and shift), "map" (its output),
    "bias" (its bias) or "sum" (the sum of the layer's output and others, where the model has a `GatePoint`). A site
    without a layer has no score: its gate closes for every dead input channel, so that a norm or a bias does not
    turn it into a constant.
    """

    module: str
    kind: str
    layer: str
    parameters: tuple[str, ...] = ()
    dim: int = 1
    edges: tuple[Boundary, ...] = field(default=(), repr=False, compare=False)

    def open(self, flow: Flow) -> Mask:
        """Return the mask `(channels,)` of open gates: of the channels that are alive at the site in any call."""
        return np.logical_or.reduce([flow.alive[e.out].reshape(-1) for e in self.edges])


@dataclass(frozen=True)
class Layer:
    """A convolution or linear layer whose filters can be removed."""

    name: str
    filters: int
    kind: str  # the module's class name
    weight: str  # the parameter's qualified name
    map_size: tuple[int, ...]  # spatial size of the input; () for a linear layer
    groups: int
    site: Site
    unit: int = 1  # consecutive filters that share a norm's statistics and are only removed together
    nodes: tuple[LayerNode, ...] = field(default=(), repr=False, compare=False)


@dataclass
class FixedSizes:
    """Operators and module calls that keep all channels, because the model's own code fixes sizes there.

    `positions` are indices of operators in `Trace.ops`. A call in `whole` keeps all channels of its inputs and of
    the operators that the module itself runs, but not of those that its submodules run.
    """

    positions: set[int] = field(default_factory=set)
    whole: set[Call] = field(default_factory=set)


@dataclass
class ChannelGraph:
    """How the operators of a model treat channels, and which layers can be pruned; returned by `trace`.

    Every convolution and linear layer of the model is in exactly one of `layers`, which can be pruned, `followers`,
    which lose filters with other layers, and `skipped`, which keep all their filters.
    """

    layers: dict[str, Layer]
    unscored: dict[str, str]  # every other layer -> why it has no score of its own
    sites: list[Site]
    nodes: list[Node] = field(repr=False)
    grids: Grids = field(repr=False)
    trace: Trace = field(repr=False)
    outputs: list[Value] = field(repr=False)
    entries: dict[Call, tuple[Value, ...]] = field(repr=False)  # inputs of every module call
    # Sizes that earlier extractions found fixed in the model's code.
    pinned: FixedSizes = field(default_factory=FixedSizes, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Argument (masks as bytes) and result of the last call of `_alive`.
        self._last_alive: tuple[dict[str, bytes], Flow] = {}, Flow(self._given, reached=set(self.trace.inputs))

    @cached_property
    def relations(self) -> Relations:
        """Coupling between the layers."""
        return Relations(self)

    @property
    def followers(self) -> dict[str, tuple[str, ...]]:
        """Layers without scores that lose filters with other layers, mapped to the names of those layers."""
        return self.relations.followers

    @cached_property
    def skipped(self) -> dict[str, str]:
        """Layers that keep all their filters, mapped to the reason."""
        return {name: reason for name, reason in self.unscored.items() if name not in self.followers}

    def flow(self, keep: Mapping[str, Mask]) -> Flow:
        """Return which channels are alive and which are needed when each layer keeps only the given filters."""
        flow = self._alive(keep)
        for value in self.outputs:
            flow.need(value, np.ones(self.grids[value], bool), self.grids[value])
        for node in reversed(self.nodes):
            node.pull(flow)
        return flow

    def _alive(self, keep: Mapping[str, Mask]) -> Flow:
        """Return a flow with alive channels and tensors that depend on the network's inputs, but without need.

        Nodes whose gate and inputs have not changed since the last call (usually most) are not computed again.
        """
        gates = {name: mask.tobytes() for name, mask in keep.items()}
        before, last = self._last_alive
        moved = {name for name in gates.keys() | before.keys() if gates.get(name) != before.get(name)}
        complete = len(last.alive) > len(self._given)
        flow, changed = Flow(dict(last.alive), reached=set(last.reached)), set[Value]()
        for node in self.nodes:
            layer = node.layer if isinstance(node, Boundary) else ""
            if complete and layer not in moved and changed.isdisjoint(node.inputs):
                continue
            node.push(flow)
            if isinstance(node, Boundary) and layer in keep:
                node.gate(flow, keep[layer])
            reached = not flow.reached.isdisjoint(node.inputs)
            reached = reached and (not isinstance(node, LayerNode) or bool(flow.alive[node.x].any()))
            for value in node.outputs:
                flow.reached.discard(value)
                if reached and flow.alive[value].any():
                    flow.reached.add(value)
                same = complete and np.array_equal(flow.alive[value], last.alive[value])
                if not same or (value in flow.reached) != (value in last.reached):
                    changed.add(value)
        self._last_alive = gates, flow
        return Flow(flow.alive, reached=flow.reached)

    def carried(self, origin: Mapping[str, Mask]) -> Flow:
        """Return the flow in which the given filters are alive and all other filters of gated layers are dead."""
        flow = Flow(dict(self._given))
        for node in self.nodes:
            node.push(flow)
            if isinstance(node, Boundary) and node.layer:
                grid = self.grids[node.out]
                given = origin.get(node.layer)
                flow.alive[node.out] = np.zeros(grid, bool) if given is None else given.reshape(grid)
        return flow

    def alive_regardless_of(self, layers: Collection[str]) -> Flow:
        """Return the flow with all gates of the given layers closed: its alive channels are alive in every plan.

        Layers that are not depthwise, and sums over all channels, are assumed to keep an alive input channel.
        """
        flow = Flow(dict(self._given))
        for node in self.nodes:
            node.push(flow)
            if isinstance(node, Boundary) and node.layer in layers:
                flow.alive[node.out] = np.zeros(self.grids[node.out], bool)
            whole = isinstance(node, (Sum, Product)) and max(self.grids[node.out], default=1) == 1
            if whole or (isinstance(node, LayerNode) and not node.depthwise):
                flow.alive[node.out] = np.ones(self.grids[node.out], bool)
        return flow

    def undefined(self, flow: Flow) -> list[Elementwise]:
        """Return the operators whose value or gradient is undefined for a removed channel that they read."""
        whole = self._whole.alive
        return [n for n in self.avoiding if any((whole[v] & ~flow.alive[v]).any() for v in n.avoiding)]

    @cached_property
    def avoiding(self) -> list[Elementwise]:
        """Operators with operands that must not become zero, such as divisors."""
        return [node for node in self.nodes if isinstance(node, Elementwise) and node.avoiding]

    @cached_property
    def _whole(self) -> Flow:
        return self._alive({})

    @cached_property
    def _given(self) -> dict[Value, Mask]:
        """Masks of inputs, parameters and constants, which are all alive."""
        return {v: np.broadcast_to(np.True_, grid) for v, grid in self.grids.items() if v.kind != "result"}

    @cached_property
    def ties(self) -> list[Callable[[Layout], None]]:
        """Constraints on a layout: functions that add the channels that must be present to it."""
        ties = [node.tie for node in self.nodes]
        shared = _calls_of_one_module(self.nodes, self.grids)
        return [*ties, *reversed(ties), *(partial(Layout.tie, ends=ends) for ends in shared)]

    def all_filters(self) -> dict[str, Mask]:
        """Return masks that keep every filter of every layer."""
        return {name: np.ones(layer.filters, bool) for name, layer in self.layers.items()}

    def settle(self, keep: Mapping[str, Mask]) -> dict[str, Mask]:
        """Return masks of the kept filters after removing those without alive input and those that are not needed.

        A grouped convolution keeps the same number of filters in each remaining group, that of the largest one.
        If a filter is kept, so are those that share the statistics of a group norm with it.
        """
        return self.settled(keep)[0]

    def settled(self, keep: Mapping[str, Mask]) -> tuple[dict[str, Mask], Flow]:
        """Return the masks of `settle` and the flow for these masks."""
        kept = self.all_filters() | {n: np.asarray(m, bool) for n, m in keep.items()}
        for _ in range(len(self.layers) + 2):
            flow = self.flow(kept)
            left = {name: self._left(layer, kept[name], flow) for name, layer in self.layers.items()}
            if all(np.array_equal(left[n], kept[n]) for n in left):
                return kept, flow
            kept = left
        return kept, self.flow(kept)

    def _left(self, layer: Layer, before: Mask, flow: Flow) -> Mask:
        left = np.zeros(layer.filters, bool)
        for edge in layer.site.edges:
            if (wanted := edge.wanted(flow)) is not None:
                left |= wanted.reshape(-1)
        left = whole_groups(left & before, layer.unit)
        if layer.site.kind != "sum":  # a gate after a sum stays open if another operand is alive
            left &= np.logical_or.reduce([n.fed(flow) for n in layer.nodes])
        if layer.groups > 1 and left.any():
            rows = left.reshape(layer.groups, -1)
            # If input channels cannot be removed, such as those of the network's input, no group can be removed.
            whole = any(self.grids[n.x][1] < n.x.shape[1] for n in layer.nodes)
            left = equalize_groups(rows, some(rows, 1) | whole).reshape(-1)
        return left

    def connected(self, keep: Mapping[str, Mask]) -> bool:
        """Return True if no output lost its dependence on the inputs, and `undefined` finds no operator."""
        flow = self._alive(keep)
        return self._led <= flow.reached and not self.undefined(flow)

    @cached_property
    def _led(self) -> set[Value]:
        """Outputs that depend on the inputs when all filters are kept."""
        return self._whole.reached & set(self.outputs)

    def disconnecting_layers(self, keep: Mapping[str, Mask], order: Sequence[str] = ()) -> list[str]:
        """Return a minimal set of layers that must keep more filters for the network to be connected.

        To make the set minimal, layers are dropped from it where possible, in the given order.
        """
        if self.connected(keep):
            return []
        short = [n for n, m in keep.items() if not m.any()]
        restored = dict(keep) | {n: np.ones(len(keep[n]), bool) for n in short}
        if not self.connected(restored):  # operands of a product, say, keep different channels
            short = [n for n, m in keep.items() if not m.all()]
            restored = dict(keep) | {n: np.ones(len(keep[n]), bool) for n in short}
        for name in (n for n in (order or short) if n in short):
            without = {**restored, name: keep[name]}
            if self.connected(without):
                restored = without
        return [n for n in short if restored[n] is not keep[n]]

    def check_connected(self, keep: Mapping[str, Mask]) -> None:
        """Raise a PlanError that names the layers to blame if the network is not `connected`."""
        culprits = self.disconnecting_layers(keep)
        if culprits:
            names = ", ".join(culprits[:5]) + (" ..." if len(culprits) > 5 else "")
            kept, remedy = "only filters that reach no output", "keep others there"
            if not any(keep[n].any() for n in culprits):
                kept, remedy = "no filter", "keep at least one filter there"
            flow = self._alive(keep)
            harm = "disconnects the output from the input"
            if self._led <= flow.reached:
                node = self.undefined(flow)[0]
                harm = f"makes an input of {node.op.name} at {node.op.where} zero, where it has no {node.lacks}"
            raise PlanError(
                f"the plan {harm}: {names} would keep {kept}, and there is no shortcut around; {remedy}"
            )


def solve_layout(graph: ChannelGraph, flow: Flow, fixed: FixedSizes | None = None) -> Layout:
    """Return the smallest layout in which every operator can run.

    Alive and needed channels are present, and those that operators also require: both operands of an addition share
    one layout, operand and result of a view have one mask per dimension, the halves of a chunk have equal sizes.
    """
    layout = Layout(graph.grids)
    for value in graph.grids:
        layout.start(value, flow.wanted(value))
    for value in graph.outputs:
        layout.fill(value)
    if fixed is not None:
        _fill_fixed(graph, layout, fixed)
    _grow(graph, layout)
    for value in graph.grids:  # after the constraints: an earlier placeholder would stay if they add channels
        if value.kind == "result":
            _add_placeholder(layout, value)
    _grow(graph, layout)
    return layout


def _grow(graph: ChannelGraph, layout: Layout) -> None:
    # Several passes, because the channels that a grouped convolution adds depend on those already present.
    while layout.changed:
        layout.changed = False
        for tie in graph.ties:
            tie(layout)


def _calls_of_one_module(nodes: Sequence[Node], grids: Grids) -> list[list[tuple[Value, int]]]:
    """Return lists of dimensions that share a layout: of the inputs, or outputs, of all calls of one module."""
    ends: dict[tuple[str, str], list[tuple[Value, int]]] = defaultdict(list)
    for node in nodes:
        if isinstance(node, Boundary):
            ends[node.module, f"{node.side}, before"].append((node.x, node.dim))
            ends[node.module, f"{node.side}, after"].append((node.out, node.dim))
        elif node.op.name == ZEROS and node.op.call is not None:
            out = node.out
            ends[node.op.call.module, "zeros"].append((out, int(np.argmax(grids[out]))))
    return [e for e in ends.values() if len(e) > 1]


def _fill_fixed(graph: ChannelGraph, layout: Layout, fixed: FixedSizes) -> None:
    """Add all channels to the layout where the model's own code fixes sizes."""
    calls = {node.op.call for node in graph.nodes if node.op.position in fixed.positions} - {None}
    for node in graph.nodes:
        # Edges of the operator's module are filled too: its input may depend on channels outside the module.
        edge = isinstance(node, Boundary) and node.op.call in calls
        inside = node.op.position >= 0 and node.op.call in fixed.whole
        if node.op.position in fixed.positions or edge or inside:
            for value in (*node.inputs, *node.outputs):
                # At a `walled` edge, hard-coded sizes do not apply to the tensor outside the module.
                if not (isinstance(node, Boundary) and node.walled and (value is node.x) == (node.side == "in")):
                    layout.fill(value)
    for call in fixed.whole:
        for value in graph.entries[call]:
            layout.fill(value)


def _add_placeholder(layout: Layout, value: Value) -> None:
    """Keep one channel of zeros along each dimension that lost all channels, because no size may be zero."""
    for dim, mask in enumerate(layout.masks[value]):
        if mask is not None and not np.count_nonzero(mask):
            layout.add(value, dim, np.arange(len(mask)) == 0)


def vanished(graph: ChannelGraph, flow: Flow) -> set[str]:
    """Return the modules without an output channel that is alive and needed in any of their calls."""
    wanted: dict[str, bool] = defaultdict(bool)
    for node in graph.nodes:
        if isinstance(node, Boundary) and node.side == "out":
            mask = node.wanted(flow)
            wanted[node.module] |= mask is not None and bool(mask.any())
    return {module for module, is_wanted in wanted.items() if not is_wanted}


@dataclass(frozen=True)
class ResidualBlock:
    """An addition of a branch and a shortcut."""

    name: str  # the module whose forward runs the addition
    addition: int  # index among `additions`, in the order of execution
    branch: int  # which operand is the branch: 0 or 1
    layer: str  # the prunable layer whose filters are the channels of the branch, or ""
    layers: tuple[str, ...] = ()  # all prunable layers of the branch, in the order of execution


def residual_blocks(graph: ChannelGraph) -> list[ResidualBlock]:
    """Return the residual blocks of a network, in the order of execution.

    Both operands of the addition depend on a common tensor. The operand computed with more layers that the other
    does not depend on is the branch `f(x)`, the other one the shortcut `x`. If both have equally many such layers
    (parallel branches), the addition is no residual block. Module names are not used.

    >>> import torch
    >>> from .build import trace
    >>> from ..models import resolve
    >>> found = residual_blocks(trace(resolve("resnet20"), torch.zeros(1, 3, 32, 32)))
    >>> [block.name for block in found][:3], found[0].layer, len(found)
    (['layer1.0', 'layer1.1', 'layer1.2'], 'layer1.0.conv2', 9)
    """
    indices = {op.position: index for index, op in enumerate(additions(graph.trace.ops))}
    walk = _Walk(graph)
    found: list[ResidualBlock] = []
    taken: Counter[str] = Counter()
    graph_inputs = set(graph.trace.inputs)
    for node in graph.nodes:
        op = node.op
        if op.position not in indices or not isinstance(node, Elementwise) or len(op.inputs) != 2:
            continue
        above = [walk.above(value) for value in op.inputs]
        shared = above[0] & above[1]
        if not shared and graph_inputs.isdisjoint(op.inputs):
            continue
        counts = [sum(isinstance(graph.nodes[at], LayerNode) for at in each - shared) for each in above]
        if counts[0] == counts[1]:
            continue
        branch = int(counts[1] > counts[0])
        layer = walk.owner(op.inputs[branch])
        name = (op.call.module if op.call is not None else "") or layer or op.where
        taken[name] += 1
        again = f" ({taken[name]})" if taken[name] > 1 else ""
        nodes = [graph.nodes[at] for at in sorted(above[branch] - above[1 - branch])]
        names = dict.fromkeys(n.layer for n in nodes if isinstance(n, LayerNode) and n.layer in graph.layers)
        found.append(ResidualBlock(name + again, indices[op.position], branch, layer, tuple(names)))
    return found


def additions(ops: list[Op]) -> list[Op]:
    """Return the operators that add two feature maps: those for which `is_addition`, used at run time, is true."""
    return [op for op in ops if len(op.inputs) == 2 and is_addition(op.name, *(v.shape for v in op.inputs))]


def is_addition(name: str, first: tuple[int, ...], second: tuple[int, ...]) -> bool:
    """Return True for an addition of two feature maps of equal spatial size."""
    return name in ("aten.add", "aten.add_") and len(first) == len(second) > 2 and first[2:] == second[2:]


class _Walk:
    """Backward traversal of a graph."""

    def __init__(self, graph: ChannelGraph) -> None:
        self.graph = graph
        self.maker = {value: at for at, node in reversed([*enumerate(graph.nodes)]) for value in node.outputs}

    def owner(self, value: Value) -> str:
        """Return the prunable layer whose filters are the channels of a tensor, at the same indices, or ""."""
        while value in self.maker:
            node: Node = self.graph.nodes[self.maker[value]]
            if isinstance(node, LayerNode):
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

    def above(self, value: Value) -> set[int]:
        """Return the indices of all nodes that a tensor depends on."""
        found: set[int] = set()
        todo = [value]
        while todo:
            at = self.maker.get(todo.pop())
            if at is not None and at not in found:
                found.add(at)
                todo += self.graph.nodes[at].inputs
        return found
