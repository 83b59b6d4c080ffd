"""Convolutions with gradients that are fast for few channels, and a disk cache of the fastest kernels.

The input gradient of a convolution with stride 1 is itself a convolution, with the kernel flipped and the channels
exchanged. torch.compile tunes this form like any forward, while cuDNN's kernels for input gradients are designed
for many more channels than a CIFAR network has. Two kernels per step cast and flip the weights of all layers at
once, because for 55 single layers the kernel launches take longer than the computation. If Triton is installed, a
kernel of this package (`triton_kernels`) computes the weight gradients of the layers for which it is faster.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import RunError
from ...utils.files import atomic_path
from ...utils.user_model import PrunerHook


def load_choice(key: str) -> str | None:
    """Return the kernel choice that an earlier process stored under a key, or None.

    Each choice is a small file in the cache folder of torch's compiler. Runs that start at the same time would
    disturb each other's timings, which stored choices avoid. If the files are lost, measuring again takes seconds.
    """
    with suppress(OSError, UnicodeDecodeError):
        stored, _, choice = _choice_file(key).read_text("utf-8").partition("\n")
        if stored == key:
            return choice.strip()
    return None


def store_choice(key: str, choice: str) -> None:
    """Store a kernel choice for later processes; do nothing if the cache folder is not writable."""
    with suppress(OSError, RunError), atomic_path(_choice_file(key)) as path:
        path.write_text(f"{key}\n{choice}\n", "utf-8")


def _choice_file(key: str) -> Path:
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # imports the compiler, which takes seconds

    return Path(cache_dir()) / "sbf_pruner" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.txt"


_ALIGNED = 64  # elements to align copies of weights to; a compiled kernel first copies an unaligned tensor


class TunableConvolutions:
    """Context in which a network's convolutions with stride 1 have gradients that the compiler can tune.

    They read copies of their weights in `dtype`, updated by `refresh`; gradients are those of the original weights.
    """

    def __init__(self, network: nn.Module, dtype: torch.dtype) -> None:
        self.modules = [m for m in network.modules() if type(m) is nn.Conv2d and _suits(m)]
        weights = [m.weight for m in self.modules]
        self._weights = [w.detach() for w in weights]
        *starts, size = accumulate((-(-w.numel() // _ALIGNED) * _ALIGNED for w in weights), initial=0)
        device = weights[0].device if weights else None
        self._plain = torch.zeros(size, dtype=dtype, device=device)
        self._turned = torch.zeros(size, dtype=dtype, device=device)
        places = torch.zeros(size, dtype=torch.int64)
        self._casts: list[Tensor] = []
        self._tuned: list[_Tuned] = []
        for module, weight, start in zip(self.modules, weights, starts, strict=True):
            filters, channels, height, width = weight.shape
            part = slice(start, start + weight.numel())
            # Both have the memory order of channels_last; in `turned`, filters and channels are exchanged.
            cast = self._plain[part].view(filters, height, width, channels).permute(0, 3, 1, 2)
            turned = self._turned[part].view(channels, height, width, filters).permute(0, 3, 1, 2)
            numbers = torch.arange(part.start, part.stop).view(filters, height, width, channels)
            places[part] = numbers.flip(1, 2).permute(3, 1, 2, 0).reshape(-1)
            self._casts.append(cast)
            self._tuned.append(_Tuned(module, cast, turned, _has_kernel(module, dtype)))
        self._places = places.to(device)

    def __enter__(self) -> TunableConvolutions:
        for module, tuned in zip(self.modules, self._tuned, strict=True):
            module.__dict__["forward"] = tuned.forward
        self.refresh()
        return self

    def __exit__(self, *_: object) -> None:
        for module in self.modules:
            del module.__dict__["forward"]

    @torch.no_grad()
    def refresh(self) -> None:
        """Update the cast copies of the weights, and the flipped ones, in place."""
        if self.modules:
            torch._foreach_copy_(self._casts, self._weights)
            torch.index_select(self._plain, 0, self._places, out=self._turned)


class _Tuned(PrunerHook):
    """Replacement for the forward of one convolution.

    This is no `functools.partial`, because torch.compile formats the values that it guards on as text, and would
    copy the tensors of a partial from the device row by row for that.
    """

    def __init__(self, module: nn.Conv2d, cast: Tensor, turned: Tensor, kernel: bool) -> None:
        self.module, self.cast, self.turned, self.kernel = module, cast, turned, kernel
        self.padding = int(module.padding[0])

    def forward(self, x: Tensor) -> Tensor:
        x, weight = x.to(self.cast.dtype), self.module.weight
        result: Tensor = _Convolution.apply(x, weight, self.cast, self.turned, self.padding, self.kernel)
        return result


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, cast: Tensor, turned: Tensor, padding: int, kernel: bool
    ) -> Tensor:
        ctx.save_for_backward(x, cast, turned)
        ctx.padding, ctx.kernel, ctx.dtype = padding, kernel, weight.dtype
        return F.conv2d(x, cast, None, 1, padding)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        x, cast, turned = ctx.saved_tensors
        of_input = of_weight = None
        if ctx.needs_input_grad[0]:
            of_input = F.conv2d(gradient, turned, None, 1, cast.shape[2] - 1 - ctx.padding)
        if ctx.needs_input_grad[1]:
            if ctx.kernel:
                of_weight = torch.ops.sbf_pruner.weight_gradient(x, gradient)
            else:
                sides, wanted = [ctx.padding, ctx.padding], [False, True, False]
                of_weight = torch.ops.aten.convolution_backward(
                    gradient, x, cast, None, [1, 1], sides, [1, 1], False, [0, 0], 1, wanted
                )[1]
            of_weight = of_weight.to(ctx.dtype)
        return of_input, of_weight, None, None, None, None


def _suits(module: nn.Conv2d) -> bool:
    return (
        "forward" not in module.__dict__
        and "weight" in module._parameters  # not recomputed by a hook, as the old weight_norm does
        and module.stride == module.dilation == (1, 1)
        and module.groups == 1
        and module.bias is None
        and module.kernel_size[0] == module.kernel_size[1]
        and module.padding in {(p, p) for p in range(module.kernel_size[0])}
        and module.padding_mode == "zeros"
    )


def _has_kernel(module: nn.Conv2d, dtype: torch.dtype) -> bool:
    if not (module.weight.is_cuda and dtype in (torch.bfloat16, torch.float16) and find_spec("triton")):
        return False
    from . import triton_kernels  # noqa: F401 (registers the operator; needs Triton)

    return module.kernel_size == (3, 3) and module.padding == (1, 1)
