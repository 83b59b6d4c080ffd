"""Modeled on GAL: soft masks driven to zero against a discriminator (Lin et al., 2019).

Each filter has a mask, a factor that starts at 1; the weights are frozen. A discriminator learns to distinguish the
outputs of the masked network from those without masks. The masks are trained to deceive it and to reproduce the
outputs, under a growing penalty on their sum, by accelerated proximal steps (FISTA: Beck and Teboulle, 2009). The
score of a filter is the mean of its mask over all steps. No labels are used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..errors import PruningError
from ..utils.user_model import call
from .subject import Scores, Subject

_STEPS = 100
# Penalty per mean mask in the first and in the last step; outputs without any information have a loss of 1/2
_PENALTY = (0.3, 10.0)
_TRIALS = 30  # step lengths to try, each half of the previous one
_LONGER = 0.9  # factor on the curvature assumed for the next step, as the loss may be flatter there
_ROUNDING = 1e-6
_HIDDEN = (128, 256, 128)  # layer widths of the discriminator
_RATE = 1e-3  # learning rate of the discriminator
_WIDEST = 4096  # largest number of outputs per sample that the discriminator reads


def mask_persistence(subject: Subject) -> Scores:
    """Score filters by the mean of their mask over all steps: the sooner it is zero, the lower the score."""
    if not subject.batches:
        return {}
    masked = _Masked(subject)
    adversary = _Discriminator(masked.rows[0], subject.seed)
    optimizer = Fista(masked.rows[0].new_ones(sum(layer.filters for layer in subject.graph.layers.values())))
    total = torch.zeros_like(optimizer.values)
    first, last = _PENALTY
    for step in range(_STEPS):
        batch = step % len(masked.rows)

        def loss(masks: Tensor, batch: int = batch) -> Tensor:
            fake = masked(batch, masks)
            return (fake - masked.rows[batch]).square().mean() / 2 + F.softplus(-adversary(fake)).mean()

        optimizer.step(loss, first * (last / first) ** (step / (_STEPS - 1)) / len(total))
        adversary.learn(masked.rows[batch], masked.latest)
        total += optimizer.values
    return {name: values.cpu().numpy() for name, values in masked.split(total / _STEPS).items()}


class Fista:
    """Accelerated proximal gradient steps (FISTA) for nonnegative values, under a penalty on their sum.

    The step length is found by backtracking: the loss must not exceed the parabola that the step minimizes.

    >>> target, optimizer = torch.tensor([1.0, 0.5, 0.1]), Fista(torch.ones(3))
    >>> for _ in range(20):
    ...     optimizer.step(lambda values: (values - target).square().sum() / 2, penalty=0.2)
    >>> optimizer.values
    tensor([0.8000, 0.3000, 0.0000])
    """

    def __init__(self, start: Tensor) -> None:
        self.values, self.ahead = start, start
        self.momentum, self.curvature = 1.0, 1.0 / len(start)

    def step(self, loss: Callable[[Tensor], Tensor], penalty: float) -> None:
        """Take one step; the last evaluation of `loss` is at the new values."""
        with torch.enable_grad():
            ahead = self.ahead.detach().requires_grad_()
            here = loss(ahead)
            slope = torch.autograd.grad(here, ahead)[0]
        with torch.no_grad():
            for _ in range(_TRIALS):
                moved = (ahead - (slope + penalty) / self.curvature).clamp_min(0)
                change = moved - ahead
                parabola = here + slope @ change + self.curvature / 2 * change @ change
                if loss(moved) <= parabola + _ROUNDING * here.abs():
                    break
                self.curvature *= 2
            if (ahead - moved) @ (moved - self.values) > 0:  # The step reverses direction, so restart the momentum.
                self.momentum = 1.0
            before, self.momentum = self.momentum, (1 + math.sqrt(1 + 4 * self.momentum**2)) / 2
            self.ahead = moved + (before - 1) / self.momentum * (moved - self.values)
            self.values = moved
            self.curvature *= _LONGER


class _Masked:
    """The network with its filters multiplied by masks; `rows` holds its normalized outputs without masks."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        with torch.no_grad():
            rows = [_row(call(subject.model, images), len(labels)) for images, labels in subject.batches]
        self.mean = torch.cat(rows).mean(0)
        spread = (torch.cat(rows) - self.mean).square().mean().sqrt()
        if not spread.isfinite():
            raise PruningError("the network's outputs contain NaN or infinity")
        self.unit = torch.where(spread > 0, spread, 1.0)  # Makes losses comparable between networks.
        self.rows = [(row - self.mean) / self.unit for row in rows]
        self.latest = self.rows[0]

    def __call__(self, batch: int, masks: Tensor) -> Tensor:
        images, labels = self.subject.batches[batch]
        parts = self.split(masks)

        def gate(name: str, output: Tensor) -> Tensor:
            dim = self.subject.graph.layers[name].site.dim
            return output * parts[name].to(output.dtype).view(-1, *[1] * (output.dim() - 1 - dim % output.dim()))

        with self.subject.watched(gate):
            row = (_row(call(self.subject.model, images), len(labels)) - self.mean) / self.unit
        self.latest = row.detach()
        return row

    def split(self, masks: Tensor) -> dict[str, Tensor]:
        layers = self.subject.graph.layers
        return dict(zip(layers, masks.split([layer.filters for layer in layers.values()]), strict=True))


class _Discriminator:
    """Distinguishes outputs of the network without masks (logits above 0) from those with masks."""

    def __init__(self, rows: Tensor, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)  # Drawn on the CPU, so that it is the same on every device.
        self.parameters: list[Tensor] = []
        for inputs, outputs in zip((rows.shape[1], *_HIDDEN), (*_HIDDEN, 1), strict=True):
            weight = torch.randn(inputs, outputs, generator=random) * math.sqrt(2 / inputs)
            self.parameters += [weight.to(rows).requires_grad_(), rows.new_zeros(outputs).requires_grad_()]
        self.optimizer = torch.optim.Adam(self.parameters, _RATE)

    def __call__(self, rows: Tensor) -> Tensor:
        *hidden, last = zip(self.parameters[::2], self.parameters[1::2], strict=True)
        for weight, bias in hidden:
            rows = (rows @ weight + bias).relu()
        return (rows @ last[0] + last[1])[:, 0]

    def learn(self, real: Tensor, fake: Tensor) -> None:
        """Take one training step.

        The last term of the loss, which labels fake outputs as real, prevents early perfect discrimination.
        """
        with torch.enable_grad():
            loss = F.softplus(-self(real)) + F.softplus(self(fake)) + F.softplus(-self(fake))
        for parameter, slope in zip(
            self.parameters, torch.autograd.grad(loss.mean(), self.parameters), strict=True
        ):
            parameter.grad = slope
        self.optimizer.step()


def _row(outputs: Any, samples: int) -> Tensor:
    """Flatten the floating-point outputs of a network to one row of numbers per sample.

    Rows longer than `_WIDEST` are reduced by average pooling.
    """
    tensors = [x for x in tree_leaves(outputs) if isinstance(x, Tensor) and x.is_floating_point() and x.dim()]
    rows = [x.reshape(samples, -1) for x in tensors if len(x) == samples]
    if not rows:
        raise PruningError("the network has no floating-point output with one row per sample")
    row = torch.cat([x.to(torch.promote_types(x.dtype, torch.float32)) for x in rows], 1)
    return row if row.shape[1] <= _WIDEST else F.adaptive_avg_pool1d(row, _WIDEST)
