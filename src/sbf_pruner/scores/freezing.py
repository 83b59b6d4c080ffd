"""Models that stand still while scores are trained: their weights, and the running statistics of their norms.

A model enters; until it is thawed, no weight of it wants or has a gradient, none is made anew from pass to pass (as
a spectral norm does in training mode), and no mode makes its norms look at the batch.  On CUDA the gradient of a
norm takes a way of our own: PyTorch's, in evaluation mode, leaves a channels-last network with maps whose channels
come first, and every convolution then turns them round again.  What holds: the forward is PyTorch's own, bit for
bit; the gradients are the same sums; a norm with a forward of its own keeps it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm

from ..utils.user_model import Attached, memory_format


def freeze_model(model: nn.Module, *, norms: bool = True) -> Callable[[], None]:
    """Freeze the weights of a model, and with `norms` their running statistics; returns what undoes it.

    A gradient that a weight still has is dropped: an optimiser that steps meanwhile would take it for a new one.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    held = [module for module in model.modules() if isinstance(module, _NormBase) and norms]
    makers = _weight_makers(model)
    modes = {module: module.training for module in (*held, *makers)}
    followed = {module: mode == model.training for module, mode in modes.items()}
    for parameter in trained.values():
        parameter.requires_grad_(False).grad = None
    undo = [freeze(norm) for norm in held]
    # First of all hooks: one of the others may be what makes the weight.
    undo += [module.register_forward_pre_hook(Held().hold, prepend=True).remove for module in makers]

    def thaw() -> None:
        # By name as well: weights that were put in the places of others, frozen as those were, are trained too.
        for name, parameter in (*trained.items(), *model.named_parameters()):
            if name in trained:
                parameter.requires_grad_(True)
        for let_go in undo:
            let_go()
        for module, mode in modes.items():  # the mode of the model may have been changed meanwhile
            module.training = model.training if followed[module] else mode

    return thaw


def _weight_makers(model: nn.Module) -> list[nn.Module]:
    """The modules that compute weights, which may do so differently in training mode."""
    found = {
        inner: None for module in model.modules() if isinstance(module, ParametrizationList)
        for inner in module.modules()
    }  # fmt: skip
    hooked = [m for m in model.modules() if any(isinstance(h, SpectralNorm) for h in m._forward_pre_hooks.values())]
    return [*found, *hooked]


def freeze(norm: _NormBase) -> Callable[[], None]:
    """Keep a norm on its running statistics, whatever mode the model is put in; returns what undoes it."""
    frozen = FrozenNorm(norm)
    handle = norm.register_forward_pre_hook(frozen.hold)
    if _is_plain(norm):
        norm.__dict__["forward"] = frozen.forward

    def thaw() -> None:
        handle.remove()
        if getattr(norm.__dict__.get("forward"), "__self__", None) is frozen:
            del norm.__dict__["forward"]

    return thaw


def _is_plain(norm: _NormBase) -> bool:
    """Whether a norm is what PyTorch makes, with running statistics, and scale and shift or neither."""
    own = type(norm).forward is not _BatchNorm.forward or "forward" in norm.__dict__
    return not own and norm.running_mean is not None and (norm.weight is None) == (norm.bias is None)


class Held(Attached):
    """What is put on a module that is to stand still: a hook."""

    def hold(self, module: nn.Module, args: Any) -> None:
        """Let nothing put the module into training mode."""
        module.training = False


class FrozenNorm(Held):
    """What is put on one norm: a hook, and a forward where the norm has PyTorch's own."""

    def __init__(self, norm: _NormBase) -> None:
        self.norm = norm

    def forward(self, input: Tensor) -> Tensor:
        """What the norm's own forward computes, which a compiler is shown as it is."""
        norm = self.norm
        if norm.training or torch.compiler.is_compiling() or not _serves(input):
            return type(norm).forward(norm, input)
        norm._check_input_dim(input)
        statistics = norm.running_mean, norm.running_var, norm.eps
        result: Tensor = _Frozen.apply(input, norm.weight, norm.bias, *statistics)
        return result


def _serves(x: Tensor) -> bool:
    """Whether our gradient is wanted, and better than PyTorch's."""
    wanted = x.is_cuda and x.numel() > 0 and torch.is_grad_enabled()
    return wanted and memory_format(x) != torch.contiguous_format


class _Frozen(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float
    ) -> Tensor:
        summed = any(ctx.needs_input_grad[1:3])
        ctx.save_for_backward(x if summed else None, weight, mean, var)
        ctx.eps, ctx.format = eps, memory_format(x)
        return F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        x, weight, mean, var = ctx.saved_tensors
        of_x, of_weight, of_bias = None, None, None
        accurate = torch.promote_types(gradient.dtype, torch.float32)
        mean, deviations = mean.to(accurate), (var.to(accurate) + ctx.eps).rsqrt()
        gradient = gradient.contiguous(memory_format=ctx.format)  # as the map lies, which those before it lie like
        if x is not None:
            of_weight, of_bias = _sums(gradient, x, mean, deviations, weight)
        if ctx.needs_input_grad[0]:
            of_x = _scaled(gradient, deviations, weight)
        return of_x, of_weight, of_bias, None, None, None


def _sums(gradient: Tensor, x: Tensor, mean: Tensor, deviations: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of weight and bias: for each channel the sum over what was normalised, and over all."""
    if _fast(gradient):
        sums = torch.batch_norm_backward_reduce(gradient, x, mean, deviations, weight, False, True, True)
        return sums[2], sums[3]
    places, wide = [0, *range(2, x.dim())], gradient.to(mean.dtype)
    total, product = wide.sum(places), (wide * (x - _across(mean, x))).sum(places)
    return (product * deviations).to(weight.dtype), total.to(weight.dtype)


def _scaled(gradient: Tensor, deviations: Tensor, weight: Tensor | None) -> Tensor:
    """The gradient of the input: each channel times its factor, which is not rounded first."""
    if _fast(gradient):
        return torch.batch_norm_elemt(gradient, weight, None, torch.zeros_like(deviations), deviations, 0.0)
    scale = deviations if weight is None else deviations * weight
    return (gradient * _across(scale, gradient)).to(gradient.dtype)


def _fast(gradient: Tensor) -> bool:
    """Whether the kernels of synchronised norms serve: they are for CUDA, and have no gradient themselves."""
    return gradient.is_cuda and not torch.is_grad_enabled()


def _across(values: Tensor, x: Tensor) -> Tensor:
    return values.view(-1, *[1] * (x.dim() - 2))
