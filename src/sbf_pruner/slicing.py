"""The stored tensors of a smaller network: what a layout leaves of every weight, bias and statistic.

A model, its graph and a layout enter; the slices leave, by the identity of the tensor each is taken from.  What
holds: nothing of the model is changed, and a slice lies in memory as the whole tensor did.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from .graph.channels import ChannelGraph
from .graph.masks import Layout, some
from .graph.records import Value
from .graph.unchanged import tensors_of
from .graph.weighted import Contract
from .inputs import memory_format


def sliced(model: nn.Module, graph: ChannelGraph, layout: Layout) -> dict[int, Tensor]:
    """What is left of every stored tensor that loses something, by the identity of the whole one."""
    held = tensors_of(model, graph)
    grouped = {n.weight: n for n in graph.nodes if isinstance(n, Contract) and n.groups > 1}
    found: dict[int, Tensor] = {}
    for name, value in graph.trace.states.items():
        if value in layout.masks:
            old = held[name]
            new = _grouped(old, grouped[value], layout) if value in grouped else _boxed(old, value, layout)
            if new is not old:
                found[id(old)] = new
    return found


def _boxed(tensor: Tensor, value: Value, layout: Layout) -> Tensor:
    new = tensor.detach()
    for dim, mask in enumerate(layout.masks[value]):
        if mask is not None and mask.any() and not mask.all():
            new = new.index_select(dim, torch.from_numpy(np.flatnonzero(mask)).to(tensor.device))
    return tensor if new.shape == tensor.shape else _like(tensor, new)


def _grouped(tensor: Tensor, node: Contract, layout: Layout) -> Tensor:
    """Slice the weight of a grouped convolution, whose groups may keep different channels each."""
    ends = (node.out, node.x) if node.out_axis == 0 else (node.x, node.out)
    rows, columns = (node.grouped(layout.line(value, 1)) for value in ends)
    there = some(rows, 1) & some(columns, 1)
    kept = np.flatnonzero(rows & there[:, None])
    if not kept.size or (kept.size == rows.size and columns.all()):
        return tensor
    # Every group that is there has as many columns as the others, but perhaps not the same.
    of_group = np.nonzero(columns[there])[1].reshape(int(there.sum()), -1)
    group = (np.cumsum(there) - 1)[kept // rows.shape[1]]
    places = [torch.from_numpy(index).to(tensor.device) for index in (kept[:, None], of_group[group])]
    return _like(tensor, tensor.detach()[places[0], places[1]])


def _like(old: Tensor, new: Tensor) -> Tensor:
    new = new.contiguous(memory_format=memory_format(old))  # slicing gives plain layouts whatever the tensor had
    if isinstance(old, nn.Parameter):
        return nn.Parameter(new, requires_grad=old.requires_grad)
    return new
