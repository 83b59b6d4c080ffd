"""From scores to gates: by the threshold alone, or as many filters as a budget holds.

A channel graph, a budget and guards enter; for any scores, masks leave that keep the network connected, respect
the guards and break no limit.  A budget that no choice can meet is refused at once, before anything is trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import cached_property
from typing import Protocol

import numpy as np

from ..errors import PruningError
from ..graph.channels import ChannelGraph
from ..graph.costs import Laid, cost_of, lay_out, whole_cost
from ..graph.masks import Mask
from ..stored import Stored
from .guards import Guards
from .landing import Field, Landing, Masks, Values, land
from .prices import Prices, prices
from .targets import MICROSECONDS, Budget, Limits, Usage, is_missed
from .widths import Widths


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
