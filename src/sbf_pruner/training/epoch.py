"""Train and evaluate one epoch of a phase, and make its record for `metrics.jsonl`.

An epoch depends only on the seed and its number, so one that was stopped after any step can be continued. A loss,
weight or score that is not finite stops the run before it is saved.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from ..errors import RunError
from ..schedule import Phase
from ..scores.freezing import lagging
from .data.datasets import RunBatches
from .engine.eager import EPOCH_START, Engine, EpochProgress, EpochResult, Teacher, WeightTrainer
from .recipe import Recipe
from .run_folder import LAST_CHECKPOINT
from .schedule import (
    distillation_weight,
    is_distilled,
    learning_rate,
    optimizer_config,
    score_rate_key,
    total_epochs,
)

RECALIBRATION_BATCHES = 20  # training batches, to recalibrate running statistics that lag behind

_log = logging.getLogger(__name__)


class EpochRunner:
    """Run the epochs of a run one at a time.

    `kept` is the folder of its checkpoints, which error messages name.
    """

    def __init__(self, recipe: Recipe, feed: RunBatches, kept: Path, rank: int = 0) -> None:
        self._recipe, self._feed, self._kept, self._rank = recipe, feed, kept, rank
        self._began = 0.0
        self._told_of_norms = False

    def run(
        self,
        phase: Phase,
        number: int,
        engine: Engine,
        descent: WeightTrainer | None,
        teacher: Teacher | None,
        initial: dict[str, Tensor],
        begun: EpochProgress = EPOCH_START,
    ) -> dict[str, Any]:
        """Train epoch `number` of the run, or the rest of it after `begun`, and return its record.

        Without a `descent` only scores are trained. `initial` is the state dict that the run began with.
        """
        self._began = time.perf_counter() - begun.seconds
        epoch, last = number - phase.first, number + 1 == phase.end
        torch.manual_seed(_mixed(self._recipe.seed, number, self._rank))
        if begun.steps:
            _set_random(begun.random, engine.device)
        tally, rate = self._train(phase, number, engine, descent, teacher, begun)
        test = held_out = None
        if last or (epoch + 1) % self._recipe.evaluate_every == 0:
            with ExitStack() as undone:
                if descent is not None and descent.average is not None:
                    undone.enter_context(descent.average.applied())
                undo = self._settle_norms(phase, number, engine, descent, initial)
                if undo is not None and not last:  # The last epoch keeps the statistics it is judged by.
                    undone.callback(undo)
                test, held_out = evaluate_splits(engine, self._feed)
        if not (tally.finite and (test is None or test.finite)):
            self._stop("the loss is", phase, epoch, engine)
        # The training loss does not show what the last step did to the weights, and a test is not always due.
        self._check_finite(phase, epoch, engine, descent)
        if last and test is not None and descent is not None:
            self._warn_of_guessing(phase, tally.accuracy, test.accuracy)
        return {
            "done": number + 1,
            "total": total_epochs(self._recipe),
            "phase": phase.kind,
            "cycle": phase.cycle,
            "epoch": epoch + 1,
            "epochs": phase.epochs,
            "loss": tally.loss,
            "penalty": tally.penalty,
            "train_accuracy": tally.accuracy,
            "validation_accuracy": held_out.accuracy if held_out else None,
            "test_accuracy": test.accuracy if test else None,
            "lr": rate,
            "seconds": round(time.perf_counter() - self._began, 3),
        }

    def begun(
        self, phase: Phase, number: int, engine: Engine, descent: WeightTrainer | None, steps: int
    ) -> EpochProgress:
        """Return what is needed to continue the current epoch after `steps` steps.

        Raises a RunError if the loss, a weight or a score is not finite.
        """
        sums = tuple(engine.sums.tolist())
        if not all(map(math.isfinite, sums)):
            self._stop("the loss is", phase, number - phase.first, engine)
        self._check_finite(phase, number - phase.first, engine, descent)
        return EpochProgress(steps, sums, time.perf_counter() - self._began, _random(engine.device))

    def _settle_norms(
        self, phase: Phase, number: int, engine: Engine, descent: WeightTrainer | None, initial: dict[str, Tensor]
    ) -> Callable[[], None] | None:
        """Recalibrate batch norms whose running statistics lag behind training; return a function that undoes it.

        Does nothing and returns None if no statistics lag, if scores are trained with frozen norms, or if the phase
        has just ended with a recalibration that the recipe asks for.
        """
        if descent is None:
            done = self._recipe.scores.freeze_norms
        else:
            done = number + 1 == phase.end and optimizer_config(self._recipe, phase).recalibrate > 0
        slow = None if done else lagging(engine.network, initial)
        if slow is None:
            return None
        if not self._told_of_norms:
            self._told_of_norms = True
            _log.info(
                "running statistics of batch norms lag (momentum %g, %d steps), so they are recalibrated on up to "
                "%d training batches before each evaluation",
                *slow,
                RECALIBRATION_BATCHES,
            )
        return engine.recalibrate(self._feed.whole(phase), number, RECALIBRATION_BATCHES)

    def _warn_of_guessing(self, phase: Phase, train: float, test: float) -> None:
        """Log a warning if the network has learned the training images but guesses the test images."""
        guessed = 150 / self._feed.test.num_classes  # In percent, 1.5 times chance level.
        if test < guessed < train and train >= 2 * test:
            _log.warning(
                "after phase %s the training accuracy is %.2f %% and the test accuracy %.2f %%, about that of "
                "guessing among %d classes; check that test images are prepared and labelled as in training",
                phase,
                train,
                test,
                self._feed.test.num_classes,
            )

    def _train(
        self,
        phase: Phase,
        number: int,
        engine: Engine,
        descent: WeightTrainer | None,
        teacher: Teacher | None,
        begun: EpochProgress,
    ) -> tuple[EpochResult, float]:
        """Train the remaining steps of an epoch; return their tally and the learning rate of its first step."""
        batches = self._feed.of(phase)
        epoch = number - phase.first
        teacher = teacher if is_distilled(self._recipe, phase) else None
        if teacher is not None:
            teacher.alpha.fill_(distillation_weight(self._recipe, phase, epoch))
        if descent is None:
            assert engine.pruner is not None
            return engine.score_epoch(batches, number, teacher, begun), engine.pruner.lr
        config, each = optimizer_config(self._recipe, phase), len(batches)
        first = epoch * each
        rates = [learning_rate(config, step, each * phase.epochs, each) for step in range(first, first + each)]
        optimizer, average = descent.optimizer, descent.average
        smoothing = config.label_smoothing
        tally = engine.train_epoch(batches, number, optimizer, rates, smoothing, teacher, average, begun)
        if number + 1 == phase.end:
            descent.settle()
            if config.recalibrate:
                engine.recalibrate(self._feed.whole(phase), number, config.recalibrate)
        return tally, rates[0]

    def _check_finite(self, phase: Phase, epoch: int, engine: Engine, descent: WeightTrainer | None) -> None:
        if not _finite(_trained(engine, descent)):
            self._stop(f"the {'scores' if descent is None else 'weights'} are", phase, epoch, engine)

    def _stop(self, broken: str, phase: Phase, epoch: int, engine: Engine) -> NoReturn:
        """Raise a RunError, so that numbers that are not finite are never saved."""
        section = {"joint": "weights", "control": "warmup"}.get(phase.kind, phase.kind)
        if phase.kind == "score":
            assert engine.pruner is not None  # Its `lr` is the speed, even if derived from the budget.
            key, rate = score_rate_key(self._recipe), engine.pruner.lr
        else:
            key, rate = f"{section}.lr", getattr(self._recipe, section).lr
        raise RunError(
            f"{broken} no longer finite in phase {phase}, epoch {epoch + 1} of {phase.epochs}; lower "
            f"{key} (it is {rate:g}) and start over with --force{self._kept_so_far()}"
        )

    def _kept_so_far(self) -> str:
        return (
            f"; the last good checkpoint is kept in {self._kept}"
            if (self._kept / LAST_CHECKPOINT).is_file()
            else ""
        )


def evaluate_splits(engine: Engine, feed: RunBatches) -> tuple[EpochResult, EpochResult | None]:
    """Evaluate a network on the test split and, if there is one, on the validation split."""
    return engine.evaluate(feed.test), engine.evaluate(feed.validation) if feed.validation else None


def _trained(engine: Engine, descent: WeightTrainer | None) -> list[Tensor]:
    """Return the tensors that the steps of an epoch change; frozen ones may hold infinities on purpose."""
    weights = [] if descent is None else [p for group in descent.optimizer.param_groups for p in group["params"]]
    return weights if engine.pruner is None else [*weights, *engine.pruner.score_parameters]


@torch.no_grad()
def _finite(tensors: Iterable[Tensor]) -> bool:
    """Return True if all values are finite; takes the maximum norm of each tensor and synchronizes only once."""
    largest = torch._foreach_norm([tensor for tensor in tensors if tensor.numel()], math.inf)
    return bool(torch.stack([norm.isfinite() for norm in largest]).all())


def _random(device: torch.device) -> tuple[Tensor, ...]:
    """Return the states of torch's random generators, on the CPU and on `device` if it is a GPU."""
    return torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])


def _set_random(states: Sequence[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda" and len(states) > 1:  # A run may be resumed on a machine without a GPU.
        torch.cuda.set_rng_state(states[1], device)


def _mixed(seed: int, epoch: int, rank: int) -> int:
    """Return the seed of torch's global generator (dropout) for an epoch and a rank.

    It is not the seed that the order of the images is drawn with.
    """
    return int(np.random.SeedSequence((seed, epoch, 1 + rank)).generate_state(1)[0])
