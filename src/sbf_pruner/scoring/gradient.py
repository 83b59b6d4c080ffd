"""The gradient that a backward pass left on the scores, made fit for a step.

It enters as it lies on the scores; it leaves averaged over all processes, without the factor of a gradient scaler,
and finite.  What holds: a batch whose loss is not a number moves no score by itself, while in Adam's moments it
would stay for good, and no filter would ever have a score again.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from ..errors import PruningError
from ..team import Team

_STILL = 0.1  # scores begin at 1; as long as all are this near to it, they tell little of which filter matters

_log = logging.getLogger("sbf_pruner")


class Gradient:
    """What backward passes leave on `scores`."""

    def __init__(self, scores: Tensor) -> None:
        self.scores = scores
        self.lost = torch.zeros((), dtype=torch.int64, device=scores.device)  # steps, in the phase under way
        self.taken = False  # in that phase, at least once

    def take(self, scaler: torch.amp.GradScaler | None = None) -> Tensor:
        """The gradient, which is gone from the scores then; all zeros where a part of it is not finite."""
        found = self.scores.grad
        if found is None:
            raise PruningError("step() found no gradient; call loss.backward() with pruner.penalty() in the loss")
        Team.present().average([found])
        if scaler is not None:
            scaler.unscale_(torch.optim.SGD([self.scores]))  # it looks only at what an optimiser holds
        # Nobody waits for the answer, and a captured step can hold the question.
        broken = ~found.isfinite().all()
        found.masked_fill_(broken, 0)
        if scaler is None:  # to one that seeks its factor this is no news
            self.lost += broken
        self.scores.grad, self.taken = None, True
        return found

    def tell_if_still(self, scores: Tensor) -> None:
        """Say that a budget was met by scores that have hardly moved, if steps were made and they have not."""
        furthest = float((scores.detach() - 1).abs().max())
        if self.taken and furthest < _STILL:
            _log.warning(
                "the budget is met, but no score has moved further than %.2g from 1, so they tell little of which "
                "filters matter; give a speed (how far a logit moves in a step), about 3 / all score steps to come",
                furthest,
            )

    def tell(self) -> None:
        """Say how many steps were lost in a phase that ends, or that there was none."""
        if self.scores.grad is not None and not self.taken:
            _log.warning("no score moved in this score phase: step() was not called after backward()")
        if lost := int(self.lost):
            _log.warning("%d of the steps of this score phase counted for nothing: the loss was not finite", lost)
        self.lost.zero_()
        self.taken = False
