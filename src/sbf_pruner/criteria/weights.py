"""Methods that judge a filter by its weights alone, and the one that judges by chance.

A `Subject` enters; a score for each filter leaves.  None of them looks at an image.
"""

from __future__ import annotations

import numpy as np
import torch

from ..errors import PruningError
from .subject import Scores, Subject


def absolute(subject: Subject) -> Scores:
    """The sum of a filter's absolute weights (Li et al., 2017)."""
    return {name: subject.rows(name).abs().sum(1).cpu().numpy() for name in subject.graph.layers}


def euclidean(subject: Subject) -> Scores:
    """The l2 norm of a filter, as soft filter pruning has it (He et al., 2018)."""
    return {name: subject.rows(name).norm(dim=1).cpu().numpy() for name in subject.graph.layers}


def distance(subject: Subject) -> Scores:
    """The sum of a filter's distances to all others of its layer (FPGM: He et al., 2019).

    The one nearest to their geometric median is the one that the others can stand in for.
    """
    found = {}
    for name in subject.graph.layers:
        rows = subject.rows(name)
        found[name] = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").sum(1).cpu().numpy()
    return found


def norm_scale(subject: Subject) -> Scores:
    """The absolute scale of the norm behind a filter.

    Network slimming (Liu et al., 2017) also has a penalty on these scales during training; here there is none.

    A layer without such a norm cannot be judged so; its filters go when no others are left.  A network that has
    none at all is refused.
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


def chance(subject: Subject) -> Scores:
    """A random number: what any other method has to be better than."""
    random = np.random.default_rng(subject.seed)
    return {name: random.random(layer.filters) for name, layer in subject.graph.layers.items()}
