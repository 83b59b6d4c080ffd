"""Modeled on NPPM: gates that maximize the accuracy predicted by a small network (Gao et al., 2021).

In every step binary gates are sampled, and the accuracy of the sub-network that they select is stored in a memory,
on which a predictor is trained. The gates follow the gradients of the predicted accuracy, of the loss, and of the
cost as long as that exceeds the target. The score of a filter is the logit of its gate.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..budget.controller import Selector
from ..graph.nodes import Mask
from .ranking import SubnetEvaluator, target_of
from .subject import Scores, Subject

_EPOCHS = 10
_OPEN = 3.0  # initial logit of all gates: 95 of 100 are open
_SHARP = 1.0  # temperature of the gates
_RATE = 0.1  # learning rate of the gates
_COST, _ACCURACY = 4.0, 1.0  # weights of the cost and the predicted accuracy relative to the loss
_PRICED = 16  # steps after which the costs of filters are recomputed
_REMEMBERED = 128  # sub-networks in the memory
_HIDDEN = 64
_LEARNED = 4  # steps of the predictor per step of the gates


@torch.enable_grad()
def learned_gates(subject: Subject) -> Scores:
    """Score filters by the learned logit of their gate; a gate with a logit above 0 is open more often than not."""
    masked, random = SubnetEvaluator(subject), np.random.default_rng(subject.seed)
    spans, count = masked.gates.spans, len(masked.gates.soft)
    values = torch.full((count,), _OPEN, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([values], lr=_RATE)
    predictor, penalty = Predictor(count, subject.seed), CostPenalty(target_of(subject))
    for batch in (batch for _ in range(_EPOCHS) for batch in masked.batches):
        drawn = ((values + torch.from_numpy(random.logistic(size=count))) / _SHARP).sigmoid()
        gates = (drawn.detach() > 0.5).double()
        accuracy, slope = masked.accuracy_and_gradient(gates, batch)
        predictor.remember(gates, accuracy)
        predictor.learn()
        slope = slope - _ACCURACY * predictor.slope(gates)
        for name, cost in penalty.slope({n: gates[span].bool().numpy() for n, span in spans.items()}).items():
            slope[spans[name]] += _COST * cost
        optimizer.zero_grad()
        drawn.backward(slope)  # Straight-through: the gradient of a gate goes to the value that was thresholded.
        optimizer.step()
    return {name: values.detach()[span].numpy() for name, span in spans.items()}


class CostPenalty:
    """Penalty on sub-networks above the target: the logarithm of their cost relative to the target."""

    def __init__(self, selector: Selector) -> None:
        self._selector, self._steps = selector, 0
        self._prices = selector.prices

    def slope(self, keep: Mapping[str, Mask]) -> dict[str, float]:
        """Return the derivative of the penalty with respect to a filter of each layer; 0 if the target is met."""
        selector, limits = self._selector, self._selector.limits
        assert limits is not None
        self._steps += 1
        if self._steps % _PRICED == 0:
            self._prices = selector.priced(keep)
        usage = selector.count(dict(keep))
        over = {name: limits.whole[name] / usage[name] for name in limits.broken(usage)}
        return {layer: sum(over[name] * self._prices[name][layer] for name in over) for layer in keep}


class Predictor:
    """Predicts the accuracy of a sub-network from its gates; trained on a memory of those that were tried."""

    def __init__(self, gates: int, seed: int) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            layers = nn.Linear(gates, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, 1), nn.Sigmoid()
        self._network = nn.Sequential(*layers).double()
        self._optimizer = torch.optim.Adam(self._network.parameters(), weight_decay=1e-4)
        self.memory: list[tuple[Tensor, float]] = []

    def remember(self, gates: Tensor, accuracy: float) -> None:
        """Store the accuracy of a sub-network; if the memory is full, replace the most similar one."""
        if len(self.memory) < _REMEMBERED:
            self.memory.append((gates, accuracy))
        else:
            distances = [float((gates - known).abs().sum()) for known, _ in self.memory]
            self.memory[int(np.argmin(distances))] = gates, accuracy

    def learn(self) -> None:
        """Take a few training steps on the whole memory."""
        gates = torch.stack([known for known, _ in self.memory])
        accuracies = torch.tensor([accuracy for _, accuracy in self.memory], dtype=gates.dtype)
        for _ in range(_LEARNED):
            self._optimizer.zero_grad()
            F.mse_loss(self.predict(gates), accuracies).backward()
            self._optimizer.step()

    def predict(self, gates: Tensor) -> Tensor:
        """Predict the accuracy of each sub-network."""
        accuracies: Tensor = self._network(gates).squeeze(-1)
        return accuracies

    def slope(self, gates: Tensor) -> Tensor:
        """Return the gradient of the predicted accuracy of a sub-network with respect to its gates."""
        gates = gates.clone().requires_grad_()
        return torch.autograd.grad(self.predict(gates), gates)[0]
