"""What a filter costs, given its neighbours as they are now, and what that makes of the penalty's weights.

A channel graph and the filters it keeps enter; for every layer and resource the mean cost of one of its filters
leaves, as a part of the whole network.  Where the filters of a layer cannot go one by one, in groups say, it is
the layer's own cost divided among them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from ..graph.channels import ChannelGraph, Layer
from ..graph.costs import cost
from ..graph.masks import Mask
from ..graph.worth import Appraiser

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
    whole, appraiser = cost(graph, {}), Appraiser(graph, keep)
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
