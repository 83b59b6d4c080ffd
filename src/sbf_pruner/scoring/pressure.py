"""The pressure on the scores: how strong the penalty is, and how it is spread over the layers.

A balance, or a budget to follow, enters; a differentiable scalar leaves for every step.  Strength and weights
lie in tensors that are filled in place, so a captured step sees them change.  With a budget the strength is
steered towards it; under the balance "cost" a filter's weight is what it costs among the neighbours it has now,
in the units of the limits, each counted the more the scarcer it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..budget.aim import Aim
from ..budget.landing import Landing
from ..budget.prices import Mix
from ..budget.steering import Steering
from ..graph.channels import ChannelGraph
from ..graph.masks import Mask
from .penalty import Balance, balance_weights, per_filter, weighted_l1


class Pressure:
    """The penalty of a pruner."""

    def __init__(
        self, graph: ChannelGraph, aim: Aim, strength: float, balance: Balance, steering: Steering | None = None
    ) -> None:
        self.graph, self.aim, self.steering = graph, aim, steering
        self.mix = Mix(aim.scarce()) if balance == "cost" else None
        self.strength = torch.tensor(strength)
        self.weights = self._spread(balance_weights(balance, [layer.map_size for layer in graph.layers.values()]))
        if self.mix is not None:
            self.weights = self._costs(self.mix, graph.all_filters())

    def to(self, scores: Tensor) -> None:
        """Lie where the scores are."""
        self.strength, self.weights = self.strength.to(scores), self.weights.to(scores)

    def on(self, scores: Tensor) -> Tensor:
        """The penalty of the scores."""
        return weighted_l1(scores, self.weights, self.strength)

    def steer(self, level: float, progress: float) -> None:
        """Follow the budget: `level` is the score that would separate what stays from what goes."""
        if self.steering is not None:
            self.strength.fill_(self.steering.follow(level, progress))

    def follow(self, landing: Landing, progress: float) -> None:
        """Take up what a landing tells: what was scarce, and which neighbours filters have."""
        if self.mix is not None:
            if self.aim.limits is not None:
                self.mix.follow(self.aim.limits.eased(progress).room(landing.usage))
            self.weights.copy_(self._costs(self.mix, self.graph.settle(landing.masks)))

    def state_dict(self) -> dict[str, Any]:
        """What following has changed."""
        mixed = None if self.mix is None else dict(self.mix.parts)
        steered = None if self.steering is None else self.steering.state_dict()
        return {
            "strength": float(self.strength),
            "weights": self.weights.clone(),
            "mix": mixed,
            "steering": steered,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state; what it does not know, because nothing was followed then, is as it was given here."""
        first = {"strength": state["strength"], "error": 0.0}  # of a version that knew no error
        if self.steering is not None and (steered := state.get("steering", first)) is not None:
            self.steering.load_state_dict(steered)
            self.strength.fill_(state["strength"])
        if self.mix is not None and (state["mix"] or {}).keys() == self.mix.parts.keys():
            self.mix = Mix(state["mix"])
            self.weights.copy_(state["weights"])

    def _costs(self, mix: Mix, keep: Mapping[str, Mask]) -> Tensor:
        filters = {name: layer.filters for name, layer in self.graph.layers.items()}
        return self._spread(mix.weights(self.aim.priced(keep), filters))

    def _spread(self, weights: Sequence[float]) -> Tensor:
        return per_filter(weights, [layer.filters for layer in self.graph.layers.values()])
