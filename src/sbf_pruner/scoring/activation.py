"""From logits to scores.

Logits enter, one number per filter; positive scores leave.  What holds: a logit of 0 is a score of exactly 1,
so a network whose scores were just attached computes what it did before; the gradient is finite for every
finite logit and never zero at the start.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def leaky_exponential(x: Tensor, leak: float = 0.1) -> Tensor:
    """The paper's activation (Eq. 3): `exp(x)` below zero and `1 + leak * x` above it.

    The two branches meet at 0 with slopes 1 and `leak`.  The slope used there is that of the exponential, 1:
    every logit starts at 0, and so the first step can go either way even with `leak=0`.

    >>> leaky_exponential(torch.tensor([0.0, 10.0]))
    tensor([1., 2.])
    """
    # `where` differentiates the branch not taken, too, and 0 * inf is nan: exp must not overflow there.
    return torch.where(x > 0, 1 + leak * x, x.clamp(max=0).exp())


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
