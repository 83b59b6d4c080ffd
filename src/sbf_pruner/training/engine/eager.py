"""Eager training engine: training epochs, evaluation, optimizers, moving averages of weights, and distillation.

Losses and correct predictions are summed on the device and read once per epoch, so there is no host synchronization
between steps. The learning rate and the gates are tensors that are filled in place, so no Python number in a step
changes from one step to the next, and a step can be compiled or captured.
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
from ...scores.freezing import fresh_statistics
from ...scores.penalty import for_this_device
from ...utils.distributed import DistributedContext
from ..data.batches import Batches
from ..device import to_memory_format
from ..recipe import OptimizerConfig

AfterStep = Callable[[int, int], None]  # called with the steps done and the steps of the epoch


@dataclass(frozen=True)
class EpochProgress:
    """The part of a training epoch that was done before the run was interrupted."""

    steps: int = 0
    sums: tuple[float, ...] = (0.0, 0.0, 0.0)  # of loss, correct predictions and penalty over these steps
    seconds: float = 0.0
    random: tuple[Tensor, ...] = ()  # states of torch's random number generators, of the CPU and of the GPU in use


EPOCH_START = EpochProgress()


@dataclass(frozen=True)
class EpochResult:
    """Result of an epoch: mean loss without the penalty, accuracy in percent, and mean penalty of the scores."""

    loss: float
    accuracy: float
    penalty: float = 0.0

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.penalty)


class Engine:
    """Training and evaluation of one network on one device, epoch by epoch.

    >>> from ..data.batches import DeviceBatches, Split
    >>> two = Split(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.tensor([0, 1]))
    >>> Engine(nn.Sequential(nn.Flatten(), nn.Linear(16, 2))).evaluate(DeviceBatches(two, 2, [0.0], [1.0])).accuracy
    50.0
    """

    def __init__(
        self,
        network: nn.Module,
        device: torch.device | str = "cpu",
        pruner: Pruner | None = None,
        team: DistributedContext | None = None,
        dtype: torch.dtype = torch.float32,
        order: torch.memory_format = torch.channels_last,
    ) -> None:
        self.network = to_memory_format(network.to(device), order)
        self.device, self.dtype, self.order = torch.device(device), dtype, order
        self.pruner = pruner
        self.team = team or DistributedContext.present()  # the ranks that share every batch
        self.after_step: AfterStep | None = None
        self.before_evaluation_batch: Callable[[], None] | None = None
        # sums of loss, correct predictions and penalty over the steps of the current training epoch
        self.sums = torch.zeros(3, dtype=torch.float64, device=self.device)

    def train_epoch(
        self,
        batches: Batches,
        epoch: int,
        optimizer: torch.optim.Optimizer,
        rates: Sequence[float],
        label_smoothing: float = 0.0,
        teacher: Teacher | None = None,
        average: Average | None = None,
        begun: EpochProgress = EPOCH_START,
    ) -> EpochResult:
        """Train the weights for the rest of an epoch; `rates` holds the learning rate of each of its steps.

        `begun` says which steps were done before the run was interrupted. Calls with the same optimizer must pass
        the same label smoothing, teacher and average, because `CapturedEngine` captures one step per optimizer.
        Inside `pruner.scoring(joint=True)` the scores are trained in the same steps.
        """
        weights = WeightSteps(optimizer, rates, label_smoothing, average)
        result = self._train(batches, epoch, teacher, begun, weights)
        # Ranks train on different images, so average norm statistics and the moving average over all ranks.
        statistics = [buffer for buffer in self.network.buffers() if buffer.is_floating_point()]
        self.team.average([*statistics, *([] if average is None else average.tensors)])
        return result

    def score_epoch(
        self, batches: Batches, epoch: int, teacher: Teacher | None = None, begun: EpochProgress = EPOCH_START
    ) -> EpochResult:
        """Train the scores for the steps of an epoch after `begun`; call this inside `pruner.scoring()`."""
        assert self._scored() is not None
        return self._train(batches, epoch, teacher, begun)

    def _train(
        self,
        batches: Batches,
        epoch: int,
        teacher: Teacher | None,
        begun: EpochProgress,
        weights: WeightSteps | None = None,
    ) -> EpochResult:
        """Train the weights if `weights` is given, and the scores if called inside `pruner.scoring()`."""
        self.network.train()
        scored = self._scored()
        sums = _Sums(self.sums, begun, batches)
        for step, (images, labels) in enumerate(batches.parts(epoch, self.team, begun.steps), begun.steps):
            if weights is not None:
                for group in weights.optimizer.param_groups:
                    group["lr"].fill_(weights.rates[step])
                weights.optimizer.zero_grad(set_to_none=True)
            outputs = self._forward(images)
            loss = F.cross_entropy(outputs, labels, label_smoothing=weights.label_smoothing if weights else 0.0)
            if teacher is not None:
                loss = teacher.mixed(loss, outputs, self._answers(teacher, images))
            penalty = None if scored is None else scored.penalty()
            (loss if penalty is None else loss + penalty).backward()
            if weights is not None:
                self._share_gradients()
                weights.optimizer.step()
            if scored is not None:
                scored.step()
            if weights is not None and weights.average is not None:
                weights.average.update()
            sums.add(outputs, labels, loss, penalty)
            if self.after_step is not None:
                self.after_step(step + 1, len(batches))
        return sums.tally(self.team)

    @torch.no_grad()
    def evaluate(self, batches: Batches) -> EpochResult:
        self.network.eval()
        sums = _Sums(torch.zeros_like(self.sums))
        for images, labels in batches.parts(0, self.team):
            if self.before_evaluation_batch is not None:
                self.before_evaluation_batch()
            if len(labels):  # The last batch may have fewer images than there are ranks.
                outputs = self._forward(images)
                sums.add(outputs, labels, F.cross_entropy(outputs, labels))
        return sums.tally(self.team)

    def recalibrate(self, batches: Batches, epoch: int, count: int) -> Callable[[], None]:
        """Recompute batch norm statistics from `count` batches of an epoch; return a function that undoes this."""
        self.network.eval()
        with fresh_statistics(self.network) as undo:
            self.look(batches, epoch, count)
        return undo

    def look(self, batches: Batches, epoch: int, count: int) -> None:
        """Run the first `count` batches of an epoch through the network, to update the statistics of its norms."""
        for images, _ in islice(batches.epoch(epoch), count):
            self._forward(images)

    def _share_gradients(self) -> None:
        self.team.average([p.grad for p in self.network.parameters() if p.grad is not None])

    def _scored(self) -> Pruner | None:
        """Return the pruner if it is in a phase that trains its scores, otherwise None."""
        return None if self.pruner is None or self.pruner.optimizer is None else self.pruner

    def _forward(self, images: Tensor) -> Tensor:
        return self._compute(self.network, images)

    def _answers(self, teacher: Teacher, images: Tensor) -> Tensor:
        return self._compute(teacher.answers, images)

    def _compute(self, function: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
        """Return the outputs of `function` as float32; it runs in the engine's dtype and memory format."""
        images, lower = images.contiguous(memory_format=self.order), self.dtype != torch.float32
        with torch.autocast(self.device.type, self.dtype, enabled=lower):
            outputs = function(images.to(self.dtype) if lower else images)
        return outputs.float() if lower else outputs


def count_correct(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the number of correctly classified images; a blended image counts as its most probable class.

    >>> soft = torch.tensor([[0.6, 0.4], [0.7, 0.3]])
    >>> count_correct(torch.eye(3), torch.tensor([0, 1, 1])), count_correct(torch.eye(2), soft)
    (tensor(2), tensor(1))
    """
    return (outputs.argmax(1) == (labels.argmax(1) if labels.is_floating_point() else labels)).sum()


class _Sums:
    """Sums of loss, correct predictions and penalty on the device; loss and penalty are weighted by batch size."""

    def __init__(self, sums: Tensor, begun: EpochProgress = EPOCH_START, batches: Batches | None = None) -> None:
        self.sums = sums.copy_(torch.tensor(begun.sums, dtype=sums.dtype))
        self.seen = 0 if batches is None else begun.steps * batches.each

    def add(self, outputs: Tensor, labels: Tensor, loss: Tensor, penalty: Tensor | None = None) -> None:
        count = len(labels)
        # In float32 the product with a batch size such as 24 would be rounded.
        self.sums[0] += count * loss.detach().double()
        self.sums[1] += count_correct(outputs, labels)
        if penalty is not None:
            self.sums[2] += count * penalty.detach().double()
        self.seen += count

    def tally(self, team: DistributedContext) -> EpochResult:
        seen = torch.tensor(self.seen, device=self.sums.device)
        team.all_reduce_sum(self.sums)
        team.all_reduce_sum(seen)
        loss, hits, penalty = (self.sums / seen.clamp(min=1)).tolist()
        return EpochResult(loss, 100 * hits, penalty)


@dataclass(frozen=True)
class WeightSteps:
    """Arguments of `Engine.train_epoch` about the weights; `rates` holds the learning rate of each step."""

    optimizer: torch.optim.Optimizer
    rates: Sequence[float]
    label_smoothing: float
    average: Average | None


@dataclass
class WeightTrainer:
    """Optimizer of a phase and, if its `ema` is above 0, the moving average of the network that it trains."""

    optimizer: torch.optim.Optimizer
    average: Average | None = None

    @classmethod
    def of(
        cls,
        network: nn.Module,
        config: OptimizerConfig,
        optimizer: dict[str, Any] | None = None,
        average: dict[str, Any] | None = None,
    ) -> WeightTrainer:
        """Create both for a phase; `optimizer` and `average` are their states if the phase is resumed."""
        trainer = cls(make_optimizer(network, config), Average(network, config.ema) if config.ema else None)
        if optimizer is not None:
            restore_optimizer(trainer.optimizer, optimizer)
        if trainer.average is not None and average is not None:
            trainer.average.load_state_dict(average)
        return trainer

    def settle(self) -> None:
        """Copy the average, if there is one, into the network at the end of a phase, and discard it."""
        if self.average is not None:
            self.average.take_over()
            self.average = None

    def state(self) -> dict[str, Any]:
        average = None if self.average is None else self.average.state_dict()
        return {"optimizer": self.optimizer.state_dict(), "average": average}


def make_optimizer(network: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Create an optimizer over the parameters that require gradients, with its learning rate in a tensor."""
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    on_cuda = trained[0].is_cuda
    rate: Any = torch.tensor(config.lr, device=trained[0].device)
    groups: list[dict[str, Any]] = [{"params": trained}]
    if not config.decay_all:
        # Scales and shifts of norms, and biases, are the parameters with one dimension.
        matrices = {"params": [parameter for parameter in trained if parameter.dim() > 1]}
        vectors = {"params": [parameter for parameter in trained if parameter.dim() <= 1], "weight_decay": 0.0}
        groups = [group for group in (matrices, vectors) if group["params"]]
    if config.optimizer == "adam":
        return torch.optim.Adam(groups, rate, weight_decay=config.weight_decay, fused=on_cuda, capturable=on_cuda)
    return torch.optim.SGD(
        groups, rate, config.momentum, weight_decay=config.weight_decay, nesterov=config.nesterov, fused=on_cuda
    )


def restore_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a state dict into an optimizer, and give its tensors the memory format of the parameters.

    A checkpoint stores contiguous tensors, but a resumed step is bit-identical only if state and parameters have
    the same memory format. The learning rate remains one tensor on the optimizer's device, shared by all groups.
    """
    rate = optimizer.param_groups[0]["lr"]
    optimizer.load_state_dict(for_this_device(state, optimizer))
    for group in optimizer.param_groups:
        group["lr"] = rate
    for parameter, entries in optimizer.state.items():
        for key, value in entries.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                entries[key] = torch.empty_like(parameter).copy_(value)


class Average:
    """Exponential moving average of a network's parameters and floating-point buffers.

    It starts as a copy, with a small decay that grows to `decay` over the first steps, so that the initial values
    are soon forgotten. Integer buffers such as counters are not averaged. An update consists of tensor operations
    only, so it can be captured with its step. `applied` and `take_over` change the network's tensors in place.

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
        named = chain(network.named_parameters(), network.named_buffers())
        tensors = {name: tensor.detach() for name, tensor in named if tensor.is_floating_point()}
        self._names, self._now = list(tensors), list(tensors.values())
        self._average = [tensor.clone() for tensor in self._now]
        self.steps = torch.zeros((), device=self._now[0].device)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that an update changes."""
        return [*self._average, self.steps]

    @torch.no_grad()
    def update(self) -> None:
        self.steps += 1
        towards = 1 - (self.steps / (9 + self.steps)).clamp(max=self.decay)
        change = torch._foreach_sub(self._now, self._average)
        torch._foreach_mul_(change, towards)
        torch._foreach_add_(self._average, change)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context in which the network's tensors hold the average."""
        before = [tensor.clone() for tensor in self._now]
        self.take_over()
        try:
            yield
        finally:
            torch._foreach_copy_(self._now, before)

    @torch.no_grad()
    def take_over(self) -> None:
        """Copy the average into the network permanently."""
        torch._foreach_copy_(self._now, self._average)

    def state_dict(self) -> dict[str, Any]:
        return {"average": dict(zip(self._names, self._average, strict=True)), "steps": self.steps}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, tensor in zip(self._names, self._average, strict=True):
            tensor.copy_(state["average"][name])
        self.steps.copy_(state["steps"])


class Teacher:
    """A network whose outputs are distilled into another; it runs without gradients.

    It must be in evaluation mode, and gets the same augmented images as the student.
    """

    def __init__(self, network: nn.Module, alpha: float, temperature: float, *, mirrored: bool = False) -> None:
        self.network, self.temperature, self.mirrored = network, temperature, mirrored
        device = next((parameter.device for parameter in network.parameters()), None)
        # Filled in place when distillation fades, so that a captured step sees the new value.
        self.alpha = torch.tensor(alpha, device=device)

    def answers(self, images: Tensor) -> Tensor:
        """Return the teacher's logits; if `mirrored` is true, the mean over each image and its mirror image.

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
        """Return `(1 - alpha) loss + alpha T^2 KL(teacher || student)`; T^2 keeps the gradient's scale as T grows.

        >>> same = torch.tensor([[1.0, 2.0]])
        >>> Teacher(nn.Identity(), 0.5, 4.0).mixed(torch.tensor(3.0), same, same)
        tensor(1.5000)
        """
        student, teacher = (F.log_softmax(logits / self.temperature, 1) for logits in (outputs, answers))
        divergence = F.kl_div(student, teacher, reduction="batchmean", log_target=True)
        return (1 - self.alpha) * loss + self.alpha * self.temperature**2 * divergence
