"""The inner loops at the speed of the chip: every step is one replay of a captured CUDA graph.

The same numbers enter and leave as in `engine`.  Order, crops and learning rates of a whole epoch are laid on
the device beforehand and a counter there says which step it is, so that the host only says "again".  Forward
and backward are compiled, in bfloat16, with the channels last; gates are folded into the norms by a few
kernels for all layers at once.  Capturing runs the step a few times to warm it up: everything it changed is
put back before the first real step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..pruner import Pruner
from ..scoring.folded import Folded
from .average import Average
from .convolutions import tunable_convolutions
from .data import Batches
from .engine import Engine, Tally
from .teacher import Teacher

Work = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]  # images, labels -> loss, outputs, penalty
Taught = Callable[[Tensor, Tensor, Tensor], Tensor]  # images, loss, outputs -> the loss to train on

_OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {
    "max_autotune": True,
    "triton.cudagraphs": False,
}
_WARM_UPS = 3


class CapturedEngine(Engine):
    """`Engine` for CUDA; on the CPU it takes the same way without compiling and capturing, for tests."""

    def __init__(self, network: nn.Module, device: torch.device | str, pruner: Pruner | None = None) -> None:
        super().__init__(network, device, pruner)
        self._fast = self.device.type == "cuda"
        self._loss = self._plain_loss
        if self._fast:
            torch.backends.cudnn.benchmark = True
            torch.set_float32_matmul_precision("high")
            self._loss = torch.compile(self._plain_loss, options=_OPTIONS)
        self._steps: dict[Any, _Step] = {}

    def train_epoch(
        self,
        batches: Batches,
        epoch: int,
        optimizer: torch.optim.Optimizer,
        rates: Sequence[float],
        label_smoothing: float = 0.0,
        teacher: Teacher | None = None,
        average: Average | None = None,
    ) -> Tally:
        self.network.train()
        if optimizer not in self._steps:
            folded = self._folded()
            taught = self._taught(teacher)
            work = self._weight_work(optimizer, label_smoothing, folded, taught, average)
            rate = optimizer.param_groups[0]["lr"]
            changed = _Changed(self.network, optimizer, [] if average is None else average.tensors)
            with self._tunable():
                self._only(optimizer, _Step(batches, work, folded, changed, rate))
        return self._steps[optimizer].epoch(epoch, rates)

    def score_epoch(self, batches: Batches, epoch: int, teacher: Teacher | None = None) -> Tally:
        assert self.pruner is not None and self.pruner.optimizer is not None
        self.network.train()
        optimizer = self.pruner.optimizer
        if optimizer not in self._steps:
            folded = self._folded()
            assert folded is not None
            changed = _Changed(
                self.network, optimizer, [*self.pruner.projection.parameters, self.pruner.gates.soft]
            )
            with self._tunable():
                work = self._score_work(folded, self._taught(teacher))
                self._only(optimizer, _Step(batches, work, folded, changed, None))
        return self._steps[optimizer].epoch(epoch, [0.0] * len(batches))

    @torch.no_grad()
    def evaluate(self, batches: Batches) -> Tally:
        if not self._fast:
            return super().evaluate(batches)
        self.network.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for images, labels in batches.epoch(0):
            loss, outputs = self._plain_loss(images, labels, 0.0)
            sums += torch.stack([loss.double() * len(labels), (outputs.argmax(1) == labels).sum().double()])
        loss_sum, hits = (sums / len(batches.labels)).tolist()
        return Tally(loss_sum, 100 * hits)

    def _only(self, key: Any, step: _Step) -> None:
        self._steps = {key: step}  # one optimiser at a time: an old graph would hold on to its memory

    def _tunable(self) -> AbstractContextManager[None]:
        return tunable_convolutions(self.network) if self._fast else nullcontext()

    def _folded(self) -> Folded | None:
        return None if self.pruner is None else Folded(self.network, self.pruner.gates)

    def _taught(self, teacher: Teacher | None) -> Taught:
        """What a teacher makes of a loss; it is compiled apart, so that the student's own graph stays as it is."""
        if teacher is None:
            return lambda images, loss, outputs: loss
        answers: Callable[[Tensor], Tensor] = teacher.answers
        mixed: Callable[[Tensor, Tensor, Tensor], Tensor] = teacher.mixed
        if self._fast:
            answers = torch.compile(lambda images: _in_half(teacher, images), options=_OPTIONS)
            mixed = torch.compile(teacher.mixed)
        return lambda images, loss, outputs: mixed(loss, outputs, answers(images))

    def _weight_work(
        self,
        optimizer: torch.optim.Optimizer,
        label_smoothing: float,
        folded: Folded | None,
        taught: Taught,
        average: Average | None,
    ) -> Work:
        def work(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            optimizer.zero_grad(set_to_none=True)
            if folded is not None:
                folded.refresh()
            loss, outputs = self._loss(images, labels, label_smoothing)
            loss = taught(images, loss, outputs)
            loss.backward()
            if folded is not None:
                folded.weight_gradients()
            optimizer.step()
            if average is not None:
                average.update()
            return loss.detach(), outputs.detach(), torch.zeros_like(loss)

        return work

    def _score_work(self, folded: Folded, taught: Taught) -> Work:
        pruner = self.pruner
        assert pruner is not None

        def work(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            folded.refresh()
            loss, outputs = self._loss(images, labels, 0.0)
            loss = taught(images, loss, outputs)
            penalty = pruner.penalty()
            (loss + penalty).backward()
            assert pruner.gates.soft.grad is not None
            pruner.gates.soft.grad += folded.score_gradients()
            pruner.step()
            return loss.detach(), outputs.detach(), penalty.detach()

        return work

    def _plain_loss(self, images: Tensor, labels: Tensor, label_smoothing: float) -> tuple[Tensor, Tensor]:
        if self._fast:
            images = images.to(torch.bfloat16)
        images = images.contiguous(memory_format=torch.channels_last)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._fast):
            outputs = self.network(images)
        outputs = outputs.float()
        return F.cross_entropy(outputs, labels, label_smoothing=label_smoothing), outputs


def _in_half(teacher: Teacher, images: Tensor) -> Tensor:
    with torch.autocast(images.device.type, torch.bfloat16):
        return teacher.answers(images.to(torch.bfloat16))


def make_engine(network: nn.Module, device: torch.device, pruner: Pruner | None = None) -> Engine:
    """The engine that suits a device."""
    return (CapturedEngine if device.type == "cuda" else Engine)(network, device, pruner)


class _Changed:
    """Everything a step changes, remembered so that warming it up leaves no trace."""

    def __init__(self, network: nn.Module, optimizer: torch.optim.Optimizer, more: Sequence[Tensor] = ()) -> None:
        self.optimizer = optimizer
        self.tensors = [*network.parameters(), *network.buffers(), *more]
        self.before = [t.detach().clone() for t in self.tensors]
        self.state = {p: {k: _clone(v) for k, v in s.items()} for p, s in optimizer.state.items()}

    @torch.no_grad()
    def undo(self) -> None:
        for tensor, before in zip(self.tensors, self.before, strict=True):
            tensor.copy_(before)
        for parameter, held in self.optimizer.state.items():
            before_state = self.state.get(parameter, {})
            for key, value in held.items():
                if isinstance(value, Tensor):
                    # A moment that did not exist is the same as one of zero: the step adds to it either way.
                    value.copy_(before_state[key]) if key in before_state else value.zero_()


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


class _Step:
    """One step over the data of an epoch, captured once and replayed."""

    def __init__(
        self, batches: Batches, work: Work, folded: Folded | None, changed: _Changed, rate: Tensor | None
    ) -> None:
        self.batches, self.work, self.rate = batches, work, rate
        self.folded: Any = nullcontext() if folded is None else folded
        device, self.steps = batches.device, len(batches)
        capture = device.type == "cuda"
        self.take = torch.compile(batches.take) if capture else batches.take
        self.drawn = [self._rows(c).to(device) for c in batches.draw(0)]
        self.rates = torch.zeros(self.steps, device=device)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.next: tuple[int, list[Tensor]] | None = None
        if capture:
            with self.folded:  # a replay reads the folded tensors wherever the model looks by then
                self._capture()
            changed.undo()

    def _rows(self, choice: Tensor) -> Tensor:
        size = self.batches.batch_size if len(choice) >= self.batches.batch_size else len(choice)
        return choice[: self.steps * size].view(self.steps, size)

    def _capture(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                self._once()
                self.at.zero_()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._once()
        self.graph = graph

    def _once(self) -> None:
        if self.rate is not None:
            self.rate.copy_(self.rates.index_select(0, self.at)[0])
        images, labels = self.take(*(choice.index_select(0, self.at)[0] for choice in self.drawn))
        loss, outputs, penalty = self.work(images, labels)
        hits = (outputs.argmax(1) == labels).sum()
        self.sums += torch.stack([loss.double() * len(labels), hits.double(), penalty.double() * len(labels)])
        self.at += 1

    def epoch(self, index: int, rates: Sequence[float]) -> Tally:
        """Run all steps of an epoch; the only wait for the device is for the three sums at its end."""
        drawn = self._draw(index) if self.next is None or self.next[0] != index else self.next[1]
        for held, choice in zip(self.drawn, drawn, strict=True):
            held.copy_(choice, non_blocking=True)
        self.rates.copy_(torch.tensor(rates))
        self.at.zero_()
        self.sums.zero_()
        if self.graph is None:
            with self.folded:
                for _ in range(self.steps):
                    self._once()
        else:
            for _ in range(self.steps):
                self.graph.replay()
        self.next = index + 1, self._draw(index + 1)  # while the device is busy
        loss, hits, penalty = (self.sums / self.drawn[0].numel()).tolist()
        return Tally(loss, 100 * hits, penalty)

    def _draw(self, index: int) -> list[Tensor]:
        return [self._rows(choice) for choice in self.batches.draw(index)]
