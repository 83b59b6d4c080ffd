"""Triton kernel for the weight gradient of 3x3 convolutions with few channels, and selection of the fastest kernel.

cuDNN's kernels are designed for hundreds of channels and use little of the device with 16. This kernel computes the
gradient of all nine positions of the 3x3 window in one matrix product, which is large enough for the tensor cores:
one factor concatenates the input shifted by each row of the window, the other one the output gradient shifted by
each column. Each program handles a range of pixels; their sums are added in a fixed order, so equal inputs give
bit-identical results. Needs Triton and a CUDA device; `convolutions` imports this module only if both exist.
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

from .convolutions import load_choice, store_choice

Candidate = TypeVar("Candidate")
Work = Callable[[], Tensor]

_AGREES = 0.02  # largest accepted error, relative to the trusted result, which may be rounded to bfloat16
_IMPOSSIBLE = (RuntimeError, triton.TritonError)  # The device has too few registers or too little shared memory.
# Clock cycles that the device sleeps while the host queues the timed launches. Launching takes longer than running
# these kernels, so without the sleep the measured time would be that of the host.
_HEAD_START = 10_000_000


class Choices(Generic[Candidate]):
    """Fastest candidate for each input shape, dtype, device and number of filters.

    Choices are stored on disk for other processes. `source` is the path of the file that defines the kernels; a
    stored choice is used only if that file has not changed.
    """

    def __init__(self, trusted: Candidate, source: str) -> None:
        self.trusted = trusted
        self._source = hashlib.sha256(Path(source).read_bytes()).hexdigest()[:16]
        self._made: dict[tuple[torch.Size, int, torch.dtype, torch.device], Candidate] = {}

    def choose(self, x: Tensor, filters: int, works: Mapping[Candidate, Work]) -> Candidate:
        """Return the fastest candidate for a layer; the first call for that layer measures all of them.

        During graph capture nothing is measured, and a layer without a choice uses the trusted candidate.
        """
        layer = (x.shape, filters, x.dtype, x.device)
        if layer not in self._made and not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._made[layer] = self._found(x, filters, works)
        return self._made.get(layer, self.trusted)

    def told(self) -> dict[str, str]:
        """Return all choices so far as text, for benchmarks."""
        return {f"{tuple(layer[0])} to {layer[1]}": str(way) for layer, way in self._made.items()}

    def _found(self, x: Tensor, filters: int, works: Mapping[Candidate, Work]) -> Candidate:
        if not x.is_cuda:
            return quickest(works)
        place = f"{torch.cuda.get_device_name(x.device)}, torch {torch.__version__}, triton {triton.__version__}"
        layer = f"{self._source} on {place}: {tuple(x.shape)} {x.dtype} to {filters}"
        known = {str(way): way for way in works}
        remembered = load_choice(layer)
        if remembered not in known:
            remembered = str(quickest(works))
            store_choice(layer, remembered)
        return known[remembered]


def quickest(works: Mapping[Candidate, Work]) -> Candidate:
    """Return the fastest candidate whose result agrees with that of the first one, which is trusted."""
    ways = list(works)
    trusted = works[ways[0]]()
    times = {way: seconds(works[way]) for way in ways if way == ways[0] or _agrees(works[way], trusted)}
    return min(times, key=lambda way: times[way])


def _agrees(work: Work, trusted: Tensor) -> bool:
    try:
        found = work()
    except _IMPOSSIBLE:
        return False
    return float((found - trusted).norm()) <= _AGREES * float(trusted.norm())  # False for NaN.


def seconds(work: Work, repeats: int = 10, rounds: int = 3) -> float:
    """Return the device time of one call of `work` in seconds, or infinity if it cannot run on this device.

    This is the minimum over several rounds, because other processes may use the device too.
    """
    try:
        for _ in range(3):  # Compile the kernels, and let the library choose its algorithm.
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


_LARGEST = 128 * 128  # largest number of elements of a product that one program can hold in registers
_SMALL = 64 * 64  # A product of up to this many elements needs only half of the registers.


class KernelConfig(NamedTuple):
    """Configuration of the kernel.

    `rows` is the number of rows of the window that one program handles, `ahead` the number of pipeline stages of
    its loads, and `programs` the number of programs per multiprocessor, over all rows of the window.
    """

    rows: int
    ahead: int
    programs: int


LIBRARY = KernelConfig(0, 0, 0)
CHOICES = Choices(LIBRARY, __file__)


def candidate_configs(x: Tensor, filters: int) -> list[KernelConfig]:
    """Return the configurations to try: all rows of the window in one program if they fit, otherwise one each.

    Pipelined loads (`ahead` above 1) are kept in shared memory. Other loads go through the L1 cache, where
    overlapping windows hit, and need more programs to hide their latency.
    """
    whole, row = (_product(rows, x.shape[1], filters) for rows in (3, 1))
    if row > _LARGEST or not _small_enough(x, filters):
        return [LIBRARY]
    if whole > _LARGEST:
        return [LIBRARY, KernelConfig(1, 1, 1), KernelConfig(1, 3, 1)]
    return (
        [LIBRARY, KernelConfig(3, 1, 4), KernelConfig(3, 3, 2)]
        if whole <= _SMALL
        else [LIBRARY, KernelConfig(3, 1, 2), KernelConfig(3, 3, 1)]
    )


@triton.jit
def _kernel(  # type: ignore[no-untyped-def]
    x_ptr, dy_ptr, sums_ptr, pixels, c_units, f_units, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    C_UNIT: tl.constexpr, F_UNIT: tl.constexpr, BC: tl.constexpr, BF: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    # A channel count is passed as a factor times a compile-time divisor (C_UNIT, F_UNIT), so that the compiler can
    # vectorize the loads, and need not compile the kernel again for every count.
    C = c_units * C_UNIT
    N_F = f_units * F_UNIT
    program = tl.program_id(0)
    # Triton requires sizes that are powers of two, so three rows are padded to four, and the fourth is masked.
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
        # The input `down` rows below a pixel is multiplied by the gradient `right` columns left of it.
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
    # Store in the memory order of a channels_last weight: filter, row, column, channel.
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
    """Return the weight gradient of `conv2d(x, weight, padding=1)` for a 3x3 kernel with stride 1, in float32.

    `x` and the output gradient `dy` are bfloat16 or float16. The first call for each shape measures all
    configurations, including torch's own operator, and selects the fastest one that agrees with that operator.
    """
    x, dy = (t.contiguous(memory_format=torch.channels_last) for t in (x, dy))
    works = {way: partial(compute, x, dy, way) for way in candidate_configs(x, dy.shape[1])}
    return works[CHOICES.choose(x, dy.shape[1], works)]()


@weight_gradient.register_fake
def _(x: Tensor, dy: Tensor) -> Tensor:
    return _empty(x, dy)


def compute(x: Tensor, dy: Tensor, way: KernelConfig) -> Tensor:
    """Compute the weight gradient with the configuration `way`; `x` and `dy` are channels_last."""
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
    """Return the number of elements of the matrix product that one program computes."""
    return _tile(channels) * (4 if rows == 3 else 1) * 4 * _tile(filters)


def _small_enough(x: Tensor, filters: int) -> bool:
    """Return True if all offsets into the input and the output gradient fit the kernel's 32-bit integers."""
    return max(x.shape[1], filters) * (x.numel() // x.shape[1]) < 2**31


def _multiprocessors(x: Tensor) -> int:
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 3


def _tile(count: int) -> int:
    return max(16, 1 << (count - 1).bit_length())  # Tensor cores multiply matrices of at least 16 x 16.


def _empty(x: Tensor, dy: Tensor) -> Tensor:
    shape = (dy.shape[1], x.shape[1], 3, 3)
    return torch.empty(shape, dtype=torch.float32, device=x.device, memory_format=torch.channels_last)
