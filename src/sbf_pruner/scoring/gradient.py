"""The gradient of the scores, made safe for a step of Adam.

It is averaged over all processes and divided by the factor of a gradient scaler.  A batch whose gradient is not
finite, or so large that its square overflows, is skipped: Adam's second moment would stay infinite, and no score
would ever move again.
"""

from __future__ import annotations

import logging
import math

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
        # A gradient of the scores is multiplied by weights before Adam squares it.
        self.largest = math.sqrt(torch.finfo(scores.dtype).max) / 1000
        self.lost = torch.zeros((), dtype=torch.int64, device=scores.device)  # steps, in the phase under way
        self.taken = False  # in that phase, at least once

    def take(self, scaler: torch.amp.GradScaler | None = None) -> Tensor:
        """Take the gradient off the scores; zeros if a part of it is not finite or too large to be squared."""
        found = self.scores.grad
        if found is None:
            raise PruningError("step() found no gradient; call loss.backward() with pruner.penalty() in the loss")
        Team.present().average([found])
        if scaler is not None:
            scaler.unscale_(torch.optim.SGD([self.scores]))  # it looks only at what an optimiser holds
        # No host synchronisation, so this is safe inside a CUDA graph.
        usable = (found.abs() <= self.largest).all()
        # A scaler that seeks its factor makes gradients that are not finite, and handles them.
        lost = ~usable if scaler is None else ~usable & found.isfinite().all()
        found.masked_fill_(~usable, 0)
        self.lost += lost
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
            _log.warning(
                "%d of the steps of this score phase moved no score, because the gradient of the scores was not "
                "finite or above %.0e; look for the cause in the loss, or lower the penalty",
                lost,
                self.largest,
            )
        self.lost.zero_()
        self.taken = False
