"""Function-preserving rewrites of a captured graph: norm and constant folding, remaps, in-place operators.

A remap is an operator that moves channels: a `Remap` of an extracted network, an index_select, or a padding with
zero channels. Remaps are merged with each other, with the columns (input channels) of the weights that read them
and with the rows (filters) of the weight before them; the others are written as ordinary operators. `simplify`
makes no layer larger, so it suits every runtime; the other rewrites are chosen per form. Results are equal up to
rounding, for finite values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from .capture import (
    CONVS,
    NORM,
    REMAP,
    Node,
    add_tensor,
    argument,
    fake_with_channels,
    fold_norms,
    insert_after,
    is_tensor,
    layer_of,
    output_shape,
    remove_dead,
    replace_layer_weights,
    same_shape,
    scale_and_shift,
    stored_tensor,
)

aten = torch.ops.aten
Choice = Callable[[Node], bool]
# Elementwise operators of one tensor that return a finite number for every finite number.
POINTWISE = {
    getattr(aten, name).default
    for name in (
        *("relu", "relu6", "leaky_relu", "elu", "celu", "selu", "silu", "gelu", "mish", "softplus"),
        *("tanh", "sigmoid", "clamp", "hardswish", "hardsigmoid", "hardtanh"),
    )
}
_END = 2**31 - 1
_ZEROS = (aten.new_zeros.default, aten.zeros.default, aten.zeros_like.default)


def simplify(graph: fx.GraphModule) -> None:
    """Apply, in place, all rewrites that help in every runtime."""
    remove_identity_ops(graph)
    find_remaps(graph)
    fold_norms(graph)
    drop_constants(graph)
    merge_remaps(graph)
    fold_norms(graph)  # A remap between a convolution and its norm may have been merged.
    flatten_by_name(graph)
    remove_dead(graph)


def remove_identity_ops(graph: fx.GraphModule) -> None:
    """Remove operators that return their input unchanged: full slices and dropout."""
    for node in list(graph.graph.nodes):
        identity = node.target in (aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default)
        if node.target is aten.slice.Tensor:
            start, end, step = argument(node, 2, "start"), argument(node, 3, "end"), argument(node, 4, "step", 1)
            to_end = end is None or (isinstance(end, int) and end >= _END)
            identity = start in (0, None) and step == 1 and to_end
        if identity:
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)


def flatten_by_name(graph: fx.GraphModule) -> None:
    """Replace a view from `(N, C, 1, 1)` to `(N, C)` by a flatten, which has no number of channels as argument."""
    for node in list(graph.graph.nodes):
        if node.target in (aten.view.default, aten.reshape.default) and is_tensor(node.args[0]):
            before, after = output_shape(node.args[0]), output_shape(node)
            if before[2:] == [1] * (len(before) - 2) and [*map(str, after)] == [*map(str, before[:2])]:
                node.target, node.args = aten.flatten.using_ints, (node.args[0], 1)


# -- Constants -----------------------------------------------------------------------------------------------


def drop_constants(graph: fx.GraphModule) -> None:
    """Remove additions of zeros, and replace constant operands of additions by one stored number per channel.

    This removes a residual branch without filters, including all operators whose outputs only it uses.
    """
    known: dict[Node, Tensor] = {}
    for node in list(graph.graph.nodes):
        found = _constant(graph, node, known) if is_tensor(node) and len(output_shape(node)) >= 2 else None
        if found is not None:
            known[node] = found
        elif node.target is aten.add.Tensor and not node.kwargs and len(node.args) == 2:
            _drop_constant_operand(graph, node, known)
        elif node.target is aten.cat.default and argument(node, 1, "dim", 0) == 1:
            _concat_to_remap(node, known)
    graph.graph.eliminate_dead_code()


def _drop_constant_operand(graph: fx.GraphModule, node: Node, known: dict[Node, Tensor]) -> None:
    for constant, other in (node.args, node.args[::-1]):
        if constant not in known or not is_tensor(other) or not same_shape(other, node):
            continue
        values = known[constant]
        if not values.any():
            node.replace_all_uses_with(other)
        else:
            line = values.reshape(1, -1, *[1] * (len(output_shape(node)) - 2)).to(node.meta["val"].dtype)
            node.args = (other, add_tensor(graph, node, f"{node.name}_constant", line))
        return


def _concat_to_remap(node: Node, known: dict[Node, Tensor]) -> None:
    """Replace a concatenation of one tensor with zeros by a remap of that tensor."""
    parts: Any = list(node.args[0])
    real = [part for part in parts if part not in known or known[part].any()]
    if len(real) == 1:
        source: list[int] = []
        for part in parts:
            width = output_shape(part)[1]
            source += range(width) if part is real[0] else [-1] * width
        node.replace_all_uses_with(insert_after(node, REMAP, (real[0], source, 1), node.meta["val"]))


def _constant(graph: fx.GraphModule, node: Node, known: dict[Node, Tensor]) -> Tensor | None:
    """Return one value per channel (dimension 1) if every channel of a node's output is constant, else None."""
    if node.target in _ZEROS:
        width = output_shape(node)[1]
        return torch.zeros(width, dtype=torch.float64) if isinstance(width, int) else None
    x: Any = node.args[0] if node.args else None
    if isinstance(x, fx.Node) and x.target is NORM and node.args[1:] == (0,) and x.args[0] in known:
        pair = scale_and_shift(graph, x)
        return None if pair is None else known[x.args[0]] * pair[0] + pair[1]
    found: Tensor | None = None
    if node.target in (aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor) and not node.kwargs:
        if len(node.args) == 2 and all(a in known and same_shape(a, node) for a in node.args):
            found = node.target(*(known[a] for a in node.args))
    elif x not in known:
        return None
    elif node.target in POINTWISE:
        found = node.target(known[x], *node.args[1:], **node.kwargs)
    elif node.target is REMAP and node.args[2] == 1:
        found = select_rows(known[x], node.args[1])
    elif (layer := layer_of(graph, node)) is not None and layer.dim == 1 and not known[x].any():
        zeros = torch.zeros(layer.weight.shape[0], dtype=torch.float64)
        found = zeros if layer.bias is None else layer.bias.double()
    return found


def find_remaps(graph: fx.GraphModule) -> None:
    """Replace selections of channels and padding with zero channels by remaps, which can be merged."""
    for node in list(graph.graph.nodes):
        if not (is_tensor(node) and node.args and is_tensor(node.args[0]) and len(output_shape(node)) >= 2):
            continue
        source = _padded(node)
        if node.target is aten.index_select.default and node.args[1] == 1:
            indices = stored_tensor(graph, node.args[2])
            source = None if indices is None else indices.tolist()
        if source:
            fresh = insert_after(node, REMAP, (node.args[0], source, 1), node.meta["val"])
            node.replace_all_uses_with(fresh)
            graph.graph.erase_node(node)


def _padded(node: Node) -> list[int] | None:
    if node.target is aten.pad.default:
        mode, value = argument(node, 2, "mode", "constant"), argument(node, 3, "value")
    elif node.target is aten.constant_pad_nd.default:
        mode, value = "constant", argument(node, 2, "value", 0)
    else:
        return None
    sizes, pads = output_shape(node.args[0]), list(node.args[1])
    at = 2 * (len(sizes) - 2)  # Padding is listed from the last dimension to the first.
    if mode != "constant" or value not in (None, 0) or not isinstance(sizes[1], int) or len(pads) < at + 2:
        return None
    if any(pads[:at] + pads[at + 2 :]) or not all(isinstance(pad, int) and pad >= 0 for pad in pads):
        return None
    return [-1] * pads[at] + list(range(sizes[1])) + [-1] * pads[at + 1]


# -- Merging -----------------------------------------------------------------------------------------------


def merge_remaps(graph: fx.GraphModule, rows: Choice | None = None) -> None:
    """Merge remaps with adjacent remaps and, if no layer grows by it, with adjacent layers.

    If `rows` is given, layers may grow. A remap that selects input channels of a layer becomes zero columns of its
    weight. A remap that adds zero channels to the output of a layer becomes zero filters if `rows(remap)` is true;
    otherwise it is moved past activations, toward the layers that read it.
    """
    changed = True
    while changed:
        changed = False
        for node in [n for n in graph.graph.nodes if n.target is REMAP]:
            changed |= _merge(graph, node, rows) or (rows is not None and _sink(graph, node))
    graph.graph.eliminate_dead_code()


def _merge(graph: fx.GraphModule, node: Node, rows: Choice | None) -> bool:
    x, source, dim = remap_args(node)
    width = output_shape(x)[dim]
    if not node.users:
        graph.graph.erase_node(node)
    elif source == list(range(width)):
        node.replace_all_uses_with(x)
    elif x.target is REMAP and remap_args(x)[2] == dim:
        inner, first, _ = remap_args(x)
        node.args = (inner, [first[i] if i >= 0 else -1 for i in source], dim)
    elif (len(source) >= width or rows is not None) and _into_columns(graph, node):
        pass
    else:
        return _into_rows(graph, node, rows)
    return True


def _into_columns(graph: fx.GraphModule, node: Node) -> bool:
    """Merge a remap into the columns (input channels) of the layers that read it; return True if any does."""
    x, source, dim = remap_args(node)
    readers = [layer_of(graph, user) for user in node.users]
    merged = [one for one in readers if one is not None and one.x is node and one.groups == 1 and one.dim == dim]
    for layer in merged:
        weight = torch.zeros_like(layer.weight[:, :1]).repeat_interleave(output_shape(x)[dim], 1)
        kept = [i for i, j in enumerate(source) if j >= 0]
        columns = torch.tensor([source[i] for i in kept], dtype=torch.int64, device=weight.device)
        replace_layer_weights(graph, layer, weight.index_add_(1, columns, layer.weight[:, kept]), layer.bias)
        layer.node.args = (x, *layer.node.args[1:])
    return bool(merged)


def _into_rows(graph: fx.GraphModule, node: Node, rows: Choice | None) -> bool:
    """Merge a remap into the rows of the layer before it, which may grow if `rows(node)`; return True if merged."""
    x, source, dim = remap_args(node)
    passed, first = [], x
    while _keeps_zero(first) and len(first.users) == 1:
        passed.append(first)
        first = first.args[0]
    layer = layer_of(graph, first)
    if layer is None or layer.groups != 1 or layer.dim != dim or len(first.users) != 1:
        return False
    grows = min(source) < 0 or len(source) > output_shape(x)[dim]
    if grows and (rows is None or not rows(node)):
        return False
    bias = None if layer.bias is None else select_rows(layer.bias, source)
    replace_layer_weights(graph, layer, select_rows(layer.weight, source), bias)
    for other in (first, *passed):
        other.meta["val"] = fake_with_channels(other.meta["val"], len(source), dim)
    node.replace_all_uses_with(x)
    return True


def _sink(graph: fx.GraphModule, node: Node) -> bool:
    """Move a remap that adds zeros past the elementwise operator that reads it, to process fewer channels there."""
    x, source, dim = remap_args(node)
    user = next(iter(node.users))
    if len(node.users) > 1 or not _keeps_zero(user) or len(source) < output_shape(x)[dim]:
        return False
    user.args = (x, *user.args[1:])
    like, user.meta["val"] = user.meta["val"], fake_with_channels(user.meta["val"], output_shape(x)[dim], dim)
    readers = list(user.users)
    fresh = insert_after(user, REMAP, (user, source, dim), like)
    for reader in readers:
        reader.replace_input_with(user, fresh)
    return True


def _keeps_zero(node: Node) -> bool:
    if node.target not in POINTWISE or len(node.all_input_nodes) > 1:
        return False
    return not node.target(torch.zeros(1), *node.args[1:], **node.kwargs).any()


def remap_args(node: Node) -> tuple[Node, list[int], int]:
    """Return the input of a remap, the source index of each output channel (-1: zero), and the dimension."""
    x, source, dim = node.args
    assert isinstance(x, fx.Node) and isinstance(dim, int)
    return x, list(source), dim


def select_rows(tensor: Tensor, source: list[int]) -> Tensor:
    """Select rows of a tensor by index; -1 selects a row of zeros."""
    return torch.cat([tensor, torch.zeros_like(tensor[:1])])[source]


_IN_PLACE = {
    getattr(aten, name).default: getattr(aten, f"{name}_").default
    for name in ("relu", "hardtanh", "silu", "hardswish", "index_add")
} | {aten.add.Tensor: aten.add_.Tensor}
# Operators that return a newly allocated tensor, or overwrite and return an input that one of these operators
# allocated. Their output shares memory with no other tensor.
_FRESH = {*CONVS, *POINTWISE, *_IN_PLACE, *_IN_PLACE.values(), aten.linear.default, aten.index_select.default}
_FRESH |= {aten.constant_pad_nd.default, aten.max_pool2d.default, aten.avg_pool2d.default, aten.mul.Tensor}
_FRESH |= {aten.adaptive_avg_pool2d.default, aten.cat.default, aten.mean.dim}


def write_in_place(graph: fx.GraphModule) -> None:
    """Replace operators by in-place variants where this is safe, which saves memory traffic in eager mode.

    A tensor is overwritten only if an operator of the graph allocated it, it shares memory with no other tensor,
    and it is not read later.
    """
    order = {node: index for index, node in enumerate(graph.graph.nodes)}
    for node in list(graph.graph.nodes):
        if node.target not in _IN_PLACE:
            continue
        if node.target is aten.add.Tensor and not node.kwargs and not _can_overwrite(node, node.args[0], order):
            node.args = (node.args[1], node.args[0], *node.args[2:])
        if _can_overwrite(node, node.args[0], order):
            node.target = _IN_PLACE[node.target]


def _can_overwrite(node: Node, x: object, order: dict[Node, int]) -> bool:
    if not isinstance(x, fx.Node) or x.target not in _FRESH or not is_tensor(x) or not same_shape(x, node):
        return False
    if sum(argument is x for argument in node.args) > 1 or x.meta["val"].dtype != node.meta["val"].dtype:
        return False
    return all(user is node or (order[user] < order[node] and user.target in _FRESH) for user in x.users)


def shortcuts_as_convolutions(graph: fx.GraphModule) -> None:
    """Replace strided slices of a feature map, and a remap that reads them, by one constant 1x1 convolution."""
    for node in list(graph.graph.nodes):
        if not node.users or not is_tensor(node) or not _is_feature_map(node):
            continue
        source: list[int] | None = None
        last = node
        if node.target is REMAP:
            last, source, _ = remap_args(node)
        elif any(user.target in (REMAP, aten.slice.Tensor) for user in node.users):
            continue  # replaced together with the node that reads it
        steps, x = _strided(last)
        width = output_shape(x)[1]
        if x is not last and isinstance(width, int):
            convolution = _constant_convolution(graph, node, x, source or list(range(width)), steps)
            node.replace_all_uses_with(convolution)
    graph.graph.eliminate_dead_code()


def _is_feature_map(node: Node) -> bool:
    return len(output_shape(node)) == 4 and bool(node.meta["val"].is_floating_point())


def _strided(node: Node) -> tuple[list[int], Node]:
    """Return the strides (height, width) of the consecutive slices that end at `node`, and the map they slice."""
    steps = [1, 1]
    while node.target is aten.slice.Tensor and argument(node, 1, "dim", 0) in (2, 3):
        dim, start = argument(node, 1, "dim", 0), argument(node, 2, "start", 0)
        end, step = argument(node, 3, "end"), argument(node, 4, "step", 1)
        x = node.args[0]
        if start not in (0, None) or not isinstance(x, fx.Node):
            break
        if end is not None and not (isinstance(end, int) and end >= output_shape(x)[dim]):
            break
        steps[dim - 2] *= step
        node = x
    return steps, node


def _constant_convolution(graph: fx.GraphModule, node: Node, x: Node, source: list[int], steps: list[int]) -> Node:
    eye = torch.eye(output_shape(x)[1], dtype=x.meta["val"].dtype)
    weight = add_tensor(graph, node, "moved_channels", select_rows(eye, source)[:, :, None, None])
    return insert_after(node, aten.conv2d.default, (x, weight, None, steps), node.meta["val"])


def write_remaps(graph: fx.GraphModule, way: str) -> None:
    """Replace every remaining remap by ordinary operators.

    `way` is "convolution" (a 1x1 convolution of zeros and ones, for 4-d tensors), "add" (an index_add, for a remap
    that is only added to other tensors) or "gather" (an index_select or a padding, used also for all other remaps).
    """
    for node in [n for n in graph.graph.nodes if n.target is REMAP]:
        x, source, dim = remap_args(node)
        others = [_added_to(node, user) for user in node.users]
        if way == "add" and None not in others:
            kept = [i for i in source if i >= 0]
            for user, other in zip(list(node.users), others, strict=True):
                selected = x if kept == list(range(output_shape(x)[dim])) else _indexed(graph, user, x, kept, dim)
                put = add_tensor(graph, user, "put", torch.tensor([o for o, i in enumerate(source) if i >= 0]))
                user.target = aten.index_add.default
                user.args = (other, dim, put, selected)
        elif way == "convolution" and dim == 1 and _is_feature_map(node):
            node.replace_all_uses_with(_constant_convolution(graph, node, x, source, [1, 1]))
        else:
            node.replace_all_uses_with(_gathered(graph, node))
        graph.graph.erase_node(node)


def _added_to(node: Node, user: Node) -> Node | None:
    """Return the tensor of equal shape that a node is added to by `user`, or None if `user` does anything else."""
    if user.target is not aten.add.Tensor or user.kwargs or len(user.args) != 2:
        return None
    other = user.args[1] if user.args[0] is node else user.args[0]
    return other if is_tensor(other) and other is not node and same_shape(other, node) else None


def _gathered(graph: fx.GraphModule, node: Node) -> Node:
    x, source, dim = remap_args(node)
    width, rank = output_shape(x)[dim], len(output_shape(x))
    ends = [0] * (2 * (rank - 1 - dim))
    first = next((o for o, i in enumerate(source) if i >= 0), 0)
    if source == [-1] * first + list(range(width)) + [-1] * (len(source) - width - first):
        pads = [*ends, first, len(source) - width - first]
        return insert_after(node, aten.constant_pad_nd.default, (x, pads), node.meta["val"])
    if -1 not in source:
        return _indexed(graph, node, x, source, dim)
    wider = fake_with_channels(x.meta["val"], width + 1, dim)
    padded = insert_after(x, aten.constant_pad_nd.default, (x, [*ends, 0, 1]), wider)
    node.prepend(padded)
    return _indexed(graph, node, padded, [width if i < 0 else i for i in source], dim)


def _indexed(graph: fx.GraphModule, before: Node, x: Node, source: list[int], dim: int) -> Node:
    table = add_tensor(graph, before, "take", torch.tensor(source))
    with graph.graph.inserting_before(before):
        node = graph.graph.call_function(aten.index_select.default, (x, dim, table))
    node.meta["val"] = fake_with_channels(x.meta["val"], len(source), dim)
    return node
