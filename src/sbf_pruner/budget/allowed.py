"""The widths that a layer may have, told for all layers alike or by patterns of their names.

A number enters, or a table of numbers by pattern; for any layer, the widths it may have leave.  What holds: of
several patterns that match a layer the last one counts, a layer that none matches has the default, and a pattern
that counts for no layer is refused, since whoever wrote it meant one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from numbers import Integral, Real
from typing import Any, NamedTuple

from ..errors import PruningError, nearest
from ..graph.channels import ChannelGraph

Counts = int | Mapping[str, int]  # for all layers, or by pattern
Parts = float | Mapping[str, float]


class Allowed(NamedTuple):
    """The widths that one layer may have."""

    min_filters: int = 0
    max_removed: float = 1.0
    round_to: int = 1

    def lacking(self, count: int, size: int) -> int:
        """How many more filters a layer must have that keeps `count` of `size`.

        >>> [Allowed(round_to=8).lacking(count, 20) for count in (0, 9, 17)]
        [0, 7, 3]
        """
        wanted = max(count, min(self.min_filters, size), math.ceil(round((1 - self.max_removed) * size, 9)))
        return min(-(-wanted // self.round_to) * self.round_to, size) - count

    def both(self, other: Allowed) -> Allowed:
        """What this one and another allow.

        >>> Allowed(2, 0.5, 4).both(Allowed(3, 0.9, 6))
        Allowed(min_filters=3, max_removed=0.5, round_to=12)
        """
        return Allowed(
            max(self.min_filters, other.min_filters),
            min(self.max_removed, other.max_removed),
            math.lcm(self.round_to, other.round_to),
        )


UNSET: dict[str, Any] = Allowed()._asdict()


def of_layer(asked: Parts, name: str, unset: float) -> Any:
    """What is asked of one layer.

    >>> [of_layer({"layer*": 8, "layer1.*": 4}, name, unset=1) for name in ("layer1.0", "layer2.0", "head")]
    [4, 8, 1]
    """
    if not isinstance(asked, Mapping):
        return asked
    pattern = _last_match(asked, name)
    return unset if pattern is None else asked[pattern]


def raised(asked: Counts, least: int, names: Iterable[str]) -> Counts:
    """The same, with nothing below `least`.

    >>> raised({"a": 4, "b": 0}, 1, ["a", "b", "c"])
    {'*': 1, 'a': 4, 'b': 1}
    """
    if not isinstance(asked, Mapping):
        return max(asked, least)
    # A pattern for the rest stands only where there is a rest, and first, so that it counts for no more than that.
    rest = any(_last_match(asked, name) is None for name in names)
    return {**({"*": least} if rest else {}), **{pattern: max(number, least) for pattern, number in asked.items()}}


def told(asked: Parts) -> str:
    """As it is written in a recipe.

    >>> told(0.5), told({"*": 0.9, "stem": 0.0})
    ('0.5', '{"*" = 0.9, "stem" = 0}')
    """
    if not isinstance(asked, Mapping):
        return f"{asked:g}"
    return "{" + ", ".join(f'"{pattern}" = {number:g}' for pattern, number in asked.items()) + "}"


def checked(key: str, asked: Any) -> Any:
    """What is asked for under `key`, a table as one of its own; a PruningError where a number makes no sense."""
    if not isinstance(asked, Mapping):
        _check_number(key, key, asked)
        return asked
    for pattern, number in asked.items():
        if not isinstance(pattern, str):
            raise PruningError(
                f'{key}: layers are told by their names, not by {type(pattern).__name__}; give {{"layer1.*": ...}}'
            )
        _check_number(key, f"{key}[{pattern!r}]", number)
    return dict(asked) or UNSET[key]


def check_patterns(key: str, asked: Parts, graph: ChannelGraph) -> None:
    """Raise a PruningError if a pattern counts for no layer."""
    patterns = list(asked) if isinstance(asked, Mapping) else []
    counted = {_last_match(patterns, name) for name in graph.layers}
    for pattern in patterns:
        if pattern in counted:
            continue
        if any(fnmatchcase(name, pattern) for name in graph.layers):
            raise PruningError(
                f"{key}: {pattern!r} counts for no layer, because those behind it match all of its layers, and the "
                "last that matches counts; put it behind them"
            )
        alone = next((name for name in graph.unscored if fnmatchcase(name, pattern)), None)
        if alone is not None:
            why = f"{alone}: {graph.unscored[alone]}"
            raise PruningError(f"{key}: {pattern!r} matches no layer that can be pruned ({why}); leave it out")
        raise PruningError(f"{key}: no layer is called {pattern!r}; {nearest(pattern, graph.layers)}")


def _last_match(patterns: Iterable[str], name: str) -> str | None:
    """The pattern that counts for a layer."""
    return next((pattern for pattern in reversed(list(patterns)) if fnmatchcase(name, pattern)), None)


def _check_number(key: str, place: str, number: Any) -> None:
    if key == "max_removed":
        if not isinstance(number, Real) or not 0 <= float(number) <= 1:
            raise PruningError(f"{place} is the part that may go, from 0 to 1, not {number!r}")
        return
    if not isinstance(number, Integral):
        raise PruningError(f"{place} counts filters; give a whole number, not {number!r}")
    if key == "min_filters" and number < 0:
        raise PruningError(f"{place}: a layer cannot keep {number} filters; give 0 or more")
    if key == "round_to" and number < 1:
        raise PruningError(f"{place}: widths are multiples of a number from 1 on, not of {number}")
