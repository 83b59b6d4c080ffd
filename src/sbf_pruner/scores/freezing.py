"""Frozen weights and norms of a score phase, and the running statistics of norms.

While a model is frozen, no weight requires or has a gradient, modules that compute weights (such as spectral norm)
do not update them, and norms use running statistics in any mode. On CUDA the backward pass of a norm is replaced:
PyTorch's, in evaluation mode, returns contiguous gradients to a channels-last network, and every convolution then
converts them back. The forward pass is PyTorch's, bit for bit, and gradients are the same sums. A norm that
overrides `forward` keeps its own. `fresh_statistics` recomputes running statistics, and `lagging` detects
statistics that are still far from those of the current weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm

from ..utils.user_model import PrunerHook, memory_format


def freeze_model(model: nn.Module, *, norms: bool = True) -> Callable[[], None]:
    """Freeze the weights of a model and, if `norms` is true, its running statistics; return a function to unfreeze.

    Sets the gradients of the weights to None, because an optimizer that steps meanwhile would apply them.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    frozen_norms = [module for module in model.modules() if isinstance(module, _NormBase) and norms]
    makers = _weight_makers(model)
    modes = {module: module.training for module in (*frozen_norms, *makers)}
    followed = {module: mode == model.training for module, mode in modes.items()}
    for parameter in trained.values():
        parameter.requires_grad_(False).grad = None
    undo = [freeze(norm) for norm in frozen_norms]
    # Prepended, because another hook of the module may be the one that computes the weight.
    undo += [module.register_forward_pre_hook(EvalModeHook().hold, prepend=True).remove for module in makers]

    def thaw() -> None:
        # Also by name: a parameter that has replaced a frozen one meanwhile must require a gradient again, too.
        for name, parameter in (*trained.items(), *model.named_parameters()):
            if name in trained:
                parameter.requires_grad_(True)
        for undo_one in undo:
            undo_one()
        for module, mode in modes.items():  # the user may have changed the mode of the model meanwhile
            module.training = model.training if followed[module] else mode

    return thaw


def _weight_makers(model: nn.Module) -> list[nn.Module]:
    """Return the modules that compute weights (parametrizations, spectral norm), which training mode may change."""
    lists = [module for module in model.modules() if isinstance(module, ParametrizationList)]
    hooked = [m for m in model.modules() if any(isinstance(h, SpectralNorm) for h in m._forward_pre_hooks.values())]
    return [*dict.fromkeys(inner for module in lists for inner in module.modules()), *hooked]


def freeze(norm: _NormBase) -> Callable[[], None]:
    """Make a norm use its running statistics in any mode of the model; return a function that undoes this."""
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
    """Return True if a norm has PyTorch's forward, running statistics, and both scale and shift or neither."""
    default = type(norm).forward is _BatchNorm.forward and "forward" not in norm.__dict__
    return default and norm.running_mean is not None and (norm.weight is None) == (norm.bias is None)


class EvalModeHook(PrunerHook):
    """Hook that keeps a module in evaluation mode."""

    def hold(self, module: nn.Module, args: Any) -> None:
        """Set the module to evaluation mode."""
        module.training = False


class FrozenNorm(EvalModeHook):
    """Hook of a frozen norm, and its replacement for PyTorch's forward."""

    def __init__(self, norm: _NormBase) -> None:
        self.norm = norm

    def forward(self, input: Tensor) -> Tensor:
        """Return the output of the norm, with the custom backward if that is faster, except when compiling."""
        norm = self.norm
        if norm.training or torch.compiler.is_compiling() or not _use_custom_backward(input):
            return type(norm).forward(norm, input)
        norm._check_input_dim(input)
        statistics = norm.running_mean, norm.running_var, norm.eps
        result: Tensor = _Frozen.apply(input, norm.weight, norm.bias, *statistics)
        return result


def _use_custom_backward(x: Tensor) -> bool:
    """Return True if a gradient is needed and the backward pass of `_Frozen` is faster than PyTorch's."""
    return x.is_cuda and x.numel() > 0 and torch.is_grad_enabled() and memory_format(x) != torch.contiguous_format


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
        # In the memory format of the input, which earlier feature maps share.
        gradient = gradient.contiguous(memory_format=ctx.format)
        if x is not None:
            of_weight, of_bias = _sums(gradient, x, mean, deviations, weight)
        if ctx.needs_input_grad[0]:
            of_x = _scaled(gradient, deviations, weight)
        return of_x, of_weight, of_bias, None, None, None


def _sums(gradient: Tensor, x: Tensor, mean: Tensor, deviations: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of weight and bias, summed over the samples and positions of each channel."""
    if _use_syncbn_kernels(gradient):
        sums = torch.batch_norm_backward_reduce(gradient, x, mean, deviations, weight, False, True, True)
        return sums[2], sums[3]
    places, wide = [0, *range(2, x.dim())], gradient.to(mean.dtype)
    total, product = wide.sum(places), (wide * (x - _across(mean, x))).sum(places)
    return (product * deviations).to(weight.dtype), total.to(weight.dtype)


def _scaled(gradient: Tensor, deviations: Tensor, weight: Tensor | None) -> Tensor:
    """Return the gradient of the input: each channel times its factor, which is at least float32."""
    if _use_syncbn_kernels(gradient):
        return torch.batch_norm_elemt(gradient, weight, None, torch.zeros_like(deviations), deviations, 0.0)
    scale = deviations if weight is None else deviations * weight
    return (gradient * _across(scale, gradient)).to(gradient.dtype)


def _use_syncbn_kernels(gradient: Tensor) -> bool:
    """Return True if the kernels of SyncBatchNorm can be used: they need CUDA and are not differentiable."""
    return gradient.is_cuda and not torch.is_grad_enabled()


def _across(values: Tensor, x: Tensor) -> Tensor:
    return values.view(-1, *[1] * (x.dim() - 2))


@contextmanager
def fresh_statistics(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Recompute running statistics of norms as the mean over all forwards in the context; yield an undo function.

    This changes no weight and restores modes and momenta. Norms that saw no batch, norms that the user keeps in
    another mode than the model and, after an exception, all norms keep their previous statistics.

    >>> net = nn.Sequential(nn.BatchNorm1d(1)).eval()
    >>> with fresh_statistics(net) as undo:
    ...     _ = net(torch.tensor([[1.0], [3.0]])), net(torch.tensor([[5.0], [7.0]]))
    >>> net[0].running_mean.item()
    4.0
    >>> undo()
    >>> net[0].running_mean.item()
    0.0
    """
    norms = [m for m in model.modules() if isinstance(m, _NormBase) and m.training == model.training]
    norms = [norm for norm in norms if norm.running_mean is not None and norm.num_batches_tracked is not None]
    before = [
        (norm, norm.momentum, {name: buffer.clone() for name, buffer in norm.named_buffers(recurse=False)})
        for norm in norms
    ]

    def undo(only_unseen: bool = False) -> None:
        for norm, _, statistics in before:
            if not (only_unseen and norm.num_batches_tracked):
                with torch.no_grad():
                    for name, buffer in norm.named_buffers(recurse=False):
                        buffer.copy_(statistics[name])

    try:
        for norm in norms:
            norm.train(isinstance(norm, _BatchNorm))  # others, such as instance norm, normalize single samples
            if norm.training:
                norm.reset_running_stats()
                norm.momentum = None  # all batches have the same weight
        with torch.no_grad():
            yield undo
    except BaseException:
        undo()
        raise
    finally:
        for norm, momentum, _ in before:
            norm.momentum = momentum
            norm.train(model.training)  # which the user may have changed meanwhile
        undo(only_unseen=True)


LEFT = 0.05  # weight of the initial values above which running statistics count as lagging


def lagging(model: nn.Module, began: Mapping[str, Tensor]) -> tuple[float, int] | None:
    """Return the momentum and the training steps of the norm whose running statistics lag most; None if none lags.

    Each step keeps a fraction `1 - momentum` of the initial statistics, and `num_batches_tracked` counts steps.
    `began` is the state dict at the start of training, from which steps count unless the counter was reset since.

    >>> net = nn.Sequential(nn.BatchNorm1d(1, momentum=0.01))
    >>> _ = net(torch.rand(2, 1))
    >>> lagging(net, {})
    (0.01, 1)
    """
    counted = [
        (name, norm.momentum, norm.num_batches_tracked)
        for name, norm in model.named_modules()
        if isinstance(norm, _BatchNorm) and norm.running_mean is not None and norm.momentum
        if norm.num_batches_tracked is not None
    ]
    slowest, most = None, LEFT
    counts = torch.stack([count for _, _, count in counted]).tolist() if counted else []  # one copy from the device
    for (name, momentum, _), count in zip(counted, counts, strict=True):
        before = int(began.get(f"{name}.num_batches_tracked".lstrip("."), torch.tensor(0)))
        steps = count - before if count >= before else count
        if steps and (left := (1 - momentum) ** steps) > most:
            slowest, most = (momentum, steps), left
    return slowest
