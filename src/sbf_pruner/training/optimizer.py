"""What trains the weights of a phase: an optimiser and, where the recipe asks for one, an average beside it.

A network and a section of the recipe enter; a `Descent` leaves, fresh or as a checkpoint left it.  What holds: the
learning rate is one tensor that is filled in place; a restored optimiser rounds as the one that was saved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..scoring.saved import for_this_device
from .average import Average
from .sections import OptimizerConfig


@dataclass
class Descent:
    """The optimiser of a phase and the running average of what it trains."""

    optimizer: torch.optim.Optimizer
    average: Average | None = None

    @classmethod
    def of(
        cls,
        network: nn.Module,
        config: OptimizerConfig,
        optimizer: dict[str, Any] | None = None,
        average: dict[str, Any] | None = None,
    ) -> Descent:
        """One for a phase that begins, or, with the two states of a checkpoint, for one that goes on."""
        made = cls(make_optimizer(network, config), Average(network, config.ema) if config.ema else None)
        if optimizer is not None:
            restore_optimizer(made.optimizer, optimizer)
        if made.average is not None and average is not None:
            made.average.load_state_dict(average)
        return made

    def settle(self) -> None:
        """Make the network its average for good, at the end of a phase."""
        if self.average is not None:
            self.average.take_over()
            self.average = None

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        average = None if self.average is None else self.average.state_dict()
        return {"optimizer": self.optimizer.state_dict(), "average": average}


def make_optimizer(network: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """A fresh optimiser over the parameters that are trained, with its learning rate in a tensor."""
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    on_cuda = trained[0].is_cuda
    rate: Any = torch.tensor(config.lr, device=trained[0].device)
    groups: list[dict[str, Any]] = [{"params": trained}]
    if not config.decay_all:
        # Scales, shifts and biases are the vectors among the parameters.
        matrices = [parameter for parameter in trained if parameter.dim() > 1]
        vectors = [parameter for parameter in trained if parameter.dim() <= 1]
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        groups = [group for group in groups if group["params"]]
    if config.optimizer == "adam":
        return torch.optim.Adam(
            groups, lr=rate, weight_decay=config.weight_decay, fused=on_cuda, capturable=on_cuda
        )
    return torch.optim.SGD(
        groups,
        lr=rate,
        momentum=config.momentum,
        nesterov=config.nesterov,
        weight_decay=config.weight_decay,
        fused=on_cuda,
    )


def restore_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a state and lay its tensors out as the parameters are: a file holds them channels first.

    An element-wise step rounds the same either way only if it walks over both in the same order.  The rate
    stays the one tensor, on the optimiser's own device, that all groups were made with.
    """
    rate = optimizer.param_groups[0]["lr"]
    optimizer.load_state_dict(for_this_device(state, optimizer))
    for group in optimizer.param_groups:
        group["lr"] = rate
    for parameter, held in optimizer.state.items():
        for key, value in held.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                held[key] = torch.empty_like(parameter).copy_(value)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate without changing any Python number the step depends on."""
    for group in optimizer.param_groups:
        group["lr"].fill_(rate)
