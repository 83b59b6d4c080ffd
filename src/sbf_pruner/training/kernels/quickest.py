"""Which of several ways to compute the same thing is the quickest on this device.

Pieces of work enter, the first of them trusted; the quickest that agrees with it leaves, and is remembered, here
and for other processes.  A way that cannot be taken here, or that comes to something else, is not taken: a kernel
is as good as the compiler that made it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Generic, TypeVar

import torch
import triton
from torch import Tensor

from .remembered import keep, recall

Way = TypeVar("Way")
Work = Callable[[], Tensor]

_AGREES = 0.02  # of the norm: what is trusted may round its result to bfloat16
_IMPOSSIBLE = (RuntimeError, triton.TritonError)  # too few registers here, or too little shared memory
_HEAD_START = 10_000_000  # cycles the device idles while the host lines up what is timed: it is slower to launch


class Choices(Generic[Way]):
    """What was found to be quickest, for each size and type of a layer's map and each number of its filters.

    `source` is the file of the kernels: what was remembered of others says nothing about them.
    """

    def __init__(self, trusted: Way, source: str) -> None:
        self.trusted = trusted
        self._source = hashlib.sha256(Path(source).read_bytes()).hexdigest()[:16]
        self._made: dict[tuple[torch.Size, int, torch.dtype, torch.device], Way] = {}

    def choose(self, x: Tensor, filters: int, works: Mapping[Way, Work]) -> Way:
        """The way for such a layer; the first call with one tries all ways, unless it is being captured."""
        layer = (x.shape, filters, x.dtype, x.device)
        if layer not in self._made and not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._made[layer] = self._found(x, filters, works)
        return self._made.get(layer, self.trusted)

    def told(self) -> dict[str, str]:
        """All choices so far, for a benchmark to tell."""
        return {f"{tuple(layer[0])} to {layer[1]}": str(way) for layer, way in self._made.items()}

    def _found(self, x: Tensor, filters: int, works: Mapping[Way, Work]) -> Way:
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


def quickest(works: Mapping[Way, Work]) -> Way:
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
