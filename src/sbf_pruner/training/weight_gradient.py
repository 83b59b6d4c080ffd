"""The weight gradient of a 3x3 convolution with few channels, in one pass over both maps.

The map that entered a convolution and the gradient of the one that left it enter, in bfloat16 or float16 with
the channels last; the gradient of the weight leaves, in float32.  A library's kernels for this are made for
hundreds of channels and mostly wait with 16.  Here every program walks over its own stretch of pixels and
keeps nine small products in registers; the programs' sums are then added in a fixed order, so equal inputs
give equal bits.  The first call at each shape times the ways to do it, the library's included, and keeps the
quickest.  Needs Triton and a CUDA device; `convolutions` imports this only where both are there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 264  # two for each of the 132 multiprocessors of a Hopper chip
_BLOCK = 64  # pixels taken at once
_HEAD_START = 10_000_000  # cycles the device idles while the host lines up what is timed: it is slower to launch
_IN_REGISTERS = 32 * 32  # the largest product of which one program can hold nine


class Way(NamedTuple):
    """How to compute it: warps of a program, rows of the window it takes on, programs that share the map."""

    warps: int
    rows: int
    programs: int = _PROGRAMS

    def fits(self, channels: int, filters: int) -> bool:
        """Can a program hold the products of all its rows in registers?"""
        return self.rows == 1 or _tile(channels) * _tile(filters) <= _IN_REGISTERS


LIBRARY = Way(0, 1, 0)
WAYS = (LIBRARY, Way(4, 3), Way(8, 3), Way(4, 1))
_chosen: dict[tuple[Any, ...], Way] = {}


@triton.jit
def _kernel(  # type: ignore[no-untyped-def]
    x_ptr, dy_ptr, sums_ptr, pixels, height, width, c_units, f_units,
    C_UNIT: tl.constexpr, F_UNIT: tl.constexpr, BC: tl.constexpr, BF: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    # Widths come as a count of units: so the compiler knows what divides them, and loads whole vectors, without
    # being asked again for every width.
    C = c_units * C_UNIT
    N_F = f_units * F_UNIT
    program = tl.program_id(0)
    row = tl.program_id(1)  # of the 3x3 window, where one program cannot hold all three
    channels = tl.arange(0, BC)
    filters = tl.arange(0, BF)
    seen = (channels < C)[None, :]
    asked = (filters < N_F)[None, :]
    a0 = tl.zeros((BC, BF), tl.float32)
    a1 = tl.zeros((BC, BF), tl.float32)
    a2 = tl.zeros((BC, BF), tl.float32)
    a3 = tl.zeros((BC, BF), tl.float32)
    a4 = tl.zeros((BC, BF), tl.float32)
    a5 = tl.zeros((BC, BF), tl.float32)
    a6 = tl.zeros((BC, BF), tl.float32)
    a7 = tl.zeros((BC, BF), tl.float32)
    a8 = tl.zeros((BC, BF), tl.float32)
    steps = tl.cdiv(pixels, tl.num_programs(0) * BLOCK)
    for step in range(steps):
        at = (program * steps + step) * BLOCK + tl.arange(0, BLOCK)
        inside = at < pixels
        w = at % width
        h = (at // width) % height
        dy = tl.load(dy_ptr + at[:, None] * N_F + filters[None, :], mask=inside[:, None] & asked, other=0.0)
        for r in tl.static_range(ROWS):
            down = r - 1 if ROWS == 3 else row - 1
            good = inside & (h + down >= 0) & (h + down < height)
            here = at + down * width
            left = tl.load(
                x_ptr + (here - 1)[:, None] * C + channels[None, :],
                mask=(good & (w > 0))[:, None] & seen,
                other=0.0,
            )
            middle = tl.load(x_ptr + here[:, None] * C + channels[None, :], mask=good[:, None] & seen, other=0.0)
            right = tl.load(
                x_ptr + (here + 1)[:, None] * C + channels[None, :],
                mask=(good & (w < width - 1))[:, None] & seen,
                other=0.0,
            )
            if r == 0:
                a0 = tl.dot(tl.trans(left), dy, a0)
                a1 = tl.dot(tl.trans(middle), dy, a1)
                a2 = tl.dot(tl.trans(right), dy, a2)
            elif r == 1:
                a3 = tl.dot(tl.trans(left), dy, a3)
                a4 = tl.dot(tl.trans(middle), dy, a4)
                a5 = tl.dot(tl.trans(right), dy, a5)
            else:
                a6 = tl.dot(tl.trans(left), dy, a6)
                a7 = tl.dot(tl.trans(middle), dy, a7)
                a8 = tl.dot(tl.trans(right), dy, a8)
    # Laid out as a weight with its channels last is: filter, row, column, channel.
    there = (channels < C)[:, None] & asked
    place = sums_ptr + program * 9 * C * N_F + filters[None, :] * (9 * C) + channels[:, None]
    if ROWS == 1:
        place += row * 3 * C
    tl.store(place, a0, mask=there)
    tl.store(place + C, a1, mask=there)
    tl.store(place + 2 * C, a2, mask=there)
    if ROWS == 3:
        tl.store(place + 3 * C, a3, mask=there)
        tl.store(place + 4 * C, a4, mask=there)
        tl.store(place + 5 * C, a5, mask=there)
        tl.store(place + 6 * C, a6, mask=there)
        tl.store(place + 7 * C, a7, mask=there)
        tl.store(place + 8 * C, a8, mask=there)


@torch.library.custom_op("sbf_pruner::weight_gradient", mutates_args=())
def weight_gradient(x: Tensor, dy: Tensor) -> Tensor:
    """The gradient of the weight of conv2d(x, weight, padding=1), a 3x3 kernel with stride 1."""
    x, dy = (t.contiguous(memory_format=torch.channels_last) for t in (x, dy))
    key = (x.shape, dy.shape[1], x.dtype, x.device)
    if key not in _chosen and not torch.cuda.is_current_stream_capturing():
        ways = [way for way in WAYS if way.fits(x.shape[1], dy.shape[1])]
        _chosen[key] = min(ways, key=lambda way: _seconds(partial(compute, x, dy, way)))
    return compute(x, dy, _chosen.get(key, LIBRARY))


@weight_gradient.register_fake
def _(x: Tensor, dy: Tensor) -> Tensor:
    return _empty(x, dy)


def compute(x: Tensor, dy: Tensor, way: Way) -> Tensor:
    """The gradient, in the given way; both maps have their channels last."""
    images, channels, height, width = x.shape
    filters = dy.shape[1]
    result = _empty(x, dy)
    if way == LIBRARY:
        like = torch.empty_like(result, dtype=x.dtype)
        wanted = [False, True, False]
        found = torch.ops.aten.convolution_backward(
            dy, x, like, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, wanted
        )[1]
        return result.copy_(found)
    pixels = images * height * width
    programs = min(way.programs, triton.cdiv(pixels, _BLOCK))
    sums = torch.empty(programs, result.numel(), dtype=torch.float32, device=x.device)
    units = [math.gcd(count, 16) for count in (channels, filters)]
    _kernel[(programs, 3 // way.rows)](
        x, dy, sums, pixels, height, width, channels // units[0], filters // units[1],
        C_UNIT=units[0], F_UNIT=units[1], BC=_tile(channels), BF=_tile(filters), BLOCK=_BLOCK, ROWS=way.rows,
        num_warps=way.warps, num_stages=2,
    )  # fmt: skip
    torch.sum(sums, 0, out=result.permute(0, 2, 3, 1).view(-1))
    return result


def choices() -> dict[str, str]:
    """What was chosen so far, for a benchmark to tell: shapes -> way."""
    return {f"{tuple(key[0])} to {key[1]}": str(way) for key, way in _chosen.items()}


def _tile(count: int) -> int:
    return max(16, 1 << (count - 1).bit_length())  # the chip multiplies matrices of at least 16 x 16


def _empty(x: Tensor, dy: Tensor) -> Tensor:
    shape = (dy.shape[1], x.shape[1], 3, 3)
    return torch.empty(shape, dtype=torch.float32, device=x.device, memory_format=torch.channels_last)


def _seconds(work: Callable[[], Any], repeats: int = 20) -> float:
    """How long it takes on the device; forever if it cannot be done."""
    try:
        for _ in range(3):  # compiles it, and lets the library choose for itself
            work()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_HEAD_START)
        first.record()
        for _ in range(repeats):
            work()
        last.record()
        last.synchronize()
    except (RuntimeError, triton.TritonError):
        return math.inf
    return float(first.elapsed_time(last)) / 1e3 / repeats
