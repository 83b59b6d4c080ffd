"""Which of several ways to compute the same thing is the quickest on this device.

Pieces of work enter, the first of them trusted; the quickest that agrees with it leaves, and is remembered, here
and for other processes.  A way that cannot be taken here, or that comes to something else, is not taken: a kernel
is as good as the compiler that made it.

The weight gradient of a 3x3 convolution with few channels, as one small matrix product over all pixels.

The map that entered a convolution and the gradient of the one that left it enter, in bfloat16 or float16 with
the channels last; the gradient of the weight leaves, in float32.  A library's kernels for this are made for
hundreds of channels and mostly wait with 16.  Here the window is folded into the product: the map is read at
the three rows of the window side by side, the gradient at its three columns, and all nine parts of the result
are blocks of one product, which is large enough for the chip's matrix units.  Every program walks over its own
stretch of pixels; the programs' sums are then added in a fixed order, so equal inputs give equal bits.  The
first call at each shape tries the ways to do it, the library's included, and keeps the quickest that agrees
with the library.  Needs Triton and a CUDA device; `convolutions` imports this only where both are there.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from .convolutions import keep, recall

Candidate = TypeVar("Candidate")
Work = Callable[[], Tensor]

_AGREES = 0.02  # of the norm: what is trusted may round its result to bfloat16
_IMPOSSIBLE = (RuntimeError, triton.TritonError)  # too few registers here, or too little shared memory
_HEAD_START = 10_000_000  # cycles the device idles while the host lines up what is timed: it is slower to launch


class Choices(Generic[Candidate]):
    """What was found to be quickest, for each size and type of a layer's map and each number of its filters.

    `source` is the file of the kernels: what was remembered of others says nothing about them.
    """

    def __init__(self, trusted: Candidate, source: str) -> None:
        self.trusted = trusted
        self._source = hashlib.sha256(Path(source).read_bytes()).hexdigest()[:16]
        self._made: dict[tuple[torch.Size, int, torch.dtype, torch.device], Candidate] = {}

    def choose(self, x: Tensor, filters: int, works: Mapping[Candidate, Work]) -> Candidate:
        """The way for such a layer; the first call with one tries all ways, unless it is being captured."""
        layer = (x.shape, filters, x.dtype, x.device)
        if layer not in self._made and not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._made[layer] = self._found(x, filters, works)
        return self._made.get(layer, self.trusted)

    def told(self) -> dict[str, str]:
        """All choices so far, for a benchmark to tell."""
        return {f"{tuple(layer[0])} to {layer[1]}": str(way) for layer, way in self._made.items()}

    def _found(self, x: Tensor, filters: int, works: Mapping[Candidate, Work]) -> Candidate:
        if not x.is_cuda:
            return quickest(works)
        place = f"{torch.cuda.get_device_name(x.device)}, torch {torch.__version__}, triton {triton.__version__}"
        layer = f"{self._source} on {place}: {tuple(x.shape)} {x.dtype} to {filters}"
        known = {str(way): way for way in works}
        remembered = recall(layer)
        if remembered not in known:
            remembered = str(quickest(works))
            keep(layer, remembered)
        return known[remembered]


def quickest(works: Mapping[Candidate, Work]) -> Candidate:
    """The way that takes the least time, of those whose result is that of the first."""
    ways = list(works)
    trusted = works[ways[0]]()
    times = {way: seconds(works[way]) for way in ways if way == ways[0] or _agrees(works[way], trusted)}
    return min(times, key=lambda way: times[way])


def _agrees(work: Work, trusted: Tensor) -> bool:
    try:
        found = work()
    except _IMPOSSIBLE:
        return False
    return float((found - trusted).norm()) <= _AGREES * float(trusted.norm())  # never true of what is no number


def seconds(work: Work, repeats: int = 10, rounds: int = 3) -> float:
    """How long it takes on the device, in the best of some rounds: others may use it too; forever if impossible."""
    try:
        for _ in range(3):  # compiles it, and lets the library choose for itself
            work()
        return min(_round(work, repeats) for _ in range(rounds)) / repeats
    except _IMPOSSIBLE:
        return math.inf


def _round(work: Work, repeats: int) -> float:
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_HEAD_START)
    first.record()
    for _ in range(repeats):
        work()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3


_LARGEST = 128 * 128  # numbers of the product that a program can hold in registers
_SMALL = 64 * 64  # so many need only half of the registers


class Way(NamedTuple):
    """How to compute it: rows of the window a program takes on, how many steps ahead it loads, and programs.

    Programs are counted for each multiprocessor and row of the window that is left to another program.
    """

    rows: int
    ahead: int
    programs: int


LIBRARY = Way(0, 0, 0)
CHOICES = Choices(LIBRARY, __file__)


def ways(x: Tensor, filters: int) -> list[Way]:
    """The ways there are for such a map: all rows at once where that fits, else a program for each.

    What is loaded ahead waits in shared memory.  What is not goes through the cache beside it, which windows that
    overlap hit, and needs more programs that wait in turns.
    """
    whole, row = (_product(rows, x.shape[1], filters) for rows in (3, 1))
    if row > _LARGEST or not _small_enough(x, filters):
        return [LIBRARY]
    if whole > _LARGEST:
        return [LIBRARY, Way(1, 1, 1), Way(1, 3, 1)]
    return [LIBRARY, Way(3, 1, 4), Way(3, 3, 2)] if whole <= _SMALL else [LIBRARY, Way(3, 1, 2), Way(3, 3, 1)]


@triton.jit
def _kernel(  # type: ignore[no-untyped-def]
    x_ptr, dy_ptr, sums_ptr, pixels, c_units, f_units, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    C_UNIT: tl.constexpr, F_UNIT: tl.constexpr, BC: tl.constexpr, BF: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    # Widths come as a count of units: so the compiler knows what divides them, and loads whole vectors, without
    # being asked again for every width.
    C = c_units * C_UNIT
    N_F = f_units * F_UNIT
    program = tl.program_id(0)
    # Three rows of the window need room for four: sizes are powers of two. The fourth is masked.
    place_x = tl.arange(0, 4 * BC if ROWS == 3 else BC)
    place_y = tl.arange(0, 4 * BF)
    c, f = place_x % BC, place_y % BF
    down = place_x // BC - 1 if ROWS == 3 else place_x * 0 + tl.program_id(1) - 1
    right = place_y // BF - 1
    seen = (c < C) & (down < 2)
    asked = (f < N_F) & (right < 2)
    product = tl.zeros((place_x.shape[0], place_y.shape[0]), tl.float32)
    steps = tl.cdiv(pixels, tl.num_programs(0) * BLOCK)
    for step in tl.range(steps, num_stages=AHEAD):
        at = (program * steps + step) * BLOCK + tl.arange(0, BLOCK)
        inside = (at < pixels)[:, None]
        row = ((at // WIDTH) % HEIGHT)[:, None] + down[None, :]
        column = (at % WIDTH)[:, None] - right[None, :]
        # The map `down` rows below a pixel meets the gradient `right` columns left of it.
        x = tl.load(
            x_ptr + at[:, None] * C + (down * WIDTH * C + c)[None, :],
            mask=inside & seen[None, :] & (row >= 0) & (row < HEIGHT),
            other=0.0,
        )
        dy = tl.load(
            dy_ptr + at[:, None] * N_F + (f - right * N_F)[None, :],
            mask=inside & asked[None, :] & (column >= 0) & (column < WIDTH),
            other=0.0,
        )
        product = tl.dot(tl.trans(x), dy, product)
    # Laid out as a weight with its channels last is: filter, row, column, channel.
    window = (down[:, None] + 1) * 3 + right[None, :] + 1
    place = program * 9 * C * N_F + f[None, :] * (9 * C) + window * C + c[:, None]
    tl.store(sums_ptr + place, product, mask=seen[:, None] & asked[None, :])


@triton.jit
def _add_up(sums_ptr, result_ptr, programs, size, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, programs, ROWS):
        row = first + tl.arange(0, ROWS)
        there = (row < programs)[:, None] & (column < size)[None, :]
        total += tl.load(sums_ptr + row[:, None] * size + column[None, :], mask=there, other=0.0)
    tl.store(result_ptr + column, tl.sum(total, 0), mask=column < size)


@torch.library.custom_op("sbf_pruner::weight_gradient", mutates_args=())
def weight_gradient(x: Tensor, dy: Tensor) -> Tensor:
    """The gradient of the weight of conv2d(x, weight, padding=1), a 3x3 kernel with stride 1."""
    x, dy = (t.contiguous(memory_format=torch.channels_last) for t in (x, dy))
    works = {way: partial(compute, x, dy, way) for way in ways(x, dy.shape[1])}
    return works[CHOICES.choose(x, dy.shape[1], works)]()


@weight_gradient.register_fake
def _(x: Tensor, dy: Tensor) -> Tensor:
    return _empty(x, dy)


def compute(x: Tensor, dy: Tensor, way: Way) -> Tensor:
    """The gradient, in the given way; both maps have their channels last."""
    images, channels, height, width = x.shape
    filters, result = dy.shape[1], _empty(x, dy)
    if way == LIBRARY:
        like = torch.empty_like(result, dtype=x.dtype)
        wanted = [False, True, False]
        found = torch.ops.aten.convolution_backward(
            dy, x, like, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, wanted
        )[1]
        return result.copy_(found)
    small = _product(way.rows, channels, filters) <= _SMALL
    pixels, block = images * height * width, 128 if small else 64
    programs = min(_multiprocessors(x) * way.programs * way.rows // 3, triton.cdiv(pixels, block))
    sums = torch.empty(programs, result.numel(), dtype=torch.float32, device=x.device)
    units = [math.gcd(count, 16) for count in (channels, filters)]
    _kernel[(programs, 3 // way.rows)](
        x, dy, sums, pixels, channels // units[0], filters // units[1], HEIGHT=height, WIDTH=width,
        C_UNIT=units[0], F_UNIT=units[1], BC=_tile(channels), BF=_tile(filters), BLOCK=block, ROWS=way.rows,
        AHEAD=way.ahead, num_warps=4 if small else 8,
    )  # fmt: skip
    size = result.numel()
    _add_up[(triton.cdiv(size, 32),)](sums, result, programs, size, ROWS=64, COLUMNS=32, num_warps=4)
    return result


def _product(rows: int, channels: int, filters: int) -> int:
    """How many numbers the product of a program has."""
    return _tile(channels) * (4 if rows == 3 else 1) * 4 * _tile(filters)


def _small_enough(x: Tensor, filters: int) -> bool:
    """Do places in a layer's maps fit the 32 bits that the kernel counts with?"""
    return max(x.shape[1], filters) * (x.numel() // x.shape[1]) < 2**31


def _multiprocessors(x: Tensor) -> int:
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 3


def _tile(count: int) -> int:
    return max(16, 1 << (count - 1).bit_length())  # the chip multiplies matrices of at least 16 x 16


def _empty(x: Tensor, dy: Tensor) -> Tensor:
    shape = (dy.shape[1], x.shape[1], 3, 3)
    return torch.empty(shape, dtype=torch.float32, device=x.device, memory_format=torch.channels_last)
