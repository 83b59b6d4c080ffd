"""Convolutions whose input gradient the compiler may choose, for the captured engine.

The gradient of the input of a convolution with stride 1 is itself a convolution, with the kernel turned round
and the channels exchanged.  Written so, the compiler tunes it like any forward, where the
library's own kernel for it is made for many more channels than a CIFAR network has.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, padding: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.padding = padding
        return F.conv2d(x, weight, None, 1, padding)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (gradient,) = gradients
        x, weight = ctx.saved_tensors
        of_input = of_weight = None
        if ctx.needs_input_grad[0]:
            turned = weight.flip(2, 3).transpose(0, 1)
            of_input = F.conv2d(gradient, turned, None, 1, weight.shape[2] - 1 - ctx.padding)
        if ctx.needs_input_grad[1]:
            sides = [ctx.padding, ctx.padding]
            of_weight = torch.ops.aten.convolution_backward(
                gradient, x, weight, None, [1, 1], sides, [1, 1], False, [0, 0], 1, [False, True, False]
            )[1]
        return of_input, of_weight, None


@contextmanager
def tunable_convolutions(network: nn.Module) -> Iterator[None]:
    """While entered, the network's convolutions of stride 1 have gradients the compiler can tune."""
    changed = [module for module in network.modules() if type(module) is nn.Conv2d and _suits(module)]
    for module in changed:
        module.__dict__["forward"] = partial(_forward, module)
    try:
        yield
    finally:
        for module in changed:
            del module.__dict__["forward"]


def _suits(module: nn.Conv2d) -> bool:
    return (
        "forward" not in module.__dict__
        and module.stride == module.dilation == (1, 1)
        and module.groups == 1
        and module.bias is None
        and module.in_channels >= 8  # an image's few channels gain nothing
        and module.kernel_size[0] == module.kernel_size[1]
        and module.padding in {(p, p) for p in range(module.kernel_size[0])}
        and module.padding_mode == "zeros"
    )


def _forward(module: nn.Conv2d, x: Tensor) -> Tensor:
    return _Convolution.apply(x, module.weight.to(x.dtype), int(module.padding[0]))
