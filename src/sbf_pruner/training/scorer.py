"""The pruner that a recipe asks for, on the dense network of a run.

A network, its images and a recipe enter; a `Pruner` leaves, with what is known of a time that was asked for.  What
holds: a network that cannot be cut, and a target that cannot be met or that the dense network meets already, are
refused here, before anything is trained.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..budget.allowed import raised
from ..budget.guards import Guards, check_names
from ..errors import PruningError
from ..graph.build import trace
from ..graph.channels import ChannelGraph
from ..pruner import Pruner
from ..trial import try_cuts
from .recipe import Recipe
from .schedule import batch_size, closing_cycles, phases
from .timed import Timed, coupling

TRAVEL = 3.0  # logits that a score can cross while a budget closes in; to the threshold it is 0.7
AT_LEAST = 2  # cycles that it takes for that: in one, scores would be past the threshold before it is seen

_log = logging.getLogger(__name__)


def attach(
    dense: nn.Module, images: Tensor, recipe: Recipe, trained_on: int, measured: Path | None = None
) -> tuple[Pruner, Timed | None]:
    """The pruner of a network that is trained on so many images, and its clock where a time is asked for.

    `measured` is the file of that clock, if the run goes on.
    """
    scores, guards, budget, example = recipe.scores, recipe.guards, recipe.budget, images[:2]
    graph = trace(dense, example, guards.ignore)
    limits = budget.limits
    kept = _guards(dense, example, graph, recipe)
    together: dict[str, Any] = {"couple": guards.couple, "blocks": scores.blocks}
    timed = None
    if budget.latency != 1:
        timed = Timed.of(dense, images, graph, recipe, measured, limits, kept)
        together |= coupling(timed.chosen.way)
    pruner = Pruner(
        dense,
        example,
        penalty=scores.penalty,
        projection=scores.projection,  # type: ignore[arg-type]
        activation=scores.activation,  # type: ignore[arg-type]
        leak=scores.leak,
        balance=scores.balance,  # type: ignore[arg-type]
        lr=scores.lr,
        speed=_speed(recipe, trained_on),
        eps=scores.eps,
        threshold=scores.threshold,
        freeze_norms=scores.freeze_norms,
        binary=scores.binary,
        min_filters=kept.min_filters,
        max_removed=kept.max_removed,
        round_to=kept.round_to,
        budget=limits,
        steer=budget.steer,
        clock=None if timed is None else timed.clock,
        graph=graph,
        **together,
    )
    reached = pruner.aim.limits
    if reached is not None and reached.hold(reached.whole):
        found = " and ".join(reached.told(name, reached.whole) for name in reached.most)
        raise PruningError(f"there is nothing to prune for: the dense network has {found}; ask for less")
    return pruner, timed


def _guards(dense: nn.Module, example: Tensor, graph: ChannelGraph, recipe: Recipe) -> Guards:
    """The guards of the recipe, and what the model's own code asks for."""
    asked = Guards(recipe.guards.min_filters, recipe.guards.max_removed, recipe.guards.round_to)
    check_names(asked, graph)  # now: what follows takes its time
    whole = try_cuts(dense, example, graph)
    if whole is None:
        return asked
    least = raised(asked.min_filters, 1, graph.layers)
    if least != asked.min_filters:
        _log.warning("every layer keeps a filter: without some of them, %s", whole)
    return replace(asked, min_filters=least)


def _speed(recipe: Recipe, images: int) -> float:
    """How far a logit moves in a step: as asked for, or, where a budget is steered to, far enough in all."""
    scores, budget = recipe.scores, recipe.budget
    if scores.speed or not budget.steer:
        return scores.speed
    moving = [phase for phase in phases(recipe) if phase.trains_scores][:1]
    steps = sum(phase.epochs * max(images // batch_size(recipe, phase), 1) for phase in moving)
    return TRAVEL / max(closing_cycles(recipe), AT_LEAST) / max(steps, 1)
