"""A model in; its channel graph out.

Module edges are put into the trace as nodes of their own, because they are where a gate can be placed and
where, in the extracted network, a remap can be inserted.  A layer gets its gate at the first norm behind it;
then its channels are followed to see whether a removed one could stay away.  Nothing here changes a model.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from torch import nn
from torch.utils import _pytree as pytree

from ..errors import PruningError, nearest
from ..layers import Adapted, Remap, Zeros
from .channels import ChannelGraph, Layer, Site
from .masks import Grids, shrink
from .nodes import Boundary, Contract, Elementwise, Map, Node, Norm, Source
from .rules import build_node
from .trace import REMAP, ZEROS, Call, Op, Trace, Value, record

_LAYERS = {"aten.convolution": 1, "aten.mm": 1, "aten.addmm": 2}
_PRODUCTS = {"aten.mm", "aten.addmm"}
_NORMS = {"aten.native_batch_norm", "aten.cudnn_batch_norm", "aten._native_batch_norm_legit"}


def trace(model: nn.Module, example_inputs: Any, ignore: Sequence[str] = ()) -> ChannelGraph:
    """Find the layers of a model whose filters can be removed exactly, and the reasons for the others.

    `ignore` holds name patterns (`layer4.*`) of layers to leave alone.

    >>> import torch
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    >>> graph = trace(net, torch.rand(1, 3, 16, 16))
    >>> [(layer.name, layer.filters) for layer in graph.layers.values()]
    [('0', 8)]
    >>> graph.skipped
    {'3': "its filters are the network's outputs"}
    """
    if not isinstance(model, nn.Module):
        raise PruningError(f"a model is an nn.Module, not {type(model).__name__}")
    if hasattr(model, "_orig_mod"):
        raise PruningError("the model is already compiled; prune the original one and compile the result")
    graph = _Builder(model, record(model, example_inputs)).graph()
    for pattern in ignore:
        matching = [name for name in graph.layers if fnmatchcase(name, pattern)]
        if not matching and not any(fnmatchcase(name, pattern) for name in graph.skipped):
            raise PruningError(f"ignore: no layer is called {pattern!r}; {nearest(pattern, graph.layers)}")
        for name in matching:
            del graph.layers[name]
            graph.skipped[name] = f"ignored as asked ({pattern})"
    return graph


class _Builder:
    def __init__(self, model: nn.Module, trace: Trace) -> None:
        self.model = model
        self.trace = trace
        self.modules = dict(model.named_modules())
        self.plain = _plain_names(self.modules)
        self.leaves = {path for path, module in self.modules.items() if not list(module.children())}
        self.outside = _held_outside(self.modules)
        self.grids: Grids = {}
        self.nodes: list[Node] = []
        self.outputs: list[Value] = []
        self.main: dict[str, list[Contract | Norm]] = defaultdict(list)  # module -> its operator, per call
        self.edges: dict[tuple[str, str], list[Boundary]] = defaultdict(list)

    def graph(self) -> ChannelGraph:
        if not any(op.name == "aten.convolution" for op in self.trace.ops):
            raise PruningError(
                "there is no convolution in the model, so there are no filters to prune; give a convolutional "
                "network"
            )
        self._lay_out(self._edged_calls())
        self._close_edges()
        self._keep_statistics()
        self._find_idle()
        self.consumers: dict[Value, list[Node]] = defaultdict(list)
        for node in self.nodes:
            for value in dict.fromkeys(node.inputs):
                self.consumers[value].append(node)
        layers, skipped = self._find_layers()
        sites = [layer.site for layer in layers.values()]
        sites += self._followers({s.module for s in sites})
        return ChannelGraph(layers, skipped, sites, self.nodes, self.grids, self.trace, self.outputs)

    # -- module edges ----------------------------------------------------------------------------------

    def _edged_calls(self) -> list[tuple[Call, Op]]:
        """Calls of modules that hold one layer or norm: one tensor in, one out, one operator of interest."""
        inside: dict[Call, list[Op]] = defaultdict(list)
        for op in self.trace.ops:
            owner = _owner(op)
            call = op.call.within(owner) if op.call is not None and owner is not None else None
            if call is not None:
                inside[call].append(op)
        good = [
            call
            for call, ops in inside.items()
            if len(ops) == 1
            and len(call.inputs) == len(call.outputs) == 1
            and call.inputs != call.outputs
            and call.module not in self.outside
            # A convolution of an image without a batch dimension has its channels elsewhere.
            and (ops[0].name in _PRODUCTS or len(call.inputs[0].shape) == len(ops[0].inputs[0].shape))
        ]
        full = Counter(call.module for call in good)
        return [(c, inside[c][0]) for c in good if full[c.module] == len(self.trace.calls[c.module])]

    def _lay_out(self, calls: list[tuple[Call, Op]]) -> None:
        """Build the nodes in order, with an edge before and after each of the given calls."""
        first, last = defaultdict(list), defaultdict(list)
        mains, dims = {}, {}
        for call, op in calls:
            first[call.first].append(call)
            last[call.last].append(call)
            mains[op] = call.module
            # A linear layer's channels are last, whatever stands before them.
            dims[call] = len(call.inputs[0].shape) - 1 if op.name in _PRODUCTS else 1
        now: dict[Value, Value] = {}
        before: dict[Call, Value | None] = {}
        for position in range(len(self.trace.ops) + 1):
            for call in last[position]:
                inner, entered = call.outputs[0], before[call]
                now.pop(call.inputs[0])
                if entered is not None:
                    now[call.inputs[0]] = entered
                now[inner] = self._edge(call, "out", now.get(inner, inner), dims[call])
            for call in first[position]:
                outer = call.inputs[0]
                before[call] = now.get(outer)
                now[outer] = self._edge(call, "in", now.get(outer, outer), dims[call])
            if position < len(self.trace.ops):
                op = self.trace.ops[position]
                node = self._node(_renamed(op, now))
                self.nodes.append(node)
                if op in mains and isinstance(node, (Contract, Norm)):
                    self.main[mains[op]].append(node)
        self.outputs = [now.get(v, v) for v in self.trace.outputs]
        for value in self.outputs:
            self.grids.setdefault(value, (1,) * len(value.shape))

    def _close_edges(self) -> None:
        """A module whose operator turned out not to be understood is left as it is, edges and all."""
        for (module, side), edges in self.edges.items():
            if side != "remap" and len(self.main.get(module, ())) != len(edges):
                self.main.pop(module, None)
                for edge in edges:
                    edge.free = False

    def _keep_statistics(self) -> None:
        """A norm that is called several times sees what each call brings, also where its result is not used."""
        for module, mains in self.main.items():
            if len(mains) > 1 and isinstance(mains[0], Norm) and isinstance(mains[0].op.args[3], Value):
                for edge in self.edges[module, "out"]:
                    edge.lasting = True

    def _find_idle(self) -> None:
        """Channels that are zero in the user's own network (padding, say), and that a shift makes constants."""
        flow = ChannelGraph({}, {}, [], self.nodes, self.grids, self.trace, self.outputs).flow({})
        for node in self.nodes:
            if isinstance(node, Contract):
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
        edge = Boundary(op, self.grids, module=call.module, side=side, dim=dim)
        self.nodes.append(edge)
        self.edges[call.module, side].append(edge)
        return out

    def _node(self, op: Op) -> Node:
        if op.name not in (REMAP, ZEROS):
            return build_node(op, self.grids)
        assert op.call is not None
        module = self.modules[op.call.module]
        assert isinstance(module, (Remap, Zeros))
        out = op.outputs[0]
        assert out is not None
        dim = module.dim % len(out.shape)
        grid = tuple(n if d == dim else 1 for d, n in enumerate(out.shape))
        self.grids.setdefault(op.inputs[0], (1,) * len(op.inputs[0].shape))
        self.grids[out] = grid
        if isinstance(module, Zeros):  # its width is ours to choose
            return Source(op, self.grids, zero=True)
        labels = np.array(module.source, np.int64).reshape(grid)
        edge = Boundary(op, self.grids, module=op.call.module, side="remap", labels=labels, dim=dim)
        self.edges[op.call.module, "remap"].append(edge)
        return edge

    # -- layers ------------------------------------------------------------------------------------------

    def _find_layers(self) -> tuple[dict[str, Layer], dict[str, str]]:
        layers: dict[str, Layer] = {}
        skipped: dict[str, str] = {}
        self.uses: dict[Value, list[Contract]] = defaultdict(list)
        for node in self.nodes:
            if isinstance(node, Contract):
                self.uses[node.weight].append(node)
        for node in self.nodes:
            at = node.op.call.module if node.op.call is not None else ""
            if not isinstance(node, Contract):
                if node.op.name in _LAYERS and _owner(node.op) == at:
                    skipped.setdefault(self.plain[at], node.blocks)
                continue
            module = node.weight.name.rpartition(".")[0] if node.stored else at
            name = self.plain.get(module, module) or "(model)"
            if node.stored and at != module and at in self.leaves:
                skipped.setdefault(self.plain[at], f"it shares its weight with {name}, and follows it")
            if name in layers or name in skipped:
                continue
            reason = self._reason_to_skip(node, module)
            if reason:
                skipped[name] = reason
                continue
            site = self._place(module, name)
            reason = self._reason_channels_stay(site)
            if reason:
                skipped[name] = reason
                continue
            nodes = tuple(n for n in self.main[module] if isinstance(n, Contract))
            for edge in site.edges:
                edge.layer = name
            if len(nodes) == 1:
                nodes[0].revives = False
                norm = self.main[site.module][0]
                norm.revives = False
            kind = type(self.modules[module]).__name__
            spatial = node.x.shape[2:]
            layers[name] = Layer(name, node.filters, kind, node.weight.name, spatial, node.groups, site, nodes)
        return layers, skipped

    def _reason_to_skip(self, node: Contract, module: str) -> str:
        if not node.stored:
            return f"its weight is computed at {node.op.where}, not stored, and cannot be sliced"
        if node.depthwise:
            return "depthwise: its filters follow its input channels"
        if module in self.outside:
            where = self.outside[module]
            return f"it is also held in {where}, where a change would not be seen; register it only"
        others = [n for n in self.uses[node.weight] if n not in self.main.get(module, [])]
        if others and module in self.main:
            return f"its weight is used at {others[0].op.where} too, where no gate can be placed"
        if module not in self.main:
            return f"its weight is used at {node.op.where} outside the module, where no gate can be placed"
        return ""

    def _place(self, module: str, layer: str) -> Site:
        """The first norm after the layer if nothing but it reads the layer's output, else the layer itself."""
        norm = self._norm_after(module)
        if norm is None:
            edges = tuple(self.edges[module, "out"])
            return Site(module, "map", layer, dim=edges[0].dim, edges=edges)
        return self._norm_site(norm, layer)

    def _norm_site(self, module: str, layer: str) -> Site:
        edges = tuple(self.edges[module, "out"])
        main = self.main[module][0]
        assert isinstance(main, Norm)
        names = tuple(v.name.rpartition(".")[2] for v in main.op.args[1:3] if isinstance(v, Value))
        has_running = isinstance(main.op.args[3], Value)
        # Without a scale there is nothing to fold a gate into, and without a shift (but with running
        # statistics) zero would still come back.
        foldable = len(names) == 2 or (len(names) == 1 and not has_running)
        return Site(module, "affine" if foldable else "map", layer, names if foldable else (), 1, edges)

    def _norm_after(self, module: str) -> str | None:
        found: set[str | None] = set()
        for edge in self.edges[module, "out"]:
            found.add(self._follow_to_norm(edge.out))
        norm = found.pop() if len(found) == 1 else None
        if norm is not None and len(self.main[norm]) == len(self.main[module]):
            return norm
        return None

    def _follow_to_norm(self, value: Value) -> str | None:
        while True:
            readers = self.consumers[value]
            if len(readers) != 1 or value in self.outputs:
                return None
            node = readers[0]
            if isinstance(node, Boundary) and node.side == "in":
                main = self.main.get(node.module)
                return node.module if main and isinstance(main[0], Norm) else None
            passes = isinstance(node, Elementwise) and node.zero == "any" and len(node.inputs) == 1
            same = isinstance(node, Map) and self.grids[node.outputs[0]] == self.grids[value]
            identity = isinstance(node, Map) and same and _is_identity(node)
            if not (passes or identity):
                return None
            value = node.outputs[0]

    def _reason_channels_stay(self, site: Site) -> str:
        """Follow the gated channels: why could a removed one not stay away?  "" if it can."""
        gone: set[Value] = set()
        back: list[tuple[Node, Value]] = []
        todo = [e.out for e in site.edges]
        while todo:
            value = todo.pop()
            if value in gone:
                continue
            gone.add(value)
            if value in self.outputs:
                return "its filters are the network's outputs"
            for node in self.consumers[value]:
                if isinstance(node, Boundary):
                    main = self.main.get(node.module, [None])[0]
                    if node.side != "in" or isinstance(main, Norm):
                        todo.append(node.out)
                elif isinstance(node, Norm):
                    if node.revives and not self._can_follow(node):
                        return f"{node.op.name} at {node.op.where} brings a removed channel back as a constant"
                    todo.append(node.out)
                elif isinstance(node, Contract):
                    if not node.stored:
                        return f"it feeds {node.op.name} at {node.op.where}, whose weight is computed"
                elif node.blocks and isinstance(node, Elementwise):
                    back += [(node, v) for v in node.outputs]
                elif node.blocks:
                    return node.blocks
                elif isinstance(node, Elementwise) and node.zero == "any" and len(set(node.inputs)) > 1:
                    continue  # a sum: the other side keeps the channel, ours adds nothing to it
                else:
                    todo += node.outputs
        # A channel that comes back as a constant does no harm where it is multiplied by one that is gone.
        for node, value in back:
            for reader in self.consumers[value]:
                if not (isinstance(reader, Elementwise) and reader.zero == "all" and reader.outputs[0] in gone):
                    return node.blocks
            if value in self.outputs or not self.consumers[value]:
                return node.blocks
        return ""

    def _can_follow(self, norm: Norm) -> bool:
        return any(mains == [norm] for mains in self.main.values())

    def _followers(self, taken: set[str]) -> list[Site]:
        """Gates without a score: norms (and biases of depthwise convolutions) that dead channels may reach."""
        sites = []
        for module, mains in self.main.items():
            if module in taken or len(mains) > 1:
                continue
            main = mains[0]
            edges = tuple(self.edges[module, "out"])
            told_apart = self.grids[main.x][1] == main.x.shape[1]  # not so where the input itself is normalised
            if isinstance(main, Norm) and main.revives and told_apart:
                sites.append(self._norm_site(module, ""))
                main.revives = False
            elif isinstance(main, Contract) and main.depthwise and main.bias is not None:
                bias = main.bias.name.rpartition(".")[2]
                sites.append(Site(module, "bias", "", (bias,), 1, edges))
                main.revives = False
        return sites


def _owner(op: Op) -> str | None:
    """The module whose weight a layer or norm operator uses."""
    if op.name in _LAYERS:
        held: Any = op.args[_LAYERS[op.name]]
        held = held.transpose_of or held
        return held.name.rpartition(".")[0] if held.kind == "state" else None
    if op.name in _NORMS:
        for held in op.args[1:5]:
            if isinstance(held, Value) and held.kind == "state":
                return held.name.rpartition(".")[0]
    return None


def _renamed(op: Op, now: Mapping[Value, Value]) -> Op:
    if not any(v in now for v in op.inputs):
        return op
    args, kwargs = pytree.tree_map_only(Value, lambda v: now.get(v, v), (op.args, op.kwargs))
    inputs = tuple(now.get(v, v) for v in op.inputs)
    return dataclasses.replace(op, args=args, kwargs=kwargs, inputs=inputs)


def _plain_names(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Qualified names as they were before an earlier pruning put a module into an `Adapted`."""
    names: dict[str, str] = {}
    for path in modules:
        head, _, tail = path.rpartition(".")
        wrapped = isinstance(modules.get(head), Adapted) and tail == Adapted.INNER
        parent = names.get(head, head)
        names[path] = parent if wrapped else f"{parent}.{tail}" if parent else tail
    return names


def _held_outside(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Modules that a plain attribute (a list, say) refers to as well: a swap would not be seen there."""
    paths = {id(module): path for path, module in modules.items()}
    found: dict[str, str] = {}
    for holder, module in modules.items():
        for name, held in vars(module).items():
            if name != "_modules":
                for leaf in pytree.tree_leaves(held):
                    if isinstance(leaf, nn.Module) and id(leaf) in paths:
                        found[paths[id(leaf)]] = f"{holder}.{name}" if holder else name
    return found


def _is_identity(node: Map) -> bool:
    labels = node.labels[0]
    return len(node.operands) == 1 and np.array_equal(labels.reshape(-1), np.arange(labels.size))
