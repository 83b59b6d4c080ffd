"""A 3x3 convolution with few channels, as one matrix product whose windows overlap in the nearest cache.

A map and a weight enter, in bfloat16 or float16 with the channels last; the map that leaves has the same size.
Compilers and libraries load what they multiply ahead into shared memory, past the cache beside it: every pixel then
comes nine times from the cache that all multiprocessors share, and with 16 channels that is all the time there is.
Here a program loads whole windows through its own cache, in few large steps: a window's weights lie side by side.
The first call at each shape tries the ways to do it, the library's and the compiler's included, and keeps the
quickest that agrees with the library.  Needs Triton and a CUDA device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from .quickest import quickest

_FILTERS = 128  # at most: a program computes all of a pixel's
_SHAPES = 256  # at most that the compiler is asked for: pruned layers have many widths
LIBRARY, COMPILED = (0, 0), (1, 0)
# Pixels of a program, and how much of its windows it takes at once.
OURS = ((64, 64), (64, 128), (128, 64), (128, 128))
_chosen: dict[tuple[Any, ...], tuple[int, int]] = {}


@triton.jit
def _convolve(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, y_ptr, pixels, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    C: tl.constexpr, N_F: tl.constexpr, BF: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (at < pixels)[:, None]
    h = ((at // WIDTH) % HEIGHT)[:, None]
    w = (at % WIDTH)[:, None]
    f = tl.arange(0, BF)
    y = tl.zeros((BLOCK, BF), tl.float32)
    for first in tl.static_range(0, 9 * C, DEPTH):
        k = first + tl.arange(0, DEPTH)  # row, column and channel of the window, as they lie in the weight
        down, right = k // (3 * C) - 1, (k // C) % 3 - 1
        row, column = h + down[None, :], w + right[None, :]
        there = inside & (row >= 0) & (row < HEIGHT) & (column >= 0) & (column < WIDTH) & (k < 9 * C)[None, :]
        place = (down * WIDTH + right) * C + k % C
        window = tl.load(x_ptr + at[:, None] * C + place[None, :], mask=there, other=0.0)
        asked = (f < N_F)[:, None] & (k < 9 * C)[None, :]
        weight = tl.load(weight_ptr + f[:, None] * (9 * C) + k[None, :], mask=asked, other=0.0)
        y = tl.dot(window, tl.trans(weight), y)
    place = at[:, None] * N_F + f[None, :]
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=inside & (f < N_F)[None, :])


@torch.library.custom_op("sbf_pruner::convolution", mutates_args=())
def convolution(x: Tensor, weight: Tensor) -> Tensor:
    """conv2d(x, weight, padding=1), a 3x3 kernel with stride 1."""
    x, weight = (t.contiguous(memory_format=torch.channels_last) for t in (x, weight))
    key = (x.shape, weight.shape[0], x.dtype, x.device)
    if key not in _chosen and not torch.cuda.is_current_stream_capturing():
        _chosen[key] = quickest({way: partial(compute, x, weight, way) for way in ways(weight.shape[0])})
    return compute(x, weight, _chosen.get(key, LIBRARY))


@convolution.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return _empty(x, weight)


def ways(filters: int) -> list[tuple[int, int]]:
    """The ways there are for so many filters, the one to trust first."""
    return [LIBRARY, COMPILED, *(OURS if filters <= _FILTERS else ())]


def compute(x: Tensor, weight: Tensor, way: tuple[int, int]) -> Tensor:
    """The convolution, in the given way; map and weight have their channels last."""
    if way in (LIBRARY, COMPILED):
        return (_plain if way == LIBRARY else _compiled)(x, weight)
    images, channels, height, width = x.shape
    filters, (block, depth), pixels, y = weight.shape[0], way, images * height * width, _empty(x, weight)
    _convolve[(triton.cdiv(pixels, block),)](
        x, weight, y, pixels, HEIGHT=height, WIDTH=width, C=channels, N_F=filters,
        BF=max(16, triton.next_power_of_2(filters)), BLOCK=block, DEPTH=depth, num_warps=4,
    )  # fmt: skip
    return y


def choices() -> dict[str, str]:
    """What was chosen so far, for a benchmark to tell: shapes -> way."""
    names = {LIBRARY: "library", COMPILED: "compiled"}
    return {f"{tuple(key[0])} to {key[1]}": names.get(way, f"{way[0]} x {way[1]}") for key, way in _chosen.items()}


def _plain(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv2d(x, weight, padding=1)


@cache
def _tuned() -> Callable[[Tensor, Tensor], Tensor]:
    return torch.compile(_plain, dynamic=False, options={"max_autotune": True, "triton.cudagraphs": False})


@torch.no_grad()
def _compiled(x: Tensor, weight: Tensor) -> Tensor:
    with torch._dynamo.config.patch(recompile_limit=_SHAPES):
        return _tuned()(x, weight)


def _empty(x: Tensor, weight: Tensor) -> Tensor:
    images, _, height, width = x.shape
    shape = (images, weight.shape[0], height, width)
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
