"""Turn a trace into the nodes of a channel graph, with `Boundary` nodes ("edges") before and after modules.

At an edge a gate can be placed and, in the extracted network, a remap inserted. Edges surround every call of two
kinds of modules. The first holds one layer or norm and returns its channels in order: they may be pooled, activated
or transposed, but not moved or mixed, because a gate after the module would then close other channels. The second
pads channels and has no weights (a shortcut between stages); a width hard-coded there then constrains no tensor
outside.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MethodType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..modules import Remap, Zeros, plain_names
from .channel_graph import ChannelGraph
from .nodes import Boundary, ChannelMove, Elementwise, Flow, Grids, Node, Opaque, Source, along, channel_dim, shrink
from .operators import build_node
from .operators.layers import LAYERS, PRODUCTS, LayerNode, Norm, Product, weight_grids, weight_owner
from .operators.movement import RESHAPES, Numbers
from .records import REMAP, ZEROS, Call, Op, Trace, Value


class NodeBuilder:
    """The nodes of a network in order, with the module, edges and consumers of each."""

    def __init__(self, model: nn.Module, trace: Trace) -> None:
        self.trace = trace
        self.modules = dict(model.named_modules())
        self.plain = plain_names(self.modules)
        self.outside = _held_outside(self.modules)
        self.grids: Grids = weight_grids(trace)
        self._joined = MergedDimensions()
        self.nodes: list[Node] = []
        self.outputs: list[Value] = []
        self.main: dict[str, list[LayerNode | Norm]] = defaultdict(list)  # module -> its operator, per call
        self.edges: dict[tuple[str, str], list[Boundary]] = defaultdict(list)
        self.entries: dict[Call, tuple[Value, ...]] = {}  # call -> its inputs, with edges applied
        self.padding: set[str] = set()  # modules without weights that pad channels
        self.busy: set[str] = set()  # modules that turn zero channels into nonzero output: gate that output
        self.odd: dict[str, Op] = {}  # module -> first operator inside that moves or mixes its channels
        self.inner: dict[str, list[LayerNode]] = {}  # module that is not in `main` -> its layer, per call
        self._lay_out(self._edged_calls())
        self._close_edges()
        self._find_inner()
        self._close_overwritten()
        self._keep_statistics()
        self._find_idle()
        self.consumers: dict[Value, list[Node]] = defaultdict(list)
        self._makers: dict[Value, Node] = {}
        for node in self.nodes:
            for value in dict.fromkeys(node.inputs):
                self.consumers[value].append(node)
            self._makers |= dict.fromkeys(node.outputs, node)

    def what_mixes(self, weight: Value, filters: int) -> Op | None:
        """Return the operator that makes a filter of a computed weight depend on other filters, or None."""
        todo, seen = [weight], set[Value]()
        while todo:
            value = todo.pop()
            node = self._makers.get(value)
            if node is None or value in seen:
                continue
            seen.add(value)
            # `over` holds the dimensions that a sum or softmax reduces.
            together = any(node.inputs[0].shape[dim] == filters for dim in getattr(node, "over", ()))
            if together or isinstance(node, (Opaque, LayerNode, Product)):
                return node.op
            todo += node.inputs
        return None

    def _edged_calls(self) -> list[tuple[Call, Op]]:
        """Return the calls to put edges around, each with its operator: a layer, a norm or a channel padding."""
        inside: dict[Call, list[Op]] = defaultdict(list)
        read = self._last_reads()
        owners = [weight_owner(op) for op in self.trace.ops]
        for op, module in zip(self.trace.ops, owners, strict=True):
            call = op.call.within(module) if op.call is not None and module is not None else None
            if call is not None:
                inside[call].append(op)
        good = [
            call
            for call, ops in inside.items()
            if len(ops) == 1
            and len(call.inputs) == len(call.outputs) == 1
            and call.inputs != call.outputs
            and call.module not in self.outside
            # A block with a weight of its own and submodules with weights is not a layer.
            and {*owners[call.first : call.last]} <= {call.module, None}
            and not without_batch(call, ops[0])
            # A hook that stores the result gets it before a gate at the edge, but after one folded into a norm.
            and not (call.kept and not _foldable(ops[0]))
            and not self._read_outside(call, read)
        ]
        full = Counter(call.module for call in good)
        found = [(c, inside[c][0]) for c in good if full[c.module] == len(self.trace.calls[c.module])]
        for module, calls in self.trace.calls.items():
            pads = [op for op in map(self._channel_pad, calls) if op is not None]
            if len(pads) == len(calls) and module not in self.outside and module != "":
                self.padding.add(module)
                found += zip(calls, pads, strict=True)
        return found

    def _read_outside(self, call: Call, read: Mapping[Value, int]) -> bool:
        """Return True if an intermediate result of a call, computed from the inputs, is read after the call."""
        results = {value for op in self.trace.ops[call.first : call.last] for value in op.results}
        inside = results - {*call.outputs, *call.overwritten}
        return any(value.roots is None and read.get(value, -1) >= call.last for value in inside)

    def _channel_pad(self, call: Call) -> Op | None:
        """Return the operator that pads channels in a call with one input, one output and no weight, or None."""
        ops = self.trace.ops[call.first : call.last]
        one = len(call.inputs) == len(call.outputs) == 1
        if not one or len(call.inputs[0].shape) < 3 or len(call.outputs[0].shape) < 2:
            return None
        pads = [op for op in ops if op.name == "aten.constant_pad_nd"]
        wider = [op for op in pads if op.inputs[0].shape[1:2] != op.results[0].shape[1:2]]
        stored = any(value.kind == "state" for op in ops for value in op.inputs)
        return wider[0] if not stored and len(wider) == 1 and wider[0].call is call else None

    def _lay_out(self, calls: list[tuple[Call, Op]]) -> None:
        """Build the nodes in order, with an edge before and after each of the given calls."""
        first, last, entered_at = defaultdict(list), defaultdict(list), defaultdict(list)
        mains: dict[Op, str] = {}
        at: dict[Op, int] = {}  # operator -> index of its node
        for every in self.trace.calls.values():
            for call in every:
                entered_at[call.first].append(call)
        for call, op in calls:
            first[call.first].append((call, op))
            last[call.last].append((call, op))
            mains[op] = call.module
        now: dict[Value, Value] = {}  # traced value -> output of the last edge that it passed
        before: dict[Call, Value] = {}
        for position in range(len(self.trace.ops) + 1):
            for call, op in last[position]:
                now[call.inputs[0]] = before[call]
                inner = call.outputs[0]
                x = now.get(inner, inner)
                dim = 1 if call.module in self.padding else self._leaving(call, x, at[op])
                if dim is not None:
                    now[inner] = self._edge(call, "out", x, dim)
            for call in entered_at[position]:
                self.entries[call] = tuple(now.get(v, v) for v in call.inputs)
            for call, op in first[position]:
                outer = call.inputs[0]
                before[call] = now.get(outer, outer)
                now[outer] = self._edge(call, "in", before[call], self._entering(call, op, before[call]))
            if position < len(self.trace.ops):
                op = self.trace.ops[position]
                node = self._node(_renamed(op, now))
                self.nodes.append(node)
                at[op] = len(self.nodes) - 1
                if op in mains and isinstance(node, (LayerNode, Norm)):
                    self.main[mains[op]].append(node)
        self.outputs = [now.get(v, v) for v in self.trace.outputs]
        for value in self.outputs:
            self.grids.setdefault(value, (1,) * len(value.shape))

    def _entering(self, call: Call, op: Op, x: Value) -> int:
        """Return the channel dimension of a module's input: its operator's, or that along which channels differ."""
        shape = x.shape
        if op.name in PRODUCTS:  # a linear layer has its channels in the last dimension
            rows = op.args[LAYERS[op.name] - 1].shape
            usual = len(shape) - 1 if (math.prod(shape[:-1]), *shape[-1:]) == rows else None
        else:
            usual = 1 if len(shape) == len(op.inputs[0].shape) else None
        differing = [dim for dim, size in enumerate(self.grids.get(x, ())) if size > 1]
        if usual is None and len(differing) == 1:
            return differing[0]
        return min(1, len(shape) - 1) if usual is None else usual

    def _leaving(self, call: Call, out: Value, at: int) -> int | None:
        """Return the channel dimension of a module's result, or None if no edge is possible there.

        `at` is the index of the node of the module's operator. Also updates `odd` and `busy`.
        """
        main = self.nodes[at]
        if not isinstance(main, (LayerNode, Norm)):
            return None
        found = follow_to_output(main, out, self.nodes[at + 1 :])
        if found.dim is None and found.odd is not None:
            self.odd.setdefault(call.module, found.odd)
        if not found.closed:
            self.busy.add(call.module)
        return None if call.kept and not found.closed else found.dim

    def _close_edges(self) -> None:
        """Forbid remaps at modules with an unknown operator, reordered channels, or a stored result.

        Modules of the first two kinds are also dropped from `main`.
        """
        kept = {call.module for calls in self.trace.calls.values() for call in calls if call.kept}
        for module in [module for module, side in self.edges if side == "in" and module not in self.padding]:
            sides = [self.edges.get((module, side), []) for side in ("in", "out")]
            calls = len(self.main.get(module, ()))
            if any(len(edges) != calls or channel_dim(edges) is None for edges in sides):
                self.main.pop(module, None)
            if module not in self.main or module in kept:  # a stored result is read without the remap
                for edge in (*sides[0], *sides[1]):
                    edge.free = False

    def _find_inner(self) -> None:
        """Fill `inner`: layers without edges that run once per call of their module. A norm may hold their gate."""
        found: dict[str, dict[Call | None, list[LayerNode]]] = defaultdict(lambda: defaultdict(list))
        for node in self.nodes:
            if isinstance(node, LayerNode) and node.op.call is not None:
                module = weight_owner(node.op)
                if module and module not in self.main:
                    found[module][node.op.call.within(module)].append(node)
        for module, ran in found.items():
            if list(ran) == self.trace.calls.get(module) and all(len(nodes) == 1 for nodes in ran.values()):
                self.inner[module] = [nodes[0] for nodes in ran.values()]

    def _last_reads(self) -> dict[Value, int]:
        """Return the position of the last operator that reads each value; outputs are read at the end."""
        read: dict[Value, int] = {}
        for op in self.trace.ops:
            read |= dict.fromkeys(op.inputs, op.position)
        return read | dict.fromkeys(self.trace.outputs, len(self.trace.ops))

    def _close_overwritten(self) -> None:
        """Forbid remaps of inputs that a module overwrites and that are read later: it would overwrite a copy."""
        read = self._last_reads()
        for (module, side), edges in self.edges.items():
            calls = self.trace.calls[module]
            if side == "in" and any(read.get(v, -1) >= call.last for call in calls for v in call.overwritten):
                for edge in edges:
                    edge.free = False

    def _keep_statistics(self) -> None:
        """Mark repeated calls of a norm as needed even if unused, because each updates the running statistics."""
        for module, mains in self.main.items():
            if len(mains) > 1 and isinstance(mains[0], Norm) and isinstance(mains[0].op.args[3], Value):
                for edge in self.edges[module, "out"]:
                    edge.lasting = True

    def _find_idle(self) -> None:
        """Set `idle` of layers and norms: channels, such as padding, without input even if all filters are kept."""
        flow = ChannelGraph({}, {}, [], self.nodes, self.grids, self.trace, self.outputs, {}).flow({})
        for node in self.nodes:
            if isinstance(node, LayerNode):
                idle = ~node.live(flow)
            elif isinstance(node, Norm) and node.revives:
                idle = ~shrink(flow.alive[node.x], self.grids[node.out])
            else:
                continue
            node.idle = idle if idle.any() else None

    def _edge(self, call: Call, side: str, x: Value, dim: int) -> Value:
        out = Value(x.shape, "result")
        self.grids.setdefault(x, (1,) * len(x.shape))
        self.grids[out] = self.grids[x]
        op = Op(f"edge.{side}", (x,), {}, (x,), (out,), call, "")
        edge = Boundary(op, self.grids, module=call.module, side=side, dim=dim, walled=call.module in self.padding)
        self.nodes.append(edge)
        self.edges[call.module, side].append(edge)
        self._joined.holds(edge)
        return out

    def _node(self, op: Op) -> Node:
        if op.name not in (REMAP, ZEROS):
            node = build_node(op, self.grids)
            if not self._joined.holds(node):
                self.grids |= {value: (1,) * len(value.shape) for value in node.outputs}
                why = f"{op.name} at {op.where} mixes channels with pixels, differently at every image size"
                node = Opaque(op, self.grids, why)
            return node
        assert op.call is not None
        module = self.modules[op.call.module]
        assert isinstance(module, (Remap, Zeros))
        (x,), (out,) = op.inputs, op.results
        dim = module.dim % len(out.shape)
        self.grids.setdefault(x, (1,) * len(x.shape))
        self.grids[out] = along(dim, out.shape)
        if isinstance(module, Zeros):  # surgery may choose its width
            return Source(op, self.grids, zero=True)
        labels = np.array(module.source, np.int64).reshape(self.grids[out])
        edge = Boundary(op, self.grids, module=op.call.module, side="remap", labels=labels, dim=dim)
        self.edges[op.call.module, "remap"].append(edge)
        return edge


def without_batch(call: Call, op: Op) -> bool:
    """Return True if a convolution was called without a batch dimension, so that torch prepended one."""
    return op.name == "aten.convolution" and op.inputs[0].shape in [(1, *value.shape) for value in call.inputs]


def _foldable(op: Op) -> bool:
    """Return True for a norm with a stored scale and shift."""
    return op.name not in LAYERS and all(isinstance(v, Value) and v.kind == "state" for v in op.args[1:3])


def _renamed(op: Op, now: Mapping[Value, Value]) -> Op:
    inputs = tuple(now.get(v, v) for v in op.inputs)
    if inputs == op.inputs:
        return op
    args, kwargs = pytree.tree_map_only(Value, lambda v: now.get(v, v), (op.args, op.kwargs))
    return dataclasses.replace(op, args=args, kwargs=kwargs, inputs=inputs)


def _held_outside(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Map modules to the plain attribute (a list, say) that also refers to them; surgery cannot update it."""
    paths = {id(module): path for path, module in modules.items()}
    found: dict[str, str] = {}
    for holder, module in modules.items():
        for name, held in vars(module).items():
            if name != "_modules" and not name.endswith("_hooks"):  # hooks of this package refer to modules too
                for other in _modules_in(held):
                    if other is not module and id(other) in paths:
                        found[paths[id(other)]] = f"{holder}.{name}" if holder else name
    return found


def _modules_in(held: Any, depth: int = 3) -> Iterator[nn.Module]:
    """Yield the modules in a nested structure, and in objects, bound methods and partials up to `depth` levels."""
    for leaf in pytree.tree_leaves(held):
        if isinstance(leaf, nn.Module):
            yield leaf
        elif isinstance(leaf, MethodType):
            yield from _modules_in(leaf.__self__, depth)
        elif depth and not isinstance(leaf, (Tensor, type, ModuleType)):
            inside = (leaf.func, leaf.args, leaf.keywords) if isinstance(leaf, partial) else ()
            yield from _modules_in([*inside, dict(getattr(leaf, "__dict__", {}))], depth - 1)


_JOINS = {*RESHAPES, "aten.pixel_shuffle"}  # can merge channels and pixels into one dimension


class MergedDimensions:
    """Track dimensions in which a reshape merged channels with pixels, and check how they are split again.

    The position of a channel in such a dimension depends on the image size. That is harmless if the dimension is
    the input of a linear layer, or is split into the same channels and pixels again. A reshape of `(N, H * W, C)`
    to `(N, C, H, W)` splits it elsewhere: each output channel then mixes input channels, and which ones depends on
    the image size.
    """

    def __init__(self) -> None:
        # Tensor with a merged dimension -> channel number per entry, equal for the pixels of one channel.
        self._channels: dict[Value, Numbers] = {}
        self._count = 0  # numbers assigned so far

    def holds(self, node: Node) -> bool:
        """Record what a node does to merged dimensions; return False if channels then depend on the image size."""
        if isinstance(node, ChannelMove):
            return self._moved(node)
        if self._channels and isinstance(node, (Elementwise, Norm, Boundary)):
            for value in self._channels.keys() & set(node.inputs):
                same = [out for out in node.outputs if node.grids[out] == node.grids[value]]
                self._channels |= dict.fromkeys(same, self._channels[value])
        return True

    def _moved(self, node: ChannelMove) -> bool:
        grids, known = node.grids, not self._channels.keys().isdisjoint(node.operands)
        if not known and not (node.op.name in _JOINS and node.labels[0].size > math.prod(grids[node.operands[0]])):
            return True
        held = []
        for value in node.operands:
            numbers = self._channels.get(value)
            if numbers is None:
                numbers = self._new(math.prod(grids[value])).reshape(grids[value])
            held.append(np.broadcast_to(numbers, grids[value]))
        flat = np.concatenate([*(numbers.reshape(-1) for numbers in held), [-1]])
        joined = {}
        for out, labels in zip(node.outputs, node.labels, strict=True):
            after = flat[labels]
            if node.op.name in RESHAPES:
                if _cut_elsewhere(node.operands[0].shape, out.shape, held[0], after):
                    return False
            elif len(held) == 1 and _part_of_a_channel(held[0], after):
                return False
            zeros = after < 0
            after[zeros] = self._new(int(np.count_nonzero(zeros)))  # every zero counts as a channel of its own
            if len(np.unique(after)) < after.size:
                joined[out] = after
        self._channels |= joined
        return True

    def _new(self, count: int) -> Numbers:
        self._count += count
        return np.arange(self._count - count, self._count)


def _cut_elsewhere(shape: Sequence[int], into: Sequence[int], before: Numbers, after: Numbers) -> bool:
    """Return True if a reshape splits a dimension of channels and leaves a part of it merged with pixels.

    `before` and `after` hold the channel number of each entry. Samples may be merged with channels, because that is
    how groups and heads are moved into the batch dimension.
    """
    varying = [dim for dim, size in enumerate(before.shape) if size > 1 and np.ptp(before, dim).any()]
    if 0 not in varying and into[0] % shape[0] == 0 and len(after) == into[0]:
        after = after[: into[0] // shape[0]]
    for dim, size in enumerate(after.shape):
        ends = math.prod(into[:dim]), math.prod(into[: dim + 1])
        cut = any(math.prod(shape[:d]) < end < math.prod(shape[: d + 1]) for d in varying for end in ends)
        if cut and size > 1:
            line = np.sort(after, dim)
            same = np.diff(line, axis=dim) == 0
            if same.any() and not same.all():
                return True
            # If the numbers of pixels and channels are coprime, no channel repeats along `dim`. Each slice
            # must then hold all channels, or no channel of another slice.
            slices = np.moveaxis(after, dim, 0).reshape(size, -1)
            shared = sum(len(np.unique(one)) for one in slices)
            if shared not in ((distinct := len(np.unique(after))), size * distinct):
                return True
    return False


def _part_of_a_channel(before: Numbers, after: Numbers) -> bool:
    """Return True if some channels keep a different share of their pixels than others."""
    channels, counts = np.unique(before, return_counts=True)
    places = np.searchsorted(channels, after[after >= 0])
    left = np.bincount(places, minlength=len(channels))
    return len(np.unique(left[left > 0] / counts[left > 0])) > 1


@dataclass(frozen=True)
class OutputChannels:
    """How the channels of a module's operator appear in the module's result."""

    dim: int | None  # their dimension; None unless all are present, once each and in order
    closed: bool  # a channel of zeros in its output is zero in the result, whatever else is alive
    odd: Op | None  # first operator that moves or mixes the channels, if any


def follow_to_output(main: LayerNode | Norm, out: Value, behind: Sequence[Node]) -> OutputChannels:
    """Follow the output channels of `main`, the operator of a module, through later nodes to the result `out`."""
    if out is main.out:
        return OutputChannels(1, True, None)
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
        return OutputChannels(None, False, odd)
    # A single channel can be in any dimension of size 1: assume that of the operator's channels.
    dim = dims[0] if dims else len(out.shape) - 1 if main.op.name in PRODUCTS else 1
    fits = dim < len(out.shape) and out.shape[dim] == filters
    return OutputChannels(dim if fits else None, not nothing.alive[out].any(), None)


def _line(numbers: Numbers, filters: int) -> list[int] | None:
    """Return `[dim]` if all channels are in order along `dim`, `[]` for a single channel, else None."""
    dims = [dim for dim, size in enumerate(numbers.shape) if size > 1]
    in_order = len(dims) <= 1 and np.array_equal(numbers.reshape(-1), np.arange(filters))
    return dims if in_order else None


def _numbers(node: Node, numbers: Mapping[Value, Numbers]) -> dict[Value, Numbers] | None:
    """Return the channel numbers of a node's outputs; None if channels are mixed or the node is not understood."""
    if isinstance(node, ChannelMove):
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
            return None  # operands with different channels
        found[value] = spread[0]
    return found
