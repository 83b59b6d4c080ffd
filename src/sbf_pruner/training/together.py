"""A run by several processes, which torchrun has started: each trains on its part of every batch, one writes.

A team enters; a folder for each process leaves.  What holds: the first process works in the run's own folder, and
every other one keeps the same books in a folder of its own, which begins with what the first has and is thrown
away in the end.  So all of them take the same way through a run, and only one of them leaves anything.
"""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..copies import real_copy
from ..errors import RunError
from ..team import Team
from .folder import RunFolder
from .recipe import Recipe
from .schedule import batch_size, phases


def join() -> Team:
    """All processes of this run, found by what torchrun has written in the environment."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        on_gpus = torch.cuda.is_available()
        if on_gpus:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpus else "gloo")
        atexit.register(_leave)
    return Team.present()


def _leave() -> None:
    gc.collect()  # first the graphs that hold messages: the group waits for them
    dist.destroy_process_group()


def check_shared(recipe: Recipe, images: int, team: Team) -> None:
    """Raise a RunError where a run cannot be shared among all processes."""
    if team.alone:
        return
    if recipe.budget.latency != 1:
        raise RunError(
            f"budget.latency: a time is measured by one process, and here are {team.size}; ask for macs or params, "
            "or leave torchrun out"
        )
    for size in dict.fromkeys(min(images, batch_size(recipe, phase)) for phase in phases(recipe)):
        if size % team.size:
            raise RunError(
                f"data.batch_size: a batch of {size} images cannot be shared by {team.size} processes; "
                f"make it a multiple of {team.size}"
            )


def same_weights(model: nn.Module, team: Team) -> nn.Module:
    """The model with the weights that the first process has; a copy, where there are other processes."""
    if not team.alone:
        model = real_copy(model)
        team.follow([held for held in model.state_dict().values() if isinstance(held, Tensor)])
    return model


@contextmanager
def books(team: Team, folder: RunFolder, check: Callable[[], None], *, resume: bool) -> Iterator[RunFolder]:
    """The folder this process writes to, once the first one has found that the run may begin or go on."""

    def found() -> dict[str, bytes]:
        check()
        return _files(folder.path) if resume and not team.alone else {}

    held = team.from_first(found)
    if team.leads:
        yield folder
        return
    with TemporaryDirectory() as path:
        for name, content in held.items():
            (Path(path) / name).parent.mkdir(parents=True, exist_ok=True)
            (Path(path) / name).write_bytes(content)
        yield RunFolder(Path(path))


def _files(path: Path) -> dict[str, bytes]:
    """What a run needs to go on, or to be read when it is finished."""
    names: Sequence[str] = ("*.toml", "*.json", "*.jsonl", "*.safetensors", "checkpoints/*.safetensors")
    return {str(file.relative_to(path)): file.read_bytes() for name in names for file in path.glob(name)}
