"""Criteria that score a filter by its feature maps: HRank and CHIP.

Scores are means over images. Feature maps are taken after the norm, and negative values are set to zero as by the
ReLU that follows.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from .subject import Scores, Subject, chunks

_STEP = 0.4  # integration step in log u, in `lost_without`; the error is about exp(-pi^2 / step) for all values
_POINTS = np.arange(-24, 10, _STEP)


def rank(subject: Subject) -> Scores:
    """Score filters by the rank of their feature map as a matrix (HRank: Lin et al., 2020)."""

    def ranks(maps: Tensor) -> Tensor:
        wide = torch.promote_types(maps.dtype, torch.float32)  # The decomposition does not support half precision.
        if maps.dim() < 4:
            maps = maps.flatten(2).unsqueeze(2) if maps.dim() == 3 else maps[:, :, None, None]
        return torch.linalg.matrix_rank(maps.flatten(3).to(wide)).double()

    return _mean(subject, ranks)


def independence(subject: Subject) -> Scores:
    """Score filters by the decrease of the nuclear norm of a layer's maps without them (CHIP: Sui et al. 2021)."""
    return _mean(subject, lambda maps: lost_without(maps.reshape(*maps.shape[:2], -1).double()))


def lost_without(rows: Tensor) -> Tensor:
    """Return the nuclear norm of each matrix of a batch, minus that of the matrix without each of its rows.

    Computed literally, this takes one decomposition per row. But removing a row subtracts a rank-one term from the
    Gram matrix of the columns, and the change in the sum of the square roots of its eigenvalues is known: with `l`
    the eigenvalues and `p` the squared component of the row in each eigenvector of the Gram matrix of the rows, it
    is

        -1/pi * integral over u from 0 to infinity of log(1 - sum of p l / (l + u^2))

    so one decomposition and a matrix product suffice for all rows. Because eigenvalues are squared singular values,
    the result is exact to about 1e-8 of the largest singular value, which is the precision of maps in float32.

    >>> lost_without(torch.tensor([[[3.0, 0.0], [0.0, 4.0]]], dtype=torch.float64)).round(decimals=4)
    tensor([[3., 4.]], dtype=torch.float64)
    """
    scale = rows.abs().amax((1, 2), keepdim=True)
    scale = torch.where(scale > 0, scale, 1.0)  # Squares must neither overflow nor underflow.
    rows = rows / scale
    wide = rows.shape[1] <= rows.shape[2]
    # The smaller of the two Gram matrices.
    values, vectors = torch.linalg.eigh(rows @ rows.mT if wide else rows.mT @ rows)
    tiny, eps = torch.finfo(rows.dtype).tiny, torch.finfo(rows.dtype).eps
    # A zero eigenvalue that is positive by rounding would contribute its square root.
    spanned = values > values.amax(1, keepdim=True) * values.shape[1] * eps
    values = values * spanned
    parts = vectors.square() if wide else (rows @ vectors).square() / values[:, None].clamp_min(tiny)
    parts = parts * spanned[:, None]
    outside = (1 - parts.sum(2)).clamp_min(0)  # part of the row's unit vector outside the span of the eigenvectors
    points = torch.from_numpy(_POINTS).to(rows).exp()
    size = values.mean(1)[:, None].sqrt()
    size = torch.where(size > 0, size, 1.0)
    passed = points.square() / ((values / size.square())[:, :, None] + points.square())
    # 1 minus a sum that may be close to 1, computed without cancellation as a sum of remainders.
    left = (outside[:, :, None] + parts @ passed).clamp(tiny, 1)
    # Beyond the last point the integrand falls as 1 / u, so the remaining steps are a geometric series.
    beyond = (rows.square().sum(2) / size.square()) / points[-1] / math.expm1(_STEP)
    return (-left.log() @ points + beyond) * _STEP * size * scale[:, 0] / torch.pi


def _mean(subject: Subject, score: Callable[[Tensor], Tensor]) -> Scores:
    """Return the mean of a score over images and calls."""
    sums: dict[str, Tensor] = {}
    seen: dict[str, int] = defaultdict(int)

    def see(name: str, output: Tensor) -> None:
        for maps in chunks(subject.filters_second(name, output), output[0].numel()):
            sums[name] = sums.get(name, 0) + score(maps.clamp_min(0)).sum(0)
        seen[name] += len(output)

    with subject.watched(see):
        subject.look()
    return {name: (total / seen[name]).cpu().numpy() for name, total in sums.items()}
