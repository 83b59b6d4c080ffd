"""Callback for Lightning's `Trainer` that alternates between training scores and weights.

Its state is part of the trainer's checkpoints, so training resumes in the right phase. Lightning is imported only
when a callback is made.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from ..errors import PruningError
from . import Turns


def pruning_callback(turns: Turns) -> Any:
    """Return a Lightning callback that drives `turns`; raises a PruningError if Lightning is not installed."""

    class PruningCallback(_base()):  # type: ignore[misc]
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            if getattr(trainer.precision_plugin, "scaler", None) is not None:
                raise PruningError(
                    "gradient scaling (16-mixed) does not work in score epochs, in which weights have no "
                    'gradients; give the trainer precision="bf16-mixed"'
                )

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            turns.epoch_begins(trainer.current_epoch)

        def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
            turns.after_backward()

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            turns.end()

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            turns.abort()

        def state_dict(self) -> dict[str, Any]:
            return turns.state_dict()

        def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
            turns.load_state_dict(state_dict)

    return PruningCallback()


def _base() -> type:
    for name in ("lightning.pytorch", "pytorch_lightning"):  # The same library is published under two names.
        try:
            found: type = importlib.import_module(name).Callback
        except ModuleNotFoundError:
            continue
        return found
    raise PruningError("Lightning is not installed; run: pip install lightning")
