"""Operators that write over their input, where that is safe; an eager runtime then touches less memory.

A captured graph enters and is rewritten.  What holds: only a tensor that an operator of the graph has just made,
that no other operator may have an alias of, and that nobody reads later, is written over.
"""

from __future__ import annotations

import torch
from torch import fx

from .captured import Node, is_tensor, same_shape
from .remaps import POINTWISE
from .weighted import CONVS

aten = torch.ops.aten
_WRITING = {aten.relu.default: aten.relu_.default, aten.hardtanh.default: aten.hardtanh_.default}
_WRITING |= {aten.silu.default: aten.silu_.default, aten.hardswish.default: aten.hardswish_.default}
_WRITING |= {aten.index_add.default: aten.index_add_.default, aten.add.Tensor: aten.add_.Tensor}
# They give memory of their own, and keep none of what they read.
_FRESH = {*CONVS, *POINTWISE, *_WRITING, *_WRITING.values(), aten.linear.default, aten.index_select.default}
_FRESH |= {aten.constant_pad_nd.default, aten.max_pool2d.default, aten.avg_pool2d.default, aten.mul.Tensor}
_FRESH |= {aten.adaptive_avg_pool2d.default, aten.cat.default, aten.mean.dim}


def write_in_place(graph: fx.GraphModule) -> None:
    """Let operators write over what they read last."""
    order = {node: index for index, node in enumerate(graph.graph.nodes)}
    for node in list(graph.graph.nodes):
        if node.target not in _WRITING:
            continue
        if node.target is aten.add.Tensor and not node.kwargs and not _may_write(node, node.args[0], order):
            node.args = (node.args[1], node.args[0], *node.args[2:])
        if _may_write(node, node.args[0], order):
            node.target = _WRITING[node.target]


def _may_write(node: Node, x: object, order: dict[Node, int]) -> bool:
    if not isinstance(x, fx.Node) or x.target not in _FRESH or not is_tensor(x) or not same_shape(x, node):
        return False
    if sum(argument is x for argument in node.args) > 1 or x.meta["val"].dtype != node.meta["val"].dtype:
        return False
    return all(user is node or (order[user] < order[node] and user.target in _FRESH) for user in x.users)
