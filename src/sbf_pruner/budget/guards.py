"""What a network must not lose, whatever the scores say: the guards around a landing.

Layers and wishes enter; `Guards` leave, which complete any choice of filters: a layer keeps its least number,
widths are what hardware likes, layers that write into one stream keep the same filters.  What holds: a choice
only ever grows, by the filters with the highest scores, so what was connected stays so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property, reduce
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ..errors import PruningError, nearest
from ..graph.channels import ChannelGraph
from ..graph.masks import Mask
from ..graph.relations import ADD
from ..graph.residual import residual_blocks
from .allowed import UNSET, Allowed, Counts, Parts, check_patterns, checked, of_layer, told
from .landing import Masks
from .streams import Link, links

WITHIN = 1e-6  # of the difference of scores is left between the filters of one branch
Couple = Literal["none", "streams", "blocks"]


@dataclass(frozen=True)
class Guards:
    """The least a layer keeps, the widths it may have, and the layers that share their filters.

    Widths are told for all layers, or by name: `{"*": 8, "head.*": 1}`, where the last pattern that matches counts.

    >>> guards = Guards(min_filters=2, round_to=4, groups=())
    >>> guards.complete({"conv": np.array([0, 1, 0, 0, 0, 0], bool)}, {"conv": np.arange(6.0)})["conv"]
    array([False,  True, False,  True,  True,  True])
    """

    min_filters: Counts = 0
    """filters that a layer keeps at least"""
    max_removed: Parts = 1.0
    """part of a layer's filters that may go at most"""
    round_to: Counts = 1
    """a layer keeps a multiple of this, or all it has"""
    groups: tuple[tuple[str, ...], ...] = ()
    """layers that keep the same filters"""
    links: tuple[Link, ...] = ()
    """what arrives from one group's stream in another's"""
    branches: tuple[tuple[str, ...], ...] = ()
    """layers of one residual branch, which stays or goes as a whole, but for the one that the limits cut through"""

    def __post_init__(self) -> None:
        for key in UNSET:
            object.__setattr__(self, key, checked(key, getattr(self, key)))

    def told(self) -> str:
        """The guards that are set, as a user sets them."""
        asked = ((key, getattr(self, key)) for key in UNSET)
        widths = [f"{key} = {told(value)}" for key, value in asked if value != UNSET[key]]
        return ", ".join([*widths, *("couple" for together in (self.groups, self.branches) if together)])

    def leveled(self, scores: Mapping[str, NDArray[np.floating]]) -> dict[str, NDArray[np.floating]]:
        """The scores with those of filters that stay or go together replaced by their mean."""
        found = dict(scores)
        for group in self.groups:
            mean = np.stack([scores[name] for name in group]).mean(axis=0)
            for name in group:
                found[name] = mean
        for link in self.links:
            # What arrives anyway is chosen before what would make the stream wider.
            arrives, places = np.array(link.places) >= 0, np.array(link.places)
            source, target = (found[self.groups[number][0]] for number in (link.source, link.target))
            raised = np.where(arrives, np.maximum(target, source[places]), target)
            found |= dict.fromkeys(self.groups[link.target], raised)
        for branch in self.branches:
            # Among themselves the filters of a branch keep their order, for the one that is cut through.
            mean = np.mean([found[name].mean() for name in branch])
            for name in branch:
                found[name] = mean + WITHIN * (found[name] - mean)
        return found

    def complete(self, masks: Masks, scores: Mapping[str, NDArray[np.floating]]) -> Masks:
        """A choice with what the guards add to it."""
        found = dict(masks)
        for number, group in enumerate(self.groups):
            together = np.logical_or.reduce([found[name] for name in group])
            for link in self.links:
                if link.target == number:
                    source, places = found[self.groups[link.source][0]], np.array(link.places)
                    together = together | (source[places] & (places >= 0))
            found |= dict.fromkeys(group, self._filled(group[0], together, scores[group[0]]))
        return {name: self._filled(name, mask, scores[name]) for name, mask in found.items()}

    @property
    def of_widths(self) -> bool:
        """Do they ask for anything of a layer's width?"""
        return any(getattr(self, key) != unset for key, unset in UNSET.items())

    def allowed(self, name: str) -> Allowed:
        """The widths a layer may have: those that it and all that keep the same filters may have."""
        if name not in self._allowed:
            together = {other for group in self.groups if name in group for other in group} | {name}
            self._allowed[name] = reduce(Allowed.both, map(self._asked, together))
        return self._allowed[name]

    @cached_property
    def _allowed(self) -> dict[str, Allowed]:
        return {}  # by layer, as they are asked for: a landing asks some thousand times

    def _asked(self, name: str) -> Allowed:
        return Allowed(**{key: of_layer(getattr(self, key), name, unset) for key, unset in UNSET.items()})

    def _filled(self, name: str, mask: Mask, scores: NDArray[np.floating]) -> Mask:
        """What a layer keeps, and as many more of its best filters as it must have."""
        filled = mask.copy()
        lacking = self.allowed(name).lacking(int(mask.sum()), mask.size)
        if not lacking:
            return filled
        filled[np.argsort(-np.where(mask, -np.inf, scores), kind="stable")[:lacking]] = True
        return filled


def check_names(guards: Guards, graph: ChannelGraph) -> None:
    """Raise a PruningError if one of the guards is for layers that are not there."""
    for key in UNSET:
        check_patterns(key, getattr(guards, key), graph)


def with_coupled(guards: Guards, graph: ChannelGraph, couple: Couple | Sequence[str]) -> Guards:
    """The guards with the layers that are to keep or lose filters together."""
    check_names(guards, graph)
    if not isinstance(couple, str) and tuple(couple) in (("streams",), ("blocks",)):  # as a recipe writes it
        couple = couple[0]
    groups, branches = coupled(graph, couple), whole_branches(graph, couple)
    return replace(guards, groups=groups, links=links(graph, groups), branches=branches)


def coupled(graph: ChannelGraph, couple: Couple | Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """The groups of layers that are to keep the same filters.

    "streams" couples all layers that write into one stream of additions; a list of name patterns couples, for
    each pattern, the layers whose names match it.
    """
    if isinstance(couple, str):
        if couple not in get_args(Couple):
            raise PruningError(
                f"couple: no way is called {couple!r}, {nearest(couple, get_args(Couple))}; or give a list of name "
                "patterns"
            )
        if couple != "streams":
            return ()
        met = [group.layers for group in graph.relations.groups if ADD in group.meet]
        groups = (group for layers in met for group in _of_one_width(graph, layers))
        order = {name: number for number, name in enumerate(graph.layers)}
        return tuple(sorted((group for group in groups if len(group) > 1), key=lambda group: order[group[0]]))
    return tuple(_matching(graph, pattern) for pattern in couple)


def _of_one_width(graph: ChannelGraph, layers: Iterable[str]) -> list[tuple[str, ...]]:
    """Layers that meet, by their number of filters: where one is folded before it meets another, they differ."""
    found: dict[int, tuple[str, ...]] = {}
    for name in layers:
        if name in graph.layers:
            width = graph.layers[name].filters
            found[width] = (*found.get(width, ()), name)
    return list(found.values())


def whole_branches(graph: ChannelGraph, couple: Couple | Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """The residual branches that are to stay or go as a whole: all of them if asked for "blocks"."""
    if couple != "blocks":
        return ()
    found: dict[str, tuple[str, ...]] = {}
    for block in residual_blocks(graph):
        mine = tuple(name for name in block.layers if name not in found)
        found |= dict.fromkeys(mine, mine)
    if not found:
        raise PruningError("couple: there are no residual branches to keep or drop as a whole; couple nothing")
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
