"""Constraints resolved for a channel graph, and how a selection of filters is extended until they hold.

A selection only grows, by the filters with the highest scores, so a connected network stays connected. `Widths`
applies constraints to the widths that remain after dead filters are removed. These differ from those of the
selection, because groups and norms fill layers up and filters without live inputs or readers disappear.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property, reduce
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import PruningError
from ..graph.channel_graph import ChannelGraph, residual_blocks
from ..graph.nodes import Elementwise, Mask, along, shrink
from ..graph.records import Value
from ..graph.relations import ADD
from .constraints import Constraints, WidthLimits
from .search import Masks, Values

# Factor on score differences within a branch: keeps their order, too small to split the branch.
BRANCH_SPREAD = 1e-6


@dataclass(frozen=True)
class ResolvedConstraints:
    """Constraints for one channel graph: those on widths, and the layers that keep the same filters.

    >>> found = ResolvedConstraints(Constraints(min_filters=2, round_to=4))
    >>> found.complete({"conv": np.array([0, 1, 0, 0, 0, 0], bool)}, {"conv": np.arange(6.0)})["conv"]
    array([False,  True, False,  True,  True,  True])
    """

    settings: Constraints = field(default_factory=Constraints)
    groups: tuple[tuple[str, ...], ...] = ()
    """Groups of layers that keep the same filters."""
    links: tuple[Link, ...] = ()
    """Channels of one group's residual stream that reach another group's."""
    branches: tuple[tuple[str, ...], ...] = ()
    """Layers of each residual branch, kept or removed as a whole; a limit may still cut through one branch."""

    def level_branches(self, scores: Mapping[str, NDArray[np.floating]]) -> dict[str, NDArray[np.floating]]:
        """Replace the scores of filters that are kept or removed together by their mean."""
        found = dict(scores)
        for group in self.groups:
            mean = np.stack([scores[name] for name in group]).mean(axis=0)
            for name in group:
                found[name] = mean
        for link in self.links:
            # Prefer channels that arrive through the link anyway: any other one makes the residual stream wider.
            arrives, places = np.array(link.places) >= 0, np.array(link.places)
            source, target = (found[self.groups[number][0]] for number in (link.source, link.target))
            raised = np.where(arrives, np.maximum(target, source[places]), target)
            found |= dict.fromkeys(self.groups[link.target], raised)
        for branch in self.branches:
            # Filters of a branch keep their order, because a limit may be reached in the middle of one branch.
            mean = np.mean([found[name].mean() for name in branch])
            for name in branch:
                found[name] = mean + BRANCH_SPREAD * (found[name] - mean)
        return found

    def complete(self, masks: Masks, scores: Mapping[str, NDArray[np.floating]]) -> Masks:
        """Add to a selection the filters that the constraints require.

        Layers of a group get the union of their masks and of the channels that links bring in.
        """
        found = dict(masks)
        for number, group in enumerate(self.groups):
            together = np.logical_or.reduce([found[name] for name in group])
            for link in self.links:
                if link.target == number:
                    source, places = found[self.groups[link.source][0]], np.array(link.places)
                    together = together | (source[places] & (places >= 0))
            found |= dict.fromkeys(group, self._filled(group[0], together, scores[group[0]]))
        return {name: self._filled(name, mask, scores[name]) for name, mask in found.items()}

    def allowed(self, name: str) -> WidthLimits:
        """Return the width constraints of a layer, combined with those of the layers in its groups."""
        if name not in self._allowed:
            together = {other for group in self.groups if name in group for other in group} | {name}
            self._allowed[name] = reduce(WidthLimits.both, map(self.settings.for_layer, together))
        return self._allowed[name]

    @cached_property
    def _allowed(self) -> dict[str, WidthLimits]:
        return {}  # filled on demand by `allowed`, which one search calls thousands of times

    def _filled(self, name: str, mask: Mask, scores: NDArray[np.floating]) -> Mask:
        """Add the absent filters with the highest scores until the width of the layer is allowed."""
        filled = mask.copy()
        lacking = self.allowed(name).lacking(int(mask.sum()), mask.size)
        if not lacking:
            return filled
        filled[np.argsort(-np.where(mask, -np.inf, scores), kind="stable")[:lacking]] = True
        return filled


def resolve(constraints: Constraints | ResolvedConstraints | None, graph: ChannelGraph) -> ResolvedConstraints:
    """Find the groups, links and branches that `constraints.couple` stands for in a graph.

    Constraints that are resolved already are returned as they are. Raises a PruningError if a pattern of the
    constraints applies to no layer.
    """
    if isinstance(constraints, ResolvedConstraints):
        return constraints
    constraints = constraints or Constraints()
    constraints.check_patterns(graph)
    if constraints.couple == ("blocks",):
        return ResolvedConstraints(constraints, branches=whole_branches(graph))
    groups = coupled(graph, constraints.couple)
    return ResolvedConstraints(constraints, groups, stream_links(graph, groups))


def coupled(graph: ChannelGraph, couple: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return the groups of layers that must keep the same filters.

    "streams" couples all layers whose outputs are added into one residual stream; name patterns couple, for each
    pattern, the layers whose names match it.
    """
    if tuple(couple) != ("streams",):
        return tuple(_matching(graph, pattern) for pattern in couple)
    met = [group.layers for group in graph.relations.groups if ADD in group.meet]
    groups = (group for layers in met for group in _of_one_width(graph, layers))
    order = {name: number for number, name in enumerate(graph.layers)}
    return tuple(sorted((group for group in groups if len(group) > 1), key=lambda group: order[group[0]]))


def _of_one_width(graph: ChannelGraph, layers: Iterable[str]) -> list[tuple[str, ...]]:
    """Split layers by number of filters, which differ where an output is reshaped before the addition."""
    found: dict[int, tuple[str, ...]] = {}
    for name in layers:
        if name in graph.layers:
            width = graph.layers[name].filters
            found[width] = (*found.get(width, ()), name)
    return list(found.values())


def whole_branches(graph: ChannelGraph) -> tuple[tuple[str, ...], ...]:
    """Return the layers of each residual branch; a layer inside several branches belongs to the first of them."""
    found: dict[str, tuple[str, ...]] = {}
    for block in residual_blocks(graph):
        mine = tuple(name for name in block.layers if name not in found)
        found |= dict.fromkeys(mine, mine)
    if not found:
        raise PruningError(
            'couple: "blocks" needs residual blocks that can be pruned, and the model has none; leave it out'
        )
    return tuple(dict.fromkeys(found.values()))


def _matching(graph: ChannelGraph, pattern: str) -> tuple[str, ...]:
    group = tuple(name for name in graph.layers if fnmatchcase(name, pattern))
    if len(group) < 2:
        raise PruningError(f"couple: {pattern!r} matches {len(group)} layers that can be pruned; two are needed")
    widths = {graph.layers[name].filters for name in group}
    if len(widths) > 1:
        raise PruningError(
            f"couple: the layers that {pattern!r} matches have different numbers of filters "
            f"({', '.join(map(str, sorted(widths)))}); couple layers of equal width"
        )
    return group


Groups = Sequence[Sequence[str]]


class Link(NamedTuple):
    """Map from the channels of one group's residual stream to those of another group's.

    `places` holds, for every channel of the stream of group `target`, the filter of group `source` that arrives
    there, or -1. An example is a shortcut that pads the channels of one stage for the next: channels kept in the
    first stage are in the next one's stream whether its layers write them or not, so layers that choose them make
    it no wider.
    """

    source: int
    target: int
    places: tuple[int, ...]


def stream_links(graph: ChannelGraph, groups: Groups) -> tuple[Link, ...]:
    """Find the links between the residual streams of the groups, in the order of their target groups."""
    sums = {number: found for number, group in enumerate(groups) if (found := _sum(graph, group)) is not None}
    arriving = []
    for source, group in enumerate(groups):
        # Number the filters of the group and propagate the numbers as liveness, one bit per pass: the bits that
        # reach a channel of another stream spell the number of the filter that arrives there.
        numbers = np.arange(1, graph.layers[group[0]].filters + 1)
        read = {target: np.zeros(value.shape[1], int) for target, value in sums.items() if target != source}
        for bit in range(int(numbers[-1]).bit_length()):
            alive = graph.carried(dict.fromkeys(group, numbers >> bit & 1 == 1)).alive
            for target in read:
                read[target] |= _by_channel(alive[sums[target]]).astype(int) << bit
        arriving += [Link(source, target, tuple((n - 1).tolist())) for target, n in read.items() if n.any()]
    return tuple(sorted(arriving, key=lambda link: link.target))


def _by_channel(alive: Mask) -> Mask:
    return shrink(alive, along(1, alive.shape)).reshape(-1)


def _sum(graph: ChannelGraph, group: Sequence[str]) -> Value | None:
    """Return the result of the first addition behind a layer of the group, or None if there is none."""
    for name in group:
        value: Value = graph.layers[name].site.edges[0].out
        while True:
            readers = [node for node in graph.nodes if value in node.inputs]
            if len(readers) != 1 or not isinstance(readers[0], Elementwise):
                break
            value = readers[0].outputs[0]
            if len(readers[0].inputs) > 1:
                return value
    return None


class Widths:
    """Widths of a network's layers after dead filters are removed, for any selection of filters."""

    def __init__(self, graph: ChannelGraph) -> None:
        self._graph = graph
        self._whole = graph.settle({})  # filters that are dead in the dense network are dead in every selection

    def extended(self, masks: Masks, scores: Mapping[str, Values], constraints: ResolvedConstraints) -> Masks:
        """Extend a selection until the constraints hold for the widths that remain after dead filters are removed.

        Returns the selection as far as it came if no filter can make a layer wider.
        """
        if not constraints.settings.limit_widths:
            return constraints.complete(masks, scores)
        futile = {name: ~mask for name, mask in self._whole.items()}
        for _ in range(sum(map(len, scores.values()))):  # an upper bound; a few rounds are enough
            values = {name: np.where(futile[name], own.min() - 1, own) for name, own in scores.items()}
            masks = constraints.complete(masks, values)
            if empty := self._cut_off_by(masks, scores, constraints):
                masks = constraints.complete({**masks, **empty}, values)
            left = self._graph.settle(masks)
            grown, stuck = dict(masks), []
            for name, there in left.items():
                lacking = constraints.allowed(name).lacking(int(there.sum()), int(self._whole[name].sum()))
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
            # Completing a group may only restore filters that are dead in one of its layers: no progress either.
            if _same(grown, masks) or (stuck and _same(constraints.complete(grown, values), masks)):
                more_of = next(filter(None, (self._elsewhere(name, masks, scores) for name in stuck)), None)
                if more_of is None:
                    break
                grown |= {other: grown[other] | some for other, some in more_of.items()}
            masks = grown
        return masks

    def _cut_off_by(self, masks: Masks, scores: Mapping[str, Values], constraints: ResolvedConstraints) -> Masks:
        """Return the best filter of every empty layer that makes all filters of a constrained layer dead.

        If all layers have the same constraints, none of them is empty here. If only some have, such as the first
        layer of a branch, the other layers of the branch need a filter as well.
        """
        empty = [name for name, mask in masks.items() if not mask.any()]
        kept = [name for name in masks if constraints.allowed(name).lacking(0, int(self._whole[name].sum()))]
        if not empty or not kept:
            return {}
        best = {name: np.arange(len(own)) == np.where(self._whole[name], own, -np.inf).argmax()
                for name, own in scores.items() if name in empty}  # fmt: skip
        found = {name: one for name, one in best.items() if any(name in self._needed[other] for other in kept)}

        def living(opened: Masks) -> bool:
            left = self._graph.settle({**masks, **opened})
            return all(left[name].any() for name in kept)

        if not living(found) and living(best):  # where one of several is enough, those with low scores stay empty
            found, needed = dict(best), found
            for name in sorted((n for n in best if n not in needed), key=lambda name: float(scores[name].max())):
                fewer = {other: one for other, one in found.items() if other != name}
                found = fewer if living(fewer) else found
        return found

    @cached_property
    def _needed(self) -> dict[str, set[str]]:
        """For each layer, the layers that leave it without live filters when they are empty."""
        found: dict[str, set[str]] = {name: set() for name in self._whole}
        for name, layer in self._graph.layers.items():
            for other, left in self._graph.settle({name: np.zeros(layer.filters, bool)}).items():
                if other != name and not left.any():
                    found[other].add(name)
        return found

    def _beside(self, name: str, left: Masks) -> Iterator[tuple[str, Mask]]:
        """Yield layers and some of their filters: adding one of these can make more filters of `name` live.

        These are filters in the empty groups of a grouped convolution that reads `name`, or filters that feed empty
        groups of `name` itself.
        """
        for feeder, readers in self._readers.items():
            for reader in readers:
                gone = ~_by_group(left[reader], self._rows(reader))
                if feeder == name:
                    yield reader, gone
                elif reader == name:
                    size, groups = len(left[feeder]), self._rows(reader)
                    # Other sizes mean that channels are moved, or other layers run, between the two; `_elsewhere`
                    # handles these cases.
                    if size == self._graph.layers[reader].nodes[0].x.shape[1]:
                        yield feeder, gone[:: len(gone) // groups].repeat(size // groups)

    def _elsewhere(self, name: str, masks: Masks, scores: Mapping[str, Values]) -> Masks:
        """Return filters to add in another layer, or else in several, so that more filters of `name` are live.

        This is for layers of which no further filter can be live, because all that they read or all that reads them
        is dead.
        """
        alive = int(self._graph.settle(masks)[name].sum())

        def lifts(more: Masks) -> bool:
            return int(self._graph.settle({**masks, **more})[name].sum()) > alive

        def fewest(other: str, beside: Masks) -> Mask:
            """Return the fewest of the best absent filters that suffice, or the last of them if it alone does."""
            there = masks[other]
            order = [place for place in np.argsort(-scores[other], kind="stable") if not there[place]]
            few, enough = -1 if beside else 0, len(order)  # bisect: the first `few` are not enough, `enough` are
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
        for other in sorted(whole, key=lambda other: float(scores[other].max())):  # low scores are reduced first
            whole[other] = masks[other] | fewest(other, whole)
        return {other: mask & ~masks[other] for other, mask in whole.items() if (mask & ~masks[other]).any()}

    def _rows(self, name: str) -> int:
        return self._graph.layers[name].groups

    @cached_property
    def _readers(self) -> dict[str, list[str]]:
        """For each layer, the grouped convolutions that are the only readers of some of its filters."""
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
    """Return the filters of all groups that have at least one filter left."""
    return np.repeat(there.reshape(groups, -1).sum(1) > 0, len(there) // groups)


def _best(there: Mask, count: int, scores: Values, groups: int) -> Mask:
    """Return the best absent filters to add, none of which has a score of -inf.

    These are `count` filters. In a grouped layer with partly filled groups it is one filter for each group that is
    not empty, because its groups have equal numbers of filters.
    """
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
