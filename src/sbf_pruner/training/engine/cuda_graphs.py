"""Training and evaluation steps that are captured once as a CUDA graph and then replayed.

The learning rates of an epoch and, if the images are on the device, its random choices are copied to the device
beforehand, and a counter on the device selects those of the current step, so the host only launches the graph.
Capturing runs the step a few times to warm up, and then restores everything that these runs changed. On the CPU the
same steps run without a graph, for tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType, MethodType
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn

from ...errors import PruningError, RunError
from ...utils.distributed import DistributedContext
from ..data.batches import Batch, Batches, DeviceBatches
from .eager import EPOCH_START, AfterStep, EpochProgress, EpochResult, count_correct

Work = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]  # images, labels -> loss, outputs, penalty
Judge = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # images, labels -> loss of each image, outputs

_WARM_UPS = 3


def capture(once: Callable[[], None], before_each: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """Capture one run of `once` as a CUDA graph; `before_each` is called before every warm-up run and the capture.

    A step that cannot be compiled or captured raises a RunError that names the alternative.
    """
    try:
        return _captured(once, before_each)
    except (PruningError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # Compilers fail in many ways, and a user's forward may synchronize with the host.
        cause = (str(error).strip() or "no reason given").splitlines()[0]
        raise RunError(
            f"the network's steps cannot be compiled and captured ({type(error).__name__}: {cause}); set "
            "engine=plain to run them eagerly"
        ) from error


def _captured(once: Callable[[], None], before_each: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """Capture one run of `once` after a few warm-up runs; the random state of the device is restored."""
    random = torch.cuda.get_rng_state()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            before_each()
            once()
        before_each()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once()
    torch.cuda.set_rng_state(random)
    return graph


class StateSnapshot:
    """Snapshot of all tensors that a step changes, to undo its warm-up runs."""

    def __init__(
        self, network: nn.Module, optimizers: Sequence[torch.optim.Optimizer], more: Sequence[Tensor] = ()
    ) -> None:
        self.optimizers = optimizers
        self.tensors = [*network.parameters(), *network.buffers(), *more]
        self.before = [t.detach().clone() for t in self.tensors]
        self.state = {p: {k: _clone(v) for k, v in held.items()} for p, held in self._held()}

    @torch.no_grad()
    def undo(self) -> None:
        """Restore the snapshot in place."""
        for tensor, before in zip(self.tensors, self.before, strict=True):
            tensor.copy_(before)
        for parameter, held in self._held():
            before_state = self.state.get(parameter, {})
            for key, value in held.items():
                if isinstance(value, Tensor):
                    # State that the optimizer created in the warm-up is reset to zero, which has the same effect as
                    # no state.
                    value.copy_(before_state[key]) if key in before_state else value.zero_()

    def _held(self) -> list[tuple[Any, dict[str, Any]]]:
        return [held for optimizer in self.optimizers for held in optimizer.state.items()]


class Step:
    """A training step that is captured once and run for every batch of an epoch.

    `inside` is the context in which the network runs, such as folded gates.
    """

    def __init__(
        self,
        batches: Batches,
        work: Work,
        changed: StateSnapshot,
        sums: Tensor,
        rate: Tensor | None = None,
        inside: AbstractContextManager[Any] | None = None,
        team: DistributedContext | None = None,
    ) -> None:
        self.work, self.rate, self.team = work, rate, team or DistributedContext()
        self.inside = inside or nullcontext()
        device, self.steps = batches.device, len(batches)
        self.seen = self.steps * batches.each
        self.rates = torch.zeros(self.steps, device=device)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        self.sums = sums
        kind = OnDeviceBatch if isinstance(batches, DeviceBatches) else StaticBatch
        self.images = kind(batches, self.at, self.team)
        self.graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            with self.inside:  # A replay reads the tensors of the capture, so it does not need this context.
                self.graph = capture(self._once, self.at.zero_)
            changed.undo()

    def epoch(
        self,
        index: int,
        rates: Sequence[float] = (),
        after_step: AfterStep | None = None,
        begun: EpochProgress = EPOCH_START,
    ) -> EpochResult:
        """Run the steps of an epoch, or those that are left after `begun`.

        The host synchronizes only to read the three sums at the end, and for whatever `after_step` does.
        """
        self.images.begin(index, begun.steps)
        if self.rate is not None:
            self.rates.copy_(torch.tensor(rates))
        self.at.fill_(begun.steps)
        self.sums.copy_(torch.tensor(begun.sums, dtype=self.sums.dtype))
        once = self._once if self.graph is None else self.graph.replay
        with self.inside if self.graph is None else nullcontext():
            for step in range(1 + begun.steps, self.steps + 1):
                self.images.advance()
                once()
                if after_step is not None:
                    after_step(step, self.steps)
        self.images.look_ahead(index + 1)  # Runs on the CPU while the device is busy.
        self.team.all_reduce_sum(self.sums)
        loss, hits, penalty = (self.sums / self.seen).tolist()
        return EpochResult(loss, 100 * hits, penalty)

    def _once(self) -> None:
        if self.rate is not None:
            self.rate.copy_(self.rates.index_select(0, self.at)[0])
        images, labels = self.images.batch()
        loss, outputs, penalty = self.work(images, labels)
        told = count_correct(outputs, labels).double()
        self.sums += torch.stack([loss.double() * len(labels), told, penalty.double() * len(labels)])
        self.at += 1


class Evaluation:
    """Evaluation of all images of a split in order, captured for batches of equal size.

    The last batch is padded with its last image; the padding is not counted.
    """

    def __init__(
        self,
        batches: DeviceBatches,
        judge: Judge,
        inside: AbstractContextManager[Any] | None = None,
        team: DistributedContext | None = None,
    ) -> None:
        self.batches, self.judge, self.team = batches, judge, team or DistributedContext()
        self.inside = inside or nullcontext()
        self.count = batches.count
        rows = torch.arange(len(batches) * min(batches.batch_size, self.count), device=batches.device)
        self.rows = self.team.part(rows.view(len(batches), -1).T).T
        self.at = torch.zeros(1, dtype=torch.int64, device=batches.device)
        self.sums = torch.zeros(2, dtype=torch.float64, device=batches.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        if batches.device.type == "cuda":
            with self.inside:
                self.graph = capture(self._once, self.at.zero_)

    def run(self) -> EpochResult:
        """Return loss and accuracy over all images."""
        self.at.zero_()
        self.sums.zero_()
        with self.inside:  # Entering recomputes the gated parameters.
            for _ in range(len(self.rows)):
                self._once() if self.graph is None else self.graph.replay()
        self.team.all_reduce_sum(self.sums)
        loss, hits = (self.sums / self.count).tolist()
        return EpochResult(loss, 100 * hits)

    @torch.no_grad()
    def _once(self) -> None:
        rows = self.rows.index_select(0, self.at)[0]
        chosen = rows.clamp_max(self.count - 1)
        # Without augmentation the offsets and flags are not used.
        images, labels = self.batches.take(chosen, *[chosen] * 3)
        losses, outputs = self.judge(images, labels)
        results = torch.stack([losses.double(), (outputs.argmax(1) == labels).double()])
        self.sums += (results * (rows < self.count)).sum(1)
        self.at += 1


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


class OnDeviceBatch:
    """Batches that a captured step makes itself, from images on the device.

    The random choices of an epoch are in fixed buffers on the device, and `at` selects those of the current step.
    """

    def __init__(self, batches: Batches, at: Tensor, team: DistributedContext) -> None:
        assert isinstance(batches, DeviceBatches)
        self.batches, self.at, self.team = batches, at, team
        self.take = compile_copy(batches.take) if batches.device.type == "cuda" else batches.take
        self.drawn = {name: choice.to(batches.device) for name, choice in self._draw(0).items()}
        self.next: tuple[int, dict[str, Tensor]] | None = None

    def begin(self, index: int, first: int = 0) -> None:
        """Copy the random choices of epoch number `index` into the buffers; `at` already selects the first step."""
        drawn = self._draw(index) if self.next is None or self.next[0] != index else self.next[1]
        for name, held in self.drawn.items():
            held.copy_(drawn[name], non_blocking=True)

    def advance(self) -> None:
        """Do nothing: the step itself advances `at`."""

    def look_ahead(self, index: int) -> None:
        """Draw the random choices of the next epoch on the CPU."""
        self.next = index, self._draw(index)

    def batch(self) -> Batch:
        """Return this rank's part of the batch, made by operations of the step itself."""
        images, labels = self.take(
            **{name: choice.index_select(0, self.at)[0] for name, choice in self.drawn.items()}
        )
        return self.team.part(images), self.team.part(labels)

    def _draw(self, index: int) -> dict[str, Tensor]:
        shape = len(self.batches), self.batches.each
        return {
            name: choice[: shape[0] * shape[1]].unflatten(0, shape)
            for name, choice in self.batches.draw(index).items()
        }


class StaticBatch:
    """Batches that are copied into two fixed buffers on the device before each step.

    A captured step reads these buffers, so their addresses never change.
    """

    def __init__(self, batches: Batches, at: Tensor, team: DistributedContext) -> None:
        self.batches, self.team = batches, team
        rows = len(team.part(torch.arange(batches.each)))
        blended = batches.augment is not None and batches.augment.mixup > 0
        self.images = torch.zeros(rows, *batches.shape, device=batches.device)
        self.labels = torch.zeros(rows, dtype=torch.int64, device=batches.device)
        if blended:
            self.labels = torch.zeros(rows, batches.num_classes, device=batches.device)
        self.coming: Iterator[Batch] = iter(())

    def begin(self, index: int, first: int = 0) -> None:
        """Start reading the batches of epoch number `index`, from number `first` on."""
        self.coming = self.batches.parts(index, self.team, first)

    def advance(self) -> None:
        """Copy the next batch into the buffers."""
        images, labels = next(self.coming)
        self.images.copy_(images)
        self.labels.copy_(labels)

    def look_ahead(self, index: int) -> None:
        """Do nothing: batches are read ahead anyway."""

    def batch(self) -> Batch:
        """Return the buffers, which hold this rank's part of the batch."""
        return self.images, self.labels


Given = ParamSpec("Given")
Result = TypeVar("Result")


def compile_copy(function: Callable[Given, Result], **settings: Any) -> Callable[Given, Result]:
    """Compile a copy of a function or bound method.

    torch stores compiled code with the code object of a function. Two networks in one process, with different hooks
    and gates, would share it: the second could run what was compiled for the first, and after eight networks
    nothing would be compiled any more. A copy has its own code object.
    """
    return cast("Callable[Given, Result]", torch.compile(copy_function(function), **settings))


def copy_function(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Return a copy of a function or bound method with its own code object.

    >>> def double(x): return 2 * x
    >>> copy_function(double)(3), copy_function(double).__code__ is double.__code__
    (6, False)
    """
    if isinstance(function, MethodType):
        return MethodType(copy_function(function.__func__), function.__self__)
    assert isinstance(function, FunctionType)
    own = FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    own.__kwdefaults__ = function.__kwdefaults__
    return cast("Callable[Given, Result]", own)
