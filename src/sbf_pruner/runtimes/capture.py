"""Capture a network as an fx graph of functional ATen operators, and read and edit the layers of that graph.

The captured `GraphModule` computes the same outputs as the model in evaluation mode, for any batch size. Every
`Remap` module of an extracted network becomes one `sbf_pruner::remap` operator. The graph has no in-place
operators, `meta["val"]` of a node is a fake tensor with the shape of its output, and the model is not changed. A
weight that several nodes read is never replaced, so the calls of a module that is called twice keep sharing it.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from ..errors import PruningError
from ..modules import Remap
from ..utils.user_code import one_line_error
from ..utils.user_model import map_tensors, real_copy


@torch.library.custom_op("sbf_pruner::remap", mutates_args=())
def remap(x: Tensor, source: list[int], dim: int) -> Tensor:
    """Return a tensor whose channel `i` is channel `source[i]` of x, or zero where `source[i]` is -1."""
    moved: Tensor = Remap(source, dim, x.shape[dim])(x)
    return moved.clone() if moved is x else moved


@remap.register_fake
def _shape_of_remap(x: Tensor, source: list[int], dim: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = len(source)
    return x.new_empty(shape)


aten = torch.ops.aten
REMAP = torch.ops.sbf_pruner.remap.default
CONVS = {getattr(getattr(aten, f"conv{n}d"), kind) for n in (1, 2, 3) for kind in ("default", "padding")}
NORM = aten._native_batch_norm_legit_no_training.default
# An fx.Node. Its type annotations in torch.fx are too narrow for the edits made here.
Node = Any


class _OneOperatorRemap(nn.Module):
    """A `Remap` that is captured as one operator."""

    def __init__(self, original: Remap) -> None:
        super().__init__()
        self.source, self.dim = list(original.source), original.dim

    def forward(self, x: Tensor) -> Tensor:
        return remap(x, self.source, self.dim % x.dim())


def capture_graph(model: nn.Module, example_inputs: Any) -> fx.GraphModule:
    """Export a model in evaluation mode, for any batch size; raise a PruningError if torch.export fails."""
    network = eval_copy(model)
    network = _OneOperatorRemap(network) if isinstance(network, Remap) else network
    for module in list(network.modules()):
        for name, child in module._modules.items():
            if isinstance(child, Remap):
                module._modules[name] = _OneOperatorRemap(child)
    try:
        with suppress_exporter_output(), torch.no_grad():
            program = export_program(network, example_inputs).run_decompositions({})
            graph = program.module(check_guards=False)
    except Exception as error:
        raise PruningError(
            f"{type(model).__name__} cannot be exported ({one_line_error(error)}); the model must accept any "
            "batch size, and its control flow must not depend on the values of the input"
        ) from error
    assert isinstance(graph, fx.GraphModule)
    return graph


def eval_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a model, unwrapped if it was compiled, in evaluation mode and without gradients."""
    with suppress_exporter_output():
        return real_copy(getattr(model, "_orig_mod", model)).eval().requires_grad_(False)


def export_program(network: nn.Module, example_inputs: Any) -> torch.export.ExportedProgram:
    """Export a network, already in evaluation mode, with a dynamic batch dimension."""
    args, kwargs, shapes = export_arguments(example_inputs)
    with suppress_exporter_output():
        return torch.export.export(network, args, kwargs, dynamic_shapes=shapes, strict=False)


def export_arguments(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Return positional arguments, keyword arguments and dynamic shapes for torch.export.

    The first dimension of all tensors is the same symbol. Single samples are repeated, because torch.export treats
    a size of one as constant.

    >>> args, kwargs, shapes = export_arguments({"x": torch.zeros(1, 3)})
    >>> args, kwargs["x"].shape, list(shapes["x"])
    ((), torch.Size([2, 3]), [0])
    """
    inputs = map_tensors(example_inputs, lambda t: torch.cat([t, t]) if t.dim() and len(t) == 1 else t)
    batch = torch.export.Dim("batch")
    given = inputs if isinstance(inputs, tuple | dict) else (inputs,)
    shapes = pytree.tree_map(lambda leaf: {0: batch} if isinstance(leaf, Tensor) and leaf.dim() else None, given)
    return ((), given, shapes) if isinstance(given, dict) else (given, {}, shapes)


# -- Reading and editing graphs --------------------------------------------------------------------------------


def output_shape(node: Node) -> list[Any]:
    """Return the output sizes of a node; the batch size is a symbol."""
    value = node.meta["val"]  # A norm returns a tuple; its first element is the feature map.
    return list((value[0] if isinstance(value, tuple) else value).shape)


def same_shape(one: Node, other: Node) -> bool:
    """Return True for equal output shapes, compared as text: comparing symbols would specialize the batch size."""
    return [str(size) for size in output_shape(one)] == [str(size) for size in output_shape(other)]


def is_tensor(node: Any) -> bool:
    """Return True for a node whose output is one tensor of known shape."""
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), Tensor)


def argument(node: Node, index: int, name: str, default: Any = None) -> Any:
    """Return an argument of an operator, whether positional or by keyword."""
    return node.args[index] if index < len(node.args) else node.kwargs.get(name, default)


def stored_tensor(graph: fx.GraphModule, node: Any) -> Tensor | None:
    """Return the tensor that a get_attr node reads from the module; None for any other node."""
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    found = attrgetter(str(node.target))(graph)
    return found.detach() if isinstance(found, Tensor) else None


def add_tensor(graph: fx.GraphModule, before: Node, name: str, tensor: Tensor) -> Node:
    """Register a tensor under an unused name like `name`; return a new get_attr node, inserted before `before`."""
    name = name.replace(".", "_")
    free = next(n for i in count() if not hasattr(graph, n := f"{name}_{i}" if i else name))
    if tensor.is_floating_point():
        graph.register_parameter(free, nn.Parameter(tensor.contiguous(), requires_grad=False))
    else:
        graph.register_buffer(free, tensor.contiguous())
    with graph.graph.inserting_before(before):
        node = graph.graph.get_attr(free)
    node.meta["val"] = tensor.to("meta")
    return node


def insert_after(after: Node, target: Any, args: Sequence[Any], like: Any, **kwargs: Any) -> Node:
    """Insert a call of `target` after a node; `like` is a fake or meta tensor of its output shape."""
    with after.graph.inserting_after(after):
        node = after.graph.call_function(target, tuple(args), kwargs)
    node.meta["val"] = like
    return node


def fake_with_channels(value: Tensor, width: int, dim: int = 1) -> Tensor:
    """Return a tensor like `value` with another number of channels, for `meta["val"]`."""
    sizes = list(value.shape)
    sizes[dim] = width
    return value.new_empty(sizes)


def remove_dead(graph: fx.GraphModule) -> None:
    """Remove dead nodes and unused tensors, then recompile the graph."""
    graph.graph.eliminate_dead_code()
    graph.graph.lint()
    used = {str(node.target) for node in graph.graph.nodes if node.op == "get_attr"}
    for module_name, module in list(graph.named_modules()):
        for table in (module._parameters, module._buffers):
            for name in [n for n in table if ".".join(filter(None, (module_name, n))) not in used]:
                del table[name]
    graph.delete_all_unused_submodules()
    graph.recompile()


@contextlib.contextmanager
def suppress_exporter_output() -> Iterator[None]:
    """Suppress the progress output and internal warnings of exporters inside the block."""
    loggers = ("torch.onnx", "onnxscript", "onnx_ir", "torch.export")
    with without_warnings(logging.ERROR, *loggers), contextlib.redirect_stdout(io.StringIO()):
        yield


@contextlib.contextmanager
def without_warnings(least: int, *names: str) -> Iterator[None]:
    """Suppress warnings inside the block, and log messages of the named loggers below the level `least`."""
    levels = {logger: logger.level for logger in map(logging.getLogger, names)}
    try:
        for logger in levels:
            logger.setLevel(least)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


@dataclass
class Layer:
    """A convolution or linear layer of the graph, with weight `(filters, input channels per group, ...)`."""

    node: Node
    weight: Tensor
    bias: Tensor | None
    groups: int
    dim: int  # channel dimension of input and output

    @property
    def x(self) -> Node:
        """Input node."""
        return self.node.args[0]

    @property
    def depthwise(self) -> bool:
        """True for a depthwise convolution with one filter per channel."""
        return self.groups > 1 and self.groups == self.weight.shape[0] and self.weight.shape[1] == 1


def layer_of(graph: fx.GraphModule, node: Any) -> Layer | None:
    """Return the layer of a node; None if it is not a layer, or if another node reads its weight or bias."""
    if not isinstance(node, fx.Node) or node.target not in {*CONVS, aten.linear.default}:
        return None
    convolution = node.target in CONVS
    weight, bias = stored_tensor(graph, node.args[1]), stored_tensor(graph, argument(node, 2, "bias"))
    if weight is None or (bias is None and argument(node, 2, "bias") is not None):
        return None
    readers = Counter(n.target for n in graph.graph.nodes if n.op == "get_attr" for _ in n.users)
    if any(readers[a.target] > 1 for a in node.args[1:3] if isinstance(a, fx.Node)):
        return None
    groups = argument(node, 6, "groups", 1) if convolution else 1
    return Layer(node, weight, bias, groups, 1 if convolution else len(output_shape(node)) - 1)


def replace_layer_weights(
    graph: fx.GraphModule, layer: Layer, weight: Tensor, bias: Tensor | None, groups: int = 0
) -> None:
    """Replace weight and bias of a layer, and its number of groups if `groups` is not 0."""
    node = layer.node
    name = str(node.args[1].target)
    arguments = list(node.args) + [None] * (3 - len(node.args))
    arguments[1] = add_tensor(graph, node, name, weight)
    arguments[2] = None if bias is None else add_tensor(graph, node, name.removesuffix("weight") + "bias", bias)
    kwargs = {key: value for key, value in node.kwargs.items() if key != "bias"}
    if groups and len(arguments) > 6:
        arguments[6] = groups
    elif groups:
        kwargs["groups"] = groups
    node.args, node.kwargs = tuple(arguments), kwargs


def fold_norms(graph: fx.GraphModule) -> None:
    """Fold every batch norm that is the only reader of a layer's output into that layer."""
    for node in list(graph.graph.nodes):
        if node.target is not NORM or any(user.args[1:] != (0,) for user in node.users):
            continue
        layer = layer_of(graph, node.args[0])
        if layer is None or layer.dim != 1 or len(layer.node.users) != 1:
            continue
        found = scale_and_shift(graph, node)
        if found is None:
            continue
        scale, shift = found
        weight = layer.weight.double() * scale.reshape(-1, *[1] * (layer.weight.dim() - 1))
        bias = shift if layer.bias is None else shift + layer.bias.double() * scale
        replace_layer_weights(graph, layer, weight.to(layer.weight.dtype), bias.to(layer.weight.dtype))
        for user in list(node.users):
            user.replace_all_uses_with(layer.node)
    graph.graph.eliminate_dead_code()


def scale_and_shift(graph: fx.GraphModule, norm: Node) -> tuple[Tensor, Tensor] | None:
    """Return scale and shift of a batch norm in evaluation mode, in float64; None without running statistics."""
    weight, bias, mean, variance = (stored_tensor(graph, a) for a in norm.args[1:5])
    if mean is None or variance is None:
        return None
    scale = torch.rsqrt(variance.double() + norm.args[6]) * (1.0 if weight is None else weight.double())
    return scale, (0.0 if bias is None else bias.double()) - mean.double() * scale
