"""A size asked for, and the filters that fit into it.

A channel graph, one score per filter and a budget enter; masks leave that keep the filters with the highest
scores, as many as the budget holds.  What holds: the network these masks make costs no more than the budget,
and no single filter of those dropped next could be added without breaking it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .errors import PruningError
from .graph.channels import ChannelGraph
from .graph.costs import Cost, cost
from .graph.masks import Mask

Masks = dict[str, Mask]

_SECOND_LOOKS = 24  # dropped filters that are tried one by one after the threshold is found


@dataclass(frozen=True)
class Budget:
    """The most a network may keep, as parts of what it has with all filters.

    >>> Budget(macs=0.5).eased(0.5)
    Budget(params=1.0, macs=0.75)
    """

    params: float = 1.0
    macs: float = 1.0

    def __post_init__(self) -> None:
        for name in ("params", "macs"):
            part = getattr(self, name)
            if not 0 < part <= 1:
                raise PruningError(f"{name} is the part to keep, above 0 and at most 1, not {part:g}")

    def eased(self, progress: float) -> Budget:
        """A budget on the way to this one: all at 0, this one from 1 on."""
        share = min(max(progress, 0.0), 1.0)
        return Budget(1 - (1 - self.params) * share, 1 - (1 - self.macs) * share)

    def holds(self, found: Cost, dense: Cost) -> bool:
        """Does a network of this cost fit?"""
        return found.params <= self.params * dense.params and found.macs <= self.macs * dense.macs


def land(
    graph: ChannelGraph,
    scores: Mapping[str, NDArray[np.floating]],
    budget: Budget,
    connect: Callable[[Masks], Masks] = lambda masks: masks,
) -> Masks:
    """The filters with the highest scores that fit into the budget.

    `connect` adds what a network must not lose; it is asked before every count.
    """
    dense = cost(graph, {})
    names = [name for name, values in scores.items() for _ in values]
    places = [place for values in scores.values() for place in range(len(values))]
    order = np.argsort(-np.concatenate(list(scores.values())), kind="stable")

    def best(count: int) -> Masks:
        masks = {name: np.zeros(len(values), bool) for name, values in scores.items()}
        for filter_ in order[:count]:
            masks[names[filter_]][places[filter_]] = True
        return connect(masks)

    def fits(masks: Masks) -> bool:
        return budget.holds(cost(graph, masks), dense)

    least, most = 0, len(order)
    if fits(best(most)):
        return best(most)
    if not fits(best(least)):
        left = cost(graph, best(least))
        raise PruningError(
            f"the budget cannot be met: the smallest network that is still connected keeps "
            f"{left.params / dense.params:.1%} of the parameters and {left.macs / dense.macs:.1%} of the MACs"
        )
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if fits(best(middle)) else (least, middle)
    masks = best(least)
    for filter_ in order[least : least + _SECOND_LOOKS]:
        more = {name: mask.copy() for name, mask in masks.items()}
        more[names[filter_]][places[filter_]] = True
        if fits(more):
            masks = more
    return masks
