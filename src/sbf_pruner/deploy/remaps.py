"""Channels that are moved: found in a captured graph, and merged with the layers beside them.

What moves channels (a remap of an extracted network, a selection, a padding with zeros) becomes one operator.
It is merged with another one, with the columns of the layers that read it and with the rows of the layer that
feeds it; `written` turns what is left into ordinary operators.  What holds: the function stays the same up to
rounding.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx

from .captured import REMAP, Node, argument, insert, is_tensor, shape, stored, widened
from .weighted import Layer, layer, replace

aten = torch.ops.aten
Choice = Callable[[Node], bool]
# Operators that treat every number of one tensor by itself, and give a number for any number.
_NAMES = (
    "relu relu6 silu gelu mish hardswish leaky_relu elu celu selu tanh sigmoid hardsigmoid hardtanh clamp softplus"
)
POINTWISE = {getattr(aten, name).default for name in _NAMES.split()}


def never(node: Node) -> bool:
    """No remap."""
    return False


def find_remaps(graph: fx.GraphModule) -> None:
    """Write selections of channels, and channels padded with zeros, as remaps, which can be merged."""
    for node in list(graph.graph.nodes):
        if not (is_tensor(node) and node.args and is_tensor(node.args[0]) and len(shape(node)) >= 2):
            continue
        source = _selected(graph, node) or _padded(node)
        if source is not None:
            fresh = insert(node, REMAP, (node.args[0], source, 1), node.meta["val"])
            node.replace_all_uses_with(fresh)
            graph.graph.erase_node(node)


def _selected(graph: fx.GraphModule, node: Node) -> list[int] | None:
    if node.target is not aten.index_select.default or node.args[1] != 1:
        return None
    table = stored(graph, node.args[2])
    return None if table is None else table.tolist()


def _padded(node: Node) -> list[int] | None:
    if node.target is aten.pad.default:
        mode, value = argument(node, 2, "mode", "constant"), argument(node, 3, "value")
    elif node.target is aten.constant_pad_nd.default:
        mode, value = "constant", argument(node, 2, "value", 0)
    else:
        return None
    x, pads = node.args[0], node.args[1]
    assert isinstance(x, fx.Node) and isinstance(pads, list | tuple)
    rank, width = len(shape(x)), shape(x)[1]
    at = 2 * (rank - 2)  # torch lists the padding from the last dimension on
    plain = mode == "constant" and value in (None, 0, 0.0) and len(pads) >= at + 2
    if not plain or not all(isinstance(pad, int) and pad >= 0 for pad in pads) or not isinstance(width, int):
        return None
    sizes: list[int] = list(pads)
    before, behind = sizes[at : at + 2]
    if any(sizes[:at] + sizes[at + 2 :]):
        return None
    return [-1] * before + list(range(width)) + [-1] * behind


# -- merging -----------------------------------------------------------------------------------------------


def merge_remaps(
    graph: fx.GraphModule, rows: Choice = never, columns: Choice = never, *, sink: bool = False
) -> None:
    """Merge remaps with what is beside them wherever that makes no layer larger, or where it is asked for.

    `rows`: a remap that adds zeros to what a layer gives becomes filters of zeros.  `columns`: a remap that
    selects from what a layer reads becomes columns of zeros.  `sink`: a remap that adds zeros moves behind an
    activation, towards the layers that read it, once it is clear that it is not to become filters.
    """
    changed = True
    while changed:
        changed = False
        for node in [n for n in graph.graph.nodes if n.target is REMAP]:
            changed |= _merge(graph, node, rows, columns) or (sink and _sink(graph, node))
    graph.graph.eliminate_dead_code()


def _merge(graph: fx.GraphModule, node: Node, rows: Choice, columns: Choice) -> bool:
    x, source, dim = parts(node)
    width = shape(x)[dim]
    if not node.users:
        graph.graph.erase_node(node)
        return True
    if source == list(range(width)):
        node.replace_all_uses_with(x)
        return True
    if x.target is REMAP and parts(x)[2] == dim:
        inner, first, _ = parts(x)
        node.args = (inner, [first[i] if i >= 0 else -1 for i in source], dim)
        return True
    if (len(source) >= width or columns(node)) and _into_columns(graph, node):
        return True
    return _into_rows(graph, node, rows)


def _into_columns(graph: fx.GraphModule, node: Node) -> bool:
    """Merge a remap with the columns of the layers that read it; were there any?"""
    x, source, dim = parts(node)
    readers = [layer(graph, user) for user in node.users]
    merged = [held for held in readers if held is not None and _reads(held, node, dim)]
    for held in merged:
        weight = torch.zeros_like(held.weight[:, :1]).repeat_interleave(shape(x)[dim], 1)
        kept = [i for i, j in enumerate(source) if j >= 0]
        places = torch.tensor([source[i] for i in kept], dtype=torch.int64, device=weight.device)
        replace(graph, held, weight.index_add_(1, places, held.weight[:, kept]), held.bias)
        held.node.args = (x, *held.node.args[1:])
    return bool(merged)


def _into_rows(graph: fx.GraphModule, node: Node, rows: Choice) -> bool:
    """Merge a remap with the rows of the layer that feeds it, if that gets no larger or where it is asked for."""
    x, source, dim = parts(node)
    between, first = [], x
    while _keeps_zero(first) and len(first.users) == 1:
        between.append(first)
        first = first.args[0]
    feeding = layer(graph, first)
    if feeding is not None and feeding.groups == 1 and feeding.dim == dim and len(first.users) == 1:
        selects = min(source) >= 0 and len(source) <= shape(x)[dim]
        if selects or rows(node):
            bias = None if feeding.bias is None else taken_rows(feeding.bias, source)
            replace(graph, feeding, taken_rows(feeding.weight, source), bias)
            for passed in (first, *between):
                passed.meta["val"] = widened(passed.meta["val"], len(source), dim)
            node.replace_all_uses_with(x)
            return True
    return False


def _sink(graph: fx.GraphModule, node: Node) -> bool:
    """Move a remap that adds zeros behind an elementwise operator, which then has less to do."""
    x, source, dim = parts(node)
    user = next(iter(node.users))
    if len(node.users) > 1 or not _keeps_zero(user) or len(source) < shape(x)[dim]:
        return False
    user.args = (x, *user.args[1:])
    like, user.meta["val"] = user.meta["val"], widened(user.meta["val"], shape(x)[dim], dim)
    readers = list(user.users)
    fresh = insert(user, REMAP, (user, source, dim), like)
    for reader in readers:
        reader.replace_input_with(user, fresh)
    return True


def _keeps_zero(node: Node) -> bool:
    plain = not any(isinstance(a, fx.Node) for a in (*node.args[1:], *node.kwargs.values()))
    return (
        node.target in POINTWISE and plain and not node.target(torch.zeros(1), *node.args[1:], **node.kwargs).any()
    )


def parts(node: Node) -> tuple[Node, list[int], int]:
    """What a remap moves, the place each channel comes from (-1: zero), and the dimension."""
    x, source, dim = node.args
    assert isinstance(x, fx.Node) and isinstance(dim, int)
    return x, list(source), dim


def _reads(held: Layer, node: Node, dim: int) -> bool:
    return held.x is node and held.groups == 1 and held.dim == dim


def taken_rows(tensor: Tensor, source: list[int]) -> Tensor:
    """Rows of a tensor by number; -1 is a row of zeros."""
    return torch.cat([tensor, torch.zeros_like(tensor[:1])])[source]
