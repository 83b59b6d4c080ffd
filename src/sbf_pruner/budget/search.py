"""Search for the filters with the highest scores that fit a budget.

The result exceeds no limit. Either one limit is used up to `TOLERANCE`, or no further filter fits, not even without
some of the dead filters that it would make live. (Of a layer without filters only the best few are tried. Under a
latency limit, filters are not tried singly, because latency rises in steps.) If one limit is used up and leaves
another unused, filters that cost little of the scarce resource are preferred, no more than needed: scores are
divided by a power of the cost ratio, whose exponent is called tilt.
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
Filters = NDArray[np.intp]  # indices into the flat array of all filters
Costed = tuple[Masks, Usage]  # a completed selection, and its cost

STEPS = (16, 8, 1)  # a layer is widened to the next multiple of one of these
_TILTS = 5  # bisection steps for the tilt (see above)
_TRIES = 3  # attempts for a layer without filters: each of its filters would make the same branch live


@dataclass(frozen=True)
class Selection:
    """Result of a search."""

    masks: Masks
    usage: Usage
    cutoff: float
    """Score that separates kept from removed filters."""


class Search:
    """Search for the best selection of filters within limits.

    The filters of all layers are numbered in one flat array. `complete` adds the filters that connectivity and
    constraints require, before every count. `count` returns the cost of a selection, and `prices` has the cost of
    one filter of each layer for every resource. The search starts from `smallest` if the required filters, chosen
    by score, already exceed the limits. `living` returns the live filters of a selection; dead ones cost nothing.
    """

    def __init__(
        self,
        scores: Mapping[str, Values],
        limits: Limits,
        count: Callable[[Masks], Usage],
        complete: Callable[[Masks], Masks] = lambda masks: masks,
        prices: Mapping[str, Mapping[str, float]] | None = None,
        smallest: Masks | None = None,
        living: Callable[[Masks], Masks] = lambda masks: masks,
    ) -> None:
        self.limits, self.count, self.complete, self.living = limits, count, complete, living
        self.prices, self.smallest = prices or {}, smallest
        self.sizes = {name: len(values) for name, values in scores.items()}
        self.scores = np.concatenate(list(scores.values()))
        self.layers = np.repeat(np.array(list(scores), object), list(self.sizes.values()))  # layer of each filter
        # Breaks ties of scores, so that every layer loses the same fraction, instead of the last layers losing all.
        self._turns = np.concatenate([np.arange(n) / n for n in self.sizes.values()])

    def best(self, *, widen: bool = True) -> Selection:
        """Return the filters with the highest scores that the limits allow.

        If `widen` is true and the latency is limited, layers are then widened as far as the limits allow.
        """
        found = self._tilted()
        return self._widened(found) if widen and "latency" in self.limits.most else found

    def masks(self, chosen: Mask) -> Masks:
        """Split a flat selection into masks by layer and complete them."""
        parts = np.split(chosen, np.cumsum(list(self.sizes.values()))[:-1])
        return self.complete(dict(zip(self.sizes, parts, strict=True)))

    def flat(self, masks: Masks) -> Mask:
        """Concatenate masks by layer into a flat selection."""
        return np.concatenate([masks[name] for name in self.sizes])

    def _costed(self, chosen: Mask) -> Costed:
        masks = self.masks(chosen)
        return masks, self.count(masks)

    @cached_property
    def _whole(self) -> Costed:
        """The selection of all filters, with its cost."""
        return self._costed(np.ones(len(self.scores), bool))

    @cached_property
    def _start(self) -> tuple[Mask, Costed]:
        """The flat selection that filters are added to, and its completion: empty or, if too large, `smallest`."""
        start = np.zeros(len(self.scores), bool)
        found = self._costed(start)
        if not self.limits.hold(found[1]) and self.smallest is not None:
            # The completion chosen by score can be too large: layers that are added together may have their best
            # filters in different channels, and the path with the best filters may be a wide one.
            start = self.flat(self.smallest)
            found = self._costed(start)
        if not self.limits.hold(found[1]):
            raise PruningError(
                f"no network meets the target for {', '.join(self.limits.broken(found[1]))}; raise it"
            )
        return start, found

    def _tilted(self) -> Selection:
        """Keep as many filters as fit; use a tilted ranking if one limit is used up and leaves another unused."""
        found = self._ranked(self.scores)
        room = self.limits.room(found.usage)
        scarce, plenty = min(room, key=room.__getitem__), max(room, key=room.__getitem__)
        if room[plenty] <= TOLERANCE or room[scarce] > TOLERANCE:
            return found
        ratios = self._price_ratios(scarce, plenty)
        if ratios is None:
            return found
        least, most = 0.0, 1.0
        for _ in range(_TILTS):
            tilt = (least + most) / 2
            tried = self._ranked(self.scores / ratios**tilt)
            left = self.limits.room(tried.usage)
            if left[plenty] < room[plenty] and left[scarce] <= TOLERANCE:
                found, room = tried, left
            if left[plenty] <= TOLERANCE:
                most = tilt  # This tilt is enough; try a smaller one.
            else:
                least = tilt
        return found

    def _price_ratios(self, scarce: str, plenty: str) -> Values | None:
        """Return the cost of each filter in `scarce` over that in `plenty`, with a median of 1; None if unknown."""
        if scarce not in self.prices or plenty not in self.prices:
            return None
        pairs = [(self.prices[scarce].get(name, 0.0), self.prices[plenty].get(name, 0.0)) for name in self.sizes]
        ratios = np.array([a / b if a > 0 and b > 0 else np.nan for a, b in pairs])
        if np.isnan(ratios).all():
            return None
        ratios = np.where(np.isnan(ratios), 1.0, ratios / np.nanmedian(ratios))
        return np.repeat(ratios, list(self.sizes.values()))

    def _ranked(self, keys: Values) -> Selection:
        """Keep as many filters as fit, highest keys first; unless latency is limited, add later ones that fit."""
        if self.limits.hold(self._whole[1]):
            return Selection(*self._whole, float(self.scores.min()))
        order = np.lexsort((self._turns, -keys))
        start, found = self._start
        count, more = self._most_that_fit(start, order)
        found = more or found
        if "latency" not in self.limits.most:  # latency rises in steps: see `_widened`
            found = self._filled_up(found, order, count)
        return Selection(*found, float(self.scores[order[count]]))

    def _most_that_fit(self, start: Mask, order: Filters, least: int = 0) -> tuple[int, Costed | None]:
        """Bisect for the longest proper prefix of `order` that fits if added to `start`.

        Returns its length and the completed selection, or `least` and None if no longer prefix fits.
        """
        found, most = None, len(order)
        while most - least > 1:
            middle = (least + most) // 2
            masks, usage = self._costed(_with(start, order[:middle]))
            if self.limits.hold(usage):
                least, found = middle, (masks, usage)
            else:
                most = middle
        return least, found

    def _filled_up(self, found: Costed, order: Filters, count: int) -> Costed:
        """Add every further filter that fits, if need be without some of the dead filters that it makes live."""
        found = self._add_fitting(found, order[count:])
        for _ in self.sizes:  # an upper bound: a partly restored branch nearly uses up a limit
            if self._full(found[1]) or (more := self._revive_in_part(found[0], order)) is None:
                break
            found = self._add_fitting(more, order)
        return found

    def _full(self, usage: Usage) -> bool:
        return min(self.limits.room(usage).values()) <= TOLERANCE

    def _add_fitting(self, found: Costed, best_first: Filters) -> Costed:
        """Add further filters that fit, highest score first, until a limit is used up to `TOLERANCE`.

        If a filter does not fit because it would make a whole branch live, hundreds of later filters often do fit.
        Filters are therefore added in steps that double while all of them fit, with the same result as one by one.
        """
        step, refused = 1, Counter[str]()
        while not self._full(found[1]):
            chosen = self.flat(found[0])
            best_first = best_first[~chosen[best_first]]
            if not len(best_first):
                break
            more, usage = self._costed(_with(chosen, best_first[:step]))
            fits = self.limits.hold(usage)
            if step > 1 and (not fits or self._full(usage)):
                step //= 2
                continue
            name = self.layers[best_first[0]]
            best_first, step = best_first[step:], 2 * step if fits else 1
            if fits:
                found = more, usage
            elif not found[0][name].any():
                refused[name] += 1
                if refused[name] == _TRIES:
                    best_first = best_first[self.layers[best_first] != name]
        return found

    def _revive_in_part(self, masks: Masks, best_first: Filters) -> Costed | None:
        """Add an absent filter that fits without some of the dead filters that it makes live; None if none does.

        Selected filters are dead if everything that they read, or everything that reads them, is removed: for
        example the first layer of a branch whose last layer is empty. Dead filters cost nothing, so they fit and
        are selected, but the first filter that reconnects the branch makes one or several whole layers live.
        """
        selected = self.flat(masks)
        dead = selected & ~self.flat(self.living(masks))
        if not dead.any():
            return None
        best: dict[str, int] = {}  # one filter per layer: all filters of a layer make the same filters live
        for absent in best_first[~selected[best_first]]:
            best.setdefault(self.layers[absent], absent)
        for absent in best.values():
            chosen = _with(selected, absent)
            revived = dead & self.flat(self.living(self.masks(chosen)))
            if not revived.any():
                continue
            # All of the filters made live do not fit, so remove them and add back as many as fit.
            turns = self._interleave(best_first[revived[best_first]])
            _, found = self._most_that_fit(_with(chosen, turns, False), turns, least=-1)
            if found is not None and self.flat(self.living(found[0]))[absent]:
                return found
        return None

    def _interleave(self, best_first: Filters) -> Filters:
        """Interleave the filters of several layers in proportion to how many each has.

        A prefix of the result then has filters of all these layers, even if one layer has all the high scores.
        """
        layers = self.layers[best_first]
        sizes, seen = Counter(layers), Counter[str]()
        turns = []
        for name in layers:
            turns.append(seen[name] / sizes[name])
            seen[name] += 1
        return best_first[np.argsort(turns, kind="stable")]

    def _widened(self, found: Selection) -> Selection:
        """Widen layers while the limits hold, in the order of the highest score among their absent filters.

        Latency rises in steps: most additional filters cost nothing, and a few cost much. Layers are therefore
        widened to all their filters or to the next multiple of one of STEPS, not filter by filter.
        """
        masks, usage = found.masks, found.usage
        order = np.argsort(-self.scores, kind="stable")
        absent = order[~self.flat(masks)[order]]
        for name in dict.fromkeys(self.layers[absent]):
            while wider := self._next_wider(masks, name, absent[self.layers[absent] == name]):
                masks, usage = wider
        return Selection(masks, usage, found.cutoff)

    def _next_wider(self, masks: Masks, name: str, best_first: Filters) -> Costed | None:
        """Return the selection with one layer widened by the largest step that fits; None if no step does."""
        count, size = int(masks[name].sum()), self.sizes[name]
        if not count:  # a removed branch needs filters in two layers at once to be live
            return None
        chosen = self.flat(masks)
        best_first = best_first[~chosen[best_first]]
        widths = {size, *(-(-(count + 1) // unit) * unit for unit in STEPS)}
        for width in sorted((w for w in widths if count < w <= size), reverse=True):
            more, usage = self._costed(_with(chosen, best_first[: width - count]))
            if int(more[name].sum()) > count and self.limits.hold(usage):
                return more, usage
        return None


def _with(chosen: Mask, filters: Filters | int, value: bool = True) -> Mask:
    """Return a copy of a selection with these filters added or, if `value` is false, removed."""
    changed = chosen.copy()
    changed[filters] = value
    return changed
