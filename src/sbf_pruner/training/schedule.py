"""Phases of a run, their batch sizes, learning rates and distillation weights, as pure functions of its recipe.

Epochs are numbered from 0 across the whole run. The same recipe always gives the same schedule, which makes a run
resumable.
"""

from __future__ import annotations

import math

from ..criteria import METHODS, OWN
from ..schedule import Phase, phases_of
from .recipe import OptimizerConfig, Recipe


def phases(recipe: Recipe) -> list[Phase]:
    """Return the phases of a run in order, without those that have no epochs.

    >>> short = Recipe.load("digits", ["phases.cycles=1"])
    >>> [phase.kind for phase in phases(short)]
    ['warmup', 'score', 'weights', 'finetune', 'control']
    """
    return phases_of(recipe.to_dict())


def is_scored(recipe: Recipe) -> bool:
    """Return True if scores are learned; otherwise another method chooses the filters before fine-tuning."""
    return recipe.method == OWN or METHODS[recipe.method].learned


def is_soft(recipe: Recipe) -> bool:
    """Return True if the method prunes softly: it sets filters to zero after every epoch of the cycles."""
    return not is_scored(recipe) and METHODS[recipe.method].soft


def cycles_end(recipe: Recipe) -> int | None:
    """Return the number of the first epoch after the last choice of filters, or None if no filters are chosen.

    >>> cycles_end(Recipe.load("digits")), cycles_end(Recipe.load("digits", ["phases.cycles=0"]))
    (25, None)
    """
    nothing = None if is_scored(recipe) else recipe.phases.warmup
    return max((phase.end for phase in phases(recipe) if phase.cycle), default=nothing)


def tightening_cycles(recipe: Recipe) -> int:
    """Return the number of cycles in which limits tighten to the budget: all but `budget.settled`, at least half.

    >>> [tightening_cycles(Recipe.load("digits", [f"phases.cycles={cycles}"])) for cycles in (1, 3, 5)]
    [1, 2, 3]
    """
    cycles = recipe.phases.cycles
    return max(cycles - recipe.budget.settled, -(-cycles // 2), 1)


def total_epochs(recipe: Recipe) -> int:
    """Return the number of epochs of a run, including those of the dense control."""
    return sum(phase.epochs for phase in phases(recipe))


def is_steered(recipe: Recipe) -> bool:
    """Return True if the penalty is adjusted to meet the budget."""
    return recipe.scores.steer and recipe.budget.asked


def score_rate_key(recipe: Recipe) -> str:
    """Return the key of the setting that controls how fast scores move.

    `scores.lr` has no effect if `scores.speed` is set or derived from the budget.

    >>> score_rate_key(Recipe.load("digits")), score_rate_key(Recipe.load("digits", ["budget.macs=0.5"]))
    ('scores.lr', 'scores.speed')
    """
    return "scores.speed" if recipe.scores.speed or is_steered(recipe) else "scores.lr"


def section_of(phase: Phase) -> str:
    """Return the section of a recipe with the settings of a phase.

    The dense control uses the section of the warm-up, with its learning rate schedule stretched over all epochs.
    """
    return {"joint": "weights", "control": "warmup", "score": "scores"}.get(phase.kind, phase.kind)


def optimizer_config(recipe: Recipe, phase: Phase) -> OptimizerConfig:
    """Return the optimizer settings of a phase that trains weights."""
    config: OptimizerConfig = getattr(recipe, section_of(phase))
    return config


def batch_size(recipe: Recipe, phase: Phase) -> int:
    """Return the number of images per step of a phase."""
    size: int = getattr(recipe, section_of(phase)).batch_size or recipe.data.batch_size
    return size


def is_distilled(recipe: Recipe, phase: Phase) -> bool:
    """Return True if the loss of a phase includes distillation from the dense network."""
    kinds = {
        "finetune": ("finetune",),
        "weights": ("finetune", "weights", "joint"),
        "cycles": ("finetune", "weights", "joint", "score"),
    }
    return recipe.distill.alpha > 0 and phase.kind in kinds[recipe.distill.during]


def distillation_weight(recipe: Recipe, phase: Phase, epoch: int) -> float:
    """Return the weight of the distillation loss in epoch `epoch` of a phase, counted from 0.

    With `distill.fade` it decreases along a cosine toward 0 over fine-tuning.

    >>> fading = Recipe.load("digits", ["distill.alpha=0.8", "distill.fade=true"])
    >>> [round(distillation_weight(fading, Phase("finetune", 0, 4, 10), epoch), 2) for epoch in range(4)]
    [0.8, 0.68, 0.4, 0.12]
    """
    fading = recipe.distill.fade and phase.kind == "finetune"
    return recipe.distill.alpha * (_cosine(epoch / phase.epochs) if fading else 1.0)


def learning_rate(config: OptimizerConfig, step: int, steps: int, each: int = 1) -> float:
    """Return the learning rate at `step` of a phase of `steps` steps, `each` of them per epoch.

    >>> [learning_rate(OptimizerConfig(lr=1.0), step, 4) for step in (0, 2)]
    [1.0, 0.5]
    >>> [learning_rate(OptimizerConfig(lr=1.0, schedule="constant", ramp=4), step, 8) for step in (0, 1, 3, 4)]
    [0.25, 0.5, 1.0, 1.0]
    """
    passed = step / steps
    rate = config.lr
    if config.schedule == "cosine":
        rate *= _cosine(passed)
    elif config.schedule == "step":
        rate *= config.gamma ** sum(passed >= milestone for milestone in config.milestones)
    rising = config.ramp * each
    return rate * (step + 1) / rising if step < rising else rate


def _cosine(passed: float) -> float:
    """Decrease from 1 to 0 along half a cosine wave as `passed` goes from 0 to 1."""
    return (1 + math.cos(math.pi * passed)) / 2
