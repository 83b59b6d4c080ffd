"""How long calls take, side by side: the one clock of the package.

Named calls enter; for each a list of seconds leaves, one per round, taken in turns: every round runs all of
them, in random order, and the round after it in the opposite order, so that a drift of the machine and what
one call leaves in the caches hit all alike.  Two such lists become a ratio round by round, with an interval
for its median that assumes nothing about how the times are spread.

The machine that figures were measured on: its processor, the versions that ran, the threads, and how busy it is.

A device enters; plain data leaves, which stands beside every figure that is saved.

How much memory a device has for us, for whoever is about to fill it.
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
from .user_model import uncollected

Name = TypeVar("Name", bound=Hashable)
_PER_PROCESSOR = 16  # threads, at most
SAMPLE = 0.01  # seconds that one sample takes at least: a clock and a scheduler are coarse


@dataclass(frozen=True)
class Interval:
    """A median, and between which values the true one lies with a probability of `confidence`."""

    median: float
    low: float
    high: float
    confidence: float
    n: int


def take_turns(
    calls: Mapping[Name, Callable[[], Any]],
    rounds: int,
    *,
    sample: float = SAMPLE,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[Name, list[float]]:
    """Seconds of one pass of each call, `rounds` times, in turns.

    A sample is the mean of as many passes as fill `sample` seconds; 0 means one pass.  On a GPU the clock is
    read only when all that was launched is done.

    >>> found = take_turns({"short": lambda: None, "long": lambda: time.sleep(1e-4)}, 3, sample=1e-3)
    >>> [len(found[name]) for name in ("short", "long")], min(found["long"]) > max(found["short"])
    ([3, 3], True)
    """
    if rounds < 1:
        raise ValueError(f"{rounds} rounds take no time; ask for at least 1")
    wait = waiting(device)
    taken: dict[Name, list[float]] = {name: [] for name in calls}
    with uncollected():
        passes = {name: _passes(run, sample, wait) for name, run in calls.items()}
        for order in _orders(list(calls), rounds, seed):
            for name in order:
                taken[name].append(_seconds(calls[name], passes[name], wait))
    return taken


def compared(slower: Sequence[float], faster: Sequence[float], confidence: float = 0.95) -> Interval:
    """How many times as long the first took as the second, round by round.

    >>> compared([2.0, 4.0, 6.0, 2.0, 2.0, 2.0], [1.0, 2.0, 2.0, 1.0, 1.0, 1.0])
    Interval(median=2.0, low=2.0, high=3.0, confidence=0.96875, n=6)
    """
    return median_interval([a / b for a, b in zip(slower, faster, strict=True)], confidence)


def median_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """The median, and the two order statistics that hold the true one at least as surely as asked.

    The true median lies below the k-th smallest of n independent values exactly as often as a fair coin falls
    heads fewer than k times in n throws.  Fewer than six values cannot give 95 %: then the smallest and the
    largest are given with the confidence they have.

    >>> median_interval([3.0, 1.0, 2.0])
    Interval(median=2.0, low=1.0, high=3.0, confidence=0.75, n=3)
    """
    if not values:
        raise ValueError("there is no median of nothing")
    ordered, n = sorted(values), len(values)
    rank, outside = 0, 2.0 ** (1 - n)  # the chance that the median lies outside of ordered[rank] .. its mirror
    while 2 * (rank + 1) < n:
        more = outside + 2 * math.comb(n, rank + 1) / 2**n
        if more > 1 - confidence:
            break
        rank, outside = rank + 1, more
    return Interval(statistics.median(ordered), ordered[rank], ordered[n - 1 - rank], 1 - min(1.0, outside), n)


@contextmanager
def using_threads(count: int | None) -> Iterator[None]:
    """While entered, torch computes with so many threads."""
    before, there = torch.get_num_threads(), os.cpu_count() or 1
    if count is not None and count > _PER_PROCESSOR * there:  # torch would end the process
        raise PruningError(f"{count} threads are too many for {there} processors; ask for {there} at most")
    try:
        if count is not None:
            torch.set_num_threads(count)
        yield
    finally:
        torch.set_num_threads(before)


def _orders(names: list[Name], rounds: int, seed: int) -> list[list[Name]]:
    chosen = random.Random(seed)
    orders: list[list[Name]] = []
    for number in range(rounds):
        orders.append(orders[-1][::-1] if number % 2 else chosen.sample(names, len(names)))
    return orders


def _passes(run: Callable[[], Any], sample: float, wait: Callable[[], None]) -> int:
    """How many passes make a sample; the first ones also warm caches and allocators up."""
    _seconds(run, 2, wait)
    return max(1, round(sample / max(_seconds(run, 2, wait), 1e-9))) if sample else 1


def _seconds(run: Callable[[], Any], passes: int, wait: Callable[[], None]) -> float:
    wait()
    began = time.perf_counter()
    for _ in range(passes):
        run()
    wait()
    return (time.perf_counter() - began) / passes


def waiting(device: torch.device | str) -> Callable[[], None]:
    """A call that returns when all that was launched on a device is done."""
    device = torch.device(device)
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: None


def environment(device: torch.device) -> dict[str, Any]:
    """The machine and the versions that were used."""
    packages = ("torch", "numpy", "safetensors")
    return {
        "python": platform.python_version(),
        "sbf-pruner": __version__,
        **{name: version(name) for name in packages},
        "platform": platform.platform(),
        "cpu": cpu(),
        "threads": torch.get_num_threads(),
        "device": str(device),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
    }


def version_of(package: str) -> str | None:
    """The version of a package that need not be there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cpu() -> str:
    """What the processor is called."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or f"{platform.machine()} ({sys.platform})"


def load(seconds: float = 0.3) -> float | None:
    """How many cores others keep busy while we do nothing; None where the system does not tell.

    The load average would still count what ended a minute ago, and our own start.
    """
    before = _ticks()
    time.sleep(seconds)
    after = _ticks()
    if before is None or after is None or after[1] == before[1]:
        return None
    return (os.cpu_count() or 1) * (after[0] - before[0]) / (after[1] - before[1])


def _ticks() -> tuple[int, int] | None:
    """The time all cores together were busy, and in all, since the system started."""
    try:
        user, nice, system, idle, wait, *rest = map(
            int, Path("/proc/stat").read_text("ascii").split("\n")[0].split()[1:9]
        )
    except (OSError, ValueError):
        return None
    busy = user + nice + system + sum(rest)
    return busy, busy + idle + wait


def memory_of(device: torch.device) -> int | None:
    """The bytes a device could still give us, or all that a machine has; None where it cannot be known."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    if device.type == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None
