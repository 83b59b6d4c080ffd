"""Locks that go with the processes that hold them, however those end.

The path of a lock enters: a file that is locked, and holds the number of the process that works under it.  What
holds: a process that was killed has let go of its lock, and a number is believed only while the lock is held.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def take_lock(path: Path, patience: float = 0.0) -> int | None:
    """A descriptor that holds the lock until every process that has it is gone; None if one has it already.

    Somebody who only asks whether it is held has it for an instant: whoever must not miss it has `patience`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    until = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                os.close(descriptor)
                return None
            time.sleep(0.02)
        else:
            os.ftruncate(descriptor, 0)  # whoever had it before is gone, and its number may be another's by now
            return descriptor


def is_locked(path: Path) -> bool:
    """Does some process hold the lock?"""
    if not path.is_file():
        return False
    descriptor = take_lock(path)
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is None


def holder(path: Path) -> int | None:
    """The process that holds a lock; None if there is none, or if it has not yet said who it is."""
    with suppress(OSError, ValueError):
        number = int(path.read_text("utf-8"))
        return number if is_locked(path) else None
    return None


def end_holders(paths: Iterable[Path], patience: float) -> list[Path]:
    """Ask the processes that hold locks to end, and wait for it; returns the locks that are held even then."""
    held, asked = [path for path in paths if is_locked(path)], set[int]()
    until = time.monotonic() + patience
    while held and time.monotonic() < until:
        for path in held:
            number = holder(path)
            if number is not None and number not in asked:
                asked.add(number)
                with suppress(ProcessLookupError):  # it may end by itself just now
                    os.kill(number, signal.SIGTERM)
        time.sleep(0.1)
        held = [path for path in held if is_locked(path)]
    return held
