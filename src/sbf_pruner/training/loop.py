"""The whole schedule: a dense network in, a trained, smaller one and a run folder out.

What holds: everything is checked before the first file is written; the model of the caller, the random streams and
torch's settings stay as they were; a run that has come to its end is read, not trained again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from ..copies import real_copy
from ..errors import RunError
from ..export import load
from ..inputs import check_model
from ..plan import Plan
from .data import Data, load_data, own_data
from .dense_stage import read_dense_stage
from .folder import RunFolder
from .machine import choose_machine, cpu_threads, own_arithmetic
from .recipe import Recipe, load_recipe
from .run import Report, Run
from .signals import Signals
from .together import books, check_shared, join, same_weights

log = logging.getLogger(__name__)


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
    """Train, score, prune and fine-tune a copy of `model` as `recipe` says; `model` itself is untouched.

    A recipe may be given by its name, or as the path of its .toml file.  It says where the images are, unless
    `data` holds them: datasets of (image, label) pairs, `{"train": ..., "test": ...}` and "val" if there is one.
    A function that `data.name` of the recipe names is imported only with `trust`: give it for a recipe of your own.

    `report` is called after every epoch with the record that `metrics.jsonl` gets.  The run's folder is `run`
    or runs/NAME-seedN; one that exists is refused unless the run is to go on (`resume`) or over (`force`).
    With `dense_from` the warm-up of another run, of the same network, data and seed, is taken over.

    Called by every process that torchrun has started, it shares each batch among them; the first one writes the
    folder and calls `report`.

    SIGINT (Ctrl-C) and SIGTERM stop a run after its present step, with a checkpoint that `resume` goes on from, and
    raise `errors.Stopped`, a KeyboardInterrupt; a second one ends the process at once.  Several processes stop at
    the end of the epoch.

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
    _check_kinds(model, recipe, data)
    recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    team, asked = join(), RunFolder.of(recipe, run)
    check = partial(asked.check, recipe, resume=resume, force=force)
    with Signals() as signals, books(team, asked, check, resume=resume) as folder:
        if resume and folder.finished:
            small = load(folder.path, lambda: real_copy(model))
            return Result(small, Plan.load(folder.path / "plan.json"), folder.read_summary(), asked.path, True)
        goes_on = resume and folder.has_checkpoint()
        if resume and not goes_on:
            log.info("the run in %s has no checkpoint yet, and begins again", asked.path)
        stage = None
        if dense_from is not None and not goes_on:
            stage = team.from_first(partial(read_dense_stage, dense_from, recipe))
        machine = choose_machine(recipe.device, recipe.engine, recipe.precision)
        device = machine.device
        streams = torch.random.fork_rng([device] if device.type == "cuda" else [])  # the caller's stay the caller's
        with streams, cpu_threads(recipe.threads), own_arithmetic():
            classes = recipe.model.num_classes
            if isinstance(data, Mapping):
                data = own_data(data, recipe.data, classes, recipe.seed)
            others = () if dense_from is None else (Path(dense_from),)
            origin = asked.origin(*others, trust=trust, resume=resume)
            data = data or load_data(recipe.data, classes, recipe.seed, origin)
            check_shared(recipe, len(data.train), team)
            told = report if team.leads else None
            ahead = Run(same_weights(model, team), recipe, data, machine, folder, told, goes_on, team, signals)
            with folder.taken():
                # Until here anyone could: what was true of the folder when the run was prepared may be so no more.
                folder.check(recipe, resume=resume, force=force)
                if resume and (folder.finished or goes_on != folder.has_checkpoint()):
                    raise RunError(
                        f"another process went on with the run in {folder.path} meanwhile; resume it again"
                    )
                if goes_on:
                    ahead.restore()
                else:
                    ahead.begin(stage, again=resume)
                small, summary = ahead.go()
            return Result(small, ahead.networks.plan, summary, asked.path)


def _check_kinds(model: object, recipe: object, data: object) -> None:
    """Refuse arguments that are not what they should be."""
    check_model(model)
    if not isinstance(recipe, (Recipe, str, Path)):
        raise RunError(f"recipe is of type {type(recipe).__name__}; give a name, a .toml file or an sbf.Recipe")
    if data is not None and not isinstance(data, (Data, Mapping)):
        raise RunError(f"data is of type {type(data).__name__}; give {{'train': dataset, 'test': dataset}}")
