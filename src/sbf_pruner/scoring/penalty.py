"""What a score costs: the weighted l1 norm of the scores (Eq. 5), and the balance between the layers.

The sizes of the layers' input maps enter, then the scores as one flat vector; a differentiable scalar
leaves.  What holds: under "area" two layers' weights stand in the ratio of the multiplications that each
of their parameters causes; the smallest map of the network has weight 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Literal, get_args

import torch
from torch import Tensor

from ..errors import PruningError, nearest

Balance = Literal["area", "side", "none", "cost"]


def balance_weights(kind: Balance, spatial: Sequence[tuple[int, ...]]) -> list[float]:
    """One weight per layer, from the spatial size of its input map relative to the smallest map.

    `area` compares numbers of pixels, `side` geometric-mean side lengths, `none` gives 1 to every layer.
    So does `cost`, for whoever weighs layers by what their filters cost to start from.
    A layer that sees no map (a linear layer, `()`) counts as one pixel, just as a convolution on a pooled
    1x1 map does; such layers weigh less than 1 and are left out of the search for the smallest map, or one
    of them would multiply the penalty of all the others.

    >>> balance_weights("area", [(32, 32), (16, 16), (8, 8), ()])
    [16.0, 4.0, 1.0, 0.015625]
    """
    if kind not in get_args(Balance):
        raise PruningError(f"no balance is called {kind!r}: {nearest(kind, get_args(Balance))}")
    if kind in ("none", "cost"):  # costs come from the channel graph, and change as filters go
        return [1.0] * len(spatial)
    sizes = [float(prod(size)) if kind == "area" or not size else prod(size) ** (1 / len(size)) for size in spatial]
    smallest = min((size for size in sizes if size > 1), default=1.0)
    return [size / smallest for size in sizes]


def per_filter(values: Sequence[float], filters: Sequence[int]) -> Tensor:
    """Each layer's value repeated for each of its filters: a flat vector that lines up with the scores.

    >>> per_filter([4.0, 1.0], [1, 2])
    tensor([4., 1., 1.])
    """
    return torch.tensor(values).repeat_interleave(torch.tensor(filters))


def weighted_l1(scores: Tensor, weights: Tensor, penalty: float | Tensor) -> Tensor:
    """`penalty * sum(weights * |scores|)`; a tensor as penalty can be steered inside a captured step.

    >>> weighted_l1(torch.tensor([1.0, 2.0]), torch.tensor([4.0, 1.0]), 0.5)
    tensor(3.)
    """
    return penalty * (weights * scores.abs()).sum()
