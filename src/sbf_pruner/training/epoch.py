"""Train and evaluate one epoch of a phase, and make its record for `metrics.jsonl`.

An epoch depends only on the seed and its number, so one that was stopped after any step can be continued. A loss,
weight or score that is not finite stops the run before it is saved.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from ..errors import RunError
from ..schedule import Phase
from ..scores.freezing import lagging
from .data.batches import RunBatches
from .engine.eager import EPOCH_START, Engine, EpochProgress, EpochResult, Teacher, WeightTrainer
from .recipe import Recipe
from .run_folder import LAST_CHECKPOINT
from .schedule import (
    distillation_weight,
    is_distilled,
    learning_rate,
    optimizer_config,
    score_rate_key,
    section_of,
    total_epochs,
)

RECALIBRATION_BATCHES = 20  # training batches, to recalibrate running statistics that lag behind

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ActivePhase:
    """A phase with its engine, trainer and teacher; if `trainer` is None, only scores are trained."""

    phase: Phase
    engine: Engine
    trainer: WeightTrainer | None
    teacher: Teacher | None


class EpochRunner:
    """Runner of single epochs of a run; `checkpoints` is the folder that error messages name."""

    def __init__(self, recipe: Recipe, feed: RunBatches, checkpoints: Path, rank: int = 0) -> None:
        self._recipe, self._feed, self._checkpoints, self._rank = recipe, feed, checkpoints, rank
        self._began = 0.0
        self._norms_reported = False

    def run(
        self, active: ActivePhase, number: int, initial: dict[str, Tensor], begun: EpochProgress = EPOCH_START
    ) -> dict[str, Any]:
        """Train epoch `number` of the run, or the rest of it after `begun`, and return its record.

        `initial` is the state dict that the run began with.
        """
        self._began = time.perf_counter() - begun.seconds
        phase, engine, trainer = active.phase, active.engine, active.trainer
        epoch, last = number - phase.first, number + 1 == phase.end
        # Seed dropout independently of the order of the images.
        seeds = np.random.SeedSequence((self._recipe.seed, number, 1 + self._rank))
        torch.manual_seed(int(seeds.generate_state(1)[0]))
        if begun.steps:
            torch.set_rng_state(begun.random[0])
            if engine.device.type == "cuda" and len(begun.random) > 1:  # It may have begun on a CPU.
                torch.cuda.set_rng_state(begun.random[1], engine.device)
        tally, rate = self._train(active, number, begun)
        test = held_out = None
        if last or (epoch + 1) % self._recipe.evaluate_every == 0:
            with ExitStack() as undone:
                if trainer is not None and trainer.average is not None:
                    undone.enter_context(trainer.average.applied())
                undo = self._settle_norms(active, number, initial)
                if undo is not None and not last:  # The last epoch keeps the recalibrated statistics.
                    undone.callback(undo)
                test, held_out = evaluate_splits(engine, self._feed)
        if not (tally.finite and (test is None or test.finite)):
            self._stop("the loss is", active, epoch)
        # The training loss does not show the effect of the last step on the weights, and evaluation may be skipped.
        self._check_finite(active, epoch)
        if last and test is not None and trainer is not None:
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

    def progress(self, active: ActivePhase, number: int, steps: int) -> EpochProgress:
        """Return what is needed to continue the current epoch after `steps` steps.

        Raises a RunError if the loss, a weight or a score is not finite.
        """
        engine, epoch = active.engine, number - active.phase.first
        sums = tuple(engine.sums.tolist())
        if not all(map(math.isfinite, sums)):
            self._stop("the loss is", active, epoch)
        self._check_finite(active, epoch)
        random = [torch.get_rng_state()]
        if engine.device.type == "cuda":
            random.append(torch.cuda.get_rng_state(engine.device))
        return EpochProgress(steps, sums, time.perf_counter() - self._began, tuple(random))

    def _settle_norms(
        self, active: ActivePhase, number: int, initial: dict[str, Tensor]
    ) -> Callable[[], None] | None:
        """Recalibrate batch norms whose running statistics lag behind training; return a function that undoes it.

        Does nothing and returns None if no statistics lag, if scores are trained with frozen norms, or if the phase
        has just ended with a recalibration set in the recipe.
        """
        phase, engine = active.phase, active.engine
        if active.trainer is None:
            done = self._recipe.scores.freeze_norms
        else:
            done = number + 1 == phase.end and optimizer_config(self._recipe, phase).recalibrate > 0
        slow = None if done else lagging(engine.network, initial)
        if slow is None:
            return None
        if not self._norms_reported:
            self._norms_reported = True
            _log.info(
                "running statistics of batch norms lag (momentum %g, %d steps), so they are recalibrated on up to "
                "%d training batches before each evaluation",
                *slow,
                RECALIBRATION_BATCHES,
            )
        return engine.recalibrate(self._feed.whole(phase), number, RECALIBRATION_BATCHES)

    def _warn_of_guessing(self, phase: Phase, train: float, test: float) -> None:
        """Log a warning if the test accuracy is near chance level but the training accuracy is not."""
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

    def _train(self, active: ActivePhase, number: int, begun: EpochProgress) -> tuple[EpochResult, float]:
        """Train the remaining steps of an epoch; return their result and the first learning rate of the epoch."""
        phase, engine, trainer = active.phase, active.engine, active.trainer
        batches, epoch = self._feed.of(phase), number - phase.first
        teacher = active.teacher if is_distilled(self._recipe, phase) else None
        if teacher is not None:
            teacher.alpha.fill_(distillation_weight(self._recipe, phase, epoch))
        if trainer is None:
            assert engine.pruner is not None
            return engine.score_epoch(batches, number, teacher, begun), engine.pruner.lr
        config, each = optimizer_config(self._recipe, phase), len(batches)
        first = epoch * each
        rates = [learning_rate(config, step, each * phase.epochs, each) for step in range(first, first + each)]
        optimizer, smoothing = trainer.optimizer, config.label_smoothing
        tally = engine.train_epoch(batches, number, optimizer, rates, smoothing, teacher, trainer.average, begun)
        if number + 1 == phase.end:
            trainer.settle()
            if config.recalibrate:
                engine.recalibrate(self._feed.whole(phase), number, config.recalibrate)
        return tally, rates[0]

    @torch.no_grad()
    def _check_finite(self, active: ActivePhase, epoch: int) -> None:
        """Raise a RunError unless all trained parameters are finite; synchronizes with the device only once.

        Frozen tensors are not checked, because they may contain infinities on purpose.
        """
        trainer, pruner = active.trainer, active.engine.pruner
        groups = [] if trainer is None else [group["params"] for group in trainer.optimizer.param_groups]
        scores = [] if pruner is None else pruner.score_parameters
        trained = [tensor for tensors in (*groups, scores) for tensor in tensors if tensor.numel()]
        largest = torch._foreach_norm(trained, math.inf)
        if not torch.stack([norm.isfinite() for norm in largest]).all():
            self._stop(f"the {'scores' if trainer is None else 'weights'} are", active, epoch)

    def _stop(self, broken: str, active: ActivePhase, epoch: int) -> NoReturn:
        """Raise a RunError that suggests a lower learning rate, so that NaN or infinity is never saved."""
        phase, pruner = active.phase, active.engine.pruner
        if phase.trains_weights:
            key, rate = f"{section_of(phase)}.lr", optimizer_config(self._recipe, phase).lr
        else:
            assert pruner is not None  # Its `lr` is the speed, even if derived from the budget.
            key, rate = score_rate_key(self._recipe), pruner.lr
        saved = (self._checkpoints / LAST_CHECKPOINT).is_file()
        kept = f"; the last good checkpoint is kept in {self._checkpoints}" if saved else ""
        raise RunError(
            f"{broken} no longer finite in phase {phase}, epoch {epoch + 1} of {phase.epochs}; lower "
            f"{key} (it is {rate:g}) and start over with --force{kept}"
        )


def evaluate_splits(engine: Engine, feed: RunBatches) -> tuple[EpochResult, EpochResult | None]:
    """Evaluate a network on the test split and, if there is one, on the validation split."""
    return engine.evaluate(feed.test), engine.evaluate(feed.validation) if feed.validation else None
