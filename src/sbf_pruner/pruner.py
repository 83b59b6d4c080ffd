"""`Pruner`: learned filter scores on a model in any training loop, and extraction of the smaller network.

The model keeps its class, and its outputs do not change until a score does. A phase changes no weight or statistic
that it freezes, and after an exception the model is usable as before. Trial cuts extract networks and discard them:
they show before training what surgery would refuse, and record in the channel graph where the model's own code
fixes channel counts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from os import PathLike
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from .budget.constraints import Constraints
from .budget.controller import LatencyPredictor, Selector, Steering
from .budget.file_size import FileSize
from .budget.search import Selection
from .budget.targets import Budget
from .errors import PruningError
from .graph.build import Ignored, trace
from .graph.channel_graph import ChannelGraph, FixedSizes, residual_blocks
from .graph.nodes import Mask
from .graph.tracer import current_weights
from .measurement.latency_model import bind_clock
from .plan import Plan, check_plan
from .scores.config import Scores
from .scores.freezing import freeze_model, fresh_statistics
from .scores.gates import Gates
from .scores.penalty import STATE_FORMAT, BlockScores, Gradient, Penalty, check_saved, for_this_device
from .scores.projections import ACTIVATIONS, PROJECTIONS, Projection, ScoresByLayer, check_slope, normalize_scores
from .surgery.extract import extract, find_fixed_sizes
from .utils.distributed import DistributedContext
from .utils.settings import check_type
from .utils.user_model import check_no_pruner_hooks, map_tensors, remove_pruner_hooks

_log = logging.getLogger("sbf_pruner")


def prunable_graph(
    model: nn.Module, example_inputs: Any, graph: ChannelGraph | None, ignore: Sequence[Ignored], *, sized: bool
) -> ChannelGraph:
    """Return the channel graph of a model: `graph` if it was traced before, otherwise a new trace.

    If `sized` is true, for a pruner with a budget, a new graph also records where the model fixes channel counts.
    Raises a PruningError if no layer can be pruned.
    """
    if graph is not None and ignore:
        raise PruningError("ignore has no effect on graph, which is already traced; pass ignore to trace() instead")
    found = trace(model, example_inputs, ignore=ignore) if graph is None else graph
    if not found.layers:
        reasons = "; ".join(f"{name}: {why}" for name, why in list(found.unscored.items())[:3])
        raise PruningError(f"no layer of the model can be pruned ({reasons})")
    if graph is None and sized:
        with suppress(PruningError):  # if the trial cut fails, nothing is recorded
            record_fixed_sizes(model, example_inputs, found)
    return found


def try_cuts(model: nn.Module, example_inputs: Any, graph: ChannelGraph) -> str | None:
    """Make trial cuts, the last one to the smallest network possible; return why that one fails, or None.

    Records fixed channel counts in the graph. Raises a PruningError if one of the other cuts fails.

    >>> import torch
    >>> from .graph.build import Ignored, trace
    >>> net, images = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1)), torch.rand(1, 3, 5, 5)
    >>> try_cuts(net, images, trace(net, images)) is None
    True
    """
    record_fixed_sizes(model, example_inputs, graph)
    try:
        extract(model, example_inputs, Plan.from_masks(Selector(graph).least()), graph)
    except PruningError as error:
        return str(error)
    return None


def record_fixed_sizes(model: nn.Module, example_inputs: Any, graph: ChannelGraph) -> None:
    """Make trial cuts and record in the graph where the model's own code fixes channel counts.

    These may show only if certain filters are removed: a slice `[:4]` changes only if one of the first four
    channels is removed. The four cuts remove one filter of each layer, at different indices; the first filter of
    each layer; the last; and every other filter.
    """
    layers = [(name, layer.filters) for name, layer in graph.layers.items() if layer.filters > 1]
    # A different filter in every layer, so that layers joined by an addition need different channels.
    some = {name: [i % size] for i, (name, size) in enumerate(layers)}
    first, last = {name: [0] for name, _ in layers}, {name: [size - 1] for name, size in layers}
    others = {name: list(range(i % 2, size, 2)) for i, (name, size) in enumerate(layers)}
    for removed in (some, first, last, others):
        plan = Plan({name: tuple(f for f in range(size) if f not in removed[name]) for name, size in layers})
        if graph.connected(plan.masks(graph)):
            _record_cut(model, example_inputs, plan, graph)


def _record_cut(model: nn.Module, example_inputs: Any, plan: Plan, graph: ChannelGraph) -> bool:
    """Record in the graph where the model's code fixes channels in a trial cut; return True if any are new."""
    found, known = find_fixed_sizes(model, example_inputs, plan, graph), graph.pinned
    graph.pinned = FixedSizes(known.positions | found.positions, known.whole | found.whole)
    return graph.pinned != known


class Pruner:
    """Learns one score per filter from the filter weights, while the user alternates `scoring()` and `gated()`.

    Args:
        model: The network; it keeps its class, and gates on it are open until a score phase ends.
        example_inputs: What one call of the model takes, as for `trace`.
        budget: Upper limits on the size of the pruned network. The penalty is adjusted so that the scores alone
            come close to them. Without a budget, the scores and the penalty decide how many filters are kept.
        scores: How scores are computed and trained. A step moves a logit by about `Scores.lr` times the l1 norm of
            its layer's weights or, with `Scores.speed`, by that much in every layer. The default `lr`, the paper's,
            is for thousands of steps; a good speed is 3 divided by the number of score steps of all cycles.
        constraints: Layers to leave alone, limits on widths, and layers that keep the same filters.
        clock: Measured times of the layers, for a limit on latency: a file written by `sbf latency`.
        graph: What `trace` returned for this model, to save tracing it again.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    >>> images = torch.rand(2, 3, 16, 16)
    >>> pruner = Pruner(net, images, scores=Scores(penalty=0.1, lr=0.1))
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
        budget: Budget | None = None,
        scores: Scores | None = None,
        constraints: Constraints | None = None,
        clock: LatencyPredictor | str | PathLike[str] | None = None,
        graph: ChannelGraph | None = None,
    ) -> None:
        check_slope()
        check_no_pruner_hooks(model)
        check_type("budget", budget, Budget, "macs=0.5")
        check_type("scores", scores, Scores, "speed=0.05")
        check_type("constraints", constraints, Constraints, "round_to=8")
        self.settings = scores = scores or Scores()
        constraints = constraints or Constraints()
        sized = budget is not None and budget.asked
        graph = prunable_graph(model, example_inputs, graph, constraints.ignore, sized=sized)
        self.activation = partial(ACTIVATIONS[scores.activation], leak=scores.leak)
        self.lr = scores.speed or scores.lr  # a speed is a rate in logits, the same for every layer
        weights, widths = current_weights(model, graph), [layer.filters for layer in graph.layers.values()]
        self.projection: Projection = PROJECTIONS[scores.projection](weights, widths, even=bool(scores.speed))
        self.optimizer: torch.optim.Optimizer | None = None
        stored = FileSize(model, example_inputs, graph) if budget is not None and budget.size != 1 else None
        self.selector = Selector(graph, budget, constraints, bind_clock(clock, graph), stored)
        self.progress = 1.0  # moves the limits from the dense network (0) to the budget (1)
        steered = scores.steer and self.selector.limits is not None
        steering = Steering(scores.penalty, scores.threshold) if steered else None
        balance = scores.balance
        if balance == "auto":
            balance = "area" if self.selector.limits is None else "cost"
        self.regularizer = Penalty(graph, self.selector, scores.penalty, balance, steering)
        branches = [block.layer for block in residual_blocks(graph) if block.layer] if scores.blocks else []
        self.model, self.example_inputs, self.graph = model, example_inputs, graph
        self.filters = {name: layer.filters for name, layer in graph.layers.items()}
        self._masks = graph.all_filters()
        self._attached = True
        # The hooks are added after everything that may raise an error, so that an error leaves the model unchanged.
        self.gates = Gates(model, graph.sites, self.filters)
        self.regularizer.to(self.gates.soft)
        self.gradient = Gradient(self.gates.soft)
        # With binary gates in score phases, the scores themselves are stored apart from the gates.
        self.values = self.gates.soft.clone() if scores.binary else self.gates.soft
        self.blocks = BlockScores(branches, self.gates.spans, self.gates.soft) if branches else None

    # -- phases --------------------------------------------------------------------------------------------

    @contextmanager
    def scoring(self, *, tune: Callable[[], object] | None = None, joint: bool = False) -> Iterator[Pruner]:
        """Train the scores, which are continuous; weights and batch-norm statistics are frozen.

        One `with` block is one phase, with a fresh Adam. When it ends, the gates are set from the scores.

        `tune` passes some batches through the model at the start of the phase, to recompute batch-norm statistics.
        This helps with a budget, which closes filters with high scores: a score phase opens them again, and
        batch-norm statistics collected without them amplify the difference, more so in a deeper network.

        If `joint` is true, for comparison, nothing is frozen, and an optimizer of the weights may step in addition
        to `step()`. The scores are computed from the weights at the start of the phase.
        """
        self._check_attached()
        if self.gates.soft.requires_grad:
            raise PruningError("a score phase is already under way; end it before the next one begins")
        if not self.projection.in_phase:
            self.projection.begin_phase(current_weights(self.model, self.graph))
            DistributedContext.present().follow([parameter.detach() for parameter in self.score_parameters])
            self.optimizer = self._fresh_optimizer()
            self._refresh_scores()
        else:
            tune = None  # in a resumed phase, the statistics were recomputed when it began
        self.gates.mode = "soft"
        thaw = untune = ExitStack().close  # no-ops until there is something to undo
        try:
            if tune is not None:
                with fresh_statistics(self.model) as untune:
                    tune()
            thaw = thaw if joint else freeze_model(self.model, norms=self.settings.freeze_norms)
            self.gates.soft.requires_grad_()
            yield self
            self._set_gates(self._select_and_adapt().masks)
            self.projection.end_phase()  # last: until the gates are set, an error interrupts the phase
        finally:
            thaw()  # first, so that the model is usable even if something below fails
            self.gates.soft.requires_grad_(False)
            self.gates.mode = "hard"
            self.optimizer = None
            self.gradient.report()
            self.zero_grad()
            if self.projection.in_phase:  # interrupted: restore the statistics; the hard gates are unchanged
                untune()
                self.projection.end_phase()

    @contextmanager
    def gated(self) -> Iterator[Pruner]:
        """Train the weights: scores are frozen, and every gate is 0 or 1."""
        self._check_attached()
        before, self.gates.mode = self.gates.mode, "hard"
        try:
            yield self
        finally:  # used inside a score phase, this evaluates hard gates, and the score phase then continues
            self.gates.mode = "soft" if before == "soft" else "hard"

    def steer(self) -> None:
        """Adapt the penalty to the budget. Call it a few times in a score phase, whose end does this as well."""
        if self.regularizer.steering is not None:
            self.regularizer.steer(self.selector.cutoff(self._score_values()), self.progress)

    def penalty(self) -> Tensor:
        """Return the weighted l1 norm of the scores, to be added to the loss in a score phase."""
        return self.regularizer.on(self.gates.soft)

    def step(self, scaler: torch.amp.GradScaler | None = None) -> None:
        """Update the scores from the gradient of the last backward pass, and clear it.

        With `torch.distributed`, the gradient is averaged over all ranks. A `scaler` that has scaled the loss is
        used as in a step of the weights; call `scaler.update()` afterwards.
        """
        if self.optimizer is None:
            raise PruningError("step() belongs inside `with pruner.scoring():`")
        gradient = self.gradient.take(scaler)
        # The autograd graph of the network ends at the scores. The rest is one small product for all layers.
        self.optimizer.zero_grad(set_to_none=True)
        self._soft_scores().backward(gradient)
        self.optimizer.step()
        self._refresh_scores()

    def zero_grad(self) -> None:
        """Clear the gradient of the scores, as an optimizer's `zero_grad` does for weights.

        `step()` does it as well; this is for a batch that is skipped, or a backward pass with another purpose.
        """
        self.gates.soft.grad = None

    # -- scores and plans ------------------------------------------------------------------------------------

    @property
    def score_parameters(self) -> list[Tensor]:
        """All parameters that a score phase trains."""
        return [*self.projection.parameters, *([] if self.blocks is None else [self.blocks.logits])]

    def scores(self) -> dict[str, Tensor]:
        """Return the continuous score of every filter, by layer."""
        return {name: self.values[span].detach().clone() for name, span in self.gates.spans.items()}

    def rank(self, scores: ScoresByLayer) -> None:
        """Set the gates from scores computed elsewhere, one for each filter, the higher the better.

        Filters with low scores are removed first; the budget decides how many.
        """
        self._check_ready("rank")
        if self.selector.limits is None:
            raise PruningError("rank() needs a budget to know how many filters to keep; give the pruner a budget")
        values = normalize_scores(scores, self.filters)
        # In float64: stored scores may be float32, in which neighboring scores can become equal.
        found = self._select(values)
        self._set_scores(torch.from_numpy(np.concatenate([values[name] for name in self.gates.spans])))
        self._set_gates(found.masks)

    def land(self) -> None:
        """Set the gates from the current scores, at the full budget.

        Use it when training was stopped before the limits had reached the budget, or when the limits or the latency
        model have changed, and train the weights afterwards. If no score has changed yet, every layer loses about
        the same fraction of its filters.
        """
        self._check_ready("land")
        self.progress = 1.0
        self._set_gates(self._select().masks)

    def plan(self) -> Plan:
        """Return the filters whose gates are open, as set by the last score phase, `rank`, `land` or `gate`."""
        return Plan.from_masks(self._masks)

    def alive(self) -> tuple[int, int]:
        """Return the number of filters with open gates, and the number of all filters."""
        return sum(int(m.sum()) for m in self._masks.values()), sum(self.filters.values())

    def gate(self, plan: Plan) -> None:
        """Set the gates from a plan."""
        self._check_ready("gate")
        check_plan(plan)
        masks = plan.masks(self.graph)
        self.graph.check_connected(masks)
        self._set_gates(masks)

    def extract(self, *, prove: bool = False) -> nn.Module:
        """Return a new, smaller module with the outputs of the gated model; if `prove` is true, compare both.

        Logs a warning if it exceeds the budget, which gates need not meet while `progress` is below 1.
        """
        if (missed := self.missed()) is not None:
            why = "" if self.progress >= 1 else f" (pruner.progress is {self.progress:.0%})"
            _log.warning("extracted before the budget is met: %s%s; call land() first, then train", missed, why)
        # Within a score phase the result would be frozen, and cut by the gates of an earlier phase.
        self._check_no_phase("extract")
        if self._attached:
            self.gates.check_reach(self.model)  # weights trained without their gates do not fit the plan
        return extract(self.model, self.example_inputs, self.plan(), self.graph, prove=prove)

    def detach(self) -> nn.Module:
        """Remove the gates from the model and return it, with the weights it has now."""
        self._check_no_phase("detach")
        self._attached = False
        return remove_pruner_hooks(self.model)

    def missed(self) -> str | None:
        """Describe what exceeds the budget; None if the plan meets it or there is no budget."""
        return self.selector.excess(self._masks)

    # -- saving ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from, also within a score phase.

        The model's own state dict does not contain the gates.
        """
        return {
            "format": STATE_FORMAT,
            "projection": self.projection.state_dict(),
            "optimizer": None if self.optimizer is None else map_tensors(self.optimizer.state_dict(), Tensor.clone),
            "held": {name: torch.from_numpy(mask.copy()) for name, mask in self._masks.items()},
            "scores": self.values.detach().clone(),
            "pressure": self.regularizer.state_dict(),
            "blocks": None if self.blocks is None else self.blocks.state_dict(),
            "progress": self.progress,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state, possibly with another budget."""
        self._check_ready("load_state_dict")
        check_saved(state, self.filters, blocks=self.blocks is not None)
        self.projection.load_state_dict(state["projection"])
        self.optimizer = None
        if state["optimizer"] is not None:
            self.optimizer = self._fresh_optimizer()
            self.optimizer.load_state_dict(for_this_device(state["optimizer"], self.optimizer))
        self._set_scores(state["scores"])
        self.regularizer.load_state_dict(state["pressure"])
        self.progress = state.get("progress", self.progress)
        if self.blocks is not None:
            self.blocks.load_state_dict(state["blocks"])
        self._set_gates({name: np.asarray(mask.cpu(), bool) for name, mask in state["held"].items()})

    # -- inside ----------------------------------------------------------------------------------------------

    def _check_ready(self, call: str) -> None:
        """Raise a PruningError if the gates were removed or a score phase is under way."""
        self._check_attached()
        self._check_no_phase(call)

    def _check_attached(self) -> None:
        if not self._attached:
            raise PruningError("this pruner was detached; make a new one")
        self.gates.check_device(self.model)
        self.gates.check_reach(self.model)

    def _check_no_phase(self, call: str) -> None:
        if self.gates.soft.requires_grad:
            raise PruningError(f"call {call}() after the `with pruner.scoring():` block, whose end sets the gates")

    def _set_gates(self, masks: dict[str, Mask]) -> None:
        self._masks, flow = self.graph.settled(masks)
        self.gates.set_hard([site.open(flow) for site in self.graph.sites])
        self.gates.mode = "hard"

    def _fresh_optimizer(self) -> torch.optim.Optimizer:
        groups = self.projection.groups(self.lr)
        if self.blocks is not None:
            groups.append(self.blocks.group(self.settings.speed))
        return torch.optim.Adam(groups, eps=self.settings.eps, capturable=self.gates.soft.is_cuda)

    def _soft_scores(self) -> Tensor:
        scores = self.activation(self.projection.logits())
        return scores if self.blocks is None else scores * self.blocks.factors(self.activation)

    @torch.no_grad()
    def _refresh_scores(self) -> None:
        self._set_scores(self._soft_scores())

    @torch.no_grad()
    def _set_scores(self, scores: Tensor) -> None:
        """Store scores in `values` and `gates.soft`; with binary gates, `gates.soft` holds 0 or 1 instead."""
        self.values.copy_(scores)
        if self.settings.binary:
            self.gates.soft.copy_(self.values >= self.settings.threshold)

    def _score_values(self) -> dict[str, NDArray[np.floating]]:
        return {name: values.cpu().numpy() for name, values in self.scores().items()}

    def _select(self, scores: dict[str, NDArray[np.floating]] | None = None) -> Selection:
        """Select filters by the given scores or else the current ones; at the full budget, also make a trial cut.

        If the cut shows that the model's own code fixes more channels, the search runs again. A failing cut is
        logged as a warning.
        """
        threshold = self.settings.threshold if scores is None else 0.5
        choose = partial(self.selector.choose, scores or self._score_values(), threshold, self.progress)
        found = choose()
        if self.selector.limits is not None and self.progress >= 1:
            try:
                while _record_cut(self.model, self.example_inputs, Plan.from_masks(found.masks), self.graph):
                    found = choose()
            except PruningError as error:
                _log.warning("a trial extraction failed, so the extracted network may exceed the budget: %s", error)
        return found

    def _select_and_adapt(self) -> Selection:
        """Select filters at the end of a score phase, and update the penalty."""
        found = self._select()
        if self.progress < 1:
            self.steer()
        else:  # reuse this selection, which `steer()` would compute again
            self.regularizer.steer(found.cutoff, self.progress)
            if self.selector.limits is not None:
                self.gradient.warn_if_still(self.values)
        self.regularizer.follow(found, self.progress)
        return found
