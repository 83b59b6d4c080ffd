"""Methods that judge a filter by the maps it gives for some images.

A `Subject` enters; a score for each filter leaves, as the mean over images.  Maps are taken behind the norm, with
what is below zero cut off as the activation that follows does.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from .subject import Scores, Subject, pieces

_STEP = 0.4  # of the integral below, in the logarithm: its error falls as exp(-pi^2 / step), whatever the values
_POINTS = np.arange(-24, 10, _STEP)


def rank(subject: Subject) -> Scores:
    """The rank of a filter's map as a matrix (HRank: Lin et al., 2020)."""

    def ranks(maps: Tensor) -> Tensor:
        wide = torch.promote_types(maps.dtype, torch.float32)  # half precision cannot be taken apart
        if maps.dim() < 4:
            maps = maps.flatten(2).unsqueeze(2) if maps.dim() == 3 else maps[:, :, None, None]
        return torch.linalg.matrix_rank(maps.flatten(3).to(wide)).double()

    return _mean(subject, ranks)


def independence(subject: Subject) -> Scores:
    """How much of the nuclear norm of all of a layer's maps goes with a filter's (CHIP: Sui et al., 2021)."""

    return _mean(subject, lambda maps: lost_without(maps.reshape(*maps.shape[:2], -1).double()))


def lost_without(rows: Tensor) -> Tensor:
    """The nuclear norm of each matrix of a batch, less that of the matrix without each of its rows.

    Taken literally that is a decomposition for every row.  But a row less is a term of rank one less in the product
    of columns, and what that takes from the sum of the roots of its eigenvalues is known: with `l` the eigenvalues
    and `p` the part of the row in each eigenvector of the product of rows, it is

        -1/pi * integral over u from 0 to infinity of log(1 - sum of p l / (l + u^2))

    so one decomposition and a product of matrices do for all rows.  Squares are taken apart: what is lost is known
    to some 1e-8 of the largest singular value, which is what maps in single precision hold.

    >>> lost_without(torch.tensor([[[3.0, 0.0], [0.0, 4.0]]], dtype=torch.float64)).round(decimals=4)
    tensor([[3., 4.]], dtype=torch.float64)
    """
    scale = rows.abs().amax((1, 2), keepdim=True)
    scale = torch.where(scale > 0, scale, 1.0)  # squares must neither overflow nor vanish
    rows = rows / scale
    wide = rows.shape[1] <= rows.shape[2]
    values, vectors = torch.linalg.eigh(rows @ rows.mT if wide else rows.mT @ rows)  # the smaller of both products
    tiny, eps = torch.finfo(rows.dtype).tiny, torch.finfo(rows.dtype).eps
    # What rounding has left of a zero would count as its root.
    spanned = values > values.amax(1, keepdim=True) * values.shape[1] * eps
    values = values * spanned
    parts = vectors.square() if wide else (rows @ vectors).square() / values[:, None].clamp_min(tiny)
    parts = parts * spanned[:, None]
    outside = (1 - parts.sum(2)).clamp_min(0)  # of a row's own direction
    points = torch.from_numpy(_POINTS).to(rows).exp()
    size = values.mean(1)[:, None].sqrt()
    size = torch.where(size > 0, size, 1.0)
    passed = points.square() / ((values / size.square())[:, :, None] + points.square())
    # 1 less a sum that may come near to it, written as the sum of what is left.
    left = (outside[:, :, None] + parts @ passed).clamp(tiny, 1)
    # Behind the last point it falls as 1 / u, and so do the steps to come.
    beyond = (rows.square().sum(2) / size.square()) / points[-1] / math.expm1(_STEP)
    return (-left.log() @ points + beyond) * _STEP * size * scale[:, 0] / torch.pi


def _mean(subject: Subject, judge: Callable[[Tensor], Tensor]) -> Scores:
    """The mean of a judgement over images and calls."""
    sums: dict[str, Tensor] = {}
    seen: dict[str, int] = defaultdict(int)

    def see(name: str, given: Tensor) -> None:
        for maps in pieces(subject.upright(name, given), given[0].numel()):
            sums[name] = sums.get(name, 0) + judge(maps.clamp_min(0)).sum(0)
        seen[name] += len(given)

    with subject.watched(see):
        subject.look()
    return {name: (total / seen[name]).cpu().numpy() for name, total in sums.items()}
