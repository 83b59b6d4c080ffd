"""Norms folded into the convolutions before them, for runtimes that do not do so themselves.

A network and example inputs enter; a copy in evaluation mode leaves, in which every batch norm that reads one
convolution, and is its only reader, is part of that convolution's weights.  What holds: the copy computes the
same up to rounding, and whatever cannot be folded safely (a layer called twice, a subclass that does more, a
norm that a list holds too) stays as it is.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from ..graph.edges import held_outside, owner
from ..graph.trace import Op, Trace, Value, record
from ..inputs import real_copy

_CONVOLUTIONS = {nn.Conv1d, nn.Conv2d, nn.Conv3d}
_NORMS = {nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d}


def fold_norms(model: nn.Module, example_inputs: Any) -> nn.Module:
    """A copy of the network in evaluation mode with its batch norms folded into the convolutions they follow.

    >>> import torch
    >>> net = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU())
    >>> fold_norms(net, torch.zeros(1, 3, 8, 8))
    Sequential(
      (0): Conv2d(3, 4, kernel_size=(3, 3), stride=(1, 1))
      (1): Identity()
      (2): ReLU()
    )
    """
    folded = real_copy(model).eval().requires_grad_(False)
    modules = dict(folded.named_modules())
    for conv, norm in _pairs(record(model, example_inputs), modules):
        fused = fuse_conv_bn_eval(modules[conv], modules[norm])
        # In place, because other modules may hold the convolution too.
        modules[conv].weight, modules[conv].bias = fused.weight, fused.bias
        modules[conv].requires_grad_(False)
        parent, _, child = norm.rpartition(".")
        setattr(modules[parent], child, nn.Identity())
    return folded


def _pairs(trace: Trace, modules: dict[str, nn.Module]) -> list[tuple[str, str]]:
    """The convolutions and the norms that follow them and nothing else."""
    readers = Counter([value for op in trace.ops for value in dict.fromkeys(op.inputs)] + trace.outputs)
    makers: dict[Value, Op] = {op.outputs[0]: op for op in trace.ops if op.outputs and op.outputs[0] is not None}
    places = Counter(id(module) for _, module in modules[""].named_modules(remove_duplicate=False))
    outside = held_outside(modules)
    found = []
    for op in trace.ops:
        norm = owner(op)
        before = makers.get(op.inputs[0]) if op.inputs else None
        if norm is None or before is None or before.name != "aten.convolution" or readers[op.inputs[0]] != 1:
            continue
        conv = owner(before)
        if (
            conv not in modules
            or norm not in modules
            or norm in outside
            or not _plain(modules[conv], modules[norm])
        ):
            continue
        used = [trace.states.get(f"{name}.weight") for name in (conv, norm)]
        if all(readers[weight] == 1 for weight in used if weight is not None) and all(
            len(trace.calls.get(name, [])) == 1 and places[id(modules[name])] == 1 for name in (conv, norm)
        ):
            found.append((conv, norm))
    return found


def _plain(conv: nn.Module, norm: nn.Module) -> bool:
    """Are they what torch calls a convolution and a norm with statistics of its own, and nothing more?"""
    hooked = any(module._forward_hooks or module._forward_pre_hooks for module in (conv, norm))
    known = type(conv) in _CONVOLUTIONS and type(norm) in _NORMS
    return known and not hooked and getattr(norm, "running_mean", None) is not None
