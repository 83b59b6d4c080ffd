"""The inner loops: one epoch of weights, of scores or of both, and one pass of evaluation.

A network and batches enter; plain numbers leave.  Losses and hits are summed on the device and read once an
epoch, so nothing waits for the host between steps.  The learning rate is a tensor that is filled in place and
the gates are too: a step holds no Python number that changes, and can be compiled or captured as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..pruner import Pruner
from ..scoring.statistics import fresh_statistics
from ..team import Team
from .average import Average
from .batches import Batches
from .machine import lay_out
from .optimizer import set_rate
from .teacher import Teacher

AfterStep = Callable[[int, int], None]  # is told how many steps of how many are done


@dataclass(frozen=True)
class Begun:
    """The part of an epoch of training that was done before the run was stopped."""

    steps: int = 0
    sums: tuple[float, ...] = (0.0, 0.0, 0.0)
    """of loss, hits and penalty, over these steps"""
    seconds: float = 0.0
    random: tuple[Tensor, ...] = ()
    """the states of torch's random streams, of the CPU and of the GPU in use"""


BEGINNING = Begun()


@dataclass(frozen=True)
class Tally:
    """What an epoch came to: mean loss (without the penalty), accuracy in percent, the scores' penalty."""

    loss: float
    accuracy: float
    penalty: float = 0.0

    @property
    def finite(self) -> bool:
        """Is every loss of the epoch a number?"""
        return math.isfinite(self.loss) and math.isfinite(self.penalty)


class Engine:
    """Runs epochs of one network on one device.

    >>> from .batches import Resident
    >>> from .splits import Split
    >>> two = Split(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.tensor([0, 1]))
    >>> Engine(nn.Sequential(nn.Flatten(), nn.Linear(16, 2))).evaluate(Resident(two, 2, [0.0], [1.0])).accuracy
    50.0
    """

    def __init__(
        self,
        network: nn.Module,
        device: torch.device | str = "cpu",
        pruner: Pruner | None = None,
        team: Team | None = None,
        dtype: torch.dtype = torch.float32,
        order: torch.memory_format = torch.channels_last,
    ) -> None:
        self.network = lay_out(network.to(device), order)
        self.device, self.dtype, self.order = torch.device(device), dtype, order
        self.pruner = pruner
        self.team = team or Team.present()
        """the processes that share every batch"""
        self.after_step: AfterStep | None = None
        self.before_evaluation_batch: Callable[[], None] | None = None
        self.sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        """of loss, hits and penalty, over the steps of the present epoch of training"""

    def train_epoch(
        self,
        batches: Batches,
        epoch: int,
        optimizer: torch.optim.Optimizer,
        rates: Sequence[float],
        label_smoothing: float = 0.0,
        teacher: Teacher | None = None,
        average: Average | None = None,
        begun: Begun = BEGINNING,
    ) -> Tally:
        """Train the weights for one epoch, or what is left of it; `rates` holds the learning rate of each step.

        An optimiser is always used with the same smoothing, teacher and average.  Inside
        `pruner.scoring(joint=True)` the scores are trained in the same steps.
        """
        self.network.train()
        scored = self._scored()
        sums = _Sums(self.sums, begun, batches)
        parts = batches.parts(epoch, self.team, begun.steps)
        for step, ((images, labels), rate) in enumerate(
            zip(parts, rates[begun.steps :], strict=True), 1 + begun.steps
        ):
            set_rate(optimizer, rate)
            optimizer.zero_grad(set_to_none=True)
            outputs = self._forward(images)
            loss = F.cross_entropy(outputs, labels, label_smoothing=label_smoothing)
            if teacher is not None:
                loss = teacher.mixed(loss, outputs, self._answers(teacher, images))
            penalty = None if scored is None else scored.penalty()
            (loss if penalty is None else loss + penalty).backward()
            self._share_gradients()
            optimizer.step()
            if scored is not None:
                scored.step()
            if average is not None:
                average.update()
            sums.add(outputs, labels, loss, penalty)
            if self.after_step is not None:
                self.after_step(step, len(rates))
        self._agree(average)
        return sums.tally(self.team)

    def score_epoch(
        self, batches: Batches, epoch: int, teacher: Teacher | None = None, begun: Begun = BEGINNING
    ) -> Tally:
        """Train the scores for one epoch, or what is left of it, inside `pruner.scoring()`."""
        pruner = self.pruner
        assert pruner is not None
        self.network.train()
        sums = _Sums(self.sums, begun, batches)
        for step, (images, labels) in enumerate(batches.parts(epoch, self.team, begun.steps), 1 + begun.steps):
            outputs = self._forward(images)
            loss = F.cross_entropy(outputs, labels)
            if teacher is not None:
                loss = teacher.mixed(loss, outputs, self._answers(teacher, images))
            penalty = pruner.penalty()
            (loss + penalty).backward()
            pruner.step()
            sums.add(outputs, labels, loss, penalty)
            if self.after_step is not None:
                self.after_step(step, len(batches))
        return sums.tally(self.team)

    @torch.no_grad()
    def evaluate(self, batches: Batches) -> Tally:
        """Loss and accuracy over the batches, in evaluation mode."""
        self.network.eval()
        sums = _Sums(torch.zeros_like(self.sums))
        for images, labels in batches.parts(0, self.team):
            if self.before_evaluation_batch is not None:
                self.before_evaluation_batch()
            if len(labels):  # the last batch may be smaller than the team
                outputs = self._forward(images)
                sums.add(outputs, labels, F.cross_entropy(outputs, labels))
        return sums.tally(self.team)

    def recalibrate(self, batches: Batches, epoch: int, count: int) -> Callable[[], None]:
        """Take batch-norm statistics anew, from the first `count` batches of an epoch; returns what undoes it."""
        self.network.eval()
        with fresh_statistics(self.network) as undo:
            self.look(batches, epoch, count)
        return undo

    def look(self, batches: Batches, epoch: int, count: int) -> None:
        """Pass the first `count` batches of an epoch through the network, for the norms to see."""
        for images, _ in islice(batches.epoch(epoch), count):
            self._forward(images)

    def _share_gradients(self) -> None:
        self.team.average([p.grad for p in self.network.parameters() if p.grad is not None])

    def _agree(self, average: Average | None) -> None:
        """Every process has seen other images: let all have the same statistics of norms, and averages of them."""
        held = [buffer for buffer in self.network.buffers() if buffer.is_floating_point()]
        self.team.average([*held, *([] if average is None else average.tensors)])

    def _scored(self) -> Pruner | None:
        """The pruner, if it is in a phase that trains its scores."""
        return None if self.pruner is None or self.pruner.optimizer is None else self.pruner

    def _forward(self, images: Tensor) -> Tensor:
        return self._computed(self.network, images)

    def _answers(self, teacher: Teacher, images: Tensor) -> Tensor:
        return self._computed(teacher.answers, images)

    def _computed(self, function: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
        """What a network says of images, computed in the engine's type and with maps in its order."""
        images, lower = images.contiguous(memory_format=self.order), self.dtype != torch.float32
        with torch.autocast(self.device.type, self.dtype, enabled=lower):
            outputs = function(images.to(self.dtype) if lower else images)
        return outputs.float() if lower else outputs


def hits(outputs: Tensor, labels: Tensor) -> Tensor:
    """How many images were told right; one that is blended counts as the class it has most of.

    >>> hits(torch.eye(3), torch.tensor([0, 1, 1])), hits(torch.eye(2), torch.tensor([[0.6, 0.4], [0.7, 0.3]]))
    (tensor(2), tensor(1))
    """
    return (outputs.argmax(1) == (labels.argmax(1) if labels.is_floating_point() else labels)).sum()


class _Sums:
    """Running sums on the device: loss, hits and penalty, each weighted by the batch."""

    def __init__(self, held: Tensor, begun: Begun = BEGINNING, batches: Batches | None = None) -> None:
        self.held = held.copy_(torch.tensor(begun.sums, dtype=held.dtype))
        self.seen = 0 if batches is None else begun.steps * batches.each

    def add(self, outputs: Tensor, labels: Tensor, loss: Tensor, penalty: Tensor | None = None) -> None:
        count = len(labels)
        self.held[0] += count * loss.detach().double()  # in float32 a batch of 24 would be rounded
        self.held[1] += hits(outputs, labels)
        if penalty is not None:
            self.held[2] += count * penalty.detach().double()
        self.seen += count

    def tally(self, team: Team) -> Tally:
        seen = torch.tensor(self.seen, device=self.held.device)
        team.add_up(self.held)
        team.add_up(seen)
        loss, hits, penalty = (self.held / seen.clamp(min=1)).tolist()
        return Tally(loss, 100 * hits, penalty)
