"""The inner loops: one epoch of weights, of scores or of both, and one pass of evaluation.

A network and batches enter; plain numbers leave.  Losses and hits are summed on the device and read once an
epoch, so nothing waits for the host between steps.  The learning rate is a tensor that is filled in place and
the gates are too: a step holds no Python number that changes, and can be compiled or captured as it is.

What trains the weights of a phase: an optimiser and, where the recipe asks for one, an average beside it.

A network and a section of the recipe enter; a `Descent` leaves, fresh or as a checkpoint left it.  What holds: the
learning rate is one tensor that is filled in place; a restored optimiser rounds as the one that was saved.

A running average of a network while it trains: what is judged, and what a phase leaves.

A network enters; beside it a second set of its tensors is kept, which every step draws a little towards the
first.  Batch-norm statistics are averaged with the weights; counters are taken as they are.  What holds: an
update is tensor operations alone, so it can be captured with the step it belongs to, and only the values of
the network's tensors ever change, never the tensors themselves.

Distillation: the dense network, as its own stage left it, teaches what is left of it.

A frozen network, the weight of its opinion and a temperature enter; a loss leaves that mixes the labels'
with the divergence from the teacher's soft answers.  The teacher sees the very images the student sees.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...pruner import Pruner
from ...scores.norm_statistics import fresh_statistics
from ...scores.penalty import for_this_device
from ...utils.distributed import Team
from ..data.batches import Batches
from ..device import lay_out
from ..sections import OptimizerConfig

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

    >>> from ..data.batches import Resident
    >>> from ..data.batches import Split
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


class Teacher:
    """A network that is only listened to: in evaluation mode, without gradients."""

    def __init__(self, network: nn.Module, alpha: float, temperature: float, *, mirrored: bool = False) -> None:
        self.network, self.temperature, self.mirrored = network, temperature, mirrored
        device = next((parameter.device for parameter in network.parameters()), None)
        # Filled in place as it fades: a captured step sees that.
        self.alpha = torch.tensor(alpha, device=device)

    def answers(self, images: Tensor) -> Tensor:
        """The teacher's logits; where it looks at mirror images too, the mean of both.

        >>> Teacher(nn.Flatten(), 0.5, 4.0, mirrored=True).answers(torch.tensor([[[[1.0, 3.0]]]]))
        tensor([[2., 2.]])
        """
        seen = torch.cat([images, images.flip(-1)]) if self.mirrored else images
        with torch.no_grad():
            outputs = self.network(seen)
        assert isinstance(outputs, Tensor)
        outputs = outputs.float()
        return outputs.unflatten(0, (2, -1)).mean(0) if self.mirrored else outputs

    def mixed(self, loss: Tensor, outputs: Tensor, answers: Tensor) -> Tensor:
        """`(1 - alpha) loss + alpha T^2 KL(teacher || student)`; T^2 keeps the gradient's size as T grows.

        >>> same = torch.tensor([[1.0, 2.0]])
        >>> Teacher(nn.Identity(), 0.5, 4.0).mixed(torch.tensor(3.0), same, same)
        tensor(1.5000)
        """
        student, teacher = (F.log_softmax(logits / self.temperature, 1) for logits in (outputs, answers))
        divergence = F.kl_div(student, teacher, reduction="batchmean", log_target=True)
        return (1 - self.alpha) * loss + self.alpha * self.temperature**2 * divergence
