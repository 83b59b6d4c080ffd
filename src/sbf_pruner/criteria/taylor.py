"""Criteria that estimate the loss without a filter from derivatives of the loss by a factor on each filter."""

from __future__ import annotations

import torch
from torch import Tensor

from .subject import Scores, Subject


def first_order(subject: Subject) -> Scores:
    """Score filters by the absolute first term of the Taylor expansion, averaged over images.

    Dividing by the norm over the layer makes layers comparable (Molchanov et al., 2017).
    """
    found = {}
    for name, slopes in subject.sensitivities().items():
        values = slopes.abs().mean(0)
        found[name] = (values / values.norm().clamp_min(torch.finfo(values.dtype).tiny)).cpu().numpy()
    return found


def pairs(subject: Subject) -> Scores:
    """Score filters by the increase of the loss, including interactions of pairs of filters of a layer.

    This is CCP (Peng et al., 2019). To the second order, with the mean product of gradients as the curvature,
    removing a set of filters costs minus the sum of its gradients plus half the sum of its products. Filters are
    removed one by one, the cheapest first. The score of a filter is the cost of its removal at that time or, if
    larger, the largest cost of an earlier removal.
    """
    return {name: _greedy(slopes).cpu().numpy() for name, slopes in subject.sensitivities().items()}


def _greedy(slopes: Tensor) -> Tensor:
    """Return scores for gradients of shape `(images, filters)`: increases of the loss in greedy removal.

    >>> _greedy(torch.tensor([[2.0, 0.1, 2.0], [-2.0, 0.1, -2.0]]))  # of the two alike, one is cheaper than both
    tensor([ 2.0000, -0.0950,  6.0000])
    """
    curvature = slopes.T @ slopes / len(slopes)
    costs = curvature.diagonal() / 2 - slopes.mean(0)
    scores = torch.zeros_like(costs)
    left = torch.ones_like(costs, dtype=torch.bool)
    worst = costs.new_tensor(-torch.inf)
    for _ in range(len(costs)):
        goes = costs.where(left, torch.inf).argmin()
        worst = torch.maximum(worst, costs[goes])
        scores[goes] = worst
        left[goes] = False
        costs = costs + curvature[goes]
    return scores
