"""Round channel counts up to multiples that suit a runtime, by adding zero filters.

Tensors whose channels correspond (added, multiplied, or passed through depthwise convolution or pooling) form a
group. A group is widened as a whole, in the rows of all layers that write it and the columns of all that read it,
or not at all. Added channels are read through zero columns only, so no output changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from .capture import (
    NORM,
    REMAP,
    Layer,
    Node,
    add_tensor,
    fake_with_channels,
    is_tensor,
    layer_of,
    output_shape,
    replace_layer_weights,
    stored_tensor,
)
from .rewrite import POINTWISE

aten = torch.ops.aten
# Operators that process each channel separately and return finite values for an added channel.
_BY_CHANNEL = (
    POINTWISE
    | {
        getattr(aten, name).default
        for name in (
            *("max_pool1d", "max_pool2d", "avg_pool2d", "adaptive_max_pool2d", "clone", "contiguous"),
            *("adaptive_avg_pool1d", "adaptive_avg_pool2d", "_adaptive_avg_pool2d"),
            *("upsample_nearest2d", "upsample_bilinear2d"),
        )
    }
    | {aten.upsample_nearest2d.vec, aten.upsample_bilinear2d.vec, aten.flatten.using_ints}
)
_ELEMENTWISE_BINARY = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor)


@dataclass
class Group:
    """Tensors whose channels correspond, with the layers that write and read them."""

    width: int
    nodes: list[Node] = field(default_factory=list)
    writers: list[Layer] = field(default_factory=list)
    readers: list[Layer] = field(default_factory=list)
    fixed: bool = False
    """an operator depends on the exact number of channels"""


def groups(graph: fx.GraphModule) -> list[Group]:
    """Return the groups that may be widened, in graph order."""
    held = _Groups()
    for node in graph.graph.nodes:
        held.visit(graph, node)
    found: dict[Node, Group] = {}
    for node in held.parent:
        root = held.root(node)
        group = found.setdefault(root, Group(output_shape(root)[1]))
        group.nodes.append(node)
        group.fixed |= node in held.fixed
    for one in held.layers:
        found[held.root(one.node)].writers.append(one)
        found[held.root(one.x)].readers.append(one)
    return [group for group in found.values() if not group.fixed and group.writers]


class _Groups:
    """Union-find over the nodes of a graph whose channels (dimension 1) correspond, filled node by node."""

    def __init__(self) -> None:
        self.parent: dict[Node, Node] = {}
        self.fixed: set[Node] = set()
        self.layers: list[Layer] = []

    def root(self, node: Node) -> Node:
        while self.parent[node] is not node:
            self.parent[node] = node = self.parent[self.parent[node]]
        return node

    def visit(self, graph: fx.GraphModule, node: Node) -> None:
        if node.op == "get_attr":
            return
        if node.target is NORM:
            self.parent[node] = node  # A norm returns a tuple; its first element has the channels.
        elif is_tensor(node) and len(output_shape(node)) >= 2 and isinstance(output_shape(node)[1], int):
            self.parent[node] = node
        inputs = [x for x in node.all_input_nodes if x in self.parent]
        if node in self.parent and self._known(graph, node, inputs):
            return
        self.fixed.update(inputs, [node] if node in self.parent else [])

    def _known(self, graph: fx.GraphModule, node: Node, inputs: list[Node]) -> bool:
        """Record a node whose effect on channels is known; return False for any other, which fixes its groups."""
        one = layer_of(graph, node)
        if one is not None and one.dim == 1 and one.x in self.parent:
            if one.groups == 1:
                self.layers.append(one)
                return True
            if one.depthwise:
                self._join(node, one.x)
                return True
            return False
        if node.target is REMAP:
            return node.args[2] == 1 and bool(inputs)
        by_channel = node.target in _BY_CHANNEL and len(inputs) == 1
        if node.target is aten.flatten.using_ints:
            by_channel &= node.args[1:] in ((1,), (1, -1)) and output_shape(inputs[0])[2:] == [1] * (
                len(output_shape(inputs[0])) - 2
            )
        if node.target is aten.mean.dim and len(inputs) == 1:
            rank = len(output_shape(inputs[0]))
            dims = {dim % rank for dim in node.args[1]}
            by_channel = 1 not in dims and (0 not in dims)
        if node.target is NORM or (node.target is not None and _first_of_norm(node)):
            by_channel = len(inputs) == 1 and (node.target is not NORM or _own_tensors(graph, node))
        if by_channel:
            self._join(node, inputs[0])
            return True
        if node.target in _ELEMENTWISE_BINARY and inputs and self._meet(graph, node, inputs):
            for x in inputs:
                self._join(node, x)
            return True
        return False

    def _meet(self, graph: fx.GraphModule, node: Node, inputs: list[Node]) -> bool:
        width = output_shape(node)[1]
        if any(output_shape(x)[1] != width or len(output_shape(x)) != len(output_shape(node)) for x in inputs):
            return False
        others = [a for a in node.args if isinstance(a, fx.Node) and a not in inputs]
        return all(_is_per_channel(graph, other, node) or _one_number(graph, other) for other in others)

    def _join(self, one: Node, other: Node) -> None:
        self.parent[self.root(one)] = self.root(other)


def _first_of_norm(node: Node) -> bool:
    x = node.args[0] if node.args else None
    return isinstance(x, fx.Node) and x.target is NORM and node.args[1:] == (0,)


def _own_tensors(graph: fx.GraphModule, node: Node) -> bool:
    held = [a for a in node.args[1:5] if a is not None]
    return all(stored_tensor(graph, a) is not None and len(a.users) == 1 for a in held)


def _is_per_channel(graph: fx.GraphModule, node: Node, like: Node) -> bool:
    """Return True for a stored tensor with one number per channel of `like`, read by a single operator."""
    held, sizes = stored_tensor(graph, node), output_shape(like)
    if held is None or len(node.users) > 1 or held.dim() != len(sizes):
        return False
    return bool(1 < held.numel() == held.shape[1] == sizes[1])


def _one_number(graph: fx.GraphModule, node: Node) -> bool:
    """Return True for a stored scalar, which applies to any number of channels."""
    held = stored_tensor(graph, node)
    return held is not None and held.numel() == 1


# -- Widening ------------------------------------------------------------------------------------------------


def widen(graph: fx.GraphModule, rule: Callable[[int], int]) -> None:
    """Widen every group to `rule(width)` channels where that is more than it has."""
    for group in groups(graph):
        width = rule(group.width)
        if width > group.width:
            _widen(graph, group, width - group.width)


def _widen(graph: fx.GraphModule, group: Group, more: int) -> None:
    for one in group.writers:
        fresh = layer_of(graph, one.node)  # Its columns may have been widened since.
        assert fresh is not None
        bias = None if fresh.bias is None else _pad_dim(fresh.bias, 0, more)
        replace_layer_weights(graph, fresh, _pad_dim(fresh.weight, 0, more), bias)
    for one in group.readers:
        fresh = layer_of(graph, one.node)
        assert fresh is not None
        replace_layer_weights(graph, fresh, _pad_dim(fresh.weight, 1, more), fresh.bias)
    for node in group.nodes:
        if node.target is NORM:
            _widen_norm(graph, node, more)
        elif node.target in _ELEMENTWISE_BINARY:
            _widen_lines(graph, node, more)
        elif node.target is REMAP:
            node.args = (node.args[0], [*node.args[1], *[-1] * more], 1)
        elif (one_layer := layer_of(graph, node)) is not None and one_layer.depthwise:
            bias = None if one_layer.bias is None else _pad_dim(one_layer.bias, 0, more)
            replace_layer_weights(
                graph, one_layer, _pad_dim(one_layer.weight, 0, more), bias, groups=group.width + more
            )
        if isinstance(node.meta.get("val"), Tensor):
            node.meta["val"] = fake_with_channels(node.meta["val"], group.width + more)


def _widen_norm(graph: fx.GraphModule, node: Node, more: int) -> None:
    arguments = list(node.args)
    for index, filler in ((1, 0.0), (2, 0.0), (3, 0.0), (4, 1.0)):
        held = stored_tensor(graph, arguments[index])
        if held is not None:
            name = str(arguments[index].target)
            arguments[index] = add_tensor(graph, node, name, _pad_dim(held, 0, more, filler))
    node.args = tuple(arguments)


def _widen_lines(graph: fx.GraphModule, node: Node, more: int) -> None:
    arguments: list[Any] = list(node.args)
    for index, given in enumerate(arguments):
        if isinstance(given, fx.Node) and _is_per_channel(graph, given, node):
            held = stored_tensor(graph, given)
            assert held is not None
            arguments[index] = add_tensor(graph, node, str(given.target), _pad_dim(held, 1, more))
    node.args = tuple(arguments)


def _pad_dim(tensor: Tensor, dim: int, more: int, filler: float = 0.0) -> Tensor:
    sizes = list(tensor.shape)
    sizes[dim] = more
    return torch.cat([tensor, tensor.new_full(sizes, filler)], dim)
