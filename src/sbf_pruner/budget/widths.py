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
            left = self._graph.settle(masks)
            grown, stuck = dict(masks), []
            for name, there in left.items():
                lacking = guards.lacking(int(there.sum()), int(self._whole[name].sum()))
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
            if all(np.array_equal(grown[name], masks[name]) for name in masks):
                more_of = next(filter(None, (self._elsewhere(name, masks, scores) for name in stuck)), None)
                if more_of is None:
                    break
                other, one = more_of
                grown[other] = grown[other] | one
            masks = grown
        return masks

    def _beside(self, name: str, left: Masks) -> Iterator[tuple[str, Mask]]:
        """Where more must stay for more of a layer to live: groups that do not read it, or do not feed it."""
        for feeder, readers in self._readers.items():
            for reader in readers:
                gone = ~_by_group(left[reader], self._rows(reader))
                if feeder == name:
                    yield reader, gone
                elif reader == name:
                    size, groups = len(left[feeder]), self._rows(reader)
                    known = size == self._graph.layers[reader].nodes[0].x.shape[1]  # nothing moves channels between
                    yield feeder, gone[:: len(gone) // groups].repeat(size // groups) if known else ~left[feeder]

    def _elsewhere(self, name: str, masks: Masks, scores: Mapping[str, Values]) -> tuple[str, Mask] | None:
        """A filter of another layer, without which a layer has none to add: the part it reads is dead."""
        alive = int(self._graph.settle(masks)[name].sum())

        def lifts(other: str, mask: Mask) -> bool:
            return int(self._graph.settle({**masks, other: mask})[name].sum()) > alive

        for other in (n for n in masks if n != name and lifts(n, self._whole[n] | masks[n])):
            order = [place for place in np.argsort(-scores[other], kind="stable") if not masks[other][place]]
            few, enough = 0, len(order)  # the best ones that do not help, and those that do
            while enough - few > 1:
                middle = (few + enough) // 2
                if lifts(other, masks[other] | np.isin(np.arange(len(masks[other])), order[:middle])):
                    enough = middle
                else:
                    few = middle
            if enough:
                return other, np.arange(len(masks[other])) == order[enough - 1]
        return None

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
