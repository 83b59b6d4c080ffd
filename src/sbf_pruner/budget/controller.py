"""From scores to gates: by the threshold alone, or as many filters as a budget holds.

A channel graph, a budget and guards enter; for any scores, masks leave that keep the network connected, respect
the guards and break no limit.  A budget that no choice can meet is refused at once, before anything is trained.

The penalty's strength, steered so that the scores themselves come to the size that was asked for.

Again and again the score enters that would separate what stays from what goes at the size asked for; a strength
leaves.  At the end that score is to be the threshold of the gates: then landing moves nothing, and the gates are
the paper's.  On the way there it is to fall evenly, because scores move at a limited speed: a strength that grew
for as long as the threshold is far would drown everything the loss says.

What a filter costs, given its neighbours as they are now, and what that makes of the penalty's weights.

A channel graph and the filters it keeps enter; for every layer and resource the mean cost of one of its filters
leaves, as a part of the whole network.  Where the filters of a layer cannot go one by one, in groups say, it is
the layer's own cost divided among them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from ..errors import PruningError
from ..graph.channel_graph import ChannelGraph, Layer
from ..graph.cost import Appraiser, Laid, cost_of, lay_out, network_cost, whole_cost
from ..graph.nodes import Mask
from .constraints import Guards, Widths
from .search import Field, Landing, Masks, Values, land
from .targets import MICROSECONDS, Budget, Limits, Stored, Usage, is_missed


class Clock(Protocol):
    """Knows how long networks take."""

    def seconds(self, laid: Laid) -> float:
        """Seconds of one pass of a network that is laid out."""

    def prices(self, laid: Laid, keep: Mapping[str, Mask]) -> dict[str, float]:
        """By layer, the part of the dense network's time that one of its filters takes."""


class Aim:
    """What the gates aim at.

    >>> import torch
    >>> from torch import nn
    >>> from ..graph.build import trace
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 1, bias=False), nn.ReLU(), nn.Conv2d(8, 4, 1, bias=False))
    >>> aim = Aim(trace(net, torch.zeros(1, 3, 4, 4)), Budget(macs=0.5))
    >>> aim.choose({"0": np.arange(8.0)}).masks["0"]
    array([False, False, False, False,  True,  True,  True,  True])
    """

    def __init__(
        self,
        graph: ChannelGraph,
        budget: Budget | None = None,
        guards: Guards | None = None,
        clock: Clock | None = None,
        stored: Stored | None = None,
        *,
        refuse: bool = True,
    ) -> None:
        self.graph = graph
        self.stored = stored
        self.clock = clock if budget is not None and budget.latency != 1 else None
        if budget is not None and budget.latency != 1 and clock is None:
            raise PruningError(
                "a target for the latency needs to know how long layers take; measure it with `sbf latency --out` "
                "and give the file (clock=, or latency.table in a recipe)"
            )
        self.guards = guards or Guards()
        self._widths = Widths(graph)
        self.limits: Limits | None = None
        if budget is not None and budget.asked:
            self.limits = budget.limits(self.whole)
            self.prices = self.priced(graph.all_filters())
            self.smallest = self._smallest(self.guards, self.limits)
            self.reachable = self.limits.hold(self.count(self.smallest))
            if refuse and not self.reachable:
                raise self._refusal(self.limits)

    def choose(self, scores: Mapping[str, Values], threshold: float = 0.5, progress: float = 1.0) -> Landing:
        """The filters that stay; `progress` is how far the limits have closed in on what was asked for."""
        scores = self.guards.leveled(scores)
        if self.limits is None:
            # The paper's gate (Eq. 6).
            above = {name: values >= threshold for name, values in scores.items()}
            return Landing(self._finished(above, scores, self.guards), {}, threshold)
        return land(self._field(scores), self.limits.eased(progress), progress >= 1)

    def level(self, scores: Mapping[str, Values]) -> float:
        """The score that would separate what stays from what goes, were the limits what was asked for already."""
        assert self.limits is not None
        return land(self._field(self.guards.leveled(scores)), self.limits, settled=False).level

    def least(self) -> Masks:
        """A network as small as may be left, whatever the scores: the first filters are those that cannot go."""
        alike = {name: np.zeros(layer.filters) for name, layer in self.graph.layers.items()}
        return self._finished(_nothing(self.graph), alike, self.guards)

    def scarce(self) -> dict[str, float]:
        """How much of each resource has to go; of MACs, where nothing is asked for."""
        if self.limits is None:
            return {"macs": 1.0}
        return {name: 1 - most / self.limits.whole[name] or 1e-3 for name, most in self.limits.most.items()}

    def count(self, masks: Masks) -> Usage:
        """What a choice costs, by resource; MACs are those of one sample, and a size that of the tensors alone
        where it is not known how they are stored."""
        laid = lay_out(self.graph, masks)
        found = asdict(cost_of(self.graph, laid))
        if self.stored is not None:
            found["size"] = self.stored.bytes(laid, found["size"])
        timed = {} if self.clock is None else {"latency": MICROSECONDS * self.clock.seconds(laid)}
        return {**found, "macs": found["macs"] / self.graph.trace.samples, **timed}

    @cached_property
    def whole(self) -> Usage:
        """What the dense network costs, with layers that lead nowhere."""
        found = asdict(whole_cost(self.graph))
        if self.stored is not None:
            found["size"] = self.stored.dense
        timed = {} if self.clock is None else {"latency": self.count({})["latency"]}
        return {**found, "macs": found["macs"] / self.graph.trace.samples, **timed}

    def missed(self, masks: Masks) -> str | None:
        """What a choice has beyond the budget, in words; None if it fits, or exceeds a time by a few percent."""
        if self.limits is None:
            return None
        used, most = self.count(masks), self.limits.most
        broken = [n for n in self.limits.broken(used) if n != "latency" or is_missed(most[n], used[n])]
        found, asked = (", ".join(self.limits.told(name, what) for name in broken) for what in (used, most))
        return f"the network has {found}, and the budget is {asked}" if broken else None

    def priced(self, keep: Mapping[str, Mask]) -> Prices:
        """What a filter of each layer costs of every resource, among the filters that are there."""
        found = prices(self.graph, keep)
        if self.clock is not None:
            found["latency"] = self.clock.prices(lay_out(self.graph, keep), keep)
        return found

    def _field(self, scores: Mapping[str, Values]) -> Field:
        def finish(masks: Masks) -> Masks:
            return self._finished(masks, scores, self.guards)

        return Field(scores, self.count, finish, self.prices, self.smallest, self.graph.settle)

    def _finished(self, masks: Masks, scores: Mapping[str, Values], guards: Guards) -> Masks:
        # A network cut in two learns nothing more: where a layer is the last way through, its best filter stays.
        weakest_first = sorted(scores, key=lambda name: float(scores[name].max()))
        masks = dict(masks)
        while lifelines := self.graph.lifelines(masks, weakest_first):
            for name in lifelines:
                best = np.arange(len(scores[name])) == scores[name].argmax()
                # Where filters are left but meet nothing (the factors of a product), all of them come back.
                masks[name] = np.ones_like(best) if masks[name].any() else best
        return self._widths.guarded(masks, scores, guards)

    def _smallest(self, guards: Guards, limits: Limits) -> Masks:
        """The smallest network that may be left: of several ways through it, one that costs little."""
        layers = self.graph.layers
        priced = [[-self.prices[resource][name] for name in layers] for resource in limits.most]
        found = []
        for worth in ([0.0 for _ in layers], [float(place) for place in range(len(layers))], *priced):
            scores = {name: np.full(layers[name].filters, value) for name, value in zip(layers, worth, strict=True)}
            found.append(self._finished(_nothing(self.graph), guards.leveled(scores), guards))
        return min(found, key=lambda masks: -min(limits.room(self.count(masks)).values()))

    def _refusal(self, limits: Limits) -> PruningError:
        least = self.count(self.smallest)
        broken = limits.broken(least)
        contradicted = self.guards != Guards() and not limits.broken(self.count(self._smallest(Guards(), limits)))
        remedy = f"loosen the guards ({self.guards.told()}), which contradict it" if contradicted else (
            "let more layers be pruned"
        )  # fmt: skip
        # A file tells of its plan too, so that of a tiny network may grow; there is no more to ask for then.
        more = "" if any(least[name] >= limits.whole[name] for name in broken) else "ask for more, or "
        asked = " and ".join(limits.told(name, limits.most) for name in broken)
        found = " and ".join(limits.told(name, least, up=True) for name in broken)
        return PruningError(
            f"the target of {asked} cannot be met: the smallest network that may be left "
            f"{'takes' if broken == ['latency'] else 'has'} {found}; {more}{remedy}"
        )


def _nothing(graph: ChannelGraph) -> Masks:
    return {name: np.zeros(layer.filters, bool) for name, layer in graph.layers.items()}


# Scores add up what pushes them, and a strength that added up errors alone would swing about the target, each time
# wider.  So it answers the change of the error first, and what is left of it more slowly.
CHANGE = 6.0
REST = 1.5
BOUND = 8.0  # the most it changes at once, as a factor
RANGE = 1e4  # the most it changes in all, as a factor: where it starts need not be known well


class Steering:
    """Follows a target with the strength of the penalty.

    >>> steering = Steering(1e-3, threshold=0.5)
    >>> steering.follow(level=0.9, progress=1.0) > 1e-3  # filters that must go score too high
    True
    """

    def __init__(self, strength: float, threshold: float) -> None:
        self.start = self.strength = strength
        self.threshold = threshold
        self.error = 0.0  # the last one; every score begins at 1, where it is wanted then

    def follow(self, level: float, progress: float) -> float:
        """The strength to go on with; `level` is where the cut would be, `progress` how far limits closed in."""
        wanted = 1 + (self.threshold - 1) * min(max(progress, 0.0), 1.0)
        error = math.log(max(level, 1e-6) / wanted)
        factor = math.exp(CHANGE * (error - self.error) + REST * error)
        self.error = error
        bounded = self.strength * min(max(factor, 1 / BOUND), BOUND)
        self.strength = min(max(bounded, self.start / RANGE), self.start * RANGE)
        return self.strength

    def state_dict(self) -> dict[str, Any]:
        """What following has changed."""
        return {"strength": self.strength, "error": self.error}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.strength, self.error = state["strength"], state["error"]


Prices = dict[str, dict[str, float]]  # resource -> layer -> part of the whole

_ASKED = 3  # filters of a layer whose cost is computed


def prices(graph: ChannelGraph, keep: Mapping[str, Mask]) -> Prices:
    """What one filter of each layer costs of each resource.

    >>> import torch
    >>> from torch import nn
    >>> from ..graph.build import trace
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 1, bias=False), nn.ReLU(), nn.Conv2d(8, 5, 1, bias=False))
    >>> graph = trace(net, torch.zeros(1, 3, 4, 4))
    >>> prices(graph, graph.all_filters())["macs"]  # 8 filters, and all there is hangs on them
    {'0': 0.125}
    """
    whole, appraiser = network_cost(graph, {}), Appraiser(graph, keep)
    found: Prices = {"params": {}, "macs": {}}
    for name, layer in graph.layers.items():
        macs, params = _mean(appraiser, name, keep[name]) or _own(layer)
        found["macs"][name] = macs / max(whole.macs, 1)
        found["params"][name] = params / max(whole.params, 1)
    return {**found, "size": found["params"]}


def _mean(appraiser: Appraiser, name: str, mask: Mask) -> tuple[float, float] | None:
    """The mean worth of some filters that are there; None where none goes alone or none is there."""
    there = np.flatnonzero(mask)
    asked = there[np.unique(np.linspace(0, len(there) - 1, _ASKED).astype(int))] if len(there) else there
    worths = [appraiser.filter(name, int(place)) for place in asked]
    macs, params = (sum(getattr(w, key) for w in worths) / max(len(worths), 1) for key in ("macs", "params"))
    return (macs, params) if params else None


def _own(layer: Layer) -> tuple[float, float]:
    """A filter's own weights, and the pixels they work on."""
    params = math.prod(layer.nodes[0].weight.shape) / layer.filters
    pixels = sum(math.prod(node.out.shape[2:]) for node in layer.nodes)
    return params * pixels, params


class Mix:
    """How much each resource counts, as its limit is near or far.

    >>> mix = Mix({"macs": 0.5, "params": 0.5})
    >>> mix.follow({"macs": 0.0, "params": 0.1})  # parameters are not what is scarce
    >>> mix.parts["macs"] > mix.parts["params"]
    True
    """

    HALVED_AT = 0.1  # room, as a part of the whole, that halves what a resource counts

    def __init__(self, parts: Mapping[str, float]) -> None:
        self.parts = _shares(parts)

    def follow(self, room: Mapping[str, float]) -> None:
        """Count less of what there is room in."""
        self.parts = _shares(
            {name: part * 2 ** (-room[name] / self.HALVED_AT) for name, part in self.parts.items()}
        )

    def weights(self, found: Prices, layers: Mapping[str, int]) -> list[float]:
        """One weight per layer for the penalty: the mixed price, with a mean of 1 over all filters."""
        mixed = {name: sum(part * found[key][name] for key, part in self.parts.items()) for name in layers}
        mean = sum(mixed[name] * filters for name, filters in layers.items()) / sum(layers.values())
        return [mixed[name] / mean for name in layers]


def _shares(parts: Mapping[str, float]) -> dict[str, float]:
    total = sum(parts.values())
    return {name: part / total for name, part in parts.items()}
