"""`Constraints`: which filters of a model may be removed, whatever their scores.

A constraint on widths is one number for all layers or a table of numbers by name pattern. The last pattern that
matches the name of a layer applies to it. `widths` resolves constraints for a channel graph and extends selections
of filters until they hold.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import PruningError, suggestion
from ..utils.settings import Section, setting

if TYPE_CHECKING:  # Recipes are read before torch is imported.
    from ..graph.channel_graph import ChannelGraph

Counts = int | dict[str, int]  # one number for all layers, or numbers by name pattern
Fractions = float | dict[str, float]


@dataclass(frozen=True)
class Constraints(Section):
    """Limits on which filters may be removed, whatever their scores.

    >>> Constraints(round_to=8, max_removed={"*": 0.9, "layer1.*": 0.3}).describe()
    'max_removed = {"*" = 0.9, "layer1.*" = 0.3}, round_to = 8'
    """

    ignore: tuple[str, ...] = setting(
        (), "layers to leave alone: names or name patterns; in Python also modules of the model"
    )
    min_filters: Counts = setting(0, "least number of filters of a layer", least=0)
    max_removed: Fractions = setting(
        1.0,
        "largest share of a layer's filters that may be removed; like min_filters and round_to, for all layers or "
        'by name pattern (`{"*" = 0.9, "layer1.*" = 0.3}`), of which the last that matches counts',
        least=0,
        most=1,
    )
    round_to: Counts = setting(1, "a layer keeps a multiple of this, or all its filters", least=1)
    couple: tuple[str, ...] = setting(
        (),
        'name patterns of layers that keep the same filters; "streams": all layers that are added together; '
        '"blocks": residual branches are kept or removed as a whole',
    )

    def __post_init__(self) -> None:
        ignore = self.ignore if isinstance(self.ignore, list | tuple) else (self.ignore,)
        modules = [entry for entry in ignore if hasattr(entry, "named_modules")]
        object.__setattr__(self, "ignore", tuple(entry for entry in ignore if entry not in modules))
        super().__post_init__()
        object.__setattr__(self, "ignore", (*self.ignore, *modules))
        for key, default in UNSET.items():
            if getattr(self, key) == {}:
                object.__setattr__(self, key, default)

    def for_layer(self, name: str) -> WidthLimits:
        """Return the constraints on the width of one layer.

        >>> Constraints(round_to={"layer*": 8, "layer1.*": 4}).for_layer("layer1.0").round_to
        4
        """
        found = dict(UNSET)
        for key, unset in UNSET.items():
            setting = getattr(self, key)
            found[key] = setting.get(_last_match(setting, name), unset) if isinstance(setting, Mapping) else setting
        return WidthLimits(**found)

    @property
    def limit_widths(self) -> bool:
        """Return True if any constraint on the width of a layer is set."""
        return any(getattr(self, key) != unset for key, unset in UNSET.items())

    def check_patterns(self, graph: ChannelGraph) -> None:
        """Raise a PruningError if a pattern of a width constraint applies to no layer."""
        for key in UNSET:
            _check_patterns(key, getattr(self, key), graph)

    def describe(self) -> str:
        """Format all constraints that differ from their defaults in recipe syntax, except for `ignore`."""
        values = ((each.name, getattr(self, each.name)) for each in fields(self) if each.name != "ignore")
        return ", ".join(
            f"{key} = {list(value) if key == 'couple' else format_setting(value)}"
            for key, value in values
            if value != UNSET.get(key, ())
        )


class WidthLimits(NamedTuple):
    """Constraints on the width of one layer."""

    min_filters: int = 0
    max_removed: float = 1.0
    round_to: int = 1

    def lacking(self, count: int, size: int) -> int:
        """Return how many filters to add to a layer that keeps `count` of `size`.

        >>> [WidthLimits(round_to=8).lacking(count, 20) for count in (0, 9, 17)]
        [0, 7, 3]
        """
        wanted = max(count, min(self.min_filters, size), math.ceil(round((1 - self.max_removed) * size, 9)))
        return min(-(-wanted // self.round_to) * self.round_to, size) - count

    def both(self, other: WidthLimits) -> WidthLimits:
        """Combine two sets of constraints into one that satisfies both.

        >>> WidthLimits(2, 0.5, 4).both(WidthLimits(3, 0.9, 6))
        WidthLimits(min_filters=3, max_removed=0.5, round_to=12)
        """
        return WidthLimits(
            max(self.min_filters, other.min_filters),
            min(self.max_removed, other.max_removed),
            math.lcm(self.round_to, other.round_to),
        )


UNSET: dict[str, Any] = WidthLimits()._asdict()


def at_least(setting: Counts, least: int, names: Iterable[str]) -> Counts:
    """Return a setting whose value is at least `least` for every layer in `names`.

    >>> at_least({"a": 4, "b": 0}, 1, ["a", "b", "c"])
    {'*': 1, 'a': 4, 'b': 1}
    """
    if not isinstance(setting, Mapping):
        return max(setting, least)
    # "*" is added only if some layer matches no pattern, because a pattern that applies to no layer is an error.
    # The last matching pattern applies, so "*" comes first and affects only layers that match no other pattern.
    rest = any(_last_match(setting, name) is None for name in names)
    return ({"*": least} if rest else {}) | {pattern: max(number, least) for pattern, number in setting.items()}


def format_setting(setting: Fractions) -> str:
    """Format a value or a table in recipe syntax.

    >>> format_setting(0.5), format_setting({"*": 0.9, "stem": 0.0})
    ('0.5', '{"*" = 0.9, "stem" = 0}')
    """
    if not isinstance(setting, Mapping):
        return f"{setting:g}"
    return "{" + ", ".join(f'"{pattern}" = {number:g}' for pattern, number in setting.items()) + "}"


def _check_patterns(key: str, setting: Fractions, graph: ChannelGraph) -> None:
    patterns = list(setting) if isinstance(setting, Mapping) else []
    counted = {_last_match(patterns, name) for name in graph.layers}
    for pattern in patterns:
        if pattern in counted:
            continue
        if any(fnmatchcase(name, pattern) for name in graph.layers):
            raise PruningError(
                f"{key}: {pattern!r} never applies, because later patterns match all its layers and the last match "
                "wins; move it after them"
            )
        for name in (name for name in graph.unscored if fnmatchcase(name, pattern)):
            why = f"{name}: {graph.unscored[name]}"
            raise PruningError(f"{key}: {pattern!r} matches no layer that can be pruned ({why}); leave it out")
        raise PruningError(f"{key}: no layer is called {pattern!r}; {suggestion(pattern, graph.layers)}")


def _last_match(patterns: Iterable[str], name: str) -> str | None:
    """Return the pattern that applies to a layer: the last one that matches its name."""
    return next((pattern for pattern in reversed(list(patterns)) if fnmatchcase(name, pattern)), None)
