"""Interleaved timing of several calls, confidence intervals for medians, and the description of the machine.

Every round times all calls, in random order or in the reverse of the last round, so that machine drift and cache
state affect all alike. `median_ratio` computes one ratio of two times per round; the confidence interval of its
median makes no assumption about the distribution.
"""

from __future__ import annotations

import math
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import torch

from .. import __version__
from ..errors import PruningError
from .user_model import gc_disabled

Name = TypeVar("Name", bound=Hashable)
_PER_PROCESSOR = 16  # maximum number of threads per processor
SAMPLE = 0.01  # minimum seconds per sample, because clock and scheduler are coarse


@dataclass(frozen=True)
class Interval:
    """A sample median and the interval that contains the true median with probability `confidence`."""

    median: float
    low: float
    high: float
    confidence: float
    n: int


def time_interleaved(
    calls: Mapping[Name, Callable[[], Any]],
    rounds: int,
    *,
    sample: float = SAMPLE,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[Name, list[float]]:
    """Time each call `rounds` times, interleaved, and return the seconds of one pass, one value per round.

    Each value is the mean over as many passes as fill `sample` seconds; 0 means one pass. On a GPU the device is
    synchronized before the clock is read. Garbage collection is off while timing.

    >>> found = time_interleaved({"short": lambda: None, "long": lambda: time.sleep(1e-4)}, 3, sample=1e-3)
    >>> [len(found[name]) for name in ("short", "long")], min(found["long"]) > max(found["short"])
    ([3, 3], True)
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    wait, rng = synchronizer(device), random.Random(seed)
    times: dict[Name, list[float]] = {name: [] for name in calls}
    order = list(calls)
    with gc_disabled():
        passes = {name: _passes(run, sample, wait) for name, run in calls.items()}
        for number in range(rounds):
            order = order[::-1] if number % 2 else rng.sample(list(calls), len(calls))
            for name in order:
                times[name].append(_seconds(calls[name], passes[name], wait))
    return times


def median_ratio(slower: Sequence[float], faster: Sequence[float]) -> Interval:
    """Return the median ratio of the first list of times to the second, paired by round, with its interval.

    >>> median_ratio([2.0, 4.0, 6.0, 2.0, 2.0, 2.0], [1.0, 2.0, 2.0, 1.0, 1.0, 1.0])
    Interval(median=2.0, low=2.0, high=3.0, confidence=0.96875, n=6)
    """
    return median_interval([a / b for a, b in zip(slower, faster, strict=True)])


def median_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Return the median and the narrowest symmetric pair of order statistics with at least the given confidence.

    For n independent values, the true median lies below the k-th smallest with the probability that a fair coin
    falls heads fewer than k times in n throws. Fewer than six values cannot reach 95 %; the interval is then their
    range, with the confidence it has.

    >>> median_interval([3.0, 1.0, 2.0])
    Interval(median=2.0, low=1.0, high=3.0, confidence=0.75, n=3)
    """
    if not values:
        raise ValueError("no median of an empty list; give at least one value")
    ordered, n = sorted(values), len(values)
    rank, outside = 0, 2.0 ** (1 - n)  # chance that the median lies outside ordered[rank] .. ordered[-1 - rank]
    while 2 * (rank + 1) < n:
        more = outside + 2 * math.comb(n, rank + 1) / 2**n
        if more > 1 - confidence:
            break
        rank, outside = rank + 1, more
    return Interval(statistics.median(ordered), ordered[rank], ordered[n - 1 - rank], 1 - min(1.0, outside), n)


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Set the number of threads of torch inside the block; None leaves it unchanged."""
    before, processors = torch.get_num_threads(), os.cpu_count() or 1
    if count is not None and count > _PER_PROCESSOR * processors:  # torch would abort the process.
        raise PruningError(
            f"{count} threads are too many for {processors} processors; ask for {processors} at most"
        )
    try:
        if count is not None:
            torch.set_num_threads(count)
        yield
    finally:
        torch.set_num_threads(before)


def _passes(run: Callable[[], Any], sample: float, wait: Callable[[], None]) -> int:
    """Return how many passes fill `sample` seconds, after two warm-up passes."""
    _seconds(run, 2, wait)
    return max(1, round(sample / max(_seconds(run, 2, wait), 1e-9))) if sample else 1


def _seconds(run: Callable[[], Any], passes: int, wait: Callable[[], None]) -> float:
    wait()
    began = time.perf_counter()
    for _ in range(passes):
        run()
    wait()
    return (time.perf_counter() - began) / passes


def synchronizer(device: torch.device | str) -> Callable[[], None]:
    """Return a function that synchronizes with a CUDA device; for other devices it does nothing."""
    device = torch.device(device)
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: None


def environment(device: torch.device) -> dict[str, Any]:
    """Return the machine, device, thread count and package versions, as plain data."""
    return {
        "python": platform.python_version(),
        "sbf-pruner": __version__,
        **{name: version(name) for name in ("torch", "numpy", "safetensors")},
        "platform": platform.platform(),
        "cpu": cpu(),
        "threads": torch.get_num_threads(),
        "device": str(device),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
    }


def version_of(package: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cpu() -> str:
    """Return the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or f"{platform.machine()} ({sys.platform})"


def busy_cores(seconds: float = 0.3) -> float | None:
    """Return the mean number of cores in use while this process sleeps for `seconds`; None without /proc/stat.

    The load average is not used, because it includes processes that ended a minute ago and this one's start-up.
    """
    before = _ticks()
    time.sleep(seconds)
    after = _ticks()
    if before is None or after is None or after[1] == before[1]:
        return None
    return (os.cpu_count() or 1) * (after[0] - before[0]) / (after[1] - before[1])


def _ticks() -> tuple[int, int] | None:
    """Return the non-idle and the total clock ticks of all cores since boot, or None if they cannot be read."""
    try:
        ticks = list(map(int, Path("/proc/stat").read_text("ascii").split("\n")[0].split()[1:9]))
        idle = ticks[3] + ticks[4]  # including waits for I/O
    except (OSError, ValueError, IndexError):
        return None
    return sum(ticks) - idle, sum(ticks)


def available_memory(device: torch.device) -> int | None:
    """Return the available bytes of a CUDA device, or the total memory of the machine; None if unknown."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    if device.type == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None
