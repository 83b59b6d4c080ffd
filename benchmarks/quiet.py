"""Waiting until nobody else uses the machine: what is timed beside other work says nothing."""

from __future__ import annotations

import time

from sbf_pruner.utils import busy_cores

QUIET = 0.15  # of a core


def wait(most: float) -> float:
    """Wait until the machine has been quiet for a while, or so many seconds; how busy it was then."""
    end, calm = time.monotonic() + most, 0
    while True:
        busy = busy_cores() or 0.0
        calm = calm + 1 if busy <= QUIET else 0
        if calm >= 5 or time.monotonic() > end:
            return busy
        time.sleep(0.7)
