"""The machine a bench ran on, and how quiet it was.

Nothing enters but what is asked for; plain data leaves: processor, versions, threads, how busy the machine was
before anything was timed, and how the memory allocator was set.
"""

from __future__ import annotations

import importlib.metadata
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..environment import environment
from .runtimes import RUNTIMES


def machine(devices: Sequence[str], runtimes: Sequence[str]) -> dict[str, Any]:
    """What belongs beside every figure."""
    packages = dict.fromkeys(package for name in runtimes for package in RUNTIMES[name].packages)
    return {
        **environment(torch.device("cuda" if "cuda" in devices else "cpu")),
        **{name: found for name in packages if (found := _version(name)) is not None},
        "cores": os.cpu_count(),
        "load": _load(),
        "allocator": {key: value for key, value in os.environ.items() if key.startswith(("MALLOC_", "LD_PRELOAD"))},
    }


def faults(run: Callable[[], Any], passes: int = 3) -> float | None:
    """Pages that the system had to hand over in one pass; each takes a time that no network is to blame for."""
    try:
        import resource
    except ImportError:  # only Unix counts them
        return None
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(passes):
        run()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / passes


def _load(seconds: float = 0.3) -> float | None:
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


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
