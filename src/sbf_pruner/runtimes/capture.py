"""A network as a graph of functional operators that may be rewritten.

A network and example inputs enter; a `GraphModule` leaves that computes the same in evaluation mode for a batch
of any size.  Every remap of an extracted network stands in it as one operator, `sbf_pruner::remap`.  What holds:
the network comes out as it went in; nothing in the graph writes in place; every node knows its shape.

Layers with stored weights in a captured graph: convolutions and linear layers, and the norms behind them.

A node enters; what it is leaves, with its tensors, which may be replaced.  What holds: a weight that more than
one node reads is never touched, so a module that is called twice stays one module.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from ..errors import PruningError
from ..modules import Remap
from ..utils.user_model import map_tensors, real_copy


@torch.library.custom_op("sbf_pruner::remap", mutates_args=())
def remap(x: Tensor, source: list[int], dim: int) -> Tensor:
    """Channel `i` of the result is channel `source[i]` of x, or zero where that is -1."""
    moved: Tensor = Remap(source, dim, x.shape[dim])(x)
    return moved.clone() if moved is x else moved


@remap.register_fake
def _shape_of_remap(x: Tensor, source: list[int], dim: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = len(source)
    return x.new_empty(shape)


_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
REMAP = torch.ops.sbf_pruner.remap.default
# A node of the graph; the types that torch.fx gives for its parts forbid most of what is done with them.
Node = Any


class _Marked(nn.Module):
    """A remap that is captured as one operator."""

    def __init__(self, held: Remap) -> None:
        super().__init__()
        self.source, self.dim = list(held.source), held.dim

    def forward(self, x: Tensor) -> Tensor:
        return remap(x, self.source, self.dim % x.dim())


def capture_graph(model: nn.Module, example_inputs: Any) -> fx.GraphModule:
    """The network's operators in evaluation mode, with a batch of any size."""
    network = evaluated_copy(model)
    network = _Marked(network) if isinstance(network, Remap) else network
    for module in list(network.modules()):
        for name, child in module._modules.items():
            if isinstance(child, Remap):
                module._modules[name] = _Marked(child)
    with quietly(), torch.no_grad():
        try:
            program = exported(network, example_inputs).run_decompositions({})
            graph = program.module(check_guards=False)
        except Exception as error:
            raise PruningError(
                f"{type(model).__name__} cannot be exported ({first_line(error)}); its batch must be free to have "
                "any size, and its path must not depend on the values of the input"
            ) from error
    assert isinstance(graph, fx.GraphModule)
    return graph


def evaluated_copy(model: nn.Module) -> nn.Module:
    """A copy of a network, also of one that was compiled, in evaluation mode and without gradients."""
    with quietly():
        return real_copy(getattr(model, "_orig_mod", model)).eval().requires_grad_(False)


def exported(network: nn.Module, example_inputs: Any) -> torch.export.ExportedProgram:
    """torch.export's program of a network in evaluation mode, with a batch of any size."""
    inputs = batch_of_two(example_inputs)
    args, kwargs = arguments(inputs)
    with quietly():
        return torch.export.export(
            network, args, kwargs, dynamic_shapes=dynamic_batch(kwargs or args), strict=False
        )


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Example inputs as positional and keyword arguments.

    >>> arguments({"x": 1}), arguments(2)
    (((), {'x': 1}), ((2,), {}))
    """
    if isinstance(inputs, dict):
        return (), inputs
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}


def batch_of_two(example_inputs: Any) -> Any:
    """The inputs with at least two samples each: torch takes a size of one for a constant."""
    return map_tensors(example_inputs, lambda t: torch.cat([t, t]) if t.dim() and len(t) == 1 else t)


def dynamic_batch(inputs: Any) -> Any:
    """For torch.export: the first dimension of every tensor may have any size, the same for all of them."""
    batch = torch.export.Dim("batch")
    return pytree.tree_map(lambda leaf: {0: batch} if isinstance(leaf, Tensor) and leaf.dim() else None, inputs)


# -- what the rewriting asks of a graph ------------------------------------------------------------------------


def shape(node: Node) -> list[Any]:
    """The sizes of what a node gives; the batch is a symbol."""
    value = node.meta["val"]  # of a norm it is a tuple, whose first part is the map
    return list((value[0] if isinstance(value, tuple) else value).shape)


def same_shape(one: Node, other: Node) -> bool:
    """Without asking the symbols, which would pin the batch."""
    return [str(size) for size in shape(one)] == [str(size) for size in shape(other)]


def is_tensor(node: Any) -> bool:
    """Is this a node that gives one tensor of a known shape?"""
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), Tensor)


def argument(node: Node, index: int, name: str, default: Any = None) -> Any:
    """One argument of an operator, however it was given."""
    return node.args[index] if index < len(node.args) else node.kwargs.get(name, default)


def stored(graph: fx.GraphModule, node: Any) -> Tensor | None:
    """The tensor behind a node that reads one from the module; None for any other node."""
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    held: Any = graph
    for part in str(node.target).split("."):
        held = getattr(held, part)
    return held.detach() if isinstance(held, Tensor) else None


def store(graph: fx.GraphModule, before: Node, name: str, tensor: Tensor) -> Node:
    """A node that reads a new tensor, kept in the module under a name like the given one."""
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


def insert(after: Node, target: Any, args: Sequence[Any], like: Any, **kwargs: Any) -> Node:
    """A new operator behind a node; `like` is what it gives, as a tensor without values."""
    with after.graph.inserting_after(after):
        node = after.graph.call_function(target, tuple(args), kwargs)
    node.meta["val"] = like
    return node


def widened(value: Tensor, width: int, dim: int = 1) -> Tensor:
    """What a node gives, as a tensor without values, with another number of channels."""
    sizes = list(value.shape)
    sizes[dim] = width
    return value.new_empty(sizes)


def tidy(graph: fx.GraphModule) -> None:
    """Drop what nobody reads, and the tensors nobody reads."""
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
def quietly() -> Iterator[None]:
    """Exporters print their progress and warn of their own internals; neither is for the user."""
    with (
        without_warnings(logging.ERROR, "torch.onnx", "onnxscript", "onnx_ir", "torch.export"),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        yield


@contextlib.contextmanager
def without_warnings(least: int, *names: str) -> Iterator[None]:
    """While entered, nothing warns, and the loggers named say what is of this level at least."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(least)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def first_line(error: BaseException) -> str:
    """The kind of an error and the first line it says, without colours."""
    text = _COLOURS.sub("", str(error)).strip().splitlines()
    return f"{type(error).__name__}: {text[0].rstrip('.')}" if text else type(error).__name__


aten = torch.ops.aten
CONVS = {getattr(getattr(aten, f"conv{n}d"), kind) for n in (1, 2, 3) for kind in ("default", "padding")}
NORM = aten._native_batch_norm_legit_no_training.default


@dataclass
class Layer:
    """A convolution or a linear layer: rows of its weight are filters, columns are what it reads."""

    node: Node
    weight: Tensor
    bias: Tensor | None
    groups: int
    dim: int
    """Where the channels are, in what enters and in what leaves."""

    @property
    def x(self) -> Node:
        """What it reads."""
        return self.node.args[0]

    @property
    def depthwise(self) -> bool:
        """Does every channel stay by itself?"""
        return self.groups > 1 and self.groups == self.weight.shape[0] and self.weight.shape[1] == 1

    @property
    def padded(self) -> bool:
        """Does it add zeros around the map?"""
        given = argument(self.node, 4, "padding", 0) if self.node.target in CONVS else 0
        return given != "valid" and given not in (0, [0], [0, 0], [0, 0, 0])


def layer(graph: fx.GraphModule, node: Any) -> Layer | None:
    """The layer a node is, if its weight is stored and its own."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return None
    convolution = node.target in CONVS
    if not convolution and node.target is not aten.linear.default:
        return None
    weight, bias = stored(graph, node.args[1]), stored(graph, argument(node, 2, "bias"))
    if weight is None or (bias is None and argument(node, 2, "bias") is not None):
        return None
    readers = _readers(graph)
    if any(readers[str(a.target)] > 1 for a in node.args[1:3] if isinstance(a, fx.Node)):
        return None
    groups = argument(node, 6, "groups", 1) if convolution else 1
    return Layer(node, weight, bias, groups, 1 if convolution else len(shape(node)) - 1)


def replace(graph: fx.GraphModule, held: Layer, weight: Tensor, bias: Tensor | None, groups: int = 0) -> None:
    """Give a layer other tensors, and another number of groups if that is named."""
    node = held.node
    name = str(node.args[1].target)
    arguments = list(node.args) + [None] * (3 - len(node.args))
    arguments[1] = store(graph, node, name, weight)
    arguments[2] = None if bias is None else store(graph, node, name.removesuffix("weight") + "bias", bias)
    kwargs = {key: value for key, value in node.kwargs.items() if key != "bias"}
    if groups and len(arguments) > 6:
        arguments[6] = groups
    elif groups:
        kwargs["groups"] = groups
    node.args, node.kwargs = tuple(arguments), kwargs


def fold_norms(graph: fx.GraphModule) -> None:
    """Fold every batch norm that alone reads a layer's output into that layer."""
    for node in list(graph.graph.nodes):
        if node.target is not NORM or any(user.args[1:] != (0,) for user in node.users):
            continue
        held = layer(graph, node.args[0])
        if held is None or held.dim != 1 or len(held.node.users) != 1:
            continue
        tensors = [stored(graph, argument) for argument in node.args[1:5]]
        found = scale_and_shift(tensors, node.args[6], held.weight.shape[0])
        if found is None:
            continue
        scale, shift = found
        weight = held.weight.double() * scale.reshape(-1, *[1] * (held.weight.dim() - 1))
        bias = shift if held.bias is None else shift + held.bias.double() * scale
        replace(graph, held, weight.to(held.weight.dtype), bias.to(held.weight.dtype))
        for user in list(node.users):
            user.replace_all_uses_with(held.node)
    graph.graph.eliminate_dead_code()


def scale_and_shift(tensors: list[Tensor | None], eps: Any, width: int) -> tuple[Tensor, Tensor] | None:
    """What a batch norm in evaluation mode multiplies by and adds, in double precision."""
    weight, bias, mean, variance = tensors
    if mean is None or variance is None:
        return None
    scale = torch.rsqrt(variance.double() + eps) * (1.0 if weight is None else weight.double())
    return scale, (torch.zeros(width).double() if bias is None else bias.double()) - mean.double() * scale


def _readers(graph: fx.GraphModule) -> Counter[str]:
    """How many nodes read each stored tensor."""
    found: Counter[str] = Counter()
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            found[str(node.target)] += len(node.users)
    return found
