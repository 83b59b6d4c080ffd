"""Search for the filters that fit a budget, called landing on a target.

`land` keeps the filters with the highest scores, as many as the limits allow. No limit is broken, and either one
has at most `TOLERANCE` of room left or no further filter fits, not even with fewer of those that it makes live
again. (For a layer without filters only the best few are tried; for a latency, which rises in steps,
only wider layers.)
If one of several limits would waste the others, the ranking is tilted towards filters that cost little of what is
scarce, no further than needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..errors import PruningError
from ..graph.nodes import Mask
from .targets import TOLERANCE, Limits, Usage

Masks = dict[str, Mask]
Values = NDArray[np.floating]

STEPS = (16, 8, 1)  # a layer is widened to the next multiple of one of these
_TILTS = 5  # bisection steps for the tilt
_TRIES = 3  # attempts for a layer without filters: each of its filters would revive the same branch


@dataclass(frozen=True)
class Landing:
    """Result of a search."""

    masks: Masks
    usage: Usage
    level: float
    """Score that separates kept from removed filters."""


class SearchSpace:
    """The filters to choose from, and how a selection of them is completed and its cost computed.

    The filters of all layers are numbered in one flat array. `finish` adds what a network must not lose, before
    every count; `count` returns the cost of a selection, and `prices` has the cost of one filter of each layer for
    every resource. `smallest` is a selection within the limits, to start from if the layers that keep the network
    connected, chosen by score, already exceed them. `living` returns the live filters of a selection; the dead ones
    cost nothing yet.
    """

    def __init__(
        self,
        scores: Mapping[str, Values],
        count: Callable[[Masks], Usage],
        finish: Callable[[Masks], Masks] = lambda masks: masks,
        prices: Mapping[str, Mapping[str, float]] | None = None,
        smallest: Masks | None = None,
        living: Callable[[Masks], Masks] = lambda masks: masks,
    ) -> None:
        self.sizes = {name: len(values) for name, values in scores.items()}
        self.scores = np.concatenate(list(scores.values())) if scores else np.zeros(0)
        self.count, self.finish, self.living = count, finish, living
        self.prices = prices or {}
        self.smallest = smallest
        self._names = [name for name, size in self.sizes.items() for _ in range(size)]
        # Breaks ties so that every layer gives up the same fraction, instead of the last layers all they have.
        self.turns = np.concatenate([np.arange(n) / n for n in self.sizes.values()]) if scores else np.zeros(0)
        self._starts = dict(zip(self.sizes, np.cumsum([0, *self.sizes.values()]).tolist(), strict=False))

    @cached_property
    def whole(self) -> tuple[Masks, Usage]:
        """All filters, and their cost."""
        return self.costed(np.ones(len(self.scores), bool))

    @cached_property
    def empty(self) -> tuple[Masks, Usage]:
        """The filters that cannot be removed, and their cost."""
        return self.costed(np.zeros(len(self.scores), bool))

    def costed(self, chosen: Mask) -> tuple[Masks, Usage]:
        """Return the completed masks of a flat selection, and their cost."""
        masks = self.masks(chosen)
        return masks, self.count(masks)

    def masks(self, chosen: Mask) -> Masks:
        """Split a flat selection into masks by layer and complete them."""
        cut = {name: chosen[at : at + self.sizes[name]].copy() for name, at in self._starts.items()}
        return self.finish(cut)

    def owner(self, filter_: int) -> str:
        """Return the layer that a filter of the flat array belongs to."""
        return self._names[filter_]

    def belong(self, filters: NDArray[np.intp], name: str) -> Mask:
        """Return which of these indices into the flat array belong to a layer."""
        return (filters >= self._starts[name]) & (filters < self._starts[name] + self.sizes[name])

    def flat(self, masks: Masks) -> Mask:
        """Concatenate masks by layer into a flat selection."""
        return np.concatenate([masks[name] for name in self.sizes])

    def scarcity(self, scarce: str, plenty: str) -> Values | None:
        """Return the cost of each filter in `excess_fractions` relative to its cost in `plenty`, scaled to a median
        of 1.

        Returns None if these costs are not known.
        """
        if scarce not in self.prices or plenty not in self.prices:
            return None
        pairs = [(self.prices[scarce].get(name, 0.0), self.prices[plenty].get(name, 0.0)) for name in self.sizes]
        ratios = np.array([a / b if a > 0 and b > 0 else np.nan for a, b in pairs])
        if np.isnan(ratios).all():
            return None
        ratios = np.where(np.isnan(ratios), 1.0, ratios / np.nanmedian(ratios))
        return np.repeat(ratios, list(self.sizes.values()))


def land(field: SearchSpace, limits: Limits, settled: bool = True) -> Landing:
    """Return the filters with the highest scores that the limits allow.

    With `settled=False` layers are not widened to use up a limit on latency.
    """
    landing = _tilted(field, limits)
    if settled and "latency" in limits.most:
        return _widened(field, limits, landing)
    return landing


def _tilted(field: SearchSpace, limits: Limits) -> Landing:
    """Keep as many filters as fit, with the ranking tilted where one of several limits would waste the others."""
    landing = _ranked(field, limits, field.scores)
    room = limits.room(landing.usage)
    if len(room) < 2:
        return landing
    scarce, plenty = min(room, key=room.__getitem__), max(room, key=room.__getitem__)
    dearness = field.scarcity(scarce, plenty)
    if room[plenty] <= TOLERANCE or room[scarce] > TOLERANCE or dearness is None:
        return landing
    least, most = 0.0, 1.0
    for _ in range(_TILTS):
        tilt = (least + most) / 2
        tried = _ranked(field, limits, field.scores / dearness**tilt)
        left = limits.room(tried.usage)
        if left[plenty] < room[plenty] and left[scarce] <= TOLERANCE:
            landing, room = tried, left
        if left[plenty] <= TOLERANCE:
            most = tilt  # enough; a smaller tilt may be, too
        else:
            least = tilt
    return landing


def _widened(field: SearchSpace, limits: Limits, landing: Landing) -> Landing:
    """Widen layers while the limits hold, those with the best absent filters first.

    Latency rises in steps: most filters cost nothing, and then one costs much. Layers are therefore widened to all
    their filters or to the next multiples that runtimes favor, not filter by filter.
    """
    masks, usage = landing.masks, landing.usage
    there = field.flat(masks)
    absent = [int(f) for f in np.argsort(-field.scores, kind="stable") if not there[f]]
    for name in dict.fromkeys(field.owner(filter_) for filter_ in absent):
        mine = [f for f in absent if field.owner(f) == name]
        while (wider := _next_wider(field, limits, masks, name, mine)) is not None:
            masks, usage = wider
    return Landing(masks, usage, landing.level)


def _next_wider(
    field: SearchSpace, limits: Limits, masks: Masks, name: str, best_first: list[int]
) -> tuple[Masks, Usage] | None:
    """Return the selection with one layer widened by the largest step that fits; None if no step does."""
    count, size = int(masks[name].sum()), field.sizes[name]
    if not count:  # a removed branch can only come back with filters in two layers at once
        return None
    widths = [size, *(-(-(count + 1) // unit) * unit for unit in STEPS)]
    for width in sorted({w for w in widths if count < w <= size}, reverse=True):
        chosen = field.flat(masks)
        chosen[[f for f in best_first if not chosen[f]][: width - count]] = True
        more = field.masks(chosen)
        if int(more[name].sum()) > count and limits.hold(found := field.count(more)):
            return more, found
    return None


def _ranked(field: SearchSpace, limits: Limits, keys: Values) -> Landing:
    """Keep as many filters as fit, the highest keys first, and then every other one that still fits."""
    order = np.lexsort((field.turns, -keys))
    given = np.zeros(len(order), bool)

    least, most = 0, len(order)
    masks, usage = field.whole
    if limits.hold(usage):
        return Landing(masks, usage, float(field.scores.min(initial=np.inf)))
    masks, usage = field.empty
    if not limits.hold(usage) and field.smallest is not None:
        # Layers that are added may have their best filters in different channels, and the path with the best
        # filters may be a wide one.
        given = field.flat(field.smallest)
        masks, usage = field.costed(given)
    if not limits.hold(usage):
        raise PruningError(f"no network meets the target for {', '.join(limits.broken(usage))}; raise it")
    while most - least > 1:
        middle = (least + most) // 2
        chosen = given.copy()
        chosen[order[:middle]] = True
        tried, found = field.costed(chosen)
        if limits.hold(found):
            least, masks, usage = middle, tried, found
        else:
            most = middle
    level = float(field.scores[order[least]])
    if "latency" in limits.most:
        return Landing(masks, usage, level)  # latency rises in steps: see `_widened`
    masks, usage = _filled_up(field, limits, masks, usage, order, least)
    return Landing(masks, usage, level)


def _filled_up(
    field: SearchSpace, limits: Limits, masks: Masks, usage: Usage, order: NDArray[np.intp], taken: int
) -> tuple[Masks, Usage]:
    """Add every further filter that fits, either as it is or with fewer of those that it makes live again."""
    masks, usage = _add_fitting(field, limits, masks, usage, order[taken:])
    for _ in field.sizes:  # an upper bound: a branch that comes back in part leaves little room
        if min(limits.room(usage).values()) <= TOLERANCE:
            break
        woken = _revive_in_part(field, limits, masks, order)
        if woken is None:
            break
        masks, usage = _add_fitting(field, limits, *woken, order)
    return masks, usage


def _add_fitting(
    field: SearchSpace, limits: Limits, masks: Masks, usage: Usage, best_first: NDArray[np.intp]
) -> tuple[Masks, Usage]:
    """Add further filters that fit, best first, until a limit has less than `TOLERANCE` of room.

    Where a filter does not fit because a whole branch would come back with it, hundreds behind it often do. Filters
    are therefore added in steps that double while all of them fit, with the same result as one by one.
    """
    step, refused = 1, Counter[str]()
    while min(limits.room(usage).values()) > TOLERANCE:
        chosen = field.flat(masks)
        best_first = best_first[~chosen[best_first]]
        if not len(best_first):
            break
        chosen[best_first[:step]] = True
        more, found = field.costed(chosen)
        fits = limits.hold(found)
        if step > 1 and (not fits or min(limits.room(found).values()) <= TOLERANCE):
            step //= 2
            continue
        name = field.owner(best_first[0])
        best_first, step = best_first[step:], 2 * step if fits else 1
        if fits:
            masks, usage = more, found
        elif not masks[name].any():
            refused[name] += 1
            if refused[name] == _TRIES:
                best_first = best_first[~field.belong(best_first, name)]
    return masks, usage


def _revive_in_part(
    field: SearchSpace, limits: Limits, masks: Masks, best_first: NDArray[np.intp]
) -> tuple[Masks, Usage] | None:
    """Add an absent filter that fits with fewer of the filters that it makes live again; None if there is none.

    Selected filters are dead while all that they feed, or all that feeds them, is removed: for example the first
    layer of a branch whose last layer is empty. They cost nothing, so they are among those that fit, but the first
    filter that reopens the branch makes a whole layer live, or several.
    """
    there, awake = field.flat(masks), field.flat(field.living(masks))
    asleep = there & ~awake
    if not asleep.any():
        return None
    best: dict[str, int] = {}  # one filter per layer, because all filters of a layer revive the same ones
    for absent in best_first[~there[best_first]]:
        best.setdefault(field.owner(absent), int(absent))
    for filter_ in best.values():
        chosen = there.copy()
        chosen[filter_] = True
        woken = asleep & field.flat(field.living(field.masks(chosen)))
        if not woken.any():
            continue
        found = _longest_prefix(field, limits, chosen, _interleave(field, best_first[woken[best_first]]))
        if found is not None and field.flat(field.living(found[0]))[filter_]:
            return found
    return None


def _longest_prefix(
    field: SearchSpace, limits: Limits, chosen: Mask, first_to_last: NDArray[np.intp]
) -> tuple[Masks, Usage] | None:
    """Remove the last of these filters, as few as it takes to fit; None if removing all of them is not enough.

    The selection with all of them is known not to fit.
    """
    found, least, most = None, -1, len(first_to_last)
    while most - least > 1:
        middle = (least + most) // 2
        fewer = chosen.copy()
        fewer[first_to_last[middle:]] = False
        masks, usage = field.costed(fewer)
        if limits.hold(usage):
            found, least = (masks, usage), middle
        else:
            most = middle
    return found


def _interleave(field: SearchSpace, best_first: NDArray[np.intp]) -> NDArray[np.intp]:
    """Interleave the filters of several layers in proportion to how many each has.

    The first filters then form a path through all these layers, even if one of them has all the high scores.
    """
    layers = [field.owner(f) for f in best_first]
    sizes, met = Counter(layers), Counter[str]()
    turns = []
    for name in layers:
        turns.append(met[name] / sizes[name])
        met[name] += 1
    return best_first[np.argsort(turns, kind="stable")]
