"""Guards that hold for the widths a network really gets, not only for the filters that were chosen.

A choice of filters and guards enter; a choice leaves that has grown until every layer has a width it may have.  The
two differ because groups and norms fill layers up, and because filters that lead nowhere, or are fed nothing, go.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property

import numpy as np

from ..graph.channels import ChannelGraph
from ..graph.masks import Mask
from .guards import Guards
from .landing import Masks, Values


class Widths:
    """The widths of one network's layers under any choice of filters."""

    def __init__(self, graph: ChannelGraph) -> None:
        self._graph = graph
        self._whole = graph.settle({})  # filters that lead nowhere in the dense network do so in all

    def guarded(self, masks: Masks, scores: Mapping[str, Values], guards: Guards) -> Masks:
        """A choice with what the guards add to it, until they hold for the widths it leaves."""
        if not guards.of_widths:
            return guards.complete(masks, scores)
        futile = {name: ~mask for name, mask in self._whole.items()}
        for _ in range(sum(map(len, scores.values()))):  # far fewer will do
            values = {name: np.where(futile[name], own.min() - 1, own) for name, own in scores.items()}
            masks = guards.complete(masks, values)
            if empty := self._cut_off_by(masks, scores, guards):
                masks = guards.complete({**masks, **empty}, values)
            left = self._graph.settle(masks)
            grown, stuck = dict(masks), []
            for name, there in left.items():
                lacking = guards.allowed(name).lacking(int(there.sum()), int(self._whole[name].sum()))
                if not lacking:
                    continue
                futile[name] = futile[name] | masks[name] & ~there
                more = _best(there, lacking, np.where(futile[name], -np.inf, scores[name]), self._rows(name))
                if more.any():
                    grown[name] = there | more
                    continue
                grown[name] = self._whole[name]
                stuck.append(name)
                for other, places in self._beside(name, left):
                    grown[other] = grown[other] | _best(grown[other] | ~places, 1, scores[other], 1)
            # Coupled layers may bring back what leads nowhere in one of them: that is no growth either.
            if _same(grown, masks) or (stuck and _same(guards.complete(grown, values), masks)):
                more_of = next(filter(None, (self._elsewhere(name, masks, scores) for name in stuck)), None)
                if more_of is None:
                    break
                grown |= {other: grown[other] | some for other, some in more_of.items()}
            masks = grown
        return masks

    def _cut_off_by(self, masks: Masks, scores: Mapping[str, Values], guards: Guards) -> Masks:
        """The best filter of every empty layer without which one that must keep some would have none.

        Where all layers are guarded alike none of these is empty; where only some are, such as the first layer of a
        branch, the others must let them live.
        """
        empty = [name for name, mask in masks.items() if not mask.any()]
        kept = [name for name in masks if guards.allowed(name).lacking(0, int(self._whole[name].sum()))]
        if not empty or not kept:
            return {}
        best = {name: np.arange(len(own)) == np.where(self._whole[name], own, -np.inf).argmax()
                for name, own in scores.items() if name in empty}  # fmt: skip
        found = {name: one for name, one in best.items() if any(name in self._needed[other] for other in kept)}

        def living(opened: Masks) -> bool:
            left = self._graph.settle({**masks, **opened})
            return all(left[name].any() for name in kept)

        if not living(found) and living(best):  # of several that would do, the weaker ones stay empty
            found, needed = dict(best), found
            for name in sorted((n for n in best if n not in needed), key=lambda name: float(scores[name].max())):
                fewer = {other: one for other, one in found.items() if other != name}
                found = fewer if living(fewer) else found
        return found

    @cached_property
    def _needed(self) -> dict[str, set[str]]:
        """By layer, those without any filter of which it has none."""
        found: dict[str, set[str]] = {name: set() for name in self._whole}
        for name, layer in self._graph.layers.items():
            for other, left in self._graph.settle({name: np.zeros(layer.filters, bool)}).items():
                if other != name and not left.any():
                    found[other].add(name)
        return found

    def _beside(self, name: str, left: Masks) -> Iterator[tuple[str, Mask]]:
        """Where more must stay for more of a layer to live: groups that do not read it, or do not feed it."""
        for feeder, readers in self._readers.items():
            for reader in readers:
                gone = ~_by_group(left[reader], self._rows(reader))
                if feeder == name:
                    yield reader, gone
                elif reader == name:
                    size, groups = len(left[feeder]), self._rows(reader)
                    # Where channels are moved between the two, or it is read by way of others, `_elsewhere` looks.
                    if size == self._graph.layers[reader].nodes[0].x.shape[1]:
                        yield feeder, gone[:: len(gone) // groups].repeat(size // groups)

    def _elsewhere(self, name: str, masks: Masks, scores: Mapping[str, Values]) -> Masks:
        """Filters of another layer, or else of several, without which a layer has none to add: what it reads, or
        all that reads it, is dead."""
        alive = int(self._graph.settle(masks)[name].sum())

        def lifts(more: Masks) -> bool:
            return int(self._graph.settle({**masks, **more})[name].sum()) > alive

        def fewest(other: str, beside: Masks) -> Mask:
            """As few of a layer's best absent filters as it takes; the last of them alone, if that does."""
            there = masks[other]
            order = [place for place in np.argsort(-scores[other], kind="stable") if not there[place]]
            few, enough = -1 if beside else 0, len(order)  # the best ones that do not help, and those that do
            while enough - few > 1:
                middle = (few + enough) // 2
                if lifts({**beside, other: there | np.isin(np.arange(len(there)), order[:middle])}):
                    enough = middle
                else:
                    few = middle
            last = np.isin(np.arange(len(there)), order[enough - 1 : enough])
            alone = not beside or lifts({**beside, other: there | last})
            return last if alone else np.isin(np.arange(len(there)), order[:enough])

        whole = {other: self._whole[other] | mask for other, mask in masks.items() if other != name}
        for other, mask in whole.items():
            if lifts({other: mask}):
                return {other: found} if (found := fewest(other, {})).any() else {}
        if not lifts(whole):
            return {}
        for other in sorted(whole, key=lambda other: float(scores[other].max())):  # the weaker stay as they are
            whole[other] = masks[other] | fewest(other, whole)
        return {other: mask & ~masks[other] for other, mask in whole.items() if (mask & ~masks[other]).any()}

    def _rows(self, name: str) -> int:
        return self._graph.layers[name].groups

    @cached_property
    def _readers(self) -> dict[str, list[str]]:
        """By layer, the convolutions in groups without which some of its filters are not read."""
        found: dict[str, list[str]] = {}
        for reader, layer in self._graph.layers.items():
            if layer.groups > 1:
                left = self._graph.settle({reader: np.zeros(layer.filters, bool)})
                for name, there in left.items():
                    if name != reader and there.sum() < self._whole[name].sum():
                        found.setdefault(name, []).append(reader)
        return found


def _same(one: Masks, other: Masks) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in other)


def _by_group(there: Mask, groups: int) -> Mask:
    """The filters of the groups of which one is there."""
    return np.repeat(there.reshape(groups, -1).sum(1) > 0, len(there) // groups)


def _best(there: Mask, count: int, scores: Values, groups: int) -> Mask:
    """The best filters to add; a layer in groups gets one for each that is there, since they are of one size."""
    absent = np.where(there, -np.inf, scores)
    found = np.zeros_like(there)
    rows = there.reshape(groups, -1)
    counts = rows.sum(1)
    if groups > 1 and ((counts > 0) & (counts < rows.shape[1])).any():
        best = np.arange(rows.shape[1]) == absent.reshape(groups, -1).argmax(1)[:, None]
        found = (best & (counts > 0)[:, None]).reshape(-1)
    else:
        found[np.argsort(-absent, kind="stable")[:count]] = True
    return np.asarray(found & (absent > -np.inf))
