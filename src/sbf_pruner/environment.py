"""The machine that figures were measured on: its processor, the versions that ran, the threads, and how busy it is.

A device enters; plain data leaves, which stands beside every figure that is saved.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from . import __version__


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
