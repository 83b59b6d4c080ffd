"""The machine that figures were measured on: its processor, the versions that ran, and the threads.

A device enters; plain data leaves, which stands beside every figure that is saved.
"""

from __future__ import annotations

import platform
import sys
from importlib.metadata import version
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


def cpu() -> str:
    """What the processor is called."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or f"{platform.machine()} ({sys.platform})"
