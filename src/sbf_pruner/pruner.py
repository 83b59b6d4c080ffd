"""Cuts that are tried, and thrown away: before anything is trained, and where a budget was landed on.

A model, inputs and its channel graph enter.  What surgery would refuse is refused now, not when hours of training
are over; where only the loss of whole layers is too much for the model's own code, the reason leaves.  What the
code insists on is noted in the graph, for what is counted there.

A model under gates: which filters they let through, and the smaller network that stands for.

A model with its channel graph, and plans, enter; the same model, gated, leaves, and what `extract` cuts from it.
How a filter earns its place is another matter (`pruner`).

Scores on a model while it trains: the method itself, for any training loop.

A model and example inputs enter; while the user alternates `scoring()` and `gated()`, one score per filter
is learned from the filter weights; a plan, and the smaller network, leave.  What holds: the model keeps its
class and computes what it did before until a score moves; what a phase freezes is really frozen, and an
exception leaves the model as usable as before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from os import PathLike
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from .budget.constraints import Counts, Couple, Guards, Parts, with_coupled
from .budget.controller import Aim, Clock, Steering
from .budget.search import Landing
from .budget.targets import Budget, Stored, check_budget
from .errors import PruningError
from .graph.build import trace
from .graph.channel_graph import ChannelGraph, Pinned, residual_blocks
from .graph.nodes import Mask
from .graph.tracer import weights_now
from .measurement.latency_model import bound
from .plan import Plan, check_plan
from .scores.freezing import freeze_model
from .scores.gates import Gates
from .scores.norm_statistics import fresh_statistics
from .scores.penalty import Balance, BlockScores, Gradient, Pressure, check_saved, for_this_device
from .scores.projections import ACTIVATIONS, PROJECTIONS, Given, Projection, check_slope, comparable
from .surgery.extract import extract, insisted
from .utils.distributed import Team
from .utils.settings import check_name, check_numbers
from .utils.user_model import check_unattached, map_tensors, without_attached

_log = logging.getLogger("sbf_pruner")


def prunable_graph(
    model: nn.Module, example_inputs: Any, graph: ChannelGraph | None, ignore: Sequence[str], *, sized: bool
) -> ChannelGraph:
    """The graph of a model that has something to prune, as it was traced before or as it is now.

    For a pruner with a size to come to (`sized`), what is traced now is noted with what the code insists on.
    """
    found = trace(model, example_inputs, ignore=ignore) if graph is None else graph
    if graph is not None and ignore:
        raise PruningError("ignore is for tracing, and graph was traced before; give it to trace() instead")
    if not found.layers:
        reasons = "; ".join(f"{name}: {why}" for name, why in list(found.unscored.items())[:3])
        raise PruningError(f"no layer of the model can be pruned ({reasons})")
    if graph is None and sized:
        with suppress(PruningError):  # which says no more than that nothing is known
            note_insisted(model, example_inputs, found)
    return found


def try_cuts(model: nn.Module, example_inputs: Any, graph: ChannelGraph) -> str | None:
    """Cut a filter off every layer, which must work; then all that can go: why not, if that fails.

    >>> import torch
    >>> from .graph.build import trace
    >>> net, images = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1)), torch.rand(1, 3, 5, 5)
    >>> try_cuts(net, images, trace(net, images)) is None
    True
    """
    note_insisted(model, example_inputs, graph)
    least = Aim(graph).least()
    try:
        extract(model, example_inputs, Plan.from_masks(least), graph)
    except PruningError as error:
        return str(error)
    return None


def note_insisted(model: nn.Module, example_inputs: Any, graph: ChannelGraph) -> None:
    """Cut filters off every layer and write down where the model's own code keeps its channels all the same.

    What it insists on may depend on which filters go: a slice up to the fourth channel is another one only without
    one of the first four.  So one goes, then the first, the last, and every other one.
    """
    layers = [(name, layer.filters) for name, layer in graph.layers.items() if layer.filters > 1]
    # Not the same filter everywhere: layers that meet in an addition are to need different channels.
    some = {name: [i % size] for i, (name, size) in enumerate(layers)}
    first, last = {name: [0] for name, _ in layers}, {name: [size - 1] for name, size in layers}
    others = {name: list(range(i % 2, size, 2)) for i, (name, size) in enumerate(layers)}
    for gone in (some, first, last, others):
        little = Plan({name: tuple(f for f in range(size) if f not in gone[name]) for name, size in layers})
        if graph.connected(little.masks(graph)):
            _note(insisted(model, example_inputs, little, graph), graph)


def landed(choose: Callable[[], Landing], model: nn.Module, example_inputs: Any, graph: ChannelGraph) -> Landing:
    """What is chosen to fit into a budget, and does when it is cut.

    If the model's own code insists on more than was reckoned with, the choice is made again.
    """
    landing = choose()
    try:
        while _note(insisted(model, example_inputs, Plan.from_masks(landing.masks), graph), graph):
            landing = choose()
    except PruningError as error:
        _log.warning("what is left when the network is cut may be more than was asked for: %s", error)
    return landing


def _note(found: Pinned, graph: ChannelGraph) -> bool:
    """Write down what the model's own code insists on; whether that is more than was known."""
    held = graph.pinned
    more = not (found.positions <= held.positions and found.whole <= held.whole)
    graph.pinned = Pinned(held.positions | found.positions, held.whole | found.whole)
    return more


class Gated:
    """Gates on a model, all open at first."""

    def __init__(self, model: nn.Module, example_inputs: Any, graph: ChannelGraph) -> None:
        self.model, self.example_inputs, self.graph = model, example_inputs, graph
        self.filters = {name: layer.filters for name, layer in graph.layers.items()}
        self.gates = Gates(model, graph.sites, self.filters)
        self._held = graph.all_filters()
        self._attached = True

    def plan(self) -> Plan:
        """The filters the gates let through: those held since the last score phase or `gate`."""
        return Plan.from_masks(self._held)

    def alive(self) -> tuple[int, int]:
        """How many filters the gates let through, and how many there are."""
        return sum(int(m.sum()) for m in self._held.values()), sum(m.size for m in self._held.values())

    def gate(self, plan: Plan) -> None:
        """Set the gates from any plan."""
        self._check_ready("gate")
        check_plan(plan)
        masks = plan.masks(self.graph)
        self.graph.check_connected(masks)
        self._hold(masks)

    def extract(self, *, prove: bool = False) -> nn.Module:
        """A new, smaller module that computes what the gated model computes; with `prove`, both run to show it."""
        self._check_settled("extract")  # it would be frozen too, and cut by the gates of an earlier phase
        if self._attached:
            self.gates.check_reach(self.model)  # or what was trained without them is cut by them
        return extract(self.model, self.example_inputs, self.plan(), self.graph, prove=prove)

    def detach(self) -> nn.Module:
        """Take the gates off the model and return it as it was (with the weights it has now)."""
        self._check_settled("detach")
        self._attached = False
        return without_attached(self.model)

    def _hold(self, masks: dict[str, Mask]) -> None:
        self._held, flow = self.graph.settled(masks)
        self.gates.set_hard([site.open(flow) for site in self.graph.sites])
        self.gates.mode = "hard"

    def _check_ready(self, call: str) -> None:
        """Refuse to set gates that are gone, or that a score phase is about to set."""
        self._check_attached()
        self._check_settled(call)

    def _check_attached(self) -> None:
        if not self._attached:
            raise PruningError("this pruner was detached; make a new one")
        self.gates.check_device(self.model)
        self.gates.check_reach(self.model)

    def _check_settled(self, call: str) -> None:
        if self.gates.soft.requires_grad:
            raise PruningError(f"{call}() belongs behind `with pruner.scoring():`, whose end sets the gates")


class Pruner(Gated):
    """One score per filter, learned from the filter weights.  Example inputs are what `trace` takes.

    How much goes: `penalty` is the weight of the scores' l1 norm (lambda), `budget` the most that may be left, to
    which the penalty is steered unless `steer=False`; a budget of time needs a `clock` (a file of `sbf latency`).
    `balance` weighs layers against each other in the penalty: by the "area" or "side" of their maps, "none", or by
    what a filter costs of the budget ("cost", the default with one; else "area").

    How scores move: by Adam with `lr` and `eps`, where a logit moves by about `lr` times the l1 norm of its layer's
    weights in a step; or, with a `speed`, by that much in every layer alike.  The default `lr`, the paper's, is for
    thousands of steps; a good speed is 3 / the score steps of all cycles.

    What a score is: `projection` is "factored" (the paper's matrix, in the few numbers it amounts to), "literal"
    (the matrix itself) or "free" (a logit per filter that sees no weights); `activation` makes a score of a logit,
    `leak` is the slope of the leaky exponential above 0, and a filter is kept from `threshold` on.  With `binary`
    gates are open or closed in score phases too; with `blocks` residual branches have scores as well.
    `freeze_norms=False` lets batch norms move in score phases.

    What must stay: layers that match a pattern of `ignore` keep all filters, the others at least `min_filters` and
    all but the part `max_removed`, in multiples of `round_to`.  Each of the three is a number for all layers, or a
    table of numbers by name pattern, `{"*": 0.9, "layer1.*": 0.3}`, of which the last that matches a layer counts.
    `couple` names layers that keep the same filters (patterns, or "streams"), or lets residual branches stay or go
    as a whole ("blocks").  `graph` is what `trace` gave for this model before.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    >>> images = torch.rand(2, 3, 16, 16)
    >>> pruner = Pruner(net, images, penalty=0.1, lr=0.1)
    >>> with pruner.scoring():
    ...     for _ in range(3):
    ...         loss = net(images).square().mean() + pruner.penalty()
    ...         loss.backward()
    ...         pruner.step()
    >>> sorted(pruner.plan().keep) == ["0"]
    True
    """

    def __init__(
        self,
        model: nn.Module,
        example_inputs: Any,
        *,
        penalty: float = 5e-4,
        projection: Literal["factored", "literal", "free"] = "factored",
        activation: Literal["leaky_exponential", "sigmoid"] = "leaky_exponential",
        leak: float = 0.1,
        balance: Balance | None = None,
        lr: float = 1e-6,
        speed: float = 0.0,
        eps: float = 1e-8,
        threshold: float = 0.5,
        freeze_norms: bool = True,
        binary: bool = False,
        blocks: bool = False,
        ignore: Sequence[str] = (),
        couple: Couple | Sequence[str] = "none",
        min_filters: Counts = 0,
        max_removed: Parts = 1.0,
        round_to: Counts = 1,
        budget: Budget | None = None,
        steer: bool = True,
        clock: Clock | str | PathLike[str] | None = None,
        graph: ChannelGraph | None = None,
    ) -> None:
        check_slope()
        check_unattached(model)
        check_name("projection", projection, PROJECTIONS)
        check_name("activation", activation, ACTIVATIONS)
        check_numbers(penalty=penalty, leak=leak, lr=lr, speed=speed, eps=eps, threshold=threshold)
        check_budget(budget)
        sized = budget is not None and budget.asked
        graph = prunable_graph(model, example_inputs, graph, ignore, sized=sized)
        self.eps, self.threshold, self.freeze_norms = eps, threshold, freeze_norms
        self.activation = partial(ACTIVATIONS[activation], leak=leak)
        self.speed, self.lr = speed, speed or lr  # a speed is a rate in logits, the same for every layer
        widths = [layer.filters for layer in graph.layers.values()]
        self.projection: Projection = PROJECTIONS[projection](weights_now(model, graph), widths, even=bool(speed))
        self.optimizer: torch.optim.Optimizer | None = None
        clock = bound(clock, graph)
        stored = Stored(model, example_inputs, graph) if budget is not None and budget.size != 1 else None
        guards = with_coupled(Guards(min_filters, max_removed, round_to), graph, couple)
        self.aim = Aim(graph, budget, guards, clock, stored)
        self.progress = 1.0  # how far the limits of the budget have closed in
        steering = Steering(penalty, threshold) if steer and self.aim.limits is not None else None
        balance = balance or ("area" if self.aim.limits is None else "cost")
        self.pressure = Pressure(graph, self.aim, penalty, balance, steering)
        branches = [block.layer for block in residual_blocks(graph) if block.layer] if blocks else []
        super().__init__(model, example_inputs, graph)  # last: what is refused leaves the model alone
        self.pressure.to(self.gates.soft)
        self.gradient = Gradient(self.gates.soft)
        # Where gates are binary in score phases too, the scores behind them are kept beside them.
        self.binary, self.values = binary, self.gates.soft.clone() if binary else self.gates.soft
        self.blocks = BlockScores(branches, self.gates.spans, self.gates.soft) if branches else None

    # -- phases --------------------------------------------------------------------------------------------

    @contextmanager
    def scoring(self, *, tune: Callable[[], object] | None = None, joint: bool = False) -> Iterator[Pruner]:
        """Train the scores: they are continuous; weights and batch-norm statistics are frozen.

        One `with` block is one phase, with a fresh Adam.  When it ends the gates are set from the scores.

        `tune` passes some batches through the model as the phase begins, for new statistics of its norms.  With a
        budget that is worth it: it closes filters whose scores are high, a score phase hears them again, and norms
        that know the network without them blow the difference up, the more the deeper it is.

        `joint` is there to compare with: nothing is frozen, and an optimiser of the weights may step beside
        `step()`.  The scores read the weights as they were when the phase began.
        """
        self._check_attached()
        if self.gates.soft.requires_grad:
            raise PruningError("a score phase is already under way; end it before the next one begins")
        if not self.projection.in_phase:
            self.projection.begin_phase(weights_now(self.model, self.graph))
            Team.present().follow([parameter.detach() for parameter in self.score_parameters])
            self.optimizer = self._fresh_optimizer()
            self._refresh_scores()
        else:
            tune = None  # the phase goes on, and was tuned when it began
        self.gates.mode = "soft"
        thaw = untune = ExitStack().close  # as long as there is nothing to undo
        try:
            if tune is not None:
                with fresh_statistics(self.model) as untune:
                    tune()
            thaw = thaw if joint else freeze_model(self.model, norms=self.freeze_norms)
            self.gates.soft.requires_grad_()
            yield self
            self._hold(self._land().masks)
            self.projection.end_phase()  # last: as long as the gates are not set, the phase can be cut short
        finally:
            thaw()  # first: whatever else fails, the model is the user's again
            self.gates.soft.requires_grad_(False)
            self.gates.mode = "hard"
            self.optimizer = None
            self.gradient.tell()
            self.zero_grad()
            if self.projection.in_phase:  # cut short: gates and statistics stay as they were
                untune()
                self.projection.end_phase()

    @contextmanager
    def gated(self) -> Iterator[Pruner]:
        """Train the weights: scores are frozen, and every filter is either there or not."""
        self._check_attached()
        before, self.gates.mode = self.gates.mode, "hard"
        try:
            yield self
        finally:  # a score phase in which this was a look at the gates goes on
            self.gates.mode = "soft" if before == "soft" else "hard"

    def steer(self) -> None:
        """Let the penalty follow the budget, a few times during a score phase; its end does it too."""
        if self.pressure.steering is not None:
            self.pressure.steer(self.aim.level(self._score_values()), self.progress)

    def penalty(self) -> Tensor:
        """The weighted l1 norm of the scores, to be added to the loss in a score phase."""
        return self.pressure.on(self.gates.soft)

    def step(self, scaler: torch.amp.GradScaler | None = None) -> None:
        """Move the scores along the gradient that backward left, and forget it.

        Where `torch.distributed` is set up, along its mean over all processes.  A `scaler` that has scaled the loss
        takes part as in a step of the weights; `scaler.update()` comes after it.
        """
        if self.optimizer is None:
            raise PruningError("step() belongs inside `with pruner.scoring():`")
        gradient = self.gradient.take(scaler)
        # The network's graph ends at the scores; from there on it is one small product for all layers.
        self.optimizer.zero_grad(set_to_none=True)
        self._soft_scores().backward(gradient)
        self.optimizer.step()
        self._refresh_scores()

    def zero_grad(self) -> None:
        """Forget what earlier backward passes left on the scores, as an optimiser's `zero_grad` does of weights.

        `step()` does it too; it is for a batch that is skipped, or for a backward pass with another purpose.
        """
        self.gates.soft.grad = None

    # -- plans -----------------------------------------------------------------------------------------------

    @property
    def score_parameters(self) -> list[Tensor]:
        """All that a score phase trains."""
        return [*self.projection.parameters, *([] if self.blocks is None else [self.blocks.logits])]

    def scores(self) -> dict[str, Tensor]:
        """The continuous score of every filter, by layer."""
        return {name: self.values[span].detach().clone() for name, span in self.gates.spans.items()}

    def rank(self, scores: Given) -> None:
        """Take scores from elsewhere, one for each filter, the higher the better, and set the gates from them.

        They say which filters go first; how many go is the budget's to say.
        """
        self._check_ready("rank")
        if self.aim.limits is None:
            raise PruningError("scores from elsewhere do not say how many filters stay; give the pruner a budget")
        values = comparable(scores, self.filters)
        # As they came: what is held is of single precision, in which neighbours may become equal.
        landing = self._landed(values)
        self._take(torch.from_numpy(np.concatenate([values[name] for name in self.gates.spans])))
        self._hold(landing.masks)

    def land(self) -> None:
        """Set the gates from the scores as they are, at the full budget.

        Use it when training was stopped before the limits had closed in, or when the limits or the clock have
        changed, and train the weights afterwards.  Where no score has moved yet, every layer loses about the same
        part of its filters.
        """
        self._check_ready("land")
        self.progress = 1.0
        self._hold(self._chosen().masks)

    def extract(self, *, prove: bool = False) -> nn.Module:
        """A new, smaller module that computes what the gated model computes; with `prove`, both run to show it.

        Logs a warning if it exceeds the budget: before `progress` is 1, a score phase need not meet it.
        """
        if (missed := self.missed()) is not None:
            why = "" if self.progress >= 1 else f" (pruner.progress is {self.progress:.0%})"
            _log.warning("extracted before the budget is met: %s%s; call land() first, then train", missed, why)
        return super().extract(prove=prove)

    def missed(self) -> str | None:
        """What the gates let through beyond the budget, in words; None if the plan meets it, or there is none."""
        return self.aim.missed(self._held)

    # -- saving ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on, also in the middle of a score phase; the model's own has no gates."""
        return {
            "projection": self.projection.state_dict(),
            "optimizer": None if self.optimizer is None else map_tensors(self.optimizer.state_dict(), Tensor.clone),
            "held": {name: torch.from_numpy(mask.copy()) for name, mask in self._held.items()},
            "scores": self.values.detach().clone(),
            "pressure": self.pressure.state_dict(),
            "blocks": None if self.blocks is None else self.blocks.state_dict(),
            "progress": self.progress,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where `state_dict` was taken, also towards another budget."""
        self._check_ready("load_state_dict")
        check_saved(state, self.filters, blocks=self.blocks is not None)
        self.projection.load_state_dict(state["projection"])
        self.optimizer = None
        if state["optimizer"] is not None:
            self.optimizer = self._fresh_optimizer()
            self.optimizer.load_state_dict(for_this_device(state["optimizer"], self.optimizer))
        self._take(state["scores"])
        self.pressure.load_state_dict(state["pressure"])
        self.progress = state.get("progress", self.progress)
        if self.blocks is not None:
            self.blocks.load_state_dict(state["blocks"])
        self._hold({name: np.asarray(mask.cpu(), bool) for name, mask in state["held"].items()})

    # -- inside ----------------------------------------------------------------------------------------------

    def _fresh_optimizer(self) -> torch.optim.Optimizer:
        groups = self.projection.groups(self.lr)
        if self.blocks is not None:
            groups.append(self.blocks.group(self.speed))
        return torch.optim.Adam(groups, eps=self.eps, capturable=self.gates.soft.is_cuda)

    def _soft_scores(self) -> Tensor:
        scores = self.activation(self.projection.logits())
        return scores if self.blocks is None else scores * self.blocks.factors(self.activation)

    @torch.no_grad()
    def _refresh_scores(self) -> None:
        self._take(self._soft_scores())

    @torch.no_grad()
    def _take(self, scores: Tensor) -> None:
        """Let the network feel scores, or the gates they make; the gradient of a gate is passed on to its score."""
        self.values.copy_(scores)
        if self.binary:
            self.gates.soft.copy_(self.values >= self.threshold)

    def _chosen(self) -> Landing:
        """What the scores make of the gates now."""
        return self._landed(self._score_values(), self.threshold)

    def _landed(self, scores: dict[str, NDArray[np.floating]], threshold: float = 0.5) -> Landing:
        def choose() -> Landing:
            return self.aim.choose(scores, threshold, self.progress)

        settled = self.aim.limits is not None and self.progress >= 1
        return landed(choose, self.model, self.example_inputs, self.graph) if settled else choose()

    def _land(self) -> Landing:
        """The same as a score phase ends, where the penalty follows."""
        landing = self._chosen()
        if self.progress < 1:
            self.steer()
        else:  # then this landing is the one that steering would reckon once more
            self.pressure.steer(landing.level, self.progress)
            if self.aim.limits is not None:
                self.gradient.tell_if_still(self.values)
        self.pressure.follow(landing, self.progress)
        return landing

    def _score_values(self) -> dict[str, NDArray[np.floating]]:
        return {name: values.cpu().numpy() for name, values in self.scores().items()}
