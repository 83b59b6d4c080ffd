"""Records of a run into TensorBoard's own files, where that is installed and asked for.

A run folder enters; a function leaves to call with the record of every epoch.  Scalars and the histogram of
every layer's scores go to RUN/tensorboard; a resumed run goes on after its last epoch, and what is run again
takes the place of what was there.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import PruningError
from ..phases import SCORED

FOLDER = "tensorboard"
_SCALARS = {
    "loss": "loss",
    "penalty": "penalty",
    "train_accuracy": "accuracy/training",
    "validation_accuracy": "accuracy/validation",
    "test_accuracy": "accuracy/test",
    "lr": "learning rate",
    "filters": "size/filters",
    "params": "size/parameters",
    "macs": "size/MACs",
}


def require_tensorboard() -> Any:
    """What writes TensorBoard's files; a sentence with the remedy where it is not installed."""
    try:
        return importlib.import_module("torch.utils.tensorboard").SummaryWriter
    except ImportError:
        raise PruningError('--tensorboard needs tensorboard; pip install "sbf-pruner[tensorboard]"') from None


@contextmanager
def tensorboard_log(folder: Path) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A function that writes the record of an epoch."""
    make = require_tensorboard()
    log: Any = None

    def write(record: dict[str, Any]) -> None:
        nonlocal log
        if log is None:  # only now: a folder with files in it would be refused when the run begins
            log = make(folder / FOLDER, purge_step=record["done"])
        control = "control/" if record["phase"] == "control" else ""
        for key, name in _SCALARS.items():
            if record.get(key) is not None:
                log.add_scalar(control + name, record[key], record["done"])
        if record["phase"] in SCORED:
            for name, scores in _last_scores(folder, record["done"]).items():
                log.add_histogram(f"scores/{name}", np.asarray(scores), record["done"])

    try:
        yield write
    finally:
        if log is not None:
            log.close()


def _last_scores(folder: Path, done: int) -> dict[str, list[float]]:
    lines = (folder / "scores.jsonl").read_text("utf-8").splitlines()
    last = json.loads(lines[-1]) if lines else {}
    return dict(last["scores"]) if last.get("done") == done else {}
