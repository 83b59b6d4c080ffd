"""Training engine that compiles a step, captures it as a CUDA graph and replays it.

Same interface as the eager engine. Forward and backward are compiled, by default in bfloat16 and channels_last;
gates are folded into the norms, convolution weights are cast and batch counters of norms are incremented by a few
kernels for all layers at once. Evaluation is captured but not compiled: it runs too rarely to earn back the compile
time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...pruner import Pruner
from ...scores.gates import LeafGates
from ...utils.distributed import DistributedContext
from ..data.batches import Batches, DeviceBatches
from ..device import ComputeConfig
from .convolutions import TunableConvolutions
from .cuda_graphs import Evaluation, StateSnapshot, Step, Work, compile_copy
from .eager import EPOCH_START, Average, Engine, EpochProgress, EpochResult, Teacher

Taught = Callable[[Tensor, Tensor, Tensor], Tensor]  # (images, loss, outputs) -> the loss to train on

OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {
    "max_autotune": True,
    "triton.cudagraphs": False,
}


class CapturedEngine(Engine):
    """`Engine` for CUDA. On the CPU it runs the same code without compiling and capturing it, for tests."""

    def __init__(
        self,
        network: nn.Module,
        device: torch.device | str,
        pruner: Pruner | None = None,
        team: DistributedContext | None = None,
        dtype: torch.dtype = torch.bfloat16,
        order: torch.memory_format = torch.channels_last,
    ) -> None:
        self._fast = torch.device(device).type == "cuda"
        super().__init__(network, device, pruner, team, dtype if self._fast else torch.float32, order)
        self._loss = self._plain_loss
        self._tunable: TunableConvolutions | None = None
        self._counters = BatchCounters(self.network)
        if self._fast:  # These settings are global; the caller restores them (own_arithmetic).
            torch.backends.cudnn.benchmark = True
            if dtype != torch.float32:
                torch.set_float32_matmul_precision("high")
            self._loss = compile_copy(self._plain_loss, options=OPTIONS)
            if order == torch.channels_last:  # TunableConvolutions computes in this memory format.
                self._tunable = TunableConvolutions(self.network, dtype)
        self._steps: dict[Any, Step] = {}
        self._evaluations: dict[Batches, Evaluation] = {}
        self._evaluated_with: tuple[str, bool] | None = None

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
        self.network.train()
        if optimizer not in self._steps:
            folded, scored = self._folded(), self._scored()
            taught = self._taught(teacher)
            work = self._weight_work(optimizer, label_smoothing, folded, taught, average, scored)
            rate = optimizer.param_groups[0]["lr"]
            optimizers, more = [optimizer], [] if average is None else list(average.tensors)
            if scored is not None and scored.optimizer is not None:
                optimizers.append(scored.optimizer)
                more += _score_tensors(scored)
            changed = StateSnapshot(self.network, optimizers, more)
            self._steps.clear()  # Free the memory of an old graph before the new one is captured.
            self._steps[optimizer] = Step(batches, work, changed, self.sums, rate, self._inside(folded), self.team)
        tally = self._steps[optimizer].epoch(epoch, rates, self.after_step, begun)
        self._agree(average)
        return tally

    def score_epoch(
        self, batches: Batches, epoch: int, teacher: Teacher | None = None, begun: EpochProgress = EPOCH_START
    ) -> EpochResult:
        assert self.pruner is not None and self.pruner.optimizer is not None
        self.network.train()
        optimizer = self.pruner.optimizer
        if optimizer not in self._steps:
            folded = self._folded()
            assert folded is not None
            changed = StateSnapshot(self.network, [optimizer], _score_tensors(self.pruner))
            work = self._score_work(folded, self._taught(teacher))
            self._steps.clear()
            self._steps[optimizer] = Step(batches, work, changed, self.sums, None, self._inside(folded), self.team)
        return self._steps[optimizer].epoch(epoch, after_step=self.after_step, begun=begun)

    @torch.no_grad()
    def evaluate(self, batches: Batches) -> EpochResult:
        # Captured evaluation reads images in order and pads the last batch, which would change norms that use batch
        # statistics.
        resident = isinstance(batches, DeviceBatches) and batches.augment is None
        if not resident or _looks_at_batches(self.network):
            return super().evaluate(batches)
        assert isinstance(batches, DeviceBatches)
        self.network.eval()
        gates = None if self.pruner is None else (self.pruner.gates.mode, self.pruner.gates.all_open)
        if gates != self._evaluated_with:  # A captured graph does not follow a change of the mode of the gates.
            self._evaluated_with, self._evaluations = gates, {}
        if batches not in self._evaluations:
            self._evaluations[batches] = Evaluation(batches, self._judge, self._folded(), self.team)
        return self._evaluations[batches].run()

    def _folded(self) -> LeafGates | None:
        return None if self.pruner is None else LeafGates(self.network, self.pruner.gates)

    def _inside(self, folded: LeafGates | None) -> _CombinedContext:
        return _CombinedContext([part for part in (self._tunable, folded, self._counters) if part is not None])

    def _taught(self, teacher: Teacher | None) -> Taught:
        """Return a function that adds the distillation loss of a teacher to a loss.

        It is compiled separately, so that the compiled graph of the student stays the same.
        """
        if teacher is None:
            return lambda images, loss, outputs: loss
        mixed: Callable[[Tensor, Tensor, Tensor], Tensor] = teacher.mixed

        def answers(images: Tensor) -> Tensor:
            return self._answers(teacher, images)

        if self._fast:
            answers = compile_copy(answers, options=OPTIONS)
            mixed = compile_copy(mixed)
        return lambda images, loss, outputs: mixed(loss, outputs, answers(images))

    def _weight_work(
        self,
        optimizer: torch.optim.Optimizer,
        label_smoothing: float,
        folded: LeafGates | None,
        taught: Taught,
        average: Average | None,
        scored: Pruner | None,
    ) -> Work:
        def work(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            optimizer.zero_grad(set_to_none=True)
            if folded is not None:
                folded.refresh()
            if self._tunable is not None:
                self._tunable.refresh()
            loss, outputs = self._loss(images, labels, label_smoothing)
            self._counters.count()
            loss = taught(images, loss, outputs)
            penalty = torch.zeros_like(loss) if scored is None else scored.penalty()
            (loss if scored is None else loss + penalty).backward()
            if scored is not None:
                assert folded is not None and scored.gates.soft.grad is not None
                scored.gates.soft.grad += folded.both_gradients()
            elif folded is not None:
                folded.weight_gradients()
            self._share_gradients()
            optimizer.step()
            if scored is not None:
                scored.step()
            if average is not None:
                average.update()
            return loss.detach(), outputs.detach(), penalty.detach()

        return work

    def _score_work(self, folded: LeafGates, taught: Taught) -> Work:
        pruner = self.pruner
        assert pruner is not None

        def work(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            folded.refresh()
            loss, outputs = self._loss(images, labels, 0.0)
            self._counters.count()
            loss = taught(images, loss, outputs)
            penalty = pruner.penalty()
            (loss + penalty).backward()
            assert pruner.gates.soft.grad is not None
            pruner.gates.soft.grad += folded.score_gradients()
            pruner.step()
            return loss.detach(), outputs.detach(), penalty.detach()

        return work

    def _plain_loss(self, images: Tensor, labels: Tensor, label_smoothing: float) -> tuple[Tensor, Tensor]:
        outputs = self._forward(images)
        return F.cross_entropy(outputs, labels, label_smoothing=label_smoothing), outputs

    def _judge(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self._forward(images)
        return F.cross_entropy(outputs, labels, reduction="none"), outputs


class _CombinedContext:
    """Several context managers combined into one that can be entered repeatedly."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts, self._stack = parts, ExitStack()

    def __enter__(self) -> _CombinedContext:
        with ExitStack() as entered:  # If a part fails, this exits those before it.
            for part in self.parts:
                entered.enter_context(part)
            self._stack = entered.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _score_tensors(pruner: Pruner) -> list[Tensor]:
    """Return the tensors that a score step changes, besides the state of its optimizer."""
    return [*pruner.score_parameters, pruner.gates.soft, pruner.values, pruner.gradient.lost]


def _looks_at_batches(network: nn.Module) -> bool:
    """Return True if a batch norm has no running statistics, and so always uses those of the batch."""
    return any(isinstance(module, _BatchNorm) and module.running_mean is None for module in network.modules())


def make_engine(
    network: nn.Module, machine: ComputeConfig, pruner: Pruner | None = None, team: DistributedContext | None = None
) -> Engine:
    """Return the engine that `machine` selects, for a network on its device."""
    kind = CapturedEngine if machine.captured else Engine
    return kind(network, machine.device, pruner, team, machine.dtype, machine.order)


_COUNTER = "num_batches_tracked"


class BatchCounters:
    """Context in which batch norms do not count batches, and `count` increments all their counters at once.

    A compiled step would otherwise increment every `num_batches_tracked` with a kernel of its own: 55 of the 311
    kernels of a forward of ResNet-56. A norm that runs twice in a step is counted once; the counters only serve to
    detect running statistics that lag.

    >>> norm = nn.BatchNorm2d(1)
    >>> with BatchCounters(norm) as counters:
    ...     _ = norm(torch.zeros(2, 1, 1, 1))
    ...     counters.count()
    >>> norm.num_batches_tracked
    tensor(1)
    """

    def __init__(self, network: nn.Module) -> None:
        # With momentum=None a norm averages over all batches, and reads its counter in the forward.
        self.modules = [
            module
            for module in network.modules()
            if isinstance(module, _BatchNorm)
            and module.momentum is not None
            and module.num_batches_tracked is not None
        ]
        self._counts = {module: module.num_batches_tracked for module in self.modules}

    def __enter__(self) -> BatchCounters:
        for module in self.modules:
            module.__dict__[_COUNTER] = None  # An instance attribute is found before the buffer of the same name.
        return self

    def __exit__(self, *_: object) -> None:
        for module in self.modules:
            del module.__dict__[_COUNTER]

    def count(self) -> None:
        """Increment the counter of every norm that is in training mode."""
        counts = [count for module, count in self._counts.items() if module.training and count is not None]
        if counts:
            torch._foreach_add_(counts, 1)
