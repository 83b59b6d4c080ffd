"""The filters that fit into a size: landing exactly where was asked.

Scores and limits enter; masks leave that keep the filters with the highest scores, as many as the limits hold.
What holds: the network these masks make breaks no limit, and either it comes within a point of one of them or
no filter of those dropped could be added without breaking one, not even with fewer of those that it brings back to
life (of a layer that has none only the best are tried; of a time, which goes in steps: no layer widened).

Of several limits one is reached first, and what the others would still allow is wasted.  Then the ranking is
tilted towards filters that cost little of what is scarce, no further than it takes to use the rest too.
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
from .targets import POINT, Limits, Usage

Masks = dict[str, Mask]
Values = NDArray[np.floating]

STEPS = (16, 8, 1)  # widths that a layer is widened to: their next multiples
_TILTS = 5  # halvings of the interval of tilts
_TRIES = 3  # filters of a layer without any that did not fit: each of the others would open the same branch


@dataclass(frozen=True)
class Landing:
    """Where it came down."""

    masks: Masks
    usage: Usage
    level: float
    """the score that separates what stays from what goes"""


class Field:
    """What there is to choose from: every filter, and how a choice is completed and counted.

    `finish` adds what a network must not lose (it is asked before every count), `count` tells what a choice
    costs, and `prices` what a filter of each layer costs of every resource.  `smallest` is a choice that keeps
    within any limits: what is begun with where the scores' own lifelines are more than may be left.  `living` tells
    which filters of a choice lead somewhere and are fed something: the others cost nothing, yet.
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
        # Of equal scores every layer gives up as large a part, not the last layers all.
        self.turns = np.concatenate([np.arange(n) / n for n in self.sizes.values()]) if scores else np.zeros(0)
        self._starts = dict(zip(self.sizes, np.cumsum([0, *self.sizes.values()]).tolist(), strict=False))

    @cached_property
    def whole(self) -> tuple[Masks, Usage]:
        """All filters, and what they cost."""
        return self.costed(np.ones(len(self.scores), bool))

    @cached_property
    def empty(self) -> tuple[Masks, Usage]:
        """No filter but those that cannot go, and what they cost."""
        return self.costed(np.zeros(len(self.scores), bool))

    def costed(self, chosen: Mask) -> tuple[Masks, Usage]:
        """A flat choice by layer, completed, and what it costs."""
        masks = self.masks(chosen)
        return masks, self.count(masks)

    def masks(self, chosen: Mask) -> Masks:
        """A flat choice by layer, completed."""
        cut = {name: chosen[at : at + self.sizes[name]].copy() for name, at in self._starts.items()}
        return self.finish(cut)

    def owner(self, filter_: int) -> str:
        """The layer that a filter of the line belongs to."""
        return self._names[filter_]

    def belong(self, filters: NDArray[np.intp], name: str) -> Mask:
        """Which filters of the line are a layer's."""
        return (filters >= self._starts[name]) & (filters < self._starts[name] + self.sizes[name])

    def flat(self, masks: Masks) -> Mask:
        """The choice that masks make, in one line."""
        return np.concatenate([masks[name] for name in self.sizes])

    def scarcity(self, scarce: str, plenty: str) -> Values | None:
        """What a filter costs of one resource for each part it costs of another, around 1; None if not known."""
        if scarce not in self.prices or plenty not in self.prices:
            return None
        pairs = [(self.prices[scarce].get(name, 0.0), self.prices[plenty].get(name, 0.0)) for name in self.sizes]
        ratios = np.array([a / b if a > 0 and b > 0 else np.nan for a, b in pairs])
        if np.isnan(ratios).all():
            return None
        ratios = np.where(np.isnan(ratios), 1.0, ratios / np.nanmedian(ratios))
        return np.repeat(ratios, list(self.sizes.values()))


def land(field: Field, limits: Limits, settled: bool = True) -> Landing:
    """The filters with the highest scores that keep within the limits; roughly, where these are not settled yet."""
    landing = _tilted(field, limits)
    if settled and "latency" in limits.most:
        return _widened(field, limits, landing)
    return landing


def _tilted(field: Field, limits: Limits) -> Landing:
    """As many filters as fit, the ranking tilted where one of several limits would waste the others."""
    landing = _ranked(field, limits, field.scores)
    room = limits.room(landing.usage)
    if len(room) < 2:
        return landing
    scarce, plenty = min(room, key=room.__getitem__), max(room, key=room.__getitem__)
    dearness = field.scarcity(scarce, plenty)
    if room[plenty] <= POINT or room[scarce] > POINT or dearness is None:
        return landing
    least, most = 0.0, 1.0
    for _ in range(_TILTS):
        tilt = (least + most) / 2
        tried = _ranked(field, limits, field.scores / dearness**tilt)
        left = limits.room(tried.usage)
        if left[plenty] < room[plenty] and left[scarce] <= POINT:
            landing, room = tried, left
        if left[plenty] <= POINT:
            most = tilt  # enough; perhaps less would do
        else:
            least = tilt
    return landing


def _widened(field: Field, limits: Limits, landing: Landing) -> Landing:
    """Widen layers, those with the best absent filters first, as far as the limits hold.

    A clock goes in steps: most filters cost nothing, and then one costs much.  So layers are not widened filter by
    filter but to all they have, or else to the next widths that runtimes like.
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
    field: Field, limits: Limits, masks: Masks, name: str, best_first: list[int]
) -> tuple[Masks, Usage] | None:
    """The choice with one layer widened a step, as large a one as the limits hold; None where they hold none."""
    count, size = int(masks[name].sum()), field.sizes[name]
    if not count:  # a branch that is gone comes back by two layers at once, or not at all
        return None
    widths = [size, *(-(-(count + 1) // unit) * unit for unit in STEPS)]
    for width in sorted({w for w in widths if count < w <= size}, reverse=True):
        chosen = field.flat(masks)
        chosen[[f for f in best_first if not chosen[f]][: width - count]] = True
        more = field.masks(chosen)
        if int(more[name].sum()) > count and limits.hold(found := field.count(more)):
            return more, found
    return None


def _ranked(field: Field, limits: Limits, keys: Values) -> Landing:
    """As many filters as fit, the highest keys first; then what still fits into the rest."""
    order = np.lexsort((field.turns, -keys))
    given = np.zeros(len(order), bool)

    least, most = 0, len(order)
    masks, usage = field.whole
    if limits.hold(usage):
        return Landing(masks, usage, float(field.scores.min(initial=np.inf)))
    masks, usage = field.empty
    if not limits.hold(usage) and field.smallest is not None:
        # The best filters of layers that are added up lie apart, and the way with the best ones may be a wide one.
        given = field.flat(field.smallest)
        masks, usage = field.costed(given)
    if not limits.hold(usage):
        raise PruningError(f"no network keeps within {', '.join(limits.broken(usage))} as asked; ask for more")
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
        return Landing(masks, usage, level)  # a clock goes in steps: see `_widened`
    masks, usage = _filled_up(field, limits, masks, usage, order, least)
    return Landing(masks, usage, level)


def _filled_up(
    field: Field, limits: Limits, masks: Masks, usage: Usage, order: NDArray[np.intp], taken: int
) -> tuple[Masks, Usage]:
    """A choice with every further filter that fits, as it is or else with fewer of those it brings back to life."""
    masks, usage = _topped_up(field, limits, masks, usage, order[taken:])
    for _ in field.sizes:  # far fewer will do: who comes back in part leaves little room
        if min(limits.room(usage).values()) <= POINT:
            break
        woken = _woken(field, limits, masks, order)
        if woken is None:
            break
        masks, usage = _topped_up(field, limits, *woken, order)
    return masks, usage


def _topped_up(
    field: Field, limits: Limits, masks: Masks, usage: Usage, best_first: NDArray[np.intp]
) -> tuple[Masks, Usage]:
    """A choice with every further filter that fits when its turn comes, until a limit is nearer than a point.

    Where one filter does not fit, because a whole branch would come back with it, hundreds behind it often do.
    They are taken by twos, by fours and so on while all of them fit, and so would have fitted one by one.
    """
    step, refused = 1, Counter[str]()
    while min(limits.room(usage).values()) > POINT:
        chosen = field.flat(masks)
        best_first = best_first[~chosen[best_first]]
        if not len(best_first):
            break
        chosen[best_first[:step]] = True
        more, found = field.costed(chosen)
        fits = limits.hold(found)
        if step > 1 and (not fits or min(limits.room(found).values()) <= POINT):
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


def _woken(field: Field, limits: Limits, masks: Masks, best_first: NDArray[np.intp]) -> tuple[Masks, Usage] | None:
    """The choice with a filter that did not fit, and with fewer of those that it brings back to life; None if no
    filter fits even so.

    Filters are asleep that are chosen while all they feed, or all that feeds them, is gone: the first layer of a
    branch whose last one is closed.  They cost nothing, so they are among those that fit; but the first filter that
    opens the branch again wakes a whole layer, or several.
    """
    there, awake = field.flat(masks), field.flat(field.living(masks))
    asleep = there & ~awake
    if not asleep.any():
        return None
    best: dict[str, int] = {}  # the filters of one layer wake the same ones, so one is asked for all of them
    for absent in best_first[~there[best_first]]:
        best.setdefault(field.owner(absent), int(absent))
    for filter_ in best.values():
        chosen = there.copy()
        chosen[filter_] = True
        woken = asleep & field.flat(field.living(field.masks(chosen)))
        if not woken.any():
            continue
        found = _in_part(field, limits, chosen, _in_turns(field, best_first[woken[best_first]]))
        if found is not None and field.flat(field.living(found[0]))[filter_]:
            return found
    return None


def _in_part(
    field: Field, limits: Limits, chosen: Mask, first_to_last: NDArray[np.intp]
) -> tuple[Masks, Usage] | None:
    """The choice with as many of these filters as the limits hold, which do not hold all; None if not even none."""
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


def _in_turns(field: Field, best_first: NDArray[np.intp]) -> NDArray[np.intp]:
    """Filters of several layers with every layer having its turn, in proportion to how many it has: a way through
    all of them is there from the first ones on, also where one of them has all the high scores."""
    layers = [field.owner(f) for f in best_first]
    sizes, met = Counter(layers), Counter[str]()
    turns = []
    for name in layers:
        turns.append(met[name] / sizes[name])
        met[name] += 1
    return best_first[np.argsort(turns, kind="stable")]
