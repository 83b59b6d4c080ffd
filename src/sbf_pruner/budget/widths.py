"""Constraints resolved for a channel graph, and extension of a selection of filters until they hold.

Extension only adds filters, those with the highest scores, so a connected network stays connected. `Widths` applies
constraints to the widths after dead filters are removed. These differ from the widths of the selection: grouped
layers and norms keep additional filters, and filters without live inputs or readers are removed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """Connections of the residual stream of one group to that of another."""
    branches: tuple[tuple[str, ...], ...] = ()
    """Layers of each residual branch, kept or removed as a whole; one branch may be cut in part, to fit a limit."""

    def level_branches(self, scores: Mapping[str, Values]) -> dict[str, Values]:
        """Return scores in which filters that are kept or removed together have their mean score."""
        found = dict(scores)
        for group in self.groups:
            found |= dict.fromkeys(group, np.stack([scores[name] for name in group]).mean(axis=0))
        for link in self.links:
            # Prefer channels that arrive through the link in any case: others make the residual stream wider.
            arrives, places = np.array(link.places) >= 0, np.array(link.places)
            source, target = (found[self.groups[number][0]] for number in (link.source, link.target))
            raised = np.where(arrives, np.maximum(target, source[places]), target)
            found |= dict.fromkeys(self.groups[link.target], raised)
        for branch in self.branches:
            # Keep the order of the filters of a branch, because a limit may be reached within the branch.
            mean = np.mean([found[name].mean() for name in branch])
            for name in branch:
                found[name] = mean + BRANCH_SPREAD * (found[name] - mean)
        return found

    def complete(self, masks: Masks, scores: Mapping[str, Values]) -> Masks:
        """Add to a selection the filters that the constraints require.

        Layers of a group get the union of their masks and of the channels that links bring in.
        """
        found = dict(masks)
        for number, group in enumerate(self.groups):
            union = np.logical_or.reduce([found[name] for name in group])
            for link in self.links:
                if link.target == number:
                    source, places = found[self.groups[link.source][0]], np.array(link.places)
                    union = union | (source[places] & (places >= 0))
            found |= dict.fromkeys(group, self._filled(group[0], union, scores[group[0]]))
        return {name: self._filled(name, mask, scores[name]) for name, mask in found.items()}

    def allowed(self, name: str) -> WidthLimits:
        """Return the width constraints of a layer, combined with those of the layers in its groups."""
        if name not in self._allowed:
            coupled = {other for group in self.groups if name in group for other in group} | {name}
            self._allowed[name] = reduce(WidthLimits.both, map(self.settings.for_layer, coupled))
        return self._allowed[name]

    @cached_property
    def _allowed(self) -> dict[str, WidthLimits]:
        return {}  # filled by `allowed`, which one search calls thousands of times

    def _filled(self, name: str, mask: Mask, scores: Values) -> Mask:
        """Add the absent filters with the highest scores until the width of the layer is allowed."""
        filled = mask.copy()
        if lacking := self.allowed(name).lacking(int(mask.sum()), mask.size):
            filled[np.argsort(-np.where(mask, -np.inf, scores), kind="stable")[:lacking]] = True
        return filled


def resolve(constraints: Constraints | ResolvedConstraints | None, graph: ChannelGraph) -> ResolvedConstraints:
    """Return constraints with the groups, links and branches that `couple` selects in a graph.

    `ResolvedConstraints` are returned unchanged. Raises a PruningError if a pattern applies to no layer.
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
    found: list[tuple[str, ...]] = []
    for group in graph.relations.groups:
        if ADD in group.meet:
            # Numbers of filters differ where an output is reshaped before the addition.
            by_width: dict[int, tuple[str, ...]] = {}
            for name in group.layers:
                if name in graph.layers:
                    width = graph.layers[name].filters
                    by_width[width] = (*by_width.get(width, ()), name)
            found += by_width.values()
    order = list(graph.layers)
    return tuple(sorted((group for group in found if len(group) > 1), key=lambda group: order.index(group[0])))


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


class Link(NamedTuple):
    """Map from the channels of one group's residual stream to those of another group's.

    `places` holds, for every channel of the stream of group `target`, the index of the filter of group `source`
    that arrives there, or -1. An example is a shortcut that pads the channels of one stage with zeros for the next
    stage. The channels of the earlier stage are part of the later stream even if no later layer writes them, so
    later layers that keep filters in these channels do not make the stream wider.
    """

    source: int
    target: int
    places: tuple[int, ...]


def stream_links(graph: ChannelGraph, groups: Sequence[Sequence[str]]) -> tuple[Link, ...]:
    """Find the links between the residual streams of the groups, in the order of their target groups."""
    sums = {number: found for number, group in enumerate(groups) if (found := _stream(graph, group)) is not None}
    arriving = []
    for source, group in enumerate(groups):
        # Number the filters of the group and propagate the numbers as liveness, one bit per pass. The bits that
        # reach a channel of another stream form the number of the filter that arrives there.
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


def _stream(graph: ChannelGraph, group: Sequence[str]) -> Value | None:
    """Return the output of the addition that follows a layer of the group; None if no addition does."""
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
    """Extends selections of filters until constraints hold for the widths of the pruned network.

    A width is counted after dead filters are removed.
    """

    def __init__(self, graph: ChannelGraph, constraints: ResolvedConstraints) -> None:
        self._graph, self._constraints = graph, constraints
        self._whole = graph.settle({})  # filters that are dead in the dense network are dead in every selection

    def extended(self, masks: Masks, scores: Mapping[str, Values]) -> Masks:
        """Return a selection extended until the constraints hold, or until no filter makes a layer wider."""
        if not self._constraints.settings.limit_widths:
            return self._constraints.complete(masks, scores)
        futile = {name: ~mask for name, mask in self._whole.items()}  # filters that would be dead
        for _ in range(sum(map(len, scores.values()))):  # an upper bound; a few rounds are enough
            values = {name: np.where(futile[name], own.min() - 1, own) for name, own in scores.items()}
            masks = self._constraints.complete(masks, values)
            grown, stuck = dict(masks), []
            for name, alive in self._graph.settle(masks).items():
                allowed = self._constraints.allowed(name)
                lacking = allowed.lacking(int(alive.sum()), int(self._whole[name].sum()))
                if not lacking:
                    continue
                futile[name] = futile[name] | masks[name] & ~alive
                useful = np.where(futile[name], -np.inf, scores[name])
                more = _best_absent(alive, lacking, useful, self._graph.layers[name].groups)
                if more.any():
                    grown[name] = alive | more
                else:
                    stuck.append(name)
            # If completing a group only restores filters that are dead in one of its layers, nothing has changed.
            if _same(grown, masks) or (stuck and _same(self._constraints.complete(grown, values), masks)):
                for name in stuck:
                    if beside := self._beside(name, masks, scores):
                        grown |= beside
                        futile[name] = ~self._whole[name]  # what was dead may be live now
                        break
                else:
                    break
            masks = grown
        return masks

    def _beside(self, name: str, masks: Masks, scores: Mapping[str, Values]) -> Masks:
        """Return extended masks of another layer, or else of several, with which more filters of `name` are live.

        Called if no further filter of `name` can be live, because everything that the layer reads, or everything
        that reads it, is dead. Returns an empty dict if no extension helps.
        """
        masks = masks | {name: self._whole[name]}
        alive = int(self._graph.settle(masks)[name].sum())

        def lifts(more: Masks) -> bool:
            return int(self._graph.settle(masks | more)[name].sum()) > alive

        def fewest(other: str, found: Masks) -> Mask:
            """Return the mask of `other` with the fewest additional filters that suffice together with `found`."""
            order = np.argsort(-scores[other], kind="stable")
            order = order[~masks[other][order]]

            def some(places: NDArray[np.intp]) -> Mask:
                return masks[other] | np.isin(np.arange(len(masks[other])), places)

            few, enough = -1, len(order)  # bisect: the first `few` are not enough, `enough` are
            while enough - few > 1:
                middle = (few + enough) // 2
                if lifts(found | {other: some(order[:middle])}):
                    enough = middle
                else:
                    few = middle
            last = some(order[max(enough - 1, 0) : enough])
            return last if lifts(found | {other: last}) else some(order[:enough])

        # Layers on which `name` depends are tried first, because a trial is slow.
        best_first = sorted(scores, key=lambda other: (other not in self._needs[name], -float(scores[other].max())))
        whole = {other: self._whole[other] | masks[other] for other in best_first if other != name}
        found = next(({other: mask} for other, mask in whole.items() if lifts({other: mask})), whole)
        if not lifts(found):
            return {}
        for other in sorted(found, key=lambda other: float(scores[other].max())):  # low scores are reduced first
            found[other] = fewest(other, found)
        return {other: mask for other, mask in found.items() if (mask & ~masks[other]).any()}

    @cached_property
    def _needs(self) -> dict[str, set[str]]:
        """For each layer, the layers whose removal leaves it with fewer live filters."""
        found: dict[str, set[str]] = {name: set() for name in self._whole}
        for name, layer in self._graph.layers.items():
            for other, left in self._graph.settle({name: np.zeros(layer.filters, bool)}).items():
                if left.sum() < self._whole[other].sum():
                    found[other].add(name)
        return found


def _same(one: Masks, other: Masks) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in other)


def _best_absent(present: Mask, count: int, scores: Values, groups: int) -> Mask:
    """Return a mask of the absent filters with the highest scores, except those with a score of -inf.

    The mask has `count` filters. In a grouped layer with partly filled groups, it has one filter for each group
    that is not empty, because all groups of a layer must have equal numbers of filters.
    """
    absent = np.where(present, -np.inf, scores)
    found = np.zeros_like(present)
    counts = present.reshape(groups, -1).sum(1)
    size = len(present) // groups
    if groups > 1 and ((counts > 0) & (counts < size)).any():
        best = absent.reshape(groups, -1).argmax(1) + size * np.arange(groups)
        found[best[counts > 0]] = True
    else:
        found[np.argsort(-absent, kind="stable")[:count]] = True
    return np.asarray(found & (absent > -np.inf))
