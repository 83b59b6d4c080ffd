"""Training engine that compiles a step, captures it as a CUDA graph and replays it.

Forward and backward are compiled, by default in bfloat16 and channels_last. Gates are folded into the parameters of
the norms; a few kernels cast the weights of all convolutions and increment the batch counters of all norms.
Evaluation is captured but not compiled, because it runs too rarely to make up for the compile time.

The learning rates of an epoch and, if the images are on the device, its random choices are copied to the device
before its first step, and a counter on the device selects those of the current step, so the host only launches the
graph. Capturing runs the step a few times to warm up, and then restores everything that these runs changed. On the
CPU the same steps run without a graph, for tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from types import FunctionType, MethodType
from typing import Any, ParamSpec, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...errors import PruningError, RunError
from ...pruner import Pruner
from ...scores.gates import LeafGates
from ...utils.distributed import DistributedContext
from ..data.batches import Batch, Batches, DeviceBatches
from ..device import ComputeConfig
from .convolutions import TunableConvolutions
from .eager import AfterStep, Engine, EpochProgress, EpochResult, Teacher, WeightSteps, count_correct

Work = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]  # images, labels -> loss, outputs, penalty
Judge = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # images, labels -> loss of each image, outputs
Taught = Callable[[Tensor, Tensor, Tensor], Tensor]  # images, loss, outputs -> the loss to train on
Inside = Callable[[], AbstractContextManager[Any]]  # -> context in which the network runs, e.g. with folded gates

OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {"max_autotune": True, "triton.cudagraphs": False}
_WARM_UPS = 3  # runs of a step before it is captured


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
        if self._fast:  # These settings are global; the caller uses `restore_torch_settings`.
            torch.backends.cudnn.benchmark = True
            if dtype != torch.float32:
                torch.set_float32_matmul_precision("high")
            self._loss = compile_copy(self._plain_loss, options=OPTIONS)
            if order == torch.channels_last:  # TunableConvolutions requires this memory format.
                self._tunable = TunableConvolutions(self.network, dtype)
        self._steps: dict[Any, Step] = {}
        self._evaluations: dict[Batches, Evaluation] = {}
        self._evaluated_with: tuple[str, bool] | None = None

    def _train(
        self,
        batches: Batches,
        epoch: int,
        teacher: Teacher | None,
        begun: EpochProgress,
        weights: WeightSteps | None = None,
    ) -> EpochResult:
        self.network.train()
        scored = self._scored()
        optimizers = [] if weights is None else [weights.optimizer]
        if scored is not None and scored.optimizer is not None:
            optimizers.append(scored.optimizer)
        key = optimizers[0]
        if key not in self._steps:
            folded = self._folded()
            taught = self._taught(teacher)
            work = self._work(weights, folded, taught, scored)
            more = [] if weights is None or weights.average is None else weights.average.tensors
            if scored is not None:  # the tensors that a score step changes, besides the state of its optimizer
                more += [*scored.score_parameters, scored.gates.soft, scored.values, scored.gradient.lost]
            changed = StateSnapshot(self.network, optimizers, more)
            rate = None if weights is None else weights.optimizer.param_groups[0]["lr"]
            self._steps.clear()  # Free the memory of an old graph before the new one is captured.
            inside = partial(self._inside, folded)
            self._steps[key] = Step(batches, work, changed, self.sums, rate, inside, self.team)
        rates = () if weights is None else weights.rates
        return self._steps[key].epoch(epoch, rates, self.after_step, begun)

    @torch.no_grad()
    def evaluate(self, batches: Batches) -> EpochResult:
        # Captured evaluation pads the last batch, which would change norms that have no running statistics.
        norms = [module for module in self.network.modules() if isinstance(module, _BatchNorm)]
        padded = all(norm.running_mean is not None for norm in norms)
        if not (padded and isinstance(batches, DeviceBatches) and batches.augment is None):
            return super().evaluate(batches)
        self.network.eval()
        gates = None if self.pruner is None else (self.pruner.gates.mode, self.pruner.gates.all_open)
        if gates != self._evaluated_with:  # A captured graph keeps the gate mode that it was captured with.
            self._evaluated_with, self._evaluations = gates, {}
        if batches not in self._evaluations:
            inside = self._folded() or nullcontext()
            self._evaluations[batches] = Evaluation(batches, self._judge, inside, self.team)
        return self._evaluations[batches].run()

    def _folded(self) -> LeafGates | None:
        return None if self.pruner is None else LeafGates(self.network, self.pruner.gates)

    @contextmanager
    def _inside(self, folded: LeafGates | None) -> Iterator[None]:
        with ExitStack() as entered:
            for part in (self._tunable, folded, self._counters):
                if part is not None:
                    entered.enter_context(part)
            yield

    def _taught(self, teacher: Teacher | None) -> Taught:
        """Return a function that mixes the distillation loss of `teacher`, if there is one, into a loss.

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

    def _work(
        self, weights: WeightSteps | None, folded: LeafGates | None, taught: Taught, scored: Pruner | None
    ) -> Work:
        """Return a training step that updates the weights if `weights` is given, and the scores if `scored` is."""

        def work(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            if weights is not None:
                weights.optimizer.zero_grad(set_to_none=True)
            if folded is not None:
                folded.refresh()
            if weights is not None and self._tunable is not None:
                self._tunable.refresh()
            loss, outputs = self._loss(images, labels, weights.label_smoothing if weights else 0.0)
            self._counters.count()
            loss = taught(images, loss, outputs)
            penalty = torch.zeros_like(loss) if scored is None else scored.penalty()
            (loss if scored is None else loss + penalty).backward()
            if scored is not None:
                assert folded is not None and scored.gates.soft.grad is not None
                gradients = folded.score_gradients if weights is None else folded.both_gradients
                scored.gates.soft.grad += gradients()
            elif folded is not None:
                folded.weight_gradients()
            if weights is not None:
                self._share_gradients()
                weights.optimizer.step()
            if scored is not None:
                scored.step()
            if weights is not None and weights.average is not None:
                weights.average.update()
            return loss.detach(), outputs.detach(), penalty.detach()

        return work

    def _plain_loss(self, images: Tensor, labels: Tensor, label_smoothing: float) -> tuple[Tensor, Tensor]:
        outputs = self._forward(images)
        return F.cross_entropy(outputs, labels, label_smoothing=label_smoothing), outputs

    def _judge(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self._forward(images)
        return F.cross_entropy(outputs, labels, reduction="none"), outputs


def make_engine(
    network: nn.Module, machine: ComputeConfig, pruner: Pruner | None = None, team: DistributedContext | None = None
) -> Engine:
    """Return the engine that `machine` selects, for a network on its device."""
    kind = CapturedEngine if machine.captured else Engine
    return kind(network, machine.device, pruner, team, machine.dtype, machine.order)


class BatchCounters:
    """Context in which batch norms do not increment `num_batches_tracked`; `count` increments all of them at once.

    A compiled step would otherwise increment every counter with a separate kernel: 55 of the 311 kernels of a
    forward of ResNet-56. A norm that runs twice in a step is counted once; the counters are only used to detect
    running statistics that lag behind training.

    >>> norm = nn.BatchNorm2d(1)
    >>> with BatchCounters(norm) as counters:
    ...     _ = norm(torch.zeros(2, 1, 1, 1))
    ...     counters.count()
    >>> norm.num_batches_tracked
    tensor(1)
    """

    def __init__(self, network: nn.Module) -> None:
        # Leave out norms with momentum=None: they average over all batches and read their counter in the forward.
        norms = [m for m in network.modules() if isinstance(m, _BatchNorm) and m.momentum is not None]
        self._counts = {m: m.num_batches_tracked for m in norms if m.num_batches_tracked is not None}

    def __enter__(self) -> BatchCounters:
        for module in self._counts:  # An instance attribute hides the buffer of the same name.
            module.__dict__["num_batches_tracked"] = None
        return self

    def __exit__(self, *_: object) -> None:
        for module in self._counts:
            del module.__dict__["num_batches_tracked"]

    def count(self) -> None:
        if counts := [count for module, count in self._counts.items() if module.training]:
            torch._foreach_add_(counts, 1)


def capture(once: Callable[[], None], before_each: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """Capture one run of `once` as a CUDA graph; `before_each` is called before every warm-up run and the capture.

    The random state of the device is restored. Raises a RunError that suggests engine=plain if the step cannot be
    compiled or captured.
    """
    try:
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
    except (PruningError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # Compilation may raise anything; a user's forward may synchronize with the host.
        cause = (str(error).strip() or "no reason given").splitlines()[0]
        raise RunError(
            f"the network's steps cannot be compiled and captured ({type(error).__name__}: {cause}); set "
            "engine=plain to run them eagerly"
        ) from error


class StateSnapshot:
    """Snapshot of all tensors that a step changes, to restore them after its warm-up runs."""

    def __init__(
        self, network: nn.Module, optimizers: Sequence[torch.optim.Optimizer], more: Sequence[Tensor] = ()
    ) -> None:
        self.optimizers = optimizers
        self.tensors = [*network.parameters(), *network.buffers(), *more]
        self.before = [t.detach().clone() for t in self.tensors]
        self.state = {
            parameter: {key: value.clone() for key, value in state.items() if isinstance(value, Tensor)}
            for parameter, state in self._states()
        }

    @torch.no_grad()
    def undo(self) -> None:
        for tensor, before in zip(self.tensors, self.before, strict=True):
            tensor.copy_(before)
        for parameter, state in self._states():
            saved = self.state.get(parameter, {})
            for key, value in state.items():
                if key in saved:
                    value.copy_(saved[key])
                elif isinstance(value, Tensor):
                    value.zero_()  # Created by the optimizer in the warm-up; zero has the same effect as no state.

    def _states(self) -> list[tuple[Any, dict[str, Any]]]:
        return [item for optimizer in self.optimizers for item in optimizer.state.items()]


class Step:
    """A training step that is captured once and run for every batch of an epoch."""

    def __init__(
        self,
        batches: Batches,
        work: Work,
        changed: StateSnapshot,
        sums: Tensor,
        rate: Tensor | None,
        inside: Inside,
        team: DistributedContext,
    ) -> None:
        self.work, self.rate, self.inside, self.team = work, rate, inside, team
        device, self.steps = batches.device, len(batches)
        self.seen = self.steps * batches.each
        self.rates = torch.zeros(self.steps, device=device)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        self.sums = sums
        kind = OnDeviceBatch if isinstance(batches, DeviceBatches) else StaticBatch
        self.images = kind(batches, self.at, self.team)
        self.graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            with self.inside():  # Needed for the capture only: a replay reads the same tensors.
                self.graph = capture(self._once, self.at.zero_)
            changed.undo()

    def epoch(
        self, index: int, rates: Sequence[float], after_step: AfterStep | None, begun: EpochProgress
    ) -> EpochResult:
        """Run the steps of epoch number `index` that are not yet done in `begun`, and return the result.

        The host synchronizes only to read the three sums at the end, and if `after_step` does.
        """
        self.images.begin(index, begun.steps)
        if self.rate is not None:
            self.rates.copy_(torch.tensor(rates))
        self.at.fill_(begun.steps)
        self.sums.copy_(torch.tensor(begun.sums, dtype=self.sums.dtype))
        once = self._once if self.graph is None else self.graph.replay
        with self.inside() if self.graph is None else nullcontext():
            for step in range(1 + begun.steps, self.steps + 1):
                self.images.advance()
                once()
                if after_step is not None:
                    after_step(step, self.steps)
        self.images.look_ahead(index + 1)  # The CPU draws random choices while the device still runs.
        self.team.all_reduce_sum(self.sums)
        loss, hits, penalty = (self.sums / self.seen).tolist()
        return EpochResult(loss, 100 * hits, penalty)

    def _once(self) -> None:
        if self.rate is not None:
            self.rate.copy_(self.rates.index_select(0, self.at)[0])
        images, labels = self.images.batch()
        loss, outputs, penalty = self.work(images, labels)
        hits = count_correct(outputs, labels).double()
        self.sums += torch.stack([loss.double() * len(labels), hits, penalty.double() * len(labels)])
        self.at += 1


class Evaluation:
    """Evaluation of all images of a split in order, captured as a CUDA graph for batches of equal size.

    The last batch is padded with copies of the last image, which are not counted.
    """

    def __init__(
        self, batches: DeviceBatches, judge: Judge, inside: AbstractContextManager[Any], team: DistributedContext
    ) -> None:
        self.batches, self.judge, self.inside, self.team = batches, judge, inside, team
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
        self.at.zero_()
        self.sums.zero_()
        with self.inside:  # Entering recomputes the parameters with folded gates.
            for _ in range(len(self.rows)):
                self._once() if self.graph is None else self.graph.replay()
        self.team.all_reduce_sum(self.sums)
        loss, hits = (self.sums / self.count).tolist()
        return EpochResult(loss, 100 * hits)

    @torch.no_grad()
    def _once(self) -> None:
        rows = self.rows.index_select(0, self.at)[0]
        chosen = rows.clamp_max(self.count - 1)
        # `take` expects crop offsets and mirror flags, but does not use them without augmentation.
        images, labels = self.batches.take(chosen, *[chosen] * 3)
        losses, outputs = self.judge(images, labels)
        results = torch.stack([losses.double(), (outputs.argmax(1) == labels).double()])
        self.sums += (results * (rows < self.count)).sum(1)
        self.at += 1


class OnDeviceBatch:
    """Batches that are made by operations inside the captured step, from images on the device.

    The random choices of an epoch are in fixed buffers on the device, and `at` selects those of the current step.
    """

    def __init__(self, batches: Batches, at: Tensor, team: DistributedContext) -> None:
        assert isinstance(batches, DeviceBatches)
        self.batches, self.at, self.team = batches, at, team
        self.take = compile_copy(batches.take) if batches.device.type == "cuda" else batches.take
        self.drawn = {name: choice.to(batches.device) for name, choice in self._draw(0).items()}
        self.next: tuple[int, dict[str, Tensor]] = -1, {}  # next epoch's number and random choices

    def begin(self, index: int, first: int = 0) -> None:
        """Copy the random choices of epoch number `index` into the buffers; `at` already selects the first step."""
        drawn = self.next[1] if self.next[0] == index else self._draw(index)
        for name, buffer in self.drawn.items():
            buffer.copy_(drawn[name], non_blocking=True)

    def advance(self) -> None:
        """Do nothing: the step itself advances `at`."""

    def look_ahead(self, index: int) -> None:
        self.next = index, self._draw(index)

    def batch(self) -> Batch:
        """Return this rank's part of the batch that `at` selects; these operations are captured."""
        rows = {name: buffer.index_select(0, self.at)[0] for name, buffer in self.drawn.items()}
        images, labels = self.take(**rows)
        return self.team.part(images), self.team.part(labels)

    def _draw(self, index: int) -> dict[str, Tensor]:
        steps, each = len(self.batches), self.batches.each
        drawn = self.batches.draw(index)
        return {name: choice[: steps * each].unflatten(0, (steps, each)) for name, choice in drawn.items()}


class StaticBatch:
    """Batches that are copied into two fixed buffers on the device before each step.

    A captured step reads these buffers, so their addresses never change.
    """

    def __init__(self, batches: Batches, at: Tensor, team: DistributedContext) -> None:
        self.batches, self.team = batches, team
        rows = len(team.part(torch.arange(batches.each)))
        self.images = torch.zeros(rows, *batches.shape, device=batches.device)
        self.labels = torch.zeros(rows, dtype=torch.int64, device=batches.device)
        if batches.augment is not None and batches.augment.mixup:
            self.labels = torch.zeros(rows, batches.num_classes, device=batches.device)
        self.coming: Iterator[Batch] = iter(())

    def begin(self, index: int, first: int = 0) -> None:
        """Start reading the batches of epoch number `index`, from batch number `first` on."""
        self.coming = self.batches.parts(index, self.team, first)

    def advance(self) -> None:
        images, labels = next(self.coming)
        self.images.copy_(images)
        self.labels.copy_(labels)

    def look_ahead(self, index: int) -> None:
        """Do nothing: data loader workers prefetch batches."""

    def batch(self) -> Batch:
        return self.images, self.labels


Given = ParamSpec("Given")
Result = TypeVar("Result")


def compile_copy(function: Callable[Given, Result], **settings: Any) -> Callable[Given, Result]:
    """Compile a copy of a function or bound method.

    torch stores compiled code with the code object of a function. Two networks in one process, with different hooks
    and gates, would share it: the second could run what was compiled for the first, and after eight networks
    torch would stop compiling. A copy has its own code object.
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
    code, rest = function.__code__.replace(), (function.__name__, function.__defaults__, function.__closure__)
    own = FunctionType(code, function.__globals__, *rest)
    own.__kwdefaults__ = function.__kwdefaults__
    return cast("Callable[Given, Result]", own)
