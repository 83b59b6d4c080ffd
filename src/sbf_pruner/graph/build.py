"""Build the channel graph of a model: which layers can be pruned, and why the others cannot.

For every layer a site for its gate is chosen. Its channels are then followed through the operators after that site,
to check that a removed channel stays zero. The model is not changed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from ..errors import PruningError, suggestion
from ..utils.user_model import check_model, gc_disabled
from .channel_graph import ChannelGraph, Layer, Site
from .gate_sites import GateSites
from .nodes import Alive, Boundary, ChannelMove, Elementwise, Located, Sampled, Sum
from .operators.layers import LAYERS, LayerNode, Norm, Product, weight_owner
from .records import Value
from .tracer import record
from .wiring import NodeBuilder, without_batch

Ignored = str | nn.Module


@gc_disabled()
@torch.inference_mode(False)  # operators are recorded under other names in inference mode
def trace(model: nn.Module, example_inputs: Any, ignore: Ignored | Sequence[Ignored] = ()) -> ChannelGraph:
    """Find the layers of a model whose filters can be removed exactly, and why the others cannot be pruned.

    `example_inputs` holds the arguments of one call: a tensor, a tuple of positional arguments, or a dict of
    keyword arguments. To pass a dict as the only argument, put it in a tuple, `(batch,)`. `ignore` is a name
    pattern (`layer4.*`) of layers not to prune, a module of the model, or a sequence of these.

    >>> import torch
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    >>> graph = trace(net, torch.rand(1, 3, 16, 16))
    >>> [(layer.name, layer.filters) for layer in graph.layers.values()]
    [('0', 8)]
    >>> graph.skipped
    {'3': "its filters are the network's outputs"}
    """
    check_model(model)
    if hasattr(model, "_orig_mod"):
        raise PruningError("the model is already compiled; prune the original one and compile the result")
    if isinstance(model, (nn.DataParallel, DistributedDataParallel)):
        raise PruningError(
            f"the model is wrapped in {type(model).__name__}; give what is inside it (model.module), and train the "
            "weights through the wrapper as before"
        )
    _check_changeable(model)
    found = record(model, example_inputs)
    if not any(op.name == "aten.convolution" for op in found.ops):
        raise PruningError(
            "there is no convolution in the model, so there are no filters to prune; give a convolutional network"
        )
    graph = _LayerFinder(NodeBuilder(model, found)).graph()
    _protect_divisors(graph)
    for entry in [ignore] if isinstance(ignore, str | nn.Module) else ignore:
        _ignore(graph, entry, model)
    return graph


def _ignore(graph: ChannelGraph, entry: Ignored, model: nn.Module) -> None:
    """Make the layers unprunable that match a name pattern, or that are in a given module of the model."""
    found = {*graph.layers, *graph.unscored}
    if isinstance(entry, nn.Module):
        paths = [f"{path}." if path else "" for path, module in model.named_modules() if module is entry]
        if not paths:
            raise PruningError(f"ignore: the {type(entry).__name__} given is not a module of the model")
        matching = {name for name in found if f"{name}.".startswith(tuple(paths))}
    elif isinstance(entry, str):
        matching = {name for name in found if fnmatchcase(name, entry)}
        if not matching:
            raise PruningError(f"ignore: no layer is called {entry!r}; {suggestion(entry, graph.layers)}")
    else:
        raise PruningError(
            f"ignore: give modules, or names or patterns of layers such as 'layer4.*', not {type(entry).__name__}"
        )
    for name in [name for name in graph.layers if name in matching]:
        del graph.layers[name]
        graph.unscored[name] = f"ignored as asked ({entry if isinstance(entry, str) else paths[0][:-1]})"


def _protect_divisors(graph: ChannelGraph) -> None:
    """Make layers unprunable until no operator can get a zero where its value or gradient is undefined.

    If a divisor is the sum of several layers, only the last of them has to keep all filters.
    """
    if not graph.avoiding:
        return
    protected: dict[str, str] = {}
    names = list(graph.layers) if graph.undefined(graph.alive_regardless_of(graph.layers)) else []
    for number, name in enumerate(names, 1):
        if undefined := graph.undefined(graph.alive_regardless_of({*names[:number]} - protected.keys())):
            protected[name] = undefined[0].at_zero
            del graph.layers[name]
    graph.unscored = protected | graph.unscored
    # Such an operator can still get a zero if the layers that feed it keep no filter.
    nothing = {name: np.zeros(layer.filters, bool) for name, layer in graph.layers.items()}
    for node in graph.undefined(graph.flow(nothing)):
        node.insists = True


def _check_changeable(model: nn.Module) -> None:
    """Raise a PruningError for scripted modules and for lazy modules without weights."""
    for path, module in model.named_modules():
        name = path or "the model"
        if isinstance(module, torch.jit.ScriptModule):
            raise PruningError(
                f"{name} is scripted and cannot be pruned; prune the module before scripting it, then "
                "compile or export it"
            )
        if any(map(is_lazy, (*module._parameters.values(), *module._buffers.values()))):
            kind = type(module).__name__
            raise PruningError(f"{name} ({kind}) has no weights yet; run the model once on inputs, then prune it")


class _LayerFinder:
    """Find the prunable layers of a network, and the reasons why the others cannot be pruned."""

    def __init__(self, net: NodeBuilder) -> None:
        self.net = net
        self.sites = GateSites(net)
        self.leaves = {path for path, module in net.modules.items() if not list(module.children())}
        # Nodes that can get a gate without a score, so that they do not turn zeros into constants.
        self.closable = {id(m[0]) for at, m in net.main.items() if len(m) == 1 and at not in net.busy}
        self.uses: dict[Value, list[LayerNode]] = defaultdict(list)  # stored tensor -> layers it is a weight of
        for node in net.nodes:
            if isinstance(node, LayerNode):
                for root in node.weight.roots or ():
                    self.uses[root].append(node)

    def graph(self) -> ChannelGraph:
        net = self.net
        layers, unscored = self._find_layers()
        sites = [layer.site for layer in layers.values()]
        sites += self.sites.followers({s.module for s in sites})
        return ChannelGraph(layers, unscored, sites, net.nodes, net.grids, net.trace, net.outputs, net.entries)

    def _find_layers(self) -> tuple[dict[str, Layer], dict[str, str]]:
        layers: dict[str, Layer] = {}
        unscored: dict[str, str] = {}
        for node in self.net.nodes:
            at = node.op.call.module if node.op.call is not None else ""
            owner = weight_owner(node.op)
            if not isinstance(node, LayerNode):
                if node.op.name in LAYERS and owner is not None and (name := self._named(owner)) not in layers:
                    unscored.setdefault(name, node.blocks)
                continue
            module = at if owner is None else owner
            name = node.layer = self._named(module)
            if node.stored and at != module and at in self.leaves:
                node.layer = self._named(at)
                if node.layer not in layers:
                    unscored.setdefault(node.layer, f"it shares its weight with {name}, and follows it")
            if name in layers or name in unscored:
                continue
            site = None
            if not (reason := self._reason_to_skip(node, module)):
                site = self.sites.of(module, name)
                reason = self._reason_channels_stay(site)
            if site is None or reason:
                unscored[name] = reason
                continue
            mains = self.net.main.get(module) or self.net.inner[module]
            nodes = tuple(n for n in mains if isinstance(n, LayerNode))
            for edge in site.edges:
                edge.layer = name
            main = self.net.main[site.module][0] if site.kind != "sum" else None
            if len(nodes) == 1 and main is not None:
                for gated, path in ((nodes[0], module), (main, site.module)):
                    gated.revives = gated.revives and path in self.net.busy
            kind = type(self.net.modules[module]).__name__
            spatial = node.x.shape[2:]
            # Prefer a parameter to a mask buffer of the same size that is multiplied with it.
            weight = max(node.weight.roots or (), key=lambda root: (root.trained, math.prod(root.shape))).name
            unit = main.per_group if isinstance(main, Norm) else 1
            for user in nodes:
                user.unit = unit
            layers[name] = Layer(name, node.filters, kind, weight, spatial, node.groups, site, unit, nodes)
        for path, owned in self.net.modules.items():
            if isinstance(owned, (_ConvNd, nn.Linear)) and (name := self._named(path)) not in layers:
                unscored.setdefault(name, self._reason_not_seen(path, owned))
        return layers, unscored

    def _named(self, module: str) -> str:
        """Return the name of a module in the graph: its path before any pruning, or "(model)" for the root."""
        return self.net.plain.get(module, module) or "(model)"

    def _reason_not_seen(self, path: str, module: nn.Module) -> str:
        """Return why no recorded layer uses a module's weight."""
        names = {f"{path}.{name}".lstrip(".") for name, _ in module.named_parameters()}
        for op in self.net.trace.ops:
            if any(value.kind == "state" and value.name in names for value in op.inputs):
                return f"no layer uses its weight; it is read by {op.name} at {op.where}"
        return "it does not run on the example inputs"

    def _reason_to_skip(self, node: LayerNode, module: str) -> str:
        if node.weight.roots is None:
            return f"its weight is computed from the input at {node.op.where}, and cannot be sliced"
        if not node.stored and (mixes := self.net.what_mixes(node.weight, node.filters)) is not None:
            return f"{mixes.name} at {mixes.where}, which computes its weight, mixes its filters"
        if node.depthwise:
            return "depthwise: its filters follow its input channels"
        if module in self.net.outside:
            where = self.net.outside[module]
            return (
                f"it is also referenced by the attribute {where}, which would keep the old module; reference it "
                "as a submodule only"
            )
        if module in self.net.trace.otherwise:
            line = self.net.trace.otherwise[module]
            return f"it feeds {line} in training mode only, and the graph follows evaluation mode"
        mains = self.net.main.get(module) or self.net.inner.get(module, [])
        others = [n for root in node.weight.roots for n in self.uses[root] if n not in mains]
        if others and mains:
            return f"its weight is used at {others[0].op.where} too, where no gate can be placed"
        return "" if module in self.net.main else self._reason_for_no_gate(node, module)

    def _reason_for_no_gate(self, node: LayerNode, module: str) -> str:
        """Return why a layer without edges gets no gate, or "" if the norm after it can be gated."""
        call = node.op.call.within(module) if node.op.call is not None else None
        if call is None:
            return f"its weight is used at {node.op.where} outside the module, where no gate can be placed"
        if without_batch(call, node.op):
            return f"its input at {node.op.where} has no batch dimension; give example inputs that have one"
        if module in self.net.inner and self.sites.norm_after(module) is not None:
            return ""
        if module in self.net.odd:
            odd = self.net.odd[module]
            return (
                f"{odd.name} at {odd.where}, in its module, reorders or mixes its channels, so no gate can be "
                "placed behind the module"
            )
        more = f"its module computes more than this layer at {node.op.where}"
        return f"{more}; move the layer into a submodule of its own"

    def _reason_channels_stay(self, site: Site) -> str:
        """Return why channels gated at a site cannot be removed, or "" if they stay zero in all later operators."""
        gone: set[Value] = set()
        back: list[tuple[str, Value]] = []
        todo = [e.out for e in site.edges]
        while todo:
            value = todo.pop()
            if value in gone:
                continue
            gone.add(value)
            if value in self.net.outputs:
                return "its filters are the network's outputs"
            for node in self.net.consumers[value]:
                line = f"{node.op.name} at {node.op.where}"
                if isinstance(node, Boundary):
                    main = self.net.main.get(node.module, [None])[0]
                    if node.side != "in" or not isinstance(main, LayerNode):  # else a layer sums over the channels
                        todo.append(node.out)
                elif isinstance(node, Norm):
                    if node.revives and id(node) not in self.closable:
                        return f"{line} brings a removed channel back as a constant"
                    todo.append(node.out)
                elif isinstance(node, LayerNode):
                    if node.weight.roots is None:
                        return f"it feeds {line}, whose weight depends on the input"
                elif isinstance(node, Sum) and max(self.net.grids[node.out], default=1) == 1:
                    continue  # a sum over all channels: the result has none
                elif isinstance(node, Product) and node.ends(value):
                    continue
                elif isinstance(node, Located):
                    todo.append(node.out)
                    if node.positions in self.net.outputs or self.net.consumers[node.positions]:
                        used = "returns positions in a removed channel too, and they are used"
                        back.append((f"{line} {used}", node.positions))
                elif isinstance(node, Sampled) and value is not node.operands[0]:
                    return f"its output is used as sampling positions by {line}"
                elif node.blocks and isinstance(node, Elementwise) and not node.steep:
                    back += [(node.blocks, v) for v in node.outputs]
                elif node.blocks:
                    return node.blocks
                elif getattr(node, "alive_if", None) is not Alive.ANY or gone.issuperset(node.inputs):
                    todo += node.outputs
                # Else this is a sum in which another operand keeps the channel, and the removed one adds zero.
                elif isinstance(node, Elementwise) and self._is_all_that_is_learned(node, gone):
                    return "its output, plus the network's input or a stored tensor, is a network output"
        return self._reason_constants_stay(back, gone)

    def _is_all_that_is_learned(self, node: Elementwise, gone: set[Value]) -> bool:
        """Return True if a removed channel is only added to inputs or stored tensors and then output."""
        others = [v for v in node.inputs if v not in gone]
        if any(v.roots is None and max(self.net.grids[v], default=1) > 1 for v in others):
            return False
        todo, seen = list(node.outputs), set[Value]()
        while todo:
            value = todo.pop()
            if value in self.net.outputs:
                return True
            if value not in seen:
                seen.add(value)
                readers = self.net.consumers[value]
                todo += [
                    v for n in readers if isinstance(n, (Elementwise, ChannelMove, Boundary)) for v in n.outputs
                ]
        return False

    def _reason_constants_stay(self, back: list[tuple[str, Value]], gone: set[Value]) -> str:
        """Return why the constants in `back` reach an output or a layer, or "" if all are multiplied by zero."""
        seen: set[int] = set()
        while back:
            reason, value = back.pop()
            readers = self.net.consumers[value]
            if value in self.net.outputs or not readers:
                return reason
            for reader in readers:
                if isinstance(reader, Elementwise) and reader.ends(value, gone):
                    continue
                if not isinstance(reader, (Elementwise, ChannelMove)):
                    return reason
                if id(reader) not in seen:
                    seen.add(id(reader))
                    back += [(reason, v) for v in reader.outputs]
        return ""
