"""A network as a graph of functional operators that may be rewritten.

A network and example inputs enter; a `GraphModule` leaves that computes the same in evaluation mode for a batch
of any size.  Every remap of an extracted network stands in it as one operator, `sbf_pruner::remap`.  What holds:
the network comes out as it went in; nothing in the graph writes in place; every node knows its shape.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from ..copies import real_copy
from ..errors import PruningError
from ..inputs import map_tensors
from ..layers import Remap


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


def capture(model: nn.Module, example_inputs: Any) -> fx.GraphModule:
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
