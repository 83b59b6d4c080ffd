"""Extract a smaller module from a model, its channel graph and a plan.

Surgery works on a deep copy and never changes the user's model: parameters and buffers are sliced to the layout,
modules keep their classes, and a module is wrapped with remaps only if the layouts on its two sides differ. A dry
run then compares the result, operator by operator, with what the layout predicts. If the model's own code fixes the
size of an operator, that operator keeps all its channels and surgery starts again.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.conv import _ConvNd

from ..errors import PruningError
from ..graph.build import trace
from ..graph.channel_graph import ChannelGraph, FixedSizes, solve_layout, vanished
from ..graph.cost import groups_left
from ..graph.nodes import Boundary, Flow, Layout, common_dim, shrink, some
from ..graph.operators.layers import LayerNode, Norm, weight_owner
from ..graph.records import ZEROS, Op, Value
from ..graph.tracer import cast_inputs, check_runs_as_traced, first_change, tensors_of, warmed_copy
from ..modules import Remap, RemappedModule, Window, Zeros
from ..plan import Plan, check_plan
from ..utils.user_model import gc_disabled, map_tensors, memory_format, meta_copy, real_copy, remove_pruner_hooks
from . import verify
from .dry_run import DryRun, failure_in_training

_log = logging.getLogger("sbf_pruner")

_FIRST_OF_RNN = ("weight_ih_l0", "weight_ih")  # weights that multiply the input of a recurrent layer


def extract(
    model: nn.Module, example_inputs: Any, plan: Plan, graph: ChannelGraph | None = None, *, prove: bool = False
) -> nn.Module:
    """Return a new module without the filters that the plan drops, equal to the model with those filters gated off.

    Where the model's own code fixes sizes (a view, a split), the channels it relies on stay as zeros; the result's
    `sbf_fixed_sizes` names those lines. If `prove` is true, both networks run in float64, on the example inputs in
    both modes and on inputs of another size, and a PruningError is raised if their outputs differ.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    >>> extract(net, torch.rand(1, 3, 16, 16), Plan({"0": [0, 5]}))[3]
    Conv2d(2, 4, kernel_size=(3, 3), stride=(1, 1))
    """
    check_plan(plan)
    graph = graph if graph is not None else trace(model, example_inputs)
    small, _ = _cut(model, example_inputs, plan, graph)
    if prove:
        gated = verify.gated_copy(model, graph, graph.settled(plan.masks(graph))[1])
        verify.prove(gated, small, cast_inputs(example_inputs, model, graph))
    return small


def find_fixed_sizes(model: nn.Module, example_inputs: Any, plan: Plan, graph: ChannelGraph) -> FixedSizes:
    """Return the operators and calls whose sizes the model's own code fixes; makes and discards an extraction."""
    return _cut(model, example_inputs, plan, graph)[1]


@gc_disabled()
@torch.inference_mode(False)  # inference tensors cannot be trained, and operator names differ
def _cut(
    model: nn.Module, example_inputs: Any, plan: Plan, graph: ChannelGraph
) -> tuple[nn.Module, _FixedSizeCollector]:
    example_inputs = cast_inputs(example_inputs, model, graph)
    masks = plan.masks(graph)
    graph.check_connected(masks)
    keep, flow = graph.settled(masks)
    pins = _FixedSizeCollector(graph)
    while True:
        layout = solve_layout(graph, flow, pins)
        surgeon = _Surgery(model, graph, flow, layout)
        small = surgeon.run()
        dry_run = DryRun(small, model, example_inputs, graph, layout, surgeon.vanished)
        odd = dry_run.first_mismatch()
        if odd is None:
            break
        try:
            pins.add(odd)
        except PruningError:
            # The cause may be a hook added since the trace, or anchors stored for inputs of another size.
            if not first_change(model, example_inputs, graph):
                raise
            model, pins = warmed_copy(model, example_inputs), _FixedSizeCollector(graph)
            check_runs_as_traced(model, example_inputs, graph)
    _check_other_runs(dry_run)
    if pins.lines:
        _log.info("the model's own code fixes sizes at %s; all channels are kept there", ", ".join(pins.lines))
    # The plans and input shapes are all that saving and loading the network needs.
    small.sbf_fixed_sizes = tuple(pins.lines)  # type: ignore[assignment]
    small.sbf_plans = (*getattr(model, "sbf_plans", ()), Plan.from_masks(keep))  # type: ignore[assignment]
    small.sbf_inputs = map_tensors(example_inputs, lambda t: torch.empty_like(t, device="meta"))
    return small, pins


def _check_other_runs(dry_run: DryRun) -> None:
    """Raise a PruningError if training mode, the first call or the other mode depends on the number of channels."""
    if failure := failure_in_training(dry_run.small, dry_run.model, dry_run.example_inputs):
        raise PruningError(
            f"in training mode the network cannot run with fewer channels: at {failure}; make that line "
            "use the number of channels of its input, or leave the layers that feed it out of the plan"
        )
    remedy = (
        "make that line independent of the number of channels, or leave the layers that feed it out of the plan"
    )
    if (odd := dry_run.first_call_mismatch()) is not None:
        raise PruningError(
            "the network stores a value in its first call that depends on the number of channels, at "
            f"{odd.where} ({odd.name}); {remedy}"
        )
    trace = dry_run.graph.trace
    if (odd := dry_run.other_trace_mismatch(trace.other)) is not None:
        mode = "evaluation" if trace.training else "training"
        raise PruningError(
            f"in {mode} mode the network computes something else with fewer channels, at {odd.where} "
            f"({odd.name}); {remedy}"
        )


class _FixedSizeCollector(FixedSizes):
    def __init__(self, graph: ChannelGraph) -> None:
        super().__init__()
        self.graph = graph
        self.lines: dict[str, None] = {}  # in the user's code

    def add(self, odd: Op) -> None:
        """Keep all channels of an operator; if it has them, of its module call, then of the call around that."""
        self.lines[f"{odd.where} ({odd.name})"] = None
        like = [op for op in self.graph.trace.ops if (op.name, op.where) == (odd.name, odd.where)]
        if odd.position not in self.positions:
            # If a line of the model fixes a size, it does so every time it runs.
            self.positions |= {op.position for op in like}
            return
        calls = {op.call for op in like}
        while self.whole & calls:
            calls = {call.parent if call in self.whole else call for call in calls if call is not None}
        more = {call for call in calls if call is not None}
        if not more:
            remedy = "exclude the layers that feed it (ignore)"
            if not self.graph.trace.on_meta:
                remedy += ", or move decisions that depend on tensor values out of the forward"
            raise PruningError(
                f"the network cannot run with fewer channels at {odd.where} ({odd.name}), even if "
                f"that operator keeps all its channels; {remedy}"
            )
        self.whole |= more


class _Surgery:
    def __init__(self, model: nn.Module, graph: ChannelGraph, flow: Flow, layout: Layout) -> None:
        self.graph, self.flow, self.layout = graph, flow, layout
        # The copy is made with sliced tensors in place of the whole ones, which are never copied.
        self.small = remove_pruner_hooks(real_copy(model, sliced(model, graph, layout)))
        self.modules = dict(self.small.named_modules())
        self._unwanted = vanished(graph, flow)
        self.vanished: set[str] = set()
        self.main: dict[str, list[LayerNode | Norm]] = defaultdict(list)
        self.edges: dict[tuple[str, str], list[Boundary]] = defaultdict(list)
        for node in graph.nodes:
            if isinstance(node, Boundary):
                self.edges[node.module, node.side].append(node)
            elif isinstance(node, (LayerNode, Norm)):
                owner, call = weight_owner(node.op), node.op.call
                if owner is None and call is not None:  # a norm without parameters
                    norm = isinstance(self.modules.get(call.module), (_NormBase, nn.GroupNorm))
                    owner = call.module if norm else None
                if owner is not None:
                    self.main[owner].append(node)

    def run(self) -> nn.Module:
        swaps: dict[int, nn.Module] = {}
        for module, nodes in self.main.items():
            if module in self.modules:
                self._rename_sizes(self.modules[module], nodes)
                if (module, "out") in self.edges:
                    swaps[id(self.modules[module])] = self._fitted(module, nodes)
        for (module, side), edges in self.edges.items():
            if side == "remap":
                swaps[id(self.modules[module])] = self._remap(edges) or nn.Identity()
            elif side == "out" and edges[0].walled:
                swaps[id(self.modules[module])] = self._adapted(module)
        for node in self.graph.nodes:
            if node.op.name == ZEROS and node.op.call is not None:
                vanished = self.modules[node.op.call.module]
                assert isinstance(vanished, Zeros)
                vanished.width = self.layout.sizes(node.out)[vanished.dim]
        self._prepare_folding(swaps)
        self._move_remaps(swaps.values())
        if id(self.small) in swaps:
            return swaps[id(self.small)]
        for parent in list(self.modules.values()):
            for name, child in parent._modules.items():
                parent._modules[name] = swaps.get(id(child), child)
        _disable_transformer_fast_path(self.small)
        return self.small

    # -- modules -------------------------------------------------------------------------------------------

    def _rename_sizes(self, module: nn.Module, nodes: list[LayerNode | Norm]) -> None:
        """Set `out_channels` and similar attributes to the sizes after pruning."""
        node = nodes[0]
        if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):  # they check the size of their input
            first = (n for n in nodes if isinstance(n, LayerNode) and n.weight.name.endswith(_FIRST_OF_RNN))
            module.input_size = next((self.layout.sizes(n.x)[1] for n in first), module.input_size)
            return
        if len({self.layout.sizes(other.out)[1] for other in nodes}) > 1:
            return  # a norm without parameters, used with several widths
        width_in, width_out = (self.layout.sizes(v)[1] for v in (node.x, node.out))
        outputs = ("out_channels", "out_features", "num_features", "num_channels")
        sizes = dict.fromkeys(("in_channels", "in_features"), (node.x.shape[1], width_in))
        sizes |= dict.fromkeys(outputs, (node.out.shape[1], width_out))
        if isinstance(node, LayerNode):
            sizes["groups"] = node.groups, groups_left(node, self.layout)
        else:
            sizes["num_groups"] = node.x.shape[1] // node.per_group, width_out // node.per_group
        for name, (before, after) in sizes.items():
            if getattr(module, name, None) == before:  # else the attribute has another meaning
                setattr(module, name, after)

    def _fitted(self, path: str, nodes: list[LayerNode | Norm]) -> nn.Module:
        """Return the replacement of a module in the small network: `Zeros`, or itself, with remaps if needed."""
        module = self.modules[path]
        ahead, behind = self.edges[path, "in"], self.edges[path, "out"]
        if path in self._unwanted and ahead[0].free:
            windows = _windows(nodes[0], ahead[0], behind[0])
            if windows is not None and self._keeps_to(windows, module, ahead[0]):
                self.vanished.add(path)
                width = self.layout.sizes(behind[0].out)[behind[0].dim]
                return Zeros(width, common_dim(behind), windows, instead_of=module)
        return self._adapted(path)

    def _keeps_to(self, windows: list[Window], module: nn.Module, ahead: Boundary) -> bool:
        """Return True if the windows compute the output size of a module for inputs of any size.

        Custom forwards and hooks may pad by the input size, as TensorFlow does, so those are run at three sizes.
        """
        own = not type(module).forward.__module__.startswith("torch.nn.modules")
        if not (own or module._forward_hooks or module._forward_pre_hooks):
            return True
        shape = self.layout.sizes(ahead.out)
        axes = [axis for axis in range(1, len(shape)) if axis != ahead.dim]
        tensor = next(module.parameters(), torch.empty(0))
        for more in range(1, 4):
            sizes = [n + more if axis in axes else n for axis, n in enumerate(shape)]
            x = torch.empty(sizes, dtype=tensor.dtype, device="meta")
            try:
                given = meta_copy(module).eval()(x).shape
            except Exception:  # it takes other arguments
                return False
            expected = [sizes[axis] for axis in axes]
            if windows:
                expected = [window(size) for window, size in zip(windows, expected, strict=True)]
            if len(given) != len(shape) or [given[axis] for axis in axes] != expected:
                return False
        return True

    def _adapted(self, path: str) -> nn.Module:
        before, after = (self._remap(self.edges[path, side]) for side in ("in", "out"))
        module = self.modules[path]
        return module if before is None and after is None else RemappedModule(module, before, after)

    def _remap(self, edges: list[Boundary]) -> Remap | None:
        edge = edges[0]
        if not edge.free:
            return None
        # One remap serves all calls of the module: it passes channels that are alive in any of them.
        masks = [shrink(self.flow.alive[e.out], e.line(e.out)).reshape(-1) for e in edges]
        alive = np.logical_or.reduce(masks) | edge.walled  # without a gate here (`walled`), dead channels are zeros
        source = edge.source(self.layout, alive)
        width = self.layout.sizes(edge.x)[edge.dim]
        return None if source == list(range(width)) else Remap(source, common_dim(edges), width)

    def _prepare_folding(self, swaps: dict[int, nn.Module]) -> None:
        """Copy the remap after each batch norm to its layer, so that folding the norm into the layer stays exact.

        Folding (`fuse_conv_bn_eval`, YOLO's `fuse()`) removes the norm together with the remap that wraps it.
        """
        for path, module in self.modules.items():
            # A `folded` remap that runs belongs to a norm folded before this extraction; `run` has replaced it.
            if isinstance(module, RemappedModule) and (f"{path}.folded".lstrip("."), "remap") not in self.edges:
                module.folded = None
        for layer, norm in self._foldable():
            if self._remaps(layer, "after", swaps) or self._remaps(norm, "before", swaps):
                continue  # the norm has channels that the layer lacks, so it cannot be folded
            behind = self._remaps(norm, "after", swaps)
            gone = [held for p in (layer, norm) if isinstance(held := swaps.get(id(self.modules[p])), Zeros)]
            if len(gone) == 2:
                gone[0].width = len(behind[-1].source) if behind else gone[1].width
            elif behind and not gone:
                source = behind[0].source
                for remap in behind[1:]:
                    source = tuple(source[i] if i >= 0 else -1 for i in remap.source)
                moved = Remap(source, behind[0].dim, behind[0].inputs)
                around = [self._wrapped(p, swaps) for p in (layer, norm)]
                if around[0].bias is None:
                    around[0].folded = moved
                else:  # a bias does not show if the norm was folded: the layer always remaps, the norm undoes it
                    around[0].after = moved
                    back = [source.index(i) if i in source else -1 for i in range(moved.inputs)]
                    around[1].before = Remap(back, moved.dim, len(source))
                self._move_remaps(around)

    def _foldable(self) -> Iterator[tuple[str, str]]:
        """Yield the layers whose output only a batch norm reads, each with its norm."""
        made = {edge.out: edge for edges in self.edges.values() for edge in edges}
        readers = Counter(value for node in self.graph.nodes for value in node.inputs)
        readers.update(self.graph.outputs)
        for norm in [path for path in self.main if isinstance(self.modules.get(path), _BatchNorm)]:
            layers: set[str] = set()
            for edge in self.edges[norm, "in"]:
                while edge.side != "out" and readers[edge.x] == 1 and edge.x in made:
                    edge = made[edge.x]
                layers.add(edge.module)
            layer = layers.pop() if len(layers) == 1 else norm
            ends = self.edges[layer, "out"]
            same_calls = len(ends) == len(self.edges[norm, "in"])
            if isinstance(self.modules.get(layer), (_ConvNd, nn.Linear)) and same_calls and ends[0].free:
                yield layer, norm

    def _remaps(self, path: str, side: str, swaps: dict[int, nn.Module]) -> list[Remap]:
        """Return the remaps on one side of a module, innermost first."""
        module = swaps.get(id(self.modules[path]), self.modules[path])
        found = [getattr(module, side)] if isinstance(module, RemappedModule) else []
        for outer in self._wrappers(path):
            held = getattr(outer, side)
            found.append(swaps.get(id(held), held))
        return [remap for remap in found if isinstance(remap, Remap)]

    def _wrappers(self, path: str) -> Iterator[RemappedModule]:
        """Yield the `RemappedModule` modules of earlier extractions around a module, innermost first."""
        while path:
            path, _, name = path.rpartition(".")
            outer = self.modules[path]
            if name != RemappedModule.INNER or not isinstance(outer, RemappedModule):
                return
            yield outer

    def _wrapped(self, path: str, swaps: dict[int, nn.Module]) -> RemappedModule:
        """Return the outermost `RemappedModule` around a module; a new one if there is none."""
        module = self.modules[path]
        *_, outer = None, swaps.get(id(module)), *self._wrappers(path)
        if not isinstance(outer, RemappedModule):
            outer = swaps[id(module)] = RemappedModule(module)
        return outer

    def _move_remaps(self, put_in: Iterable[nn.Module]) -> None:
        """Move remaps to the device of the module that they belong to."""
        first = next(self.small.parameters(), torch.empty(0))
        for module in put_in:
            device = next(module.parameters(), first).device
            for inner in module.modules():
                if isinstance(inner, Remap):
                    inner.to(device)


def _disable_transformer_fast_path(network: nn.Module) -> None:
    """Disable the fast path of transformers that contain `RemappedModule` or `Zeros`, which it would not call."""
    for module in network.modules():
        if any(isinstance(inner, (RemappedModule, Zeros)) for inner in module.modules()):
            if isinstance(module, nn.TransformerEncoder):
                module.use_nested_tensor = False
            elif isinstance(module, nn.TransformerEncoderLayer):
                module.activation_relu_or_gelu = 0  # read by the fast path only; 0 means unsupported


def _windows(node: LayerNode | Norm, ahead: Boundary, behind: Boundary) -> list[Window] | None:
    """Return a window per spatial dimension; [] if the module keeps the spatial size, None if it is unknown."""
    if ahead.dim != behind.dim or len(ahead.x.shape) != len(behind.x.shape):
        return None
    if isinstance(node, Norm) or node.op.name != "aten.convolution":
        sizes = zip(ahead.x.shape, behind.x.shape, strict=True)
        return [] if all(a == b for axis, (a, b) in enumerate(sizes) if axis != behind.dim) else None
    if node.out is not behind.x:
        return None
    stride, padding, dilation, transposed, output_padding = node.op.args[3:8]
    rank = len(node.x.shape) - 2

    extra = [padded - given for padded, given in zip(node.x.shape[2:], ahead.x.shape[2:], strict=True)]
    settings = (list(held) * (rank // len(held)) for held in (stride, padding, dilation, output_padding))
    columns = zip(node.weight.shape[2:], *settings, [bool(transposed)] * rank, extra, strict=True)
    return [Window(*column) for column in columns]


def sliced(model: nn.Module, graph: ChannelGraph, layout: Layout) -> dict[int, Tensor]:
    """Map the id of every parameter and buffer that loses entries to the slice that is left.

    The model is not changed, and slices keep the memory format of the original.
    """
    held = tensors_of(model, graph)
    grouped = {n.weight: n for n in graph.nodes if isinstance(n, LayerNode) and n.groups > 1}
    found: dict[int, Tensor] = {}
    for name, value in graph.trace.states.items():
        if value in layout.masks:
            old = held[name]
            new = _grouped(old, grouped[value], layout) if value in grouped else _boxed(old, value, layout)
            if new is not old:
                found[id(old)] = new
    return found


def _boxed(tensor: Tensor, value: Value, layout: Layout) -> Tensor:
    new = tensor.detach()
    for dim, mask in enumerate(layout.masks[value]):
        if mask is not None and mask.any() and not mask.all():
            new = new.index_select(dim, torch.from_numpy(np.flatnonzero(mask)).to(tensor.device))
    return tensor if new.shape == tensor.shape else _like(tensor, new)


def _grouped(tensor: Tensor, node: LayerNode, layout: Layout) -> Tensor:
    """Slice the weight of a grouped convolution, each of whose groups may keep different channels."""
    ends = (node.out, node.x) if node.out_axis == 0 else (node.x, node.out)
    rows, columns = (node.grouped(layout.line(value, 1)) for value in ends)
    present = some(rows, 1) & some(columns, 1)
    kept = np.flatnonzero(rows & present[:, None])
    if not kept.size or (kept.size == rows.size and columns.all()):
        return tensor
    # All groups that are left keep equally many inputs, but may keep different ones.
    of_group = np.nonzero(columns[present])[1].reshape(int(present.sum()), -1)
    group = (np.cumsum(present) - 1)[kept // rows.shape[1]]
    at = tuple(torch.from_numpy(index).to(tensor.device) for index in (kept[:, None], of_group[group]))
    return _like(tensor, tensor.detach()[at])


def _like(old: Tensor, new: Tensor) -> Tensor:
    new = new.contiguous(memory_format=memory_format(old))  # index_select does not keep it
    if isinstance(old, nn.Parameter):
        return nn.Parameter(new, requires_grad=old.requires_grad)
    return new
