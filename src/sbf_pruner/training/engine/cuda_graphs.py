"""Steps that the device repeats by itself: captured once as a CUDA graph, then replayed.

Batches and a piece of work on one batch enter; sums over an epoch leave.  Learning rates of a whole epoch, and
random choices where images lie on the device (`supply`), are laid there beforehand and a counter says which step it
is, so that the host only says "again".  Capturing runs the step a few times to warm it up: everything it changed is
put back before the first real one.  On the CPU the same steps are run one by one, for tests.

How the images of a step come to where a captured step reads them.

Batches enter; tensors that stay in their place leave, holding another batch at every step.  Images that lie on the
device are picked there by the step itself; those that are read as they are needed are handed over before it.

Compiled functions that share nothing with one another.

torch keeps what it compiled with the code object of a function, for whoever calls it next.  Two networks of one
process, dressed differently, would meet there: the second could be given what was made for the first, and after
eight of them nothing would be compiled any more.  So every engine compiles copies of its functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType, MethodType
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn

from ...errors import PruningError, RunError
from ...utils.distributed import Team
from ..data.batches import Batch, Batches, Resident
from .eager import BEGINNING, AfterStep, Begun, Tally, hits

Work = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]  # images, labels -> loss, outputs, penalty
Judge = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # images, labels -> loss of each image, outputs

_WARM_UPS = 3


def capture(once: Callable[[], None], before_each: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """One run of `once` as a graph; what cannot be compiled or captured is said with the way out."""
    try:
        return _captured(once, before_each)
    except (PruningError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # compilers fail in many ways, and a user's forward may wait for the host
        cause = (str(error).strip() or "no reason given").splitlines()[0]
        raise RunError(
            f"the network's steps cannot be compiled and captured ({type(error).__name__}: {cause}); set "
            "engine=plain, and they run one by one"
        ) from error


def _captured(once: Callable[[], None], before_each: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """One run of `once` as a graph, after a few that warm it up and leave the random numbers as they were."""
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


class Changed:
    """Everything a step changes, remembered so that warming it up leaves no trace."""

    def __init__(
        self, network: nn.Module, optimizers: Sequence[torch.optim.Optimizer], more: Sequence[Tensor] = ()
    ) -> None:
        self.optimizers = optimizers
        self.tensors = [*network.parameters(), *network.buffers(), *more]
        self.before = [t.detach().clone() for t in self.tensors]
        self.state = {p: {k: _clone(v) for k, v in held.items()} for p, held in self._held()}

    @torch.no_grad()
    def undo(self) -> None:
        """Put everything back."""
        for tensor, before in zip(self.tensors, self.before, strict=True):
            tensor.copy_(before)
        for parameter, held in self._held():
            before_state = self.state.get(parameter, {})
            for key, value in held.items():
                if isinstance(value, Tensor):
                    # A moment that did not exist is the same as one of zero: the step adds to it either way.
                    value.copy_(before_state[key]) if key in before_state else value.zero_()

    def _held(self) -> list[tuple[Any, dict[str, Any]]]:
        return [held for optimizer in self.optimizers for held in optimizer.state.items()]


class Step:
    """One training step over the data of an epoch; `inside` is how the network is dressed while it runs."""

    def __init__(
        self,
        batches: Batches,
        work: Work,
        changed: Changed,
        sums: Tensor,
        rate: Tensor | None = None,
        inside: AbstractContextManager[Any] | None = None,
        team: Team | None = None,
    ) -> None:
        self.work, self.rate, self.team = work, rate, team or Team()
        self.inside = inside or nullcontext()
        device, self.steps = batches.device, len(batches)
        self.seen = self.steps * batches.each
        self.rates = torch.zeros(self.steps, device=device)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        self.sums = sums
        kind = Laid if isinstance(batches, Resident) else Handed
        self.images = kind(batches, self.at, self.team)
        self.graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            with self.inside:  # a replay reads the same tensors wherever the model looks by then
                self.graph = capture(self._once, self.at.zero_)
            changed.undo()

    def epoch(
        self,
        index: int,
        rates: Sequence[float] = (),
        after_step: AfterStep | None = None,
        begun: Begun = BEGINNING,
    ) -> Tally:
        """Run all steps of an epoch, or those that are left.

        The only waits for the device are for the three sums at its end, and whatever `after_step` asks of it.
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
        self.images.look_ahead(index + 1)  # while the device is busy
        self.team.add_up(self.sums)
        loss, hits, penalty = (self.sums / self.seen).tolist()
        return Tally(loss, 100 * hits, penalty)

    def _once(self) -> None:
        if self.rate is not None:
            self.rate.copy_(self.rates.index_select(0, self.at)[0])
        images, labels = self.images.batch()
        loss, outputs, penalty = self.work(images, labels)
        told = hits(outputs, labels).double()
        self.sums += torch.stack([loss.double() * len(labels), told, penalty.double() * len(labels)])
        self.at += 1


class Evaluation:
    """A pass over all images of a split in order, in batches of one size.

    The last batch is filled up with its last image; what is there only to fill up does not count.
    """

    def __init__(
        self,
        batches: Resident,
        judge: Judge,
        inside: AbstractContextManager[Any] | None = None,
        team: Team | None = None,
    ) -> None:
        self.batches, self.judge, self.team = batches, judge, team or Team()
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

    def run(self) -> Tally:
        """Loss and accuracy over all images."""
        self.at.zero_()
        self.sums.zero_()
        with self.inside:  # entering brings the gated pairs up to date
            for _ in range(len(self.rows)):
                self._once() if self.graph is None else self.graph.replay()
        self.team.add_up(self.sums)
        loss, hits = (self.sums / self.count).tolist()
        return Tally(loss, 100 * hits)

    @torch.no_grad()
    def _once(self) -> None:
        rows = self.rows.index_select(0, self.at)[0]
        chosen = rows.clamp_max(self.count - 1)
        images, labels = self.batches.take(chosen, *[chosen] * 3)  # neither cropped nor mirrored
        losses, outputs = self.judge(images, labels)
        results = torch.stack([losses.double(), (outputs.argmax(1) == labels).double()])
        self.sums += (results * (rows < self.count)).sum(1)
        self.at += 1


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


class Laid:
    """All random choices of an epoch lie beside the images, and `at` says which step's are to be taken."""

    def __init__(self, batches: Batches, at: Tensor, team: Team) -> None:
        assert isinstance(batches, Resident)
        self.batches, self.at, self.team = batches, at, team
        self.take = compiled(batches.take) if batches.device.type == "cuda" else batches.take
        self.drawn = {name: choice.to(batches.device) for name, choice in self._draw(0).items()}
        self.next: tuple[int, dict[str, Tensor]] | None = None

    def begin(self, index: int, first: int = 0) -> None:
        """Lay out what epoch number `index` has drawn; `at` says which step is the first."""
        drawn = self._draw(index) if self.next is None or self.next[0] != index else self.next[1]
        for name, held in self.drawn.items():
            held.copy_(drawn[name], non_blocking=True)

    def advance(self) -> None:
        """Nothing: the step counts by itself."""

    def look_ahead(self, index: int) -> None:
        """Draw what the next epoch needs."""
        self.next = index, self._draw(index)

    def batch(self) -> Batch:
        """This process's part of the batch, made by the step itself."""
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


class Handed:
    """Two tensors, into which every batch is copied before its step."""

    def __init__(self, batches: Batches, at: Tensor, team: Team) -> None:
        self.batches, self.team = batches, team
        rows = len(team.part(torch.arange(batches.each)))
        blended = batches.augment is not None and batches.augment.mixup > 0
        self.images = torch.zeros(rows, *batches.shape, device=batches.device)
        self.labels = torch.zeros(rows, dtype=torch.int64, device=batches.device)
        if blended:
            self.labels = torch.zeros(rows, batches.num_classes, device=batches.device)
        self.coming: Iterator[Batch] = iter(())

    def begin(self, index: int, first: int = 0) -> None:
        """Have the batches of epoch number `index` read, from number `first` on."""
        self.coming = self.batches.parts(index, self.team, first)

    def advance(self) -> None:
        """Hand over the next batch."""
        images, labels = next(self.coming)
        self.images.copy_(images)
        self.labels.copy_(labels)

    def look_ahead(self, index: int) -> None:
        """Nothing: batches are read ahead anyway."""

    def batch(self) -> Batch:
        """This process's part of the batch, as it was handed over."""
        return self.images, self.labels


Given = ParamSpec("Given")
Result = TypeVar("Result")


def compiled(function: Callable[Given, Result], **settings: Any) -> Callable[Given, Result]:
    """The function, or bound method, compiled for its caller alone."""
    return cast("Callable[Given, Result]", torch.compile(own_code(function), **settings))


def own_code(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """The same function or bound method, with a code object of its own.

    >>> def double(x): return 2 * x
    >>> own_code(double)(3), own_code(double).__code__ is double.__code__
    (6, False)
    """
    if isinstance(function, MethodType):
        return MethodType(own_code(function.__func__), function.__self__)
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
