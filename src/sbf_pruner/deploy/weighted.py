"""Layers with stored weights in a captured graph: convolutions and linear layers, and the norms behind them.

A node enters; what it is leaves, with its tensors, which may be replaced.  What holds: a weight that more than
one node reads is never touched, so a module that is called twice stays one module.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from .captured import Node, argument, shape, store, stored

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
