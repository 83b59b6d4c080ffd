"""A 3x3 convolution with few channels, as one matrix product whose windows overlap in the nearest cache.

A map and a weight enter, in bfloat16 or float16 with the channels last; the map that leaves has the same size.
Compilers load what they multiply ahead into shared memory, past the cache beside it: every pixel then comes nine
times from the cache that all multiprocessors share, which with 16 channels would explain all the time it takes.
Here a program loads whole windows through its own cache, in few large steps: a window's weights lie side by side.
The first call at each shape tries the ways to do it, the library's and the compiler's included, and keeps the
quickest that agrees with the library.  Needs Triton and a CUDA device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from .quickest import Choices, small_enough

_WIDEST = 128  # channels and filters: a program computes all filters of a pixel, over unrolled steps
_SHAPES = 256  # at most that the compiler is asked for: pruned layers have many widths
LIBRARY, COMPILED = (0, 0), (1, 0)
# Pixels of a program, and how much of its windows it takes at once.
OURS = ((64, 64), (64, 128), (128, 64), (128, 128))
CHOICES = Choices(LIBRARY, __file__)


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
    works = {way: partial(compute, x, weight, way) for way in ways(x, weight.shape[0])}
    return works[CHOICES.choose(x, weight.shape[0], works)]()


@convolution.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return _empty(x, weight)


def ways(x: Tensor, filters: int) -> list[tuple[int, int]]:
    """The ways there are for such a map and so many filters, the one to trust first."""
    fits = max(x.shape[1], filters) <= _WIDEST and small_enough(x, filters)
    return [LIBRARY, COMPILED, *(OURS if fits else ())]


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
