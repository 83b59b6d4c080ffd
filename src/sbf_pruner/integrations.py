"""Alternate between training scores and weights inside an external training loop.

The phase of an epoch follows from its number alone, so a loop that resumes from a checkpoint resumes in the right
phase. The loop's own optimizer may step in every epoch, because frozen parameters have no gradient and are skipped.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch.amp import GradScaler

from .errors import PruningError
from .pruner import Pruner
from .schedule import Phase, phases_of

_log = logging.getLogger("sbf_pruner")


class Turns:
    """Runs the phases of a pruner: a warm-up, cycles of score and weight epochs, then fine-tuning.

    >>> import torch
    >>> from torch import nn
    >>> from sbf_pruner import Scores
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    >>> images, optimizer = torch.rand(2, 3, 16, 16), torch.optim.SGD(net.parameters(), 0.01)
    >>> pruner = Pruner(net, images, scores=Scores(penalty=0.1, lr=0.1))
    >>> turns = Turns(pruner, warmup=1, cycles=1, score=1, weights=1)
    >>> for epoch in range(4):
    ...     _ = turns.epoch_begins(epoch)
    ...     optimizer.zero_grad()
    ...     net(images).square().mean().backward()
    ...     turns.after_backward()
    ...     optimizer.step()
    ...     print(turns.phase)
    warmup
    score 1
    weights 1
    finetune
    >>> turns.end()
    >>> small = turns.pruner.extract()
    """

    def __init__(self, pruner: Pruner, *, warmup: int, cycles: int, score: int = 1, weights: int = 2) -> None:
        if not isinstance(pruner, Pruner):
            raise PruningError(
                f"Turns takes an sbf.Pruner, not {type(pruner).__name__}; make one of the model first"
            )
        lengths = {"warmup": warmup, "cycles": cycles, "score": score, "weights": weights}
        for name, epochs in lengths.items():
            least = int(name in ("cycles", "score"))
            if epochs < least:
                raise PruningError(f"{name}: must be at least {least}, got {epochs}")
        self.pruner, self.cycles = pruner, cycles
        self._phases = phases_of({"phases": {**lengths, "finetune": 0}})
        self._epoch: int | None = None
        self._now: Phase | None = None
        self._open: AbstractContextManager[Pruner] | None = None

    @property
    def phase(self) -> str:
        """Name of the current phase, with the number of its cycle."""
        return "finetune" if self._now is None else str(self._now)

    @property
    def scores_now(self) -> bool:
        """True in a score phase, in which the scores are trained and the weights are frozen."""
        return self._now is not None and self._now.trains_scores

    def epoch_begins(self, epoch: int) -> str:
        """Enter the phase of an epoch, numbered from 0, and return its name. Call it at the start of the epoch.

        Raises a PruningError if the cycles are over and the budget is not met.
        """
        self._epoch = epoch
        now = next((p for p in self._phases if p.first <= epoch < p.end), None)
        if self._open is None or now != self._now:
            self._close()
            self._now = now
            self._check_budget()
            if self.scores_now:
                assert now is not None
                self.pruner.progress = now.cycle / self.cycles  # The budget tightens from cycle to cycle.
            self._open = self.pruner.scoring() if self.scores_now else self.pruner.gated()
            self._open.__enter__()
        return self.phase

    def after_backward(self, scaler: GradScaler | None = None) -> None:
        """Add the gradient of the penalty and update the scores, in a score phase. Call it after `loss.backward()`.

        `scaler` is the gradient scaler that scaled the loss, if any.
        """
        if self._epoch is None:
            raise PruningError("after_backward() was called outside an epoch; call epoch_begins(epoch) before it")
        if self.scores_now:
            penalty = self.pruner.penalty()
            (penalty if scaler is None else scaler.scale(penalty)).backward()
            self.pruner.step(scaler)

    def end(self) -> None:
        """End the current phase; a score phase then sets the gates. Call it at the end of training.

        Logs a warning if the budget is not met because training ended before the last cycle.
        """
        self._close()
        self._check_budget()
        if (missed := self.pruner.missed()) is not None:
            cycle = self._now.cycle if self._now is not None else 0
            where = f"in cycle {cycle} of {self.cycles}" if cycle else f"before the first of {self.cycles} cycles"
            _log.warning(
                "the training ended %s, before the budget is met: %s; train all epochs of the cycles, or call "
                "pruner.land() and train the weights before extract()",
                where,
                missed,
            )

    def abort(self) -> None:
        """Leave the phase without setting the gates, and unfreeze everything. Call it when training has failed."""
        if self._open is not None:
            phase, self._open = self._open, None
            error = RuntimeError("the training has failed")
            phase.__exit__(type(error), error, None)  # As if the exception had passed through the phase.

    def state_dict(self) -> dict[str, Any]:
        """Return everything needed to resume, even in the middle of a score phase."""
        return {"epoch": self._epoch, "pruner": self.pruner.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state from `state_dict`, and enter the phase it was saved in."""
        self._close()
        self.pruner.load_state_dict(state["pruner"])
        if state["epoch"] is not None:  # Reenter the phase: an unfinished score phase still has to set the gates.
            self.epoch_begins(state["epoch"])

    def _close(self) -> None:
        """Leave the current phase without an exception; a score phase sets the gates."""
        if self._open is not None:
            phase, self._open = self._open, None
            phase.__exit__(None, None, None)

    def _check_budget(self) -> None:
        """Raise a PruningError if the gates exceed the budget and no score phase follows to change them."""
        last = max(phase.end for phase in self._phases if phase.trains_scores)
        if self._epoch is None or self._epoch < last or (missed := self.pruner.missed()) is None:
            return
        raise PruningError(
            f"epoch {self._epoch} is past the last of {self.cycles} cycles, but {missed}; load the state_dict() of "
            "the Turns that ran the earlier epochs, or call pruner.land()"
        )


def pruning_callback(turns: Turns) -> Any:
    """Return a callback for Lightning's `Trainer` that calls the methods of `turns`.

    Its state is part of the trainer's checkpoints, so training resumes in the right phase. Raises a PruningError if
    Lightning, which is imported only here, is not installed.
    """

    class PruningCallback(_callback_class()):  # type: ignore[misc]
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


def _callback_class() -> type:
    for name in ("lightning.pytorch", "pytorch_lightning"):  # The same library is published under two names.
        try:
            found: type = importlib.import_module(name).Callback
        except ModuleNotFoundError:
            continue
        return found
    raise PruningError("Lightning is not installed; run: pip install lightning")
