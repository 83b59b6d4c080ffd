"""When what is trained: the recipe's phases, and the learning rate at every step.

A `Recipe` enters; a list of `Phase`s leaves, in the order they run, with every epoch of the run numbered from
0.  Pure functions: the same recipe gives the same schedule, which is what makes a run resumable.
"""

from __future__ import annotations

import math

from ..criteria import METHODS, OWN
from ..schedule import Phase, planned
from .recipe import Recipe
from .sections import OptimizerConfig


def phases(recipe: Recipe) -> list[Phase]:
    """The phases of a run in order; those without epochs are left out.

    >>> from .recipe import load_recipe
    >>> short = load_recipe("digits", ["phases.cycles=1"])
    >>> [phase.kind for phase in phases(short)]
    ['warmup', 'score', 'weights', 'finetune', 'control']
    """
    return planned(recipe.to_dict())


def is_scored(recipe: Recipe) -> bool:
    """Are scores learned?  Else another method chooses filters, before fine-tuning."""
    return recipe.method == OWN or METHODS[recipe.method].learned


def is_soft(recipe: Recipe) -> bool:
    """Are filters emptied after every epoch of the cycles?"""
    return not is_scored(recipe) and METHODS[recipe.method].soft


def cycles_end(recipe: Recipe) -> int | None:
    """Number of the first epoch after filters are chosen for the last time; None where none are.

    >>> from .recipe import load_recipe
    >>> cycles_end(load_recipe("digits")), cycles_end(load_recipe("digits", ["phases.cycles=0"]))
    (25, None)
    """
    nothing = None if is_scored(recipe) else recipe.phases.warmup
    return max((phase.end for phase in phases(recipe) if phase.cycle), default=nothing)


def closing_cycles(recipe: Recipe) -> int:
    """In how many cycles the limits of a budget close in: all but those that are to be settled, at least half.

    >>> from .recipe import load_recipe
    >>> [closing_cycles(load_recipe("digits", [f"phases.cycles={cycles}"])) for cycles in (1, 3, 5)]
    [1, 2, 3]
    """
    cycles = recipe.phases.cycles
    return max(cycles - recipe.budget.settled, -(-cycles // 2), 1)


def total_epochs(recipe: Recipe) -> int:
    """All epochs of a run, the control's included."""
    return sum(phase.epochs for phase in phases(recipe))


def score_rate(recipe: Recipe) -> str:
    """The setting that says how fast scores move: where there is a speed, the learning rate says nothing.

    >>> from .recipe import load_recipe
    >>> score_rate(load_recipe("digits")), score_rate(load_recipe("digits", ["budget.steer=true"]))
    ('scores.lr', 'scores.speed')
    """
    return "scores.speed" if recipe.scores.speed or recipe.budget.steer else "scores.lr"


def optimizer_config(recipe: Recipe, phase: Phase) -> OptimizerConfig:
    """How a phase trains the weights; the control is trained as the warm-up is, over all its epochs."""
    return {
        "warmup": recipe.warmup,
        "weights": recipe.weights,
        "joint": recipe.weights,
        "finetune": recipe.finetune,
        "control": recipe.warmup,
    }[phase.kind]


def batch_size(recipe: Recipe, phase: Phase) -> int:
    """Images per step of a phase."""
    section = optimizer_config(recipe, phase) if phase.trains_weights else recipe.scores
    return section.batch_size or recipe.data.batch_size


def is_taught(recipe: Recipe, phase: Phase) -> bool:
    """Does a phase learn from the dense network as well?"""
    during = recipe.distill.during
    kinds = {
        "finetune": ("finetune",),
        "weights": ("finetune", "weights", "joint"),
        "cycles": ("finetune", "weights", "joint", "score"),
    }
    return recipe.distill.alpha > 0 and phase.kind in kinds[during]


def taught_part(recipe: Recipe, phase: Phase, epoch: int) -> float:
    """The teacher's part of the loss in an epoch, counted from 0, of a phase that is taught.

    >>> from .recipe import load_recipe
    >>> fading = load_recipe("digits", ["distill.alpha=0.8", "distill.fade=true"])
    >>> [round(taught_part(fading, Phase("finetune", 0, 4, 10), epoch), 2) for epoch in range(4)]
    [0.8, 0.68, 0.4, 0.12]
    """
    fading = recipe.distill.fade and phase.kind == "finetune"
    return recipe.distill.alpha * (_cosine(epoch / phase.epochs) if fading else 1.0)


def learning_rate(config: OptimizerConfig, step: int, steps: int, each: int = 1) -> float:
    """The learning rate at a step of a phase that has `steps` of them, `each` of them an epoch.

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
    """From 1 to 0 along half a wave."""
    return (1 + math.cos(math.pi * passed)) / 2
