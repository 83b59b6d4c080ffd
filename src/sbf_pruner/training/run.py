"""`fit`: a resumable run of warm-up, cycles, removal of filters, fine-tuning and a dense control.

Everything is checked before the first file is written. Every epoch depends only on the seed and its number, and a
checkpoint holds all state that passes from one epoch to the next, so a run that is killed and resumed ends, on the
CPU, with bit-identical weights. After a signal, a run stops at the end of a step and saves the partial epoch; if
there are several processes, whose norms and random states differ within an epoch, it stops at the end of the epoch.
Under torchrun each process trains on its part of every batch. Rank 0 writes the run folder; the other ranks write
to temporary folders that start with the same contents, so that all ranks execute the same code.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

from ..criteria import METHODS
from ..criteria.ranking import REHEARSED, check_method, first_images, ranked
from ..criteria.subject import Batch, Scores, Subject
from ..errors import RunError, Stopped
from ..plan import Plan
from ..pruner import Pruner
from ..report import write_own_report
from ..saving import load, save
from ..schedule import RUN_FORMAT, Phase
from ..utils.distributed import DistributedContext
from ..utils.timing import environment
from ..utils.user_model import check_model, real_copy
from .data.batches import Data, RunBatches
from .data.datasets import load_data, own_data
from .device import ComputeConfig, choose_machine, cpu_threads, restore_torch_settings
from .engine.captured import make_engine
from .engine.eager import EPOCH_START, Engine, EpochProgress, Teacher, WeightTrainer
from .epoch import ActivePhase, EpochRunner, evaluate_splits
from .networks import Networks
from .recipe import Recipe, load_recipe
from .recording import RunRecorder, summarize
from .run_folder import (
    DENSE,
    INITIAL,
    SCORED,
    DenseStage,
    RunFolder,
    load_checkpoint,
    read_dense_stage,
    save_checkpoint,
)
from .schedule import batch_size, cycles_end, is_scored, is_soft, optimizer_config, phases

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Result:
    """Result of a run: the pruned network, the filters it keeps, the summary and the run folder."""

    model: nn.Module
    plan: Plan
    summary: dict[str, Any]
    folder: Path
    was_finished: bool = False
    """True if the run was finished before it was resumed, so that nothing was trained."""


def fit(
    model: nn.Module,
    recipe: Recipe | str | Path,
    *,
    data: Data | Mapping[str, Dataset[Any]] | None = None,
    run: str | Path | None = None,
    resume: bool = False,
    force: bool = False,
    dense_from: str | Path | None = None,
    trust: bool = False,
    report: Report | None = None,
) -> Result:
    """Train, score, prune and fine-tune a copy of `model` as `recipe` says.

    `model`, torch's random state and its settings are left unchanged. Under torchrun every process calls `fit`;
    each batch is divided among them, and rank 0 writes the folder and calls `report`.

    Args:
        model: The dense network.
        recipe: A recipe, the name of a bundled one, or the path of a .toml file.
        data: Datasets of (image, label) pairs, `{"train": ..., "test": ...}` and optionally "val". By default the
            images that the recipe names are loaded.
        run: The run folder, runs/NAME-seedN by default. If it has a run, `resume` or `force` must be true.
        resume: Continue the run in the folder from its last checkpoint; a finished run is only read.
        force: Start the run in the folder over.
        dense_from: Folder of a run with the same network, data and seed, whose warm-up is taken over.
        trust: Import the function that `data.name` of the recipe names; give it only for a recipe of your own.
        report: Called after every epoch with the record that is appended to `metrics.jsonl`.

    Raises:
        Stopped: SIGINT (Ctrl-C) or SIGTERM was received; it is a KeyboardInterrupt. The run stops after the current
            step (with several processes: the current epoch), with a checkpoint from which `resume` continues. A
            second signal ends the process at once.

    >>> import tempfile
    >>> short = ["phases.warmup=0", "phases.cycles=1", "phases.weights=0", "phases.finetune=0"]
    >>> recipe = load_recipe("digits", [*short, "dense_control=false"])
    >>> net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     result = fit(net, recipe, run=folder)
    >>> result.summary["pruned"]["macs"] <= result.summary["dense"]["macs"]
    True
    """
    _check_kinds(model, recipe, data)
    recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    team, named = init_distributed(), RunFolder.of(recipe, run)
    check = partial(named.check, recipe, resume=resume, force=force)
    with Signals() as signals, rank_folder(team, named, check, resume=resume) as folder:
        if resume and folder.finished:
            small = load(folder.path, lambda: real_copy(model))
            return Result(small, Plan.load(folder.path / "plan.json"), folder.read_summary(), named.path, True)
        goes_on = resume and folder.has_checkpoint()
        if resume and not goes_on:
            log.info("the run in %s has no checkpoint yet, so it starts from the beginning", named.path)
        stage = None
        if dense_from is not None and not goes_on:
            stage = team.run_on_rank0(partial(read_dense_stage, dense_from, recipe))
        machine = choose_machine(recipe.device, recipe.engine, recipe.precision)
        on_cuda = machine.device.type == "cuda"
        streams = torch.random.fork_rng([machine.device] if on_cuda else [])  # Restored on exit.
        with streams, cpu_threads(recipe.threads), restore_torch_settings():
            classes = recipe.model.num_classes
            if isinstance(data, Mapping):
                data = own_data(data, recipe.data, classes, recipe.seed)
            others = () if dense_from is None else (Path(dense_from),)
            origin = named.origin(*others, trust=trust, resume=resume)
            data = data or load_data(recipe.data, classes, recipe.seed, origin)
            check_divisible(recipe, len(data.train), team)
            if not team.alone:  # Start from the weights of rank 0.
                model = real_copy(model)
                team.follow([value for value in model.state_dict().values() if isinstance(value, Tensor)])
                report = report if team.leads else None
            started = Run(model, recipe, data, machine, folder, report, goes_on, team, signals)
            with folder.taken():
                # Another process may have changed the folder before it was locked, so check it again.
                folder.check(recipe, resume=resume, force=force)
                if resume and (folder.finished or goes_on != folder.has_checkpoint()):
                    raise RunError(f"another process continued the run in {folder.path} meanwhile; resume it again")
                if goes_on:
                    started.restore()
                else:
                    started.begin(stage, again=resume)
                small, summary = started.go()
            return Result(small, started.networks.plan, summary, named.path)


def _check_kinds(model: object, recipe: object, data: object) -> None:
    check_model(model)
    if not isinstance(recipe, (Recipe, str, Path)):
        raise RunError(f"recipe is of type {type(recipe).__name__}; give a name, a .toml file or an sbf.Recipe")
    if data is not None and not isinstance(data, (Data, Mapping)):
        raise RunError(f"data is of type {type(data).__name__}; give {{'train': dataset, 'test': dataset}}")


Report = Callable[[dict[str, Any]], None]

SAVING_SHARE = 0.05  # largest fraction of a run's time for checkpoints, except those at the end of a phase


class _Interrupted(Exception):
    """Raised after a signal, between steps or evaluation batches, where the state can be saved."""


class Run:
    """A run in progress: its networks, its position in the schedule, and what it saves."""

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        data: Data,
        machine: ComputeConfig,
        folder: RunFolder,
        report: Report | None,
        goes_on: bool,
        team: DistributedContext,
        signals: Signals,
    ) -> None:
        self.recipe, self.folder, self.report, self.team, self.signals = recipe, folder, report, team, signals
        device = machine.device
        self.told, self.counts, self.feed = data.told(), data.counts, RunBatches(recipe, data, device, model)
        self.machine = replace(machine, order=self.feed.order)
        self.epochs = EpochRunner(recipe, self.feed, folder.checkpoints, self.team.rank)
        self.networks = Networks(model, recipe, data, self.feed, device, folder.latency if goes_on else None)
        self.recording = RunRecorder(folder, self.networks, self.feed.images, device)
        self.engines: dict[tuple[int, bool], Engine] = {}
        self.teacher: Teacher | None = None
        self.given_accuracy: float | None = None  # test accuracy of the given network, if it may be pretrained
        self.warmup_accuracy: float | None = None
        self.dense_from: str | None = None  # folder of the run whose warm-up was taken over
        self.done = 0
        self.steps = 0  # done in the current epoch
        self.begun = EPOCH_START  # the part of an epoch that was done before the run was stopped
        self.unfinished: tuple[Any, Any] = None, None  # states of optimizer and average in an interrupted phase
        self.spent = 0.0  # seconds of training before the run was resumed
        self.started = self.saved = time.perf_counter()
        self.saving = 0.0  # seconds that the last checkpoint took

    def begin(self, stage: DenseStage | None = None, again: bool = False) -> None:
        """Check that the run can be executed and write its first files, so that it can be resumed from here on.

        `stage`, if given, replaces the warm-up. If `again` is true, the run was killed before its first checkpoint
        and starts over from its saved initial weights, if there are any.
        """
        if again and self.folder.has_checkpoint(INITIAL):
            self.networks.load_initial(load_checkpoint(self.folder.checkpoints, INITIAL))
        if self.recipe.model.weights or not self.recipe.phases.warmup:
            engine = self._engine(self.networks.dense, self.networks.pruner)
            self.given_accuracy = evaluate_splits(engine, self.feed)[0].accuracy
        if stage is not None:  # Before any file is written: it raises if the networks differ.
            self.networks.take_over(stage.weights)
        self._check_method()
        self._check_timer()
        self.folder.begin(self.recipe)
        self.recording.begin()
        if self.networks.timed is not None:
            self.networks.timed.keep_in(self.folder.latency)
        save_checkpoint(self.folder.checkpoints, self.networks.initial, INITIAL)
        if stage is not None:  # Record the warm-up as if it had been trained here.
            self.folder.append(*stage.records)
            self.done, self.spent = len(stage.records), sum(record["seconds"] for record in stage.records)
            self.warmup_accuracy, self.dense_from = stage.records[-1]["test_accuracy"], stage.run
        if stage is not None or not self.recipe.phases.warmup:
            self._keep_dense()
            self._choose()
        if stage is not None:
            self._save(None, closed=True)

    def restore(self) -> None:
        state = load_checkpoint(self.folder.checkpoints)
        self.folder.check_unchanged(state, self.recipe, self.counts)
        self._check_timer(state["done"])
        if self.networks.timed is not None:
            self.networks.timed.keep_in(self.folder.latency)
        self.networks.restore(state["networks"], load_checkpoint(self.folder.checkpoints, INITIAL))
        self.folder.rewind(state["done"])
        self.recording.begin()
        self.done, self.spent = state["done"], state["seconds"]
        self.unfinished = state["optimizer"], state.get("average")
        self.begun = EpochProgress(**state.get("begun", {}))
        self.warmup_accuracy, self.dense_from = state["warmup_accuracy"], state.get("dense_from")
        self.given_accuracy = state.get("given_accuracy")
        if self.recipe.distill.alpha and self.done >= self.recipe.phases.warmup:
            self._set_teacher(load_checkpoint(self.folder.checkpoints, DENSE))
        if not self.folder.has_checkpoint(SCORED):  # The run was begun by a version that did not write it.
            self._keep_scored()

    def go(self) -> tuple[nn.Module, dict[str, Any]]:
        """Run the rest of the schedule and write the results; return the pruned network and the summary."""
        with self.signals.deferred():
            for phase in phases(self.recipe):
                if self.done < phase.end:
                    self._run_phase(phase)
        self._forget_engines()
        small = self.networks.pruned()
        return small, self.team.run_on_rank0(partial(self._write_results, small))

    def _write_results(self, small: nn.Module) -> dict[str, Any]:
        """Write the pruned network and the report, and last the summary, which marks the run as finished."""
        save(small, self.folder.path)
        summary = self._summary(small)
        write_own_report(self.folder.path, summary)
        self.folder.write_summary(summary)
        return summary

    def _run_phase(self, phase: Phase) -> None:
        network, pruner = self.networks.of(phase)
        engine = self._engine(network, pruner)
        trainer = None
        if phase.trains_weights:
            trainer = WeightTrainer.of(network, optimizer_config(self.recipe, phase), *self.unfinished)
        self.unfinished = None, None
        active = ActivePhase(phase, engine, trainer, self.teacher)
        with ExitStack() as frozen:
            if pruner is not None:
                frozen.enter_context(self._freeze(phase, pruner, engine))
            while self.done < phase.end:
                record = self._run_epoch(active)
                self.done += 1
                if phase.trains_scores:
                    self.networks.update_progress(phase, self.done - phase.first)
                if self.done == phase.end:
                    # Leaving the context sets the gates from the scores, and the checkpoint must contain them.
                    frozen.close()
                    trainer = None
                    if phase.trains_scores:
                        self._update_plan(phase)
                    elif phase.kind == "warmup":
                        self.warmup_accuracy = record["test_accuracy"]
                        self._keep_dense()
                    if is_scored(self.recipe):
                        self._keep_scored()
                record |= self.networks.cost(phase)
                # Append the record before saving: resuming drops a surplus record but cannot restore a missing one.
                self.recording.after_epoch(phase, self.done)
                self.folder.append(record)
                if phase.cycle and is_soft(self.recipe):
                    self._soften()
                self._choose()
                stopping = self._is_stopping()
                self._save(trainer, closed=self.done == phase.end or stopping)
                if self.report is not None:
                    self.report(record)
                if stopping:
                    raise Stopped(self.signals.received or signal.SIGTERM, f"saved after epoch {self.done}")

    def _update_plan(self, phase: Phase) -> None:
        """Update the plan from the gates; raise a RunError unless all processes keep the same filters."""
        if phase.cycle == self.recipe.phases.cycles:
            self.networks.correct_by_measurement()
        self.networks.refresh_plan()
        if not self.team.all_ranks_agree(dict(self.networks.plan.keep)):  # Layer widths follow from these.
            raise RunError(f"the processes keep different filters after phase {phase}; start over in one process")

    def _run_epoch(self, active: ActivePhase) -> dict[str, Any]:
        """Train the rest of the current epoch and return its record; after a signal, save and raise `Stopped`."""
        begun, self.begun = self.begun, EPOCH_START
        self.steps = begun.steps
        active.engine.after_step = partial(self._after_step, active.phase)
        active.engine.before_evaluation_batch = self._check_signals
        try:
            return self.epochs.run(active, self.done, self.networks.initial, begun)
        except _Interrupted:
            begun = self.epochs.progress(active, self.done, self.steps)
            self._save(active.trainer, closed=True, begun=begun)
            assert self.signals.received is not None
            where = f"saved after step {self.steps} of epoch {self.done + 1}"
            raise Stopped(self.signals.received, where) from None

    def _after_step(self, phase: Phase, step: int, steps: int) -> None:
        if phase.trains_scores:
            self.networks.after_step(phase, self.done, step, steps)
        self.steps = step
        self._check_signals()

    def _check_signals(self) -> None:
        if self.team.alone and self.signals.received is not None:
            raise _Interrupted

    def _is_stopping(self) -> bool:
        """Return True if any process has received a signal; an all-reduce, so every rank must call this."""
        if self.team.alone:
            return self.signals.received is not None
        received = torch.tensor(float(self.signals.received is not None), device=self.machine.device)
        self.team.all_reduce_sum(received)
        return bool(received)

    def _freeze(self, phase: Phase, pruner: Pruner, engine: Engine) -> AbstractContextManager[Pruner]:
        """Return the context that freezes the parameters, gates and norms that a phase does not train.

        A budget closes filters that may still have high scores. A score phase opens these again, so the statistics
        of frozen batch norms are first recalibrated on some of its batches.
        """
        if not phase.trains_scores:
            return pruner.gated()
        scores = self.recipe.scores
        frozen = scores.freeze_norms and not phase.trains_weights
        if not frozen or not scores.recalibrate or pruner.selector.limits is None or pruner.gates.all_open:
            return pruner.scoring(joint=phase.trains_weights)
        return pruner.scoring(tune=partial(engine.look, self.feed.whole(phase), self.done, scores.recalibrate))

    def _check_timer(self, done: int = 0) -> None:
        """Check that latency can be measured if a score phase remains, since the last one ends by measuring it."""
        if any(phase.trains_scores and done < phase.end for phase in phases(self.recipe)):
            self.networks.check_timer()

    def _check_method(self) -> None:
        """Try the recipe's ranking method on this network, so that it fails before anything is trained."""
        if not is_scored(self.recipe):
            images = first_images(self.feed.train.epoch(0), REHEARSED)
            check_method(self.recipe.method, self._subject(self.networks.bare_copy(), images))

    def _keep_dense(self) -> None:
        """Save the dense network, for `dense_from` of other runs and as the teacher of later phases."""
        weights = self.networks.dense.state_dict()
        save_checkpoint(self.folder.checkpoints, weights, DENSE)
        if self.recipe.distill.alpha:
            self._set_teacher(weights)

    def _choose(self) -> None:
        """Choose the filters by the recipe's ranking method at `cycles_end`, unless scores are learned."""
        if is_scored(self.recipe) or self.done != cycles_end(self.recipe):
            return
        self.networks.pruner.rank(self._ranked(self.networks.bare_copy()))
        self.networks.correct_by_measurement()
        self.networks.refresh_plan()
        self._keep_scored()

    def _soften(self) -> None:
        """Set the weights of the filters that would be removed now to zero; training may change them again."""
        pruner, network = self.networks.pruner, self.networks.dense
        keep = pruner.selector.choose(self._ranked(network)).masks
        Subject(network, pruner.graph, ()).empty(keep)

    def _ranked(self, network: nn.Module) -> Scores:
        """Return the scores that the recipe's method gives a network now, computed on rank 0 for all ranks."""
        name = self.recipe.method
        images = first_images(self.feed.train.epoch(self.done), METHODS[name].images)
        return self.team.run_on_rank0(partial(ranked, name, self._subject(network, images)))

    def _subject(self, network: nn.Module, images: Sequence[Batch]) -> Subject:
        pruner = self.networks.pruner
        return Subject(network, pruner.graph, images, self.recipe.seed, pruner.selector)

    def _keep_scored(self) -> None:
        """Save the dense network and its scores after the last cycle, for `sbf frontier`.

        Fine-tuning changes these weights if it trains the gated network.
        """
        if self.done == cycles_end(self.recipe):
            save_checkpoint(self.folder.checkpoints, self.networks.scored(), SCORED)

    def _set_teacher(self, weights: dict[str, Any]) -> None:
        network = self.networks.bare_copy()
        network.load_state_dict(weights)
        distill = self.recipe.distill
        self.teacher = Teacher(network, distill.alpha, distill.temperature, mirrored=distill.mirrored)

    def _save(self, trainer: WeightTrainer | None, *, closed: bool, begun: EpochProgress = EPOCH_START) -> None:
        """Write a checkpoint; if `closed` is false, only if saving takes a small part of the run's time."""
        now = time.perf_counter()
        if not closed and self.saving > SAVING_SHARE * (now - self.saved):
            return
        state = {
            "recipe": self.recipe.to_dict(),
            "images": self.counts,
            "done": self.done,
            "begun": asdict(begun),
            "seconds": self._seconds(),
            "given_accuracy": self.given_accuracy,
            "warmup_accuracy": self.warmup_accuracy,
            "dense_from": self.dense_from,
            **({"optimizer": None, "average": None} if trainer is None else trainer.state()),
            "networks": self.networks.state(),
        }
        save_checkpoint(self.folder.checkpoints, state)
        self.saved = time.perf_counter()
        self.saving = self.saved - now

    def _summary(self, small: nn.Module) -> dict[str, Any]:
        before = {"given_accuracy": self.given_accuracy, "warmup_accuracy": self.warmup_accuracy}
        return {
            "format": RUN_FORMAT,
            **summarize(self.recipe, self.networks, small, self.feed.images, self._judged, before),
            "data": self.told,
            "images": self.counts,
            **self.recording.finish(small),
            **({} if self.dense_from is None else {"dense_from": self.dense_from}),
            **({} if self.team.alone else {"processes": self.team.size}),
            "seconds": round(self._seconds(), 1),
            **self.machine.told(),
            "environment": environment(self.machine.device),
        }

    def _judged(self, network: nn.Module) -> dict[str, float | None]:
        """Return the accuracy on the test split and, if there is one, on the validation split."""
        engine = make_engine(network, self.machine, team=DistributedContext())  # Only rank 0 runs this.
        test, held_out = evaluate_splits(engine, self.feed)
        return {"accuracy": test.accuracy, "validation_accuracy": held_out.accuracy if held_out else None}

    def _engine(self, network: nn.Module, pruner: Pruner | None = None) -> Engine:
        """Return the engine of a network; consecutive phases of a network share it and its compiled steps."""
        key = id(network), pruner is not None
        if key not in self.engines:
            self._forget_engines()
            self.engines[key] = make_engine(network, self.machine, pruner, self.team)
        return self.engines[key]

    def _forget_engines(self) -> None:
        if self.engines:
            self.engines.clear()
            if self.machine.captured:
                gc.collect()  # Engines are in reference cycles, and their CUDA graphs hold device memory.

    def _seconds(self) -> float:
        return self.spent + time.perf_counter() - self.started


_DEFAULTS: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


class Signals:
    """Handle SIGINT and SIGTERM: inside `deferred()` the first one is stored, elsewhere it raises `Stopped`.

    Terminals send SIGINT; schedulers send SIGTERM and some 30 seconds later SIGKILL. A second signal ends the
    process at once, because the first one restores the default handlers. Only default handlers are replaced (not a
    user's own, nor an ignored SIGINT), and only in the main thread.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._deferred = False
        self._replaced: list[int] = []

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            self._replaced = [n for n, default in _DEFAULTS.items() if signal.getsignal(n) is default]
            for number in self._replaced:
                signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore_defaults()

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Context in which a signal is only stored in `received`."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    def _handle(self, number: int, frame: Any) -> None:
        self._restore_defaults()
        self.received = number
        if not self._deferred:
            raise Stopped(number)

    def _restore_defaults(self) -> None:
        for number in self._replaced:
            signal.signal(number, _DEFAULTS[number])
        self._replaced = []


def init_distributed() -> DistributedContext:
    """Return the context of all processes; initialize the process group if torchrun started several of them."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        on_gpus = torch.cuda.is_available()
        if on_gpus:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpus else "gloo")
        atexit.register(_destroy_process_group)
    return DistributedContext.present()


def _destroy_process_group() -> None:
    gc.collect()  # Frees CUDA graphs with captured collectives, which the group would wait for.
    dist.destroy_process_group()


def check_divisible(recipe: Recipe, images: int, team: DistributedContext) -> None:
    """Raise a RunError if a run cannot be divided among the processes of `team`."""
    if team.alone:
        return
    if recipe.budget.latency != 1:
        remedy = "set macs or params, or run without torchrun"
        raise RunError(f"budget.latency: latency is measured in one process, but {team.size} are running; {remedy}")
    for phase in phases(recipe):
        if (size := min(images, batch_size(recipe, phase))) % team.size:
            remedy = f"make it a multiple of {team.size}"
            raise RunError(
                f"data.batch_size: a batch of {size} images cannot be shared by {team.size} processes; {remedy}"
            )


@contextmanager
def rank_folder(
    team: DistributedContext, folder: RunFolder, check: Callable[[], None], *, resume: bool
) -> Iterator[RunFolder]:
    """Yield the folder that this process writes to, after rank 0 has passed `check`.

    Rank 0 gets `folder`. Every other rank gets a temporary one, which is deleted on exit; if `resume` is true, it
    starts with a copy of the run's files.
    """

    def checked_files() -> dict[str, bytes]:
        """Call `check`, then return the contents of the files that are needed to resume or read a run, by path."""
        check()
        names = ("*.toml", "*.json", "*.jsonl", "*.safetensors", "checkpoints/*.safetensors")
        files = [file for name in names for file in folder.path.glob(name) if resume and not team.alone]
        return {str(file.relative_to(folder.path)): file.read_bytes() for file in files}

    files = team.run_on_rank0(checked_files)
    if team.leads:
        yield folder
        return
    with TemporaryDirectory() as path:
        for name, content in files.items():
            (Path(path) / name).parent.mkdir(parents=True, exist_ok=True)
            (Path(path) / name).write_bytes(content)
        yield RunFolder(Path(path))
