"""Figures that come one part after another, and goals among them that are held against limits.

Parts enter as they are measured; each is printed and all so far are saved.  At the end every goal stands beside its
limit: "most", or "least" where a ratio says how many times as fast.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Figures = dict[str, Any]
Limits = Mapping[str, tuple[str, float]]


def gather(
    parts: Iterable[Figures],
    figures: Figures,
    goals: Callable[[Figures], dict[str, float]],
    limits: Limits,
    save: Callable[[Figures], object] | None,
) -> bool:
    """Add the parts to the figures, with the goals and the seconds; is every goal within its limit?"""
    began = time.perf_counter()
    for found in parts:
        figures.update(found)
        figures["goals"] = goals(figures)
        figures["seconds"] = round(time.perf_counter() - began, 1)
        print(json.dumps(found), flush=True)
        if save is not None:
            save(figures)
    reached = {name: _met(limits[name], value) for name, value in figures["goals"].items()}
    for name, value in figures["goals"].items():
        print(f"{name:28} {value:9.4f}, at {' '.join(map(str, limits[name]))}", "" if reached[name] else "  MISSED")
    return all(reached.values())


def _met(limit: tuple[str, float], value: float) -> bool:
    side, at = limit
    return value <= at if side == "most" else value >= at
