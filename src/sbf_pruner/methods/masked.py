"""Sub-networks on trial: the size they are held to, and how well one does before any of its weights are trained.

A `Subject` enters; a copy of its network under gates leaves, and for any choice of filters its accuracy.  What
holds: the subject's own network is not touched.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ..budget.aim import Aim
from ..budget.targets import Budget, Limits
from ..copies import real_copy
from ..errors import PruningError
from ..graph.masks import Mask
from ..scoring.gates import Gates
from ..scoring.statistics import fresh_statistics
from .subject import Batch, Subject, logits

_UNASKED = 0.5  # of the MACs, where nobody says what is to be left


def aim_of(subject: Subject) -> Aim:
    """What is asked for; else half of the MACs, or the least that can be left where that is more."""
    if subject.aim is not None and subject.aim.limits is not None:
        return subject.aim
    aim = Aim(subject.graph, Budget(macs=_UNASKED), refuse=False)
    if aim.limits is not None and not aim.reachable:
        aim.limits = Limits({"macs": aim.count(aim.smallest)["macs"]}, aim.limits.whole)
    return aim


class Masked:
    """A copy of a network, of which any part can be gated off."""

    def __init__(self, subject: Subject) -> None:
        self._graph = subject.graph
        self._model = real_copy(subject.model).eval().requires_grad_(False)
        filters = {name: layer.filters for name, layer in self._graph.layers.items()}
        self.gates = Gates(self._model, self._graph.sites, filters)
        # Of one image alone a norm may not be able to take its statistics.
        self.batches = [batch for batch in subject.batches if len(batch[1]) > 1] or list(subject.batches)

    def accuracy(self, keep: Mapping[str, Mask]) -> float:
        """The part of all images that a choice of filters gets right.

        Norms take their statistics from these images: with those of the whole network, and no weight trained, one
        sub-network is hardly better than another, and none than chance.
        """
        _, flow = self._graph.settled(keep)
        self.gates.set_hard([site.open(flow) for site in self._graph.sites])
        self.gates.mode = "hard"
        with fresh_statistics(self._model) as undo:
            right = sum(float(_hits(self._outputs(batch), batch[1]).sum()) for batch in self.batches)
            undo()
        return right / sum(labels.numel() for _, labels in self.batches)

    def felt(self, gates: Tensor, batch: Batch) -> tuple[float, Tensor]:
        """The accuracy on a batch with these gates, one for each filter, and the slope of the loss by them."""
        felt = self.gates.soft.copy_(gates).requires_grad_()
        self.gates.mode = "soft"
        outputs = self._outputs(batch)
        loss = F.cross_entropy(outputs, batch[1])
        # In what does not depend on any filter there is no slope.
        slope = torch.autograd.grad(loss, felt, allow_unused=True)[0] if loss.requires_grad else None
        felt.requires_grad_(False)
        accuracy = float(_hits(outputs, batch[1]).double().mean())
        return accuracy, torch.zeros_like(gates) if slope is None else slope.to(gates)

    def _outputs(self, batch: Batch) -> Tensor:
        found = logits(self._model, batch[0])
        if not bool(found.isfinite().all()):
            raise PruningError("what the network gives is not finite")
        return found


def _hits(outputs: Tensor, labels: Tensor) -> Tensor:
    """Where the largest of all logits is that of the label.

    >>> _hits(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
    tensor([ True, False])
    """
    return outputs.argmax(1) == labels
