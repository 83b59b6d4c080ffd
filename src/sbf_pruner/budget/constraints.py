"""The widths that a layer may have, told for all layers alike or by patterns of their names.

A number enters, or a table of numbers by pattern; for any layer, the widths it may have leave.  What holds: of
several patterns that match a layer the last one counts, a layer that none matches has the default, and a pattern
that counts for no layer is refused, since whoever wrote it meant one.

What a network must not lose, whatever the scores say: the guards around a landing.

Layers and wishes enter; `Guards` leave, which complete any choice of filters: a layer keeps its least number,
widths are what hardware likes, layers that write into one stream keep the same filters.  What holds: a choice
only ever grows, by the filters with the highest scores, so what was connected stays so.

Which channels of one residual stream arrive in another: what coupled layers find there anyway.

Groups of layers that each write into one stream enter; links leave.  Where a shortcut pads the channels of one
stage for the next, a channel that the first stage keeps is in the next one's stream whether its layers write
it or not; layers that choose it make the stream no wider, layers that choose another one do.

Guards that hold for the widths a network really gets, not only for the filters that were chosen.

A choice of filters and guards enter; a choice leaves that has grown until every layer has a width it may have.  The
two differ because groups and norms fill layers up, and because filters that lead nowhere, or are fed nothing, go.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property, reduce
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from ..errors import PruningError, nearest
from ..graph.channel_graph import ChannelGraph, residual_blocks
from ..graph.nodes import Elementwise, Mask, along, shrink
from ..graph.records import Value
from ..graph.relations import ADD
from .search import Masks, Values

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


Groups = Sequence[Sequence[str]]


class Link(NamedTuple):
    """For every channel of the stream of one group, the channel of another group that arrives there, or -1."""

    source: int
    target: int
    places: tuple[int, ...]


def links(graph: ChannelGraph, groups: Groups) -> tuple[Link, ...]:
    """How the streams of the groups feed each other, in the order of the groups."""
    sums = {number: found for number, group in enumerate(groups) if (found := _sum(graph, group)) is not None}
    arriving = []
    for source, group in enumerate(groups):
        # Every filter of the group has a number, and what arrives elsewhere tells it, one bit after the other.
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
    """What comes out where the channels of a layer of the group are added to something."""
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
