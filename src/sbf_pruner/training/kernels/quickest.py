"""Which of several ways to compute the same thing is the quickest on this device.

Pieces of work enter, the first of them trusted; the quickest that agrees with it leaves.  A way that cannot be
taken here, or that comes to something else, is not taken: a kernel is as good as the compiler that made it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
import triton
from torch import Tensor

Way = TypeVar("Way")
Work = Callable[[], Tensor]

_AGREES = 0.02  # of the norm: what is trusted may round its result to bfloat16
_IMPOSSIBLE = (RuntimeError, triton.TritonError)  # too few registers here, or too little shared memory
_HEAD_START = 10_000_000  # cycles the device idles while the host lines up what is timed: it is slower to launch


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


def seconds(work: Work, repeats: int = 20) -> float:
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
    except _IMPOSSIBLE:
        return math.inf
    return float(first.elapsed_time(last)) / 1e3 / repeats
