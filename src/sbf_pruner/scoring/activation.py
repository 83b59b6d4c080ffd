"""Activations that map logits to positive scores.

A logit of 0 gives a score of exactly 1, so attaching scores to a network does not change its output.  The gradient
is finite for every finite logit and non-zero at 0.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from ..errors import PruningError


def leaky_exponential(x: Tensor, leak: float = 0.1) -> Tensor:
    """The paper's activation (Eq. 3): `exp(x)` below zero and `1 + leak * x` above it.

    The two branches meet at 0 with slopes 1 and `leak`.  The slope used there is that of the exponential, 1:
    every logit starts at 0, and so the first step can go either way even with `leak=0`.

    >>> leaky_exponential(torch.tensor([0.0, 10.0]))
    tensor([1., 2.])
    """
    positive = x > 0
    # `where` differentiates the branch not taken as well, and 0 * inf is nan, so exp must not overflow there.  The
    # mask fixes the slope at 0; `clamp(max=0)` has a slope of 0 there since torch 2.14.
    return torch.where(positive, 1 + leak * x, x.masked_fill(positive, 0).exp())


@cache
def check_slope() -> None:
    """Raise a PruningError unless backward gives the leaky exponential a slope of 1 at 0; run once per process.

    Every logit starts at 0.  If a version of torch changes a subgradient there, no score moves, without any error.
    """
    with torch.inference_mode(False), torch.enable_grad():
        start = torch.zeros((), device="cpu", requires_grad=True)
        slope = torch.autograd.grad(leaky_exponential(start), start)[0].item()
    if slope != 1:
        raise PruningError(
            f"torch {torch.__version__} gives the activation of scores a slope of {slope:g} at 0 instead of 1, so "
            "no score would move; install a version of torch that sbf-pruner supports"
        )


def doubled_sigmoid(x: Tensor, leak: float = 0.0) -> Tensor:
    """A sigmoid that is 1 at 0, to compare with: it is flat on both sides, and never above 2.

    >>> doubled_sigmoid(torch.tensor([0.0]))
    tensor([1.])
    """
    return 2 * torch.sigmoid(x)


ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "leaky_exponential": leaky_exponential,
    "sigmoid": doubled_sigmoid,
}
