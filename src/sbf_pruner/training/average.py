"""A running average of a network while it trains: what is judged, and what a phase leaves.

A network enters; beside it a second set of its tensors is kept, which every step draws a little towards the
first.  Batch-norm statistics are averaged with the weights; counters are taken as they are.  What holds: an
update is tensor operations alone, so it can be captured with the step it belongs to, and only the values of
the network's tensors ever change, never the tensors themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn


class Average:
    """The exponential moving average of a network's parameters and buffers.

    It starts as a copy, and with a small decay that grows to `decay` over the first steps, so that what the
    network was at the start is soon forgotten.

    >>> net = nn.Linear(1, 1, bias=False)
    >>> average = Average(net, decay=0.5)
    >>> with torch.no_grad():
    ...     before = net.weight.item()
    ...     _ = net.weight.add_(10)
    >>> average.update()
    >>> with average.applied():
    ...     print(round(net.weight.item() - before))
    9
    """

    def __init__(self, network: nn.Module, decay: float) -> None:
        self.decay = decay
        held = dict(chain(network.named_parameters(), network.named_buffers()))
        self._network = {name: tensor.detach() for name, tensor in held.items()}
        self._names = [name for name, tensor in held.items() if tensor.is_floating_point()]
        self._now = [self._network[name] for name in self._names]
        self._average = [tensor.clone() for tensor in self._now]
        self.steps = torch.zeros((), device=self._now[0].device)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that an update changes."""
        return [*self._average, self.steps]

    @torch.no_grad()
    def update(self) -> None:
        """Draw the average towards the network."""
        self.steps += 1
        towards = 1 - (self.steps / (9 + self.steps)).clamp(max=self.decay)
        change = torch._foreach_sub(self._now, self._average)
        torch._foreach_mul_(change, towards)
        torch._foreach_add_(self._average, change)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """While entered, the network is its average."""
        before = [tensor.clone() for tensor in self._now]
        self.take_over()
        try:
            yield
        finally:
            torch._foreach_copy_(self._now, before)

    @torch.no_grad()
    def take_over(self) -> None:
        """Make the network its average for good."""
        torch._foreach_copy_(self._now, self._average)

    def state_dict(self) -> dict[str, Any]:
        """The average and how many steps are in it."""
        return {"average": dict(zip(self._names, self._average, strict=True)), "steps": self.steps}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a state, in place."""
        for name, tensor in zip(self._names, self._average, strict=True):
            tensor.copy_(state["average"][name])
        self.steps.copy_(state["steps"])
