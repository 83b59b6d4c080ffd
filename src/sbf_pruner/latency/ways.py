"""Three ways to take filters away, worth very different time at equal MACs: which keeps the most in a given time.

A graph, a clock and limits enter; a way leaves, with what each would keep: "filters" of every layer by itself,
"streams" (layers that are added up keep the same ones, so the stream gets narrower), or "blocks" (whole residual
branches).  Nothing is trained yet, so the scores are made up, alike for all layers; what holds: a way that cannot
come to what is asked for is not chosen, and the choice follows from the clock alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..budget.aim import Aim
from ..budget.guards import Couple, Guards, with_coupled
from ..budget.landing import Values
from ..budget.targets import Budget
from ..errors import PruningError
from ..graph.channels import ChannelGraph
from ..stored import Stored
from .model import LatencyModel

WAYS: dict[str, Couple] = {"filters": "none", "streams": "streams", "blocks": "blocks"}


@dataclass(frozen=True)
class Chosen:
    """The way that was chosen, and what each would leave of the MACs (None: it does not reach the target)."""

    way: str
    macs: Mapping[str, float | None]

    def told(self) -> str:
        """In one line."""
        others = [
            f"{name} {'cannot reach it' if share is None else f'{share:.1%}'}"
            for name, share in self.macs.items()
            if name != self.way
        ]
        own = self.macs.get(self.way)
        kept = "" if own is None else f", which keeps {own:.1%} of the MACs"
        return f"way: {self.way}{kept}" + (f" ({', '.join(others)})" if others else "")

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {"way": self.way, "macs_left": dict(self.macs)}


def guarded(graph: ChannelGraph, guards: Guards, way: str) -> Guards | None:
    """The guards of a way; None where the network has nothing that it could couple."""
    try:
        found = with_coupled(guards, graph, WAYS[way])
    except PruningError:
        return None
    return found if way == "filters" or found.groups or found.branches else None


def choose_way(
    graph: ChannelGraph, clock: LatencyModel, budget: Budget, guards: Guards, stored: Stored | None = None
) -> Chosen:
    """The way that keeps the most MACs within the budget; ties and targets none reaches go to single filters."""
    found: dict[str, float | None] = {}
    for way in WAYS:
        held = guarded(graph, guards, way)
        if held is not None:
            found[way] = _left(graph, clock, budget, held, stored)
    reached = {way: share for way, share in found.items() if share is not None}
    return Chosen(max(reached, key=reached.__getitem__) if reached else "filters", found)


def made_up(graph: ChannelGraph, guards: Guards) -> dict[str, Values]:
    """Scores that take as large a part of every layer as of any other, and of branches every other first."""
    rng = np.random.default_rng(0)
    scores: dict[str, Values] = {
        name: (rng.permutation(layer.filters) + 0.5) / layer.filters for name, layer in graph.layers.items()
    }
    for group in guards.groups:
        scores |= dict.fromkeys(group, scores[group[0]])
    if guards.branches:
        inside = {name for branch in guards.branches for name in branch}
        scores |= {name: 2 + values for name, values in scores.items() if name not in inside}
    for place, branch in enumerate(guards.branches):
        share = _scattered(place + 1)
        scores |= {name: share + 1e-3 * (scores[name] - 0.5) for name in branch}
    return scores


def _left(
    graph: ChannelGraph, clock: LatencyModel, budget: Budget, guards: Guards, stored: Stored | None
) -> float | None:
    try:
        aim = Aim(graph, budget, guards, clock, stored)
        usage = aim.choose(made_up(graph, guards)).usage
    except PruningError:
        return None
    return usage["macs"] / aim.whole["macs"]


def _scattered(number: int) -> float:
    """Numbers in a row, scattered evenly between 0 and 1 (the bits of each, mirrored).

    >>> [_scattered(n) for n in (1, 2, 3, 4)]
    [0.5, 0.25, 0.75, 0.125]
    """
    share, part = 0.0, 0.5
    while number:
        share, number, part = share + part * (number & 1), number >> 1, part / 2
    return share
