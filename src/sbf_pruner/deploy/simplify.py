"""What every form of a network gains from: norms folded, constants gone, remaps merged with what is beside them.

A captured graph enters and is rewritten.  What holds: it computes the same function up to rounding (of finite
numbers), and no step here makes any layer larger, so there is nothing to choose.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from .captured import REMAP, Node, argument, insert, is_tensor, same_shape, shape, store, stored, tidy
from .remaps import POINTWISE, find_remaps, merge_remaps, taken_rows
from .weighted import NORM, fold_norms, layer, scale_and_shift

aten = torch.ops.aten
_END = 2**31 - 1
_ZEROS = (aten.new_zeros.default, aten.zeros.default, aten.zeros_like.default)


def simplify(graph: fx.GraphModule) -> None:
    """Rewrite a captured graph in place."""
    drop_idle(graph)
    find_remaps(graph)
    fold_norms(graph)
    drop_constants(graph)
    merge_remaps(graph)
    fold_norms(graph)  # a remap between a convolution and its norm may have gone
    flatten_by_name(graph)
    tidy(graph)


def drop_idle(graph: fx.GraphModule) -> None:
    """Drop what gives its input as it came: slices of everything, dropout."""
    for node in list(graph.graph.nodes):
        if _idle(node):
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)


def _idle(node: Node) -> bool:
    if node.target is aten.slice.Tensor:
        start, end, step = argument(node, 2, "start"), argument(node, 3, "end"), argument(node, 4, "step", 1)
        return start in (0, None) and step == 1 and (end is None or (isinstance(end, int) and end >= _END))
    return node.target in (aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default)


def flatten_by_name(graph: fx.GraphModule) -> None:
    """Write a view of (batch, channels, 1, 1) as (batch, channels) without its width, which may change."""
    for node in list(graph.graph.nodes):
        if node.target not in (aten.view.default, aten.reshape.default) or not is_tensor(node.args[0]):
            continue
        before, behind = shape(node.args[0]), shape(node)
        if before[2:] == [1] * (len(before) - 2) and [*map(str, behind)] == [*map(str, before[:2])]:
            node.target, node.args = aten.flatten.using_ints, (node.args[0], 1)


# -- constants -----------------------------------------------------------------------------------------------


def drop_constants(graph: fx.GraphModule) -> None:
    """Leave out additions of zeros, and add what is one number per channel as such.

    So the branch of a block that has vanished is not added, and what only it needed is not computed.
    """
    known: dict[Node, Tensor] = {}
    for node in list(graph.graph.nodes):
        found = _constant(graph, node, known) if is_tensor(node) and len(shape(node)) >= 2 else None
        if found is not None:
            known[node] = found
        elif node.target is aten.add.Tensor and not node.kwargs and len(node.args) == 2:
            _drop_from(graph, node, known)
        elif node.target is aten.cat.default and argument(node, 1, "dim", 0) == 1:
            _leave_out(node, known)
    graph.graph.eliminate_dead_code()


def _drop_from(graph: fx.GraphModule, node: Node, known: dict[Node, Tensor]) -> None:
    for constant, other in (node.args, node.args[::-1]):
        if constant not in known or not is_tensor(other) or not same_shape(other, node):
            continue
        values = known[constant]
        if not values.any():
            node.replace_all_uses_with(other)
        else:
            line = values.reshape(1, -1, *[1] * (len(shape(node)) - 2)).to(node.meta["val"].dtype)
            node.args = (other, store(graph, node, f"{node.name}_constant", line))
        return


def _leave_out(node: Node, known: dict[Node, Tensor]) -> None:
    """Write a concatenation of one tensor with zeros as a remap of that tensor."""
    parts: Any = list(node.args[0])
    real = [part for part in parts if part not in known or known[part].any()]
    if len(real) == 1:
        source: list[int] = []
        for part in parts:
            width = shape(part)[1]
            source += range(width) if part is real[0] else [-1] * width
        node.replace_all_uses_with(insert(node, REMAP, (real[0], source, 1), node.meta["val"]))


def _constant(graph: fx.GraphModule, node: Node, known: dict[Node, Tensor]) -> Tensor | None:
    """The number that every channel (dimension 1) of a node holds everywhere, if it is so."""
    if node.target in _ZEROS:
        width = shape(node)[1]
        return torch.zeros(width, dtype=torch.float64) if isinstance(width, int) else None
    x: Any = node.args[0] if node.args else None
    if isinstance(x, fx.Node) and x.target is NORM and node.args[1:] == (0,) and x.args[0] in known:
        pair = scale_and_shift([stored(graph, a) for a in x.args[1:5]], x.args[6], shape(node)[1])
        return None if pair is None else known[x.args[0]] * pair[0] + pair[1]
    if node.target in (aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor) and not node.kwargs:
        both = [known.get(a) for a in node.args if isinstance(a, fx.Node)]
        if len(both) != 2 or both[0] is None or both[1] is None or not all(same_shape(a, node) for a in node.args):
            return None
        found: Tensor = node.target(*both)
        return found
    if x not in known:
        return None
    if node.target in POINTWISE:
        result: Tensor = node.target(known[x], *node.args[1:], **node.kwargs)
        return result
    if node.target is REMAP and node.args[2] == 1:
        return taken_rows(known[x], node.args[1])
    held = layer(graph, node)
    if held is not None and held.dim == 1 and not known[x].any():
        width = held.weight.shape[0]
        return torch.zeros(width, dtype=torch.float64) if held.bias is None else held.bias.double()
    return None
