"""Criteria that score a filter by its weights alone, and a random control; none of them uses images."""

from __future__ import annotations

import numpy as np
import torch

from ..errors import PruningError
from .subject import Scores, Subject


def l1_norm(subject: Subject) -> Scores:
    """Score filters by the sum of their absolute weights (Li et al., 2017)."""
    return {name: subject.rows(name).abs().sum(1).cpu().numpy() for name in subject.graph.layers}


def l2_norm(subject: Subject) -> Scores:
    """Score filters by the l2 norm of their weights, as soft filter pruning does (He et al., 2018)."""
    return {name: subject.rows(name).norm(dim=1).cpu().numpy() for name in subject.graph.layers}


def fpgm_distance(subject: Subject) -> Scores:
    """Score filters by the sum of their distances to all others of the layer (FPGM: He et al., 2019).

    The filter nearest to the geometric median is the one that the others can replace best.
    """
    found = {}
    for name in subject.graph.layers:
        rows = subject.rows(name)
        found[name] = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").sum(1).cpu().numpy()
    return found


def norm_scale(subject: Subject) -> Scores:
    """Score filters by the absolute scale of the norm after them.

    Network slimming (Liu et al., 2017) also penalizes these scales during training; here there is no penalty.

    The filters of a layer without such a norm are removed last. Raises a PruningError if no layer has one.
    """
    modules = dict(subject.model.named_modules())
    scales: Scores = {}
    for name, layer in subject.graph.layers.items():
        scale = getattr(modules[layer.site.module], "weight", None)
        if layer.site.kind == "affine" and scale is not None and scale.shape == (layer.filters,):
            scales[name] = scale.detach().abs().double().cpu().numpy()
    if not scales:
        raise PruningError("no layer has a norm with scales behind it")
    beyond = max(float(values.max()) for values in scales.values()) + 1.0
    return {name: scales.get(name, np.full(layer.filters, beyond)) for name, layer in subject.graph.layers.items()}


def random_scores(subject: Subject) -> Scores:
    """Score filters at random, the baseline for any other method."""
    random = np.random.default_rng(subject.seed)
    return {name: random.random(layer.filters) for name, layer in subject.graph.layers.items()}
