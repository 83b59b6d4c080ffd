"""The machine a bench ran on, and how quiet it was.

Nothing enters but what is asked for; plain data leaves: processor, versions, threads, how busy the machine was
before anything was timed, and how the memory allocator was set.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..environment import environment, load, version_of
from .runtimes import RUNTIMES

_PASSES = 3  # in which page faults are counted


def machine(devices: Sequence[str], runtimes: Sequence[str]) -> dict[str, Any]:
    """What belongs beside every figure."""
    packages = dict.fromkeys(package for name in runtimes for package in RUNTIMES[name].packages)
    return {
        **environment(torch.device("cuda" if "cuda" in devices else "cpu")),
        **{name: found for name in packages if (found := version_of(name)) is not None},
        "cores": os.cpu_count(),
        "load": load(),
        "allocator": {key: value for key, value in os.environ.items() if key.startswith(("MALLOC_", "LD_PRELOAD"))},
    }


def faults(run: Callable[[], Any]) -> float | None:
    """Pages that the system had to hand over in one pass; each takes a time that no network is to blame for."""
    try:
        import resource
    except ImportError:  # only Unix counts them
        return None
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(_PASSES):
        run()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / _PASSES
