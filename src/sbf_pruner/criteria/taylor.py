"""Methods that ask the loss what it would be without a filter, by its derivatives at a factor before each.

A `Subject` enters; a score for each filter leaves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .subject import Scores, Subject


def first_order(subject: Subject) -> Scores:
    """The absolute first term of Taylor's expansion, image by image, over the layer's norm of it.

    That is Molchanov et al. (2017), who make layers comparable so.
    """
    found = {}
    for name, slopes in subject.sensitivities().items():
        values = slopes.abs().mean(0)
        found[name] = (values / values.norm().clamp_min(torch.finfo(values.dtype).tiny)).cpu().numpy()
    return found


def pairs(subject: Subject) -> Scores:
    """The growth of the loss, with what pairs of filters of a layer share (CCP: Peng et al., 2019).

    To the second order, with the mean product of slopes for the curvature, a set of filters costs minus the sum of
    its slopes plus half the sum of its products.  Filters go one by one, each time the cheapest; a score is what
    the next one cost by then, and never less than what one before it did.
    """
    return {name: _greedy(slopes).cpu().numpy() for name, slopes in subject.sensitivities().items()}


def _greedy(slopes: Tensor) -> Tensor:
    """What the loss grows by as filters go one by one.

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
