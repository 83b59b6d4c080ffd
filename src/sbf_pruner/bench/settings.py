"""What a bench is asked for, checked before any work is done.

Words of the command line enter; frozen `Settings` leave, or one sentence that says what is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import PruningError, nearest
from .runtimes import RUNTIMES


@dataclass(frozen=True)
class Settings:
    """What is timed, and how often."""

    batches: tuple[int, ...] = (1, 64)
    runtimes: tuple[str, ...] = tuple(RUNTIMES)
    devices: tuple[str, ...] = ("cpu",)
    pairs: int | None = None
    """None: as many as fit into about 20 seconds, at least 10 and at most 100"""
    threads: int | None = None
    """None: as many as torch uses by itself"""

    def __post_init__(self) -> None:
        for flag, numbers in (("--batch", self.batches), ("--pairs", [self.pairs]), ("--threads", [self.threads])):
            if not numbers or any(number is not None and number < 1 for number in numbers):
                raise PruningError(f"{flag} must be at least 1")
        for name in self.runtimes:
            if name not in RUNTIMES:
                raise PruningError(f"--runtimes: none is called {name!r}; {nearest(name, RUNTIMES)}")


def read_settings(
    batches: str, runtimes: str | None, device: str, pairs: int | None = None, threads: int | None = None
) -> Settings:
    """Settings from the words of the command line.

    >>> read_settings("1,8", "eager", "cpu").batches
    (1, 8)
    """
    try:
        sizes = tuple(dict.fromkeys(int(word) for word in batches.split(",")))
    except ValueError:
        raise PruningError(f"--batch {batches!r}: write numbers with commas between them, such as 1,64") from None
    names = tuple(RUNTIMES) if runtimes is None else tuple(dict.fromkeys(w.strip() for w in runtimes.split(",")))
    gpu = torch.cuda.is_available()
    if device == "cuda" and not gpu:
        raise PruningError("--device cuda: torch sees no GPU here; use --device cpu")
    devices = ("cpu", *(("cuda",) if gpu else ())) if device == "auto" else (device,)
    return Settings(sizes, names, devices, pairs, threads)
