"""What a pruner may be told: names that are known, and numbers within bounds, which hold for recipes as well.

Settings enter; nothing leaves, or the sentence that says which of them makes no sense.  Recipes are read before
torch is there, so nothing here asks for it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypedDict

from ..errors import PruningError, nearest


class Bounds(TypedDict, total=False):
    """What a number is held to."""

    least: float
    above: float
    most: float
    below: float


BOUNDS: dict[str, Bounds] = {
    "penalty": {"least": 0, "most": 1e10},  # steering may raise it 10,000 times, and Adam squares its gradient
    "leak": {"least": 0},
    "lr": {"above": 0},
    "speed": {"least": 0},
    "eps": {"least": 0},
    "threshold": {"above": 0, "most": 1},
}
_Kind = Literal["least", "above", "most", "below"]
_WORDS: dict[_Kind, tuple[str, Callable[[Any, Any], bool]]] = {
    "least": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "most": ("at most", operator.le),
    "below": ("below", operator.lt),
}


def check_name(what: str, name: str, known: Iterable[str]) -> None:
    """Refuse a name that is not among those known."""
    if name not in known:
        raise PruningError(f"{what} {name!r} is not known; {nearest(str(name), known)}")


def check_numbers(**numbers: Any) -> None:
    """Refuse what is no number, and numbers that break their bounds.

    >>> check_numbers(lr=-1.0)
    Traceback (most recent call last):
    sbf_pruner.errors.PruningError: lr: must be above 0, got -1.0
    """
    for key, given in numbers.items():
        try:
            value = math.nan if isinstance(given, str | bool) else float(given)
        except (TypeError, ValueError, OverflowError):
            value = math.nan
        if not math.isfinite(value):
            raise PruningError(f"{key}: expected a finite number, got {given!r}")
        if broken := broken_bound(value, BOUNDS[key]):
            raise PruningError(f"{key}: {broken}")


def broken_bound(value: Any, bounds: Bounds) -> str:
    """The first bound that a number breaks, in words; "" where it keeps to them all.

    >>> broken_bound(2, {"above": 0, "most": 1})
    'must be at most 1, got 2'
    """
    for kind, (word, holds) in _WORDS.items():
        if kind in bounds and not holds(value, bounds[kind]):
            return f"must be {word} {bounds[kind]:g}, got {value}"
    return ""
