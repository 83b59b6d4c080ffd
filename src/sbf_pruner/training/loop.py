"""The whole schedule: a dense network in, a trained, smaller one and a run folder out.

Warm-up, cycles of scores and gated weights, removal, fine-tuning of what is left, and, where the recipe asks
for it, a dense control.  What holds: everything is checked before the first file is written; every epoch
follows from the seed and its number alone, and a checkpoint holds all that passes from one to the next, so a
run killed at any moment and resumed ends, on the CPU, with bit for bit the same weights.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ..environment import environment
from ..errors import RunError
from ..export import load, save
from ..plan import Plan
from ..pruner import Pruner
from ..report import leave_report
from .average import Average
from .captured import make_engine
from .checkpoint import NAME, load_checkpoint, save_checkpoint
from .data import Augment, Batches, Data, Split, load_data
from .engine import Engine, Tally, make_optimizer, restore_optimizer
from .folder import INITIAL, SCORED, TEACHER, RunFolder
from .networks import Networks
from .recipe import Recipe
from .recording import Recording
from .schedule import (
    Phase,
    batch_size,
    cycles_end,
    is_taught,
    learning_rate,
    optimizer_config,
    phases,
    total_epochs,
)
from .start import choose_device, cpu_threads
from .summary import sizes, widths
from .teacher import Teacher
from .timed import Timed

Report = Callable[[dict[str, Any]], None]

SAVING_SHARE = 0.05  # of a run's time at most goes into checkpoints, but for those at the end of a phase
EVALUATED_AT_ONCE = 256
TIMED_AT_ONCE = 64


@dataclass(frozen=True)
class Result:
    """What a run leaves: the small network, the filters it kept, the figures, and where they lie."""

    model: nn.Module
    plan: Plan
    summary: dict[str, Any]
    folder: Path
    was_finished: bool = False
    """The run had come to its end before it was resumed, and nothing was trained."""


def fit(
    model: nn.Module,
    recipe: Recipe,
    *,
    data: Data | None = None,
    run: str | Path | None = None,
    resume: bool = False,
    force: bool = False,
    report: Report | None = None,
) -> Result:
    """Train, score, prune and fine-tune a copy of `model` as `recipe` says; `model` itself is untouched.

    `report` is called after every epoch with the record that `metrics.jsonl` gets.  The run's folder is `run`
    or runs/NAME-seedN; one that exists is refused unless the run is to go on (`resume`) or over (`force`).

    >>> import tempfile
    >>> from .recipe import load_recipe
    >>> short = ["phases.warmup=0", "phases.cycles=1", "phases.weights=0", "phases.finetune=0"]
    >>> recipe = load_recipe("digits", [*short, "dense_control=false"])
    >>> net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     result = fit(net, recipe, run=folder)
    >>> result.summary["pruned"]["macs"] <= result.summary["dense"]["macs"]
    True
    """
    folder = RunFolder.of(recipe, run)
    folder.check(recipe, resume=resume, force=force)
    if resume and folder.finished:
        small = load(folder.path, lambda: copy.deepcopy(model))
        return Result(small, Plan.load(folder.path / "plan.json"), folder.read_summary(), folder.path, True)
    device = choose_device(recipe.device)
    streams = torch.random.fork_rng([device] if device.type == "cuda" else [])  # the caller's stay the caller's
    with streams, cpu_threads(recipe.threads):
        data = data or load_data(recipe.data, recipe.model.num_classes, recipe.seed)
        goes_on = resume and (folder.checkpoints / NAME).is_file()
        ahead = _Run(model, recipe, data, device, folder, report, goes_on)
        if goes_on:
            ahead.restore()
        else:
            ahead.begin()
        return ahead.go()


class _Run:
    """A run in progress: the networks, how far it is, and how to write it down."""

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        data: Data,
        device: torch.device,
        folder: RunFolder,
        report: Report | None,
        goes_on: bool = False,
    ) -> None:
        self.recipe, self.data, self.device, self.folder = recipe, data, device, folder
        self.report = report or (lambda record: None)
        self.train = self._batches(data.train, Augment(recipe.data.crop, recipe.data.flip))
        self.batches = {self.train.batch_size: self.train}
        self.test = self._batches(data.test)
        self.validation = self._batches(data.validation) if len(data.validation) else None
        self.images = next(self.test.epoch(0))[0]
        self.networks = Networks(model, recipe, data, self.images, device, folder.latency if goes_on else None)
        self.recording = Recording(folder, self.networks, self.images, device)
        self.engines: dict[tuple[int, bool], Engine] = {}
        self.teacher: Teacher | None = None
        self.warmup_accuracy: float | None = None
        self.done = 0
        self.unfinished: dict[str, Any] | None = None  # the optimiser of a phase that was cut short
        self.unfinished_average: dict[str, Any] | None = None
        self.spent = 0.0  # seconds before it was resumed
        self.started = self.saved = time.perf_counter()
        self.saving = 0.0  # seconds the last checkpoint took

    def begin(self) -> None:
        """Write the first files: from here on there is a run to resume."""
        self._check_timer()
        self.folder.begin(self.recipe)
        self.recording.begin()
        if self.networks.timed is not None:
            self.networks.timed.keep_in(self.folder.latency)
        save_checkpoint(self.folder.checkpoints, self.networks.initial, INITIAL)
        if not self.recipe.phases.warmup:
            self._keep_teacher()

    def restore(self) -> None:
        """Go to where the last checkpoint was taken."""
        state = load_checkpoint(self.folder.checkpoints)
        self._check_timer(state["done"])
        if self.networks.timed is not None:
            self.networks.timed.keep_in(self.folder.latency)
        self.networks.restore(state["networks"], load_checkpoint(self.folder.checkpoints, INITIAL))
        self.folder.rewind(state["done"])
        self.recording.begin()
        self.done, self.spent, self.unfinished = state["done"], state["seconds"], state["optimizer"]
        self.unfinished_average = state.get("average")
        self.warmup_accuracy = state["warmup_accuracy"]
        if self.recipe.distill.alpha and self.done >= self.recipe.phases.warmup:
            self._set_teacher(load_checkpoint(self.folder.checkpoints, TEACHER))
        if not (self.folder.checkpoints / SCORED).is_file():  # begun by a version that did not keep it
            self._keep_scored()

    def go(self) -> Result:
        """Run what is left of the schedule and write the results."""
        for phase in phases(self.recipe):
            if self.done < phase.end:
                self._run_phase(phase)
        small = self.networks.pruned()
        save(small, self.folder.path)
        summary = self._summary(small)
        leave_report(self.folder.path, summary)
        self.folder.write_summary(summary)
        return Result(small, self.networks.plan, summary, self.folder.path)

    def _run_phase(self, phase: Phase) -> None:
        network, pruner = self.networks.of(phase)
        engine = self._engine(network, pruner)
        optimizer = average = None
        if phase.trains_weights:
            config = optimizer_config(self.recipe, phase)
            optimizer = make_optimizer(network, config)
            if self.unfinished is not None:
                restore_optimizer(optimizer, self.unfinished)
            if config.ema:
                average = Average(network, config.ema)
                if self.unfinished_average is not None:
                    average.load_state_dict(self.unfinished_average)
        self.unfinished = self.unfinished_average = None
        with ExitStack() as frozen:
            if pruner is not None:
                scores = phase.trains_scores
                frozen.enter_context(pruner.scoring(joint=phase.trains_weights) if scores else pruner.gated())
            while self.done < phase.end:
                record = self._run_epoch(phase, engine, optimizer, average)
                self.done += 1
                if phase.trains_scores:
                    self.networks.closes_in(phase, self.done - phase.first_epoch)
                if self.done == phase.end:
                    # Scores become gates as their phase closes, and the checkpoint is to hold the gates.
                    frozen.close()
                    optimizer = average = None
                    if phase.trains_scores:
                        if phase.cycle == self.recipe.phases.cycles:
                            self.networks.come_in_time()
                        self.networks.gates_changed()
                    elif phase.kind == "warmup":
                        self.warmup_accuracy = record["test_accuracy"]
                        self._keep_teacher()
                    self._keep_scored()
                record |= self.networks.cost(phase)
                # Before the checkpoint: a record too many is cut off on resuming, one too few would be lost.
                self.recording.after_epoch(phase, self.done)
                self.folder.append(record)
                self._save(optimizer, average, closed=self.done == phase.end)
                self.report(record)

    def _run_epoch(
        self, phase: Phase, engine: Engine, optimizer: torch.optim.Optimizer | None, average: Average | None
    ) -> dict[str, Any]:
        began = time.perf_counter()
        epoch, last = self.done - phase.first_epoch, self.done + 1 == phase.end
        batches = self._training_batches(phase)
        teacher = self.teacher if is_taught(self.recipe, phase) else None
        torch.manual_seed(_mixed(self.recipe.seed, self.done))
        if optimizer is None:
            rate = self.networks.pruner.lr
            tally = engine.score_epoch(batches, self.done, teacher)
        else:
            config, each = optimizer_config(self.recipe, phase), len(batches)
            steps = range(epoch * each, (epoch + 1) * each)
            rates = [learning_rate(config, step, each * phase.epochs, each) for step in steps]
            rate = rates[0]
            tally = engine.train_epoch(
                batches, self.done, optimizer, rates, config.label_smoothing, teacher, average
            )
            if last:
                if average is not None:
                    average.take_over()
                    average = None
                if config.recalibrate:
                    engine.recalibrate(batches, self.done, config.recalibrate)
        test = held_out = None
        if last or (epoch + 1) % self.recipe.evaluate_every == 0:
            with nullcontext() if average is None else average.applied():
                test = engine.evaluate(self.test)
                held_out = engine.evaluate(self.validation) if self.validation else None
        self._check_finite(phase, epoch, tally, *(t for t in (test,) if t is not None))
        return {
            "done": self.done + 1,
            "total": total_epochs(self.recipe),
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
            "seconds": round(time.perf_counter() - began, 3),
        }

    def _check_finite(self, phase: Phase, epoch: int, *tallies: Tally) -> None:
        """Stop before weights that are no numbers are saved; those of the last step show in the test loss."""
        if all(tally.finite for tally in tallies):
            return
        section = {"score": "scores", "joint": "weights", "control": "warmup"}.get(phase.kind, phase.kind)
        rate = getattr(self.recipe, section).lr
        raise RunError(
            f"the loss is no longer finite in phase {phase}, epoch {epoch + 1} of {phase.epochs}; lower "
            f"{section}.lr (it is {rate:g}) and start over with --force; the last good checkpoint is kept in "
            f"{self.folder.checkpoints}"
        )

    def _check_timer(self, done: int = 0) -> None:
        """Scores that are still to come end in a landing that is timed: what that needs must be there now."""
        if any(phase.trains_scores and done < phase.end for phase in phases(self.recipe)):
            self.networks.check_timer()

    def _keep_teacher(self) -> None:
        """Write down the dense network that the later phases learn from, if they do."""
        if self.recipe.distill.alpha:
            weights = self.networks.dense.state_dict()
            save_checkpoint(self.folder.checkpoints, weights, TEACHER)
            self._set_teacher(weights)

    def _keep_scored(self) -> None:
        """Write down the dense network and its scores when the last cycle is over, for `sbf frontier`.

        Fine-tuning changes these very weights where it goes on in the gated network.
        """
        if self.done == cycles_end(self.recipe):
            save_checkpoint(self.folder.checkpoints, self.networks.scored(), SCORED)

    def _set_teacher(self, weights: dict[str, Any]) -> None:
        network = self.networks.bare_copy()
        network.load_state_dict(weights)
        self.teacher = Teacher(network, self.recipe.distill.alpha, self.recipe.distill.temperature)

    def _save(self, optimizer: torch.optim.Optimizer | None, average: Average | None, *, closed: bool) -> None:
        """Write a checkpoint, but not so often that it takes a noticeable part of the run's time."""
        now = time.perf_counter()
        if not closed and self.saving > SAVING_SHARE * (now - self.saved):
            return
        state = {
            "done": self.done,
            "seconds": self._seconds(),
            "warmup_accuracy": self.warmup_accuracy,
            "optimizer": None if optimizer is None else optimizer.state_dict(),
            "average": None if average is None else average.state_dict(),
            "networks": self.networks.state(),
        }
        save_checkpoint(self.folder.checkpoints, state)
        self.saved = time.perf_counter()
        self.saving = self.saved - now

    def _summary(self, small: nn.Module) -> dict[str, Any]:
        control = self.networks.control
        dense = self.networks.pruner.detach() if control is None else control
        batch = self.images[:TIMED_AT_ONCE]
        first, second = sizes(dense, small, batch)
        return {
            "name": self.recipe.name,
            "seed": self.recipe.seed,
            "epochs": sum(phase.epochs for phase in phases(self.recipe) if phase.kind != "control"),
            "dense": {**self._judged(control), "warmup_accuracy": self.warmup_accuracy, **first},
            "pruned": {**self._judged(small), **second},
            "latency_batch": len(batch),
            "cut_error": self.networks.cut_error,
            "layers": widths(self.networks.pruner.graph, self.networks.plan),
            **({} if self.networks.timed is None else {"latency": self._timed(self.networks.timed)}),
            **self.recording.finish(small),
            "seconds": round(self._seconds(), 1),
            "environment": environment(self.device),
        }

    def _timed(self, timed: Timed) -> dict[str, Any]:
        return timed.summary(self.networks.pruner, self.networks.plan)

    def _judged(self, network: nn.Module | None) -> dict[str, float | None]:
        """Accuracy after the last epoch; none where there is no network or no validation split."""
        if network is None:
            return {"accuracy": None, "validation_accuracy": None}
        engine = self._engine(network)
        held_out = engine.evaluate(self.validation).accuracy if self.validation else None
        return {"accuracy": engine.evaluate(self.test).accuracy, "validation_accuracy": held_out}

    def _engine(self, network: nn.Module, pruner: Pruner | None = None) -> Engine:
        """One engine per network, from phase to phase: what it has compiled stays valid."""
        key = id(network), pruner is not None
        if key not in self.engines:
            self.engines = {key: make_engine(network, self.device, pruner)}
        return self.engines[key]

    def _training_batches(self, phase: Phase) -> Batches:
        """The training images in the batches of a phase; they lie on the device once, whatever the size."""
        size = batch_size(self.recipe, phase)
        if size not in self.batches:
            split = Split(self.train.images, self.train.labels)
            self.batches[size] = self._batches(split, self.train.augment, size)
        return self.batches[size]

    def _batches(self, split: Split, augment: Augment | None = None, size: int = 0) -> Batches:
        size = size or self.recipe.data.batch_size
        size = size if augment else max(size, EVALUATED_AT_ONCE)
        return Batches(
            split,
            size,
            self.data.mean,
            self.data.std,
            device=self.device,
            augment=augment,
            seed=self.recipe.seed,
        )

    def _seconds(self) -> float:
        return self.spent + time.perf_counter() - self.started


def _mixed(seed: int, epoch: int) -> int:
    """One seed for the global stream (dropout) of an epoch, other than the one its order is drawn from."""
    return int(np.random.SeedSequence((seed, epoch, 1)).generate_state(1)[0])
