"""Selection of filters for a budget (`Selector`), and steering of the penalty towards it (`Steering`,
`ResourceWeights`, `filter_prices`).

`Selector` raises an error before training if no selection can meet the budget. The cutoff is the score that
separates kept from removed filters. `Steering` adjusts the penalty so that the cutoff equals the gate threshold at
the end of training: the selection for the budget then equals the paper's gates. The intended cutoff falls evenly,
because scores change at a limited speed: a penalty that grew until the cutoff is reached would outweigh the loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np

from ..errors import PruningError
from ..graph.channel_graph import ChannelGraph
from ..graph.cost import Cost, FilterCosts, LaidOut, cost_of, lay_out, network_cost, whole_cost
from ..graph.nodes import Mask
from .constraints import Constraints
from .file_size import FileSize
from .search import Masks, Search, Selection, Values
from .targets import MICROSECONDS, Budget, Limits, Usage, is_missed
from .widths import ResolvedConstraints, Widths, resolve


class LatencyPredictor(Protocol):
    """Interface of a latency model."""

    def seconds(self, laid: LaidOut) -> float:
        """Return the seconds that one forward pass of a network with this layout takes."""

    def prices(self, laid: LaidOut, keep: Mapping[str, Mask]) -> dict[str, float]:
        """Return, for each layer, the fraction of the dense network's time that one of its filters takes."""


class Selector:
    """Selects the filters with the highest scores that fit the budget; without one, those from the threshold on.

    Every selection keeps the network connected and satisfies the constraints. If no selection can meet the budget,
    raises a PruningError or, if `refuse` is false, sets the attribute `reachable` to False.

    >>> import torch
    >>> from torch import nn
    >>> from ..graph.build import trace
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 1, bias=False), nn.ReLU(), nn.Conv2d(8, 4, 1, bias=False))
    >>> selector = Selector(trace(net, torch.zeros(1, 3, 4, 4)), Budget(macs=0.5))
    >>> selector.choose({"0": np.arange(8.0)}).masks["0"]
    array([False, False, False, False,  True,  True,  True,  True])
    """

    def __init__(
        self,
        graph: ChannelGraph,
        budget: Budget | None = None,
        constraints: Constraints | ResolvedConstraints | None = None,
        latency_model: LatencyPredictor | None = None,
        stored: FileSize | None = None,
        *,
        refuse: bool = True,
    ) -> None:
        self.graph = graph
        self.stored = stored
        self.latency_model = latency_model if budget is not None and budget.latency != 1 else None
        if budget is not None and budget.latency != 1 and latency_model is None:
            raise PruningError(
                "a latency target needs the measured times of the layers; measure them with `sbf latency --out` "
                "and give the file (clock=, or latency.table in a recipe)"
            )
        self.constraints = resolve(constraints, graph)
        self._widths = Widths(graph, self.constraints)
        self.limits: Limits | None = None
        if budget is not None and budget.asked:
            self.limits = budget.limits(self.whole)
            self.prices = self.priced(graph.all_filters())
            self.smallest = self._smallest(self.limits)
            self.reachable = self.limits.hold(self.count(self.smallest))
            if refuse and not self.reachable:
                raise self._refusal(budget, self.limits)

    def choose(self, scores: Mapping[str, Values], threshold: float = 0.5, progress: float = 1.0) -> Selection:
        """Return the filters to keep. `progress` moves the limits from the dense network (0) to the budget (1)."""
        scores = self.constraints.level_branches(scores)
        if self.limits is None:
            # The paper's gate (Eq. 6).
            above = {name: values >= threshold for name, values in scores.items()}
            return Selection(self._completed(above, scores), {}, threshold)
        return self._search(scores, self.limits.eased(progress)).best(widen=progress >= 1)

    def cutoff(self, scores: Mapping[str, Values]) -> float:
        """Return the score that separates kept from removed filters under the final limits of the budget."""
        assert self.limits is not None
        return self._search(self.constraints.level_branches(scores), self.limits).best(widen=False).cutoff

    def least(self) -> Masks:
        """Return the smallest selection allowed for equal scores; filters with the lowest indices are kept."""
        return self._fewest({name: np.zeros(layer.filters) for name, layer in self.graph.layers.items()})

    def excess_fractions(self) -> dict[str, float]:
        """Return the fraction of each limited resource that must be removed; `{"macs": 1.0}` without a budget."""
        if self.limits is None:
            return {"macs": 1.0}
        return {name: 1 - most / self.limits.whole[name] or 1e-3 for name, most in self.limits.most.items()}

    def count(self, masks: Masks) -> Usage:
        """Return the cost of a selection by resource.

        MACs are per sample. If `stored` is None, the size is that of the tensors without a file header.
        """
        laid = lay_out(self.graph, masks)
        cost = cost_of(self.graph, laid)
        return self._usage(cost, cost.size if self.stored is None else self.stored.bytes(laid, cost.size), laid)

    @cached_property
    def whole(self) -> Usage:
        """Cost of the dense network, including layers whose output is not used."""
        cost = whole_cost(self.graph)
        return self._usage(cost, cost.size if self.stored is None else self.stored.dense, lay_out(self.graph, {}))

    def _usage(self, cost: Cost, size: float, laid: LaidOut) -> Usage:
        usage = {"params": cost.params, "macs": cost.macs / self.graph.trace.samples, "size": size}
        return (
            usage
            if self.latency_model is None
            else {**usage, "latency": MICROSECONDS * self.latency_model.seconds(laid)}
        )

    def excess(self, masks: Masks) -> str | None:
        """Describe what exceeds the budget, for latency by more than `LATENCY_TOLERANCE`; None if nothing does."""
        if self.limits is None:
            return None
        used, most = self.count(masks), self.limits.most
        broken = [n for n in self.limits.broken(used) if n != "latency" or is_missed(most[n], used[n])]
        found, allowed = (", ".join(self.limits.told(name, what) for name in broken) for what in (used, most))
        return f"the network has {found}, and the budget is {allowed}" if broken else None

    def priced(self, keep: Mapping[str, Mask]) -> Prices:
        """Return the cost of one filter of each layer for every resource, given the filters that are kept."""
        found = filter_prices(self.graph, keep)
        if self.latency_model is not None:
            found["latency"] = self.latency_model.prices(lay_out(self.graph, keep), keep)
        return found

    def _search(self, scores: Mapping[str, Values], limits: Limits) -> Search:
        complete = partial(self._completed, scores=scores)
        return Search(scores, limits, self.count, complete, self.prices, self.smallest, self.graph.settle)

    def _completed(self, masks: Masks, scores: Mapping[str, Values]) -> Masks:
        # If no path led from inputs to outputs, the network could not be trained, so a layer on the only remaining
        # path keeps the filter with the highest score.
        weakest_first = sorted(scores, key=lambda name: float(scores[name].max()))
        masks = dict(masks)
        while lifelines := self.graph.disconnecting_layers(masks, weakest_first):
            for name in lifelines:
                best = np.arange(len(scores[name])) == scores[name].argmax()
                # Tensors that are multiplied may keep no channel in common: then restore all filters of the layer.
                masks[name] = np.ones_like(best) if masks[name].any() else best
        return self._widths.extended(masks, scores)

    def _fewest(self, scores: Mapping[str, Values]) -> Masks:
        return self._completed({name: np.zeros(len(own), bool) for name, own in scores.items()}, scores)

    def _smallest(self, limits: Limits) -> Masks:
        """Return a selection that is as small as allowed.

        The path through the network that remains depends on the order in which layers are emptied, so several
        orders are tried. Returns the selection whose scarcest resource is furthest below its limit.
        """
        layers = self.graph.layers
        orders = [[0.0] * len(layers), range(len(layers))]
        orders += [[-self.prices[resource][name] for name in layers] for resource in limits.most]
        found = []
        for values in orders:
            scores = {n: np.full(layers[n].filters, float(v)) for n, v in zip(layers, values, strict=True)}
            found.append(self._fewest(self.constraints.level_branches(scores)))
        return max(found, key=lambda masks: min(limits.room(self.count(masks)).values()))

    def _refusal(self, budget: Budget, limits: Limits) -> PruningError:
        least = self.count(self.smallest)
        broken = limits.broken(least)
        remedy = "allow more layers to be pruned"
        if self.constraints != ResolvedConstraints():
            free = Selector(self.graph, budget, None, self.latency_model, self.stored, refuse=False)
            if free.reachable:
                remedy = f"loosen the constraints ({self.constraints.settings.describe()}), which contradict it"
        # A pruned file also holds the plan, so that of a tiny network may exceed the dense file: no target fits.
        more = "" if any(least[name] >= limits.whole[name] for name in broken) else "raise the target, or "
        target = " and ".join(limits.told(name, limits.most) for name in broken)
        found = " and ".join(limits.told(name, least, up=True) for name in broken)
        return PruningError(
            f"the target of {target} cannot be met: the smallest possible network "
            f"{'takes' if broken == ['latency'] else 'has'} {found}; {more}{remedy}"
        )


# Controller gains for the change (CHANGE) and for the value (REST) of the error. Scores integrate the penalty over
# steps, so a strength that integrated only the error would oscillate around the target with growing amplitude.
CHANGE = 6.0
REST = 1.5
BOUND = 8.0  # largest factor of one update
RANGE = 1e4  # largest factor of all updates together, so the initial strength need not be accurate


class Steering:
    """Controller of the penalty strength.

    >>> steering = Steering(1e-3, threshold=0.5)
    >>> steering.follow(cutoff=0.9, progress=1.0) > 1e-3  # filters that must go score too high
    True
    """

    def __init__(self, strength: float, threshold: float) -> None:
        self.start = self.strength = strength
        self.threshold = threshold
        self.error = 0.0  # at the last update; initially 0, because scores start at the intended cutoff, 1

    def follow(self, cutoff: float, progress: float) -> float:
        """Return the next strength.

        `cutoff` is the score that separates kept from removed filters under the final limits. `progress` goes from
        0 to 1 and moves the intended cutoff from 1 to the threshold.
        """
        intended = 1 + (self.threshold - 1) * min(max(progress, 0.0), 1.0)
        error = math.log(max(cutoff, 1e-6) / intended)
        factor = math.exp(CHANGE * (error - self.error) + REST * error)
        self.error = error
        bounded = self.strength * min(max(factor, 1 / BOUND), BOUND)
        self.strength = min(max(bounded, self.start / RANGE), self.start * RANGE)
        return self.strength

    def state_dict(self) -> dict[str, Any]:
        """Return the current strength and error."""
        return {"strength": self.strength, "error": self.error}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the strength and error from `state_dict`."""
        self.strength, self.error = state["strength"], state["error"]


Prices = dict[str, dict[str, float]]  # resource -> layer -> fraction of the dense network

_SAMPLED = 3  # filters per layer whose cost is computed


def filter_prices(graph: ChannelGraph, keep: Mapping[str, Mask]) -> Prices:
    """Return the mean cost of one filter of each layer, as a fraction of the dense network, by resource.

    Costs depend on the filters that the neighboring layers keep. If removing a single filter saves nothing, as in a
    grouped layer, the cost is that of the layer's own weights divided by its number of filters.

    >>> import torch
    >>> from torch import nn
    >>> from ..graph.build import trace
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 1, bias=False), nn.ReLU(), nn.Conv2d(8, 5, 1, bias=False))
    >>> graph = trace(net, torch.zeros(1, 3, 4, 4))
    >>> filter_prices(graph, graph.all_filters())["macs"]  # 8 filters, on which all of the network depends
    {'0': 0.125}
    """
    whole, costs = network_cost(graph, {}), FilterCosts(graph, keep)
    found: Prices = {"params": {}, "macs": {}}
    for name, layer in graph.layers.items():
        kept = np.flatnonzero(keep[name])
        some = np.unique(np.linspace(0, len(kept) - 1, min(_SAMPLED, len(kept))).astype(int))
        savings = [costs.filter(name, int(kept[place])) for place in some]
        macs, params = (sum(getattr(s, key) for s in savings) / max(len(savings), 1) for key in ("macs", "params"))
        if not params:
            params = math.prod(layer.nodes[0].weight.shape) / layer.filters
            macs = params * sum(math.prod(node.out.shape[2:]) for node in layer.nodes)
        found["macs"][name] = macs / max(whole.macs, 1)
        found["params"][name] = params / max(whole.params, 1)
    return {**found, "size": found["params"]}


class ResourceWeights:
    """Weights of the resources in the penalty: large for a limit that is used up, small for one that is not.

    >>> mix = ResourceWeights({"macs": 0.5, "params": 0.5})
    >>> mix.follow({"macs": 0.0, "params": 0.1})  # parameters are not what is scarce
    >>> mix.parts["macs"] > mix.parts["params"]
    True
    """

    HALVED_AT = 0.1  # unused limit, as a fraction of the dense network, that halves the weight of a resource

    def __init__(self, parts: Mapping[str, float]) -> None:
        self.parts = _shares(parts)

    def follow(self, room: Mapping[str, float]) -> None:
        """Reduce the weights of resources below their limits; `room` is limit minus usage over dense usage."""
        self.parts = _shares(
            {name: part * 2 ** (-room[name] / self.HALVED_AT) for name, part in self.parts.items()}
        )

    def weights(self, found: Prices, layers: Mapping[str, int]) -> list[float]:
        """Return one penalty weight per layer: its weighted price, scaled to a mean of 1 over all filters."""
        mixed = {name: sum(part * found[key][name] for key, part in self.parts.items()) for name in layers}
        mean = sum(mixed[name] * filters for name, filters in layers.items()) / sum(layers.values())
        return [mixed[name] / mean for name in layers]


def _shares(parts: Mapping[str, float]) -> dict[str, float]:
    total = sum(parts.values())
    return {name: part / total for name, part in parts.items()}
