"""Remaps written out as ordinary operators, in the way that a runtime likes.

A captured graph enters whose remaps have been merged as far as they can be; it leaves without any.  A remap is a
selection, a padding, an addition at some places, or a 1x1 convolution of zeros and ones.
"""

from __future__ import annotations

import torch
from torch import fx

from .captured import REMAP, Node, argument, insert, is_tensor, same_shape, shape, store, widened
from .remaps import parts, taken_rows

aten = torch.ops.aten


def shortcuts_as_convolutions(graph: fx.GraphModule) -> None:
    """Write a map read at every n-th pixel, with the remap behind it, as one 1x1 convolution of zeros and ones."""
    for node in list(graph.graph.nodes):
        if (
            not node.users
            or not is_tensor(node)
            or len(shape(node)) != 4
            or not node.meta["val"].is_floating_point()
        ):
            continue
        source: list[int] | None = None
        last = node
        if node.target is REMAP:
            last, source, _ = parts(node)
        elif any(user.target in (REMAP, aten.slice.Tensor) for user in node.users):
            continue  # seen from its reader
        steps, x = _strided(last)
        width = shape(x)[1]
        if x is last or not isinstance(width, int):
            continue
        fresh = _constant_convolution(graph, node, x, source or list(range(width)), steps)
        node.replace_all_uses_with(fresh)
    graph.graph.eliminate_dead_code()


def _strided(node: Node) -> tuple[list[int], Node]:
    """The steps at which slices read a map's rows and columns, and the map."""
    steps = [1, 1]
    while node.target is aten.slice.Tensor and argument(node, 1, "dim", 0) in (2, 3):
        dim, start = argument(node, 1, "dim", 0), argument(node, 2, "start", 0)
        end, step = argument(node, 3, "end"), argument(node, 4, "step", 1)
        x = node.args[0]
        if start not in (0, None) or not isinstance(x, fx.Node):
            break
        if end is not None and not (isinstance(end, int) and end >= shape(x)[dim]):
            break
        steps[dim - 2] *= step
        node = x
    return steps, node


def _constant_convolution(graph: fx.GraphModule, node: Node, x: Node, source: list[int], steps: list[int]) -> Node:
    eye = torch.eye(shape(x)[1], dtype=x.meta["val"].dtype)
    weight = store(graph, node, "moved_channels", taken_rows(eye, source)[:, :, None, None])
    return insert(node, aten.conv2d.default, (x, weight, None, steps), node.meta["val"])


def write_remaps(graph: fx.GraphModule, way: str) -> None:
    """Write every remap that is left as ordinary operators: "gather", "add" (where it is added), "convolution"."""
    for node in [n for n in graph.graph.nodes if n.target is REMAP]:
        x, source, dim = parts(node)
        maps = len(shape(node)) == 4 and dim == 1 and node.meta["val"].is_floating_point()
        if way == "add" and all(_adds(user, node) for user in node.users):
            _write_as_additions(graph, node)
            continue
        if way == "convolution" and maps:
            fresh = _constant_convolution(graph, node, x, source, [1, 1])
        else:
            fresh = _gathered(graph, node)
        node.replace_all_uses_with(fresh)
        graph.graph.erase_node(node)


def _adds(user: Node, node: Node) -> bool:
    if user.target is not aten.add.Tensor or user.kwargs or len(user.args) != 2:
        return False
    other = user.args[1] if user.args[0] is node else user.args[0]
    return is_tensor(other) and other is not node and same_shape(other, node)


def _write_as_additions(graph: fx.GraphModule, node: Node) -> None:
    x, source, dim = parts(node)
    kept = [i for i in source if i >= 0]
    for user in list(node.users):
        taken = x if kept == list(range(shape(x)[dim])) else _indexed(graph, user, x, kept, dim)
        put = store(graph, user, "put", torch.tensor([o for o, i in enumerate(source) if i >= 0]))
        other = user.args[1] if user.args[0] is node else user.args[0]
        user.target = aten.index_add.default
        user.args = (other, dim, put, taken)
    graph.graph.erase_node(node)


def _gathered(graph: fx.GraphModule, node: Node) -> Node:
    x, source, dim = parts(node)
    width, rank = shape(x)[dim], len(shape(x))
    ends = [0] * (2 * (rank - 1 - dim))
    first = next((o for o, i in enumerate(source) if i >= 0), 0)
    if source == [-1] * first + list(range(width)) + [-1] * (len(source) - width - first):
        pads = [*ends, first, len(source) - width - first]
        return insert(node, aten.constant_pad_nd.default, (x, pads), node.meta["val"])
    if -1 not in source:
        return _indexed(graph, node, x, source, dim)
    behind = insert(x, aten.constant_pad_nd.default, (x, [*ends, 0, 1]), widened(x.meta["val"], width + 1, dim))
    node.prepend(behind)
    return _indexed(graph, node, behind, [width if i < 0 else i for i in source], dim)


def _indexed(graph: fx.GraphModule, before: Node, x: Node, source: list[int], dim: int) -> Node:
    table = store(graph, before, "take", torch.tensor(source))
    with graph.graph.inserting_before(before):
        node = graph.graph.call_function(aten.index_select.default, (x, dim, table))
    node.meta["val"] = widened(x.meta["val"], len(source), dim)
    return node
