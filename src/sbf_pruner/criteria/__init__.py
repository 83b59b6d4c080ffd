"""Pruning criteria other than the package's learned scores: those of the paper's comparison table, and controls.

A criterion computes a score for each filter from a trained network and some images (`Subject`). Limits,
constraints, removal and fine-tuning are the same for all criteria. This file only describes the criteria and does
not import torch, so that commands start quickly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..utils import lazy_exports

OWN = "sbf"  # the learned scores of this package


@dataclass(frozen=True)
class Method:
    """A criterion, its description and its requirements."""

    judge: str
    """module and function in this folder that compute scores, as module.function; empty if scores are learned"""
    said: str
    """what a filter is scored by, in words"""
    across: bool = False
    """True if filters are compared across layers; otherwise all layers lose the same fraction"""
    images: int = 0
    """number of images that it needs"""
    soft: bool = False
    """True if filters are scored and zeroed after every epoch of the cycles but stay trainable; else scored once"""
    after: str = ""
    """the published method that it is modeled on, if it differs enough from it to need a note; otherwise empty"""
    unlike: str = ""
    """differences from the published method of the same name; empty if there are none"""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """recipe settings for a method that learns scores, with weights frozen in all cycles; otherwise empty"""

    @property
    def learned(self) -> bool:
        """True if scores are learned instead of computed from a trained network."""
        return bool(self.settings)


def judged_by(name: str) -> str:
    """Describe what a method scores filters by, and how it relates to the published method of its name.

    >>> judged_by("gal")
    'the mean of its mask under a growing penalty; after GAL'
    >>> judged_by("pfp")
    'its contribution to the outputs of the next layers; not as published yet'
    """
    if name not in METHODS:
        return "its learned score"
    method = METHODS[name]
    origin = f"; after {method.after}" if method.after else "; not as published yet" if method.unlike else ""
    return method.said + origin


def describe_method(name: str) -> str:
    """Return the name of a method with its description."""
    return f"{name} ({judged_by(name)})"


METHODS = {
    "l1": Method("weights.l1_norm", "the sum of its absolute weights"),
    "l2": Method("weights.l2_norm", "the l2 norm of its weights"),
    "sfp": Method("weights.l2_norm", "the l2 norm of its weights, epoch by epoch", soft=True),
    "fpgm": Method("weights.fpgm_distance", "its distances to the other filters of its layer"),
    "bnscale": Method("weights.norm_scale", "the scale of the norm behind it", across=True),
    "hrank": Method("feature_maps.rank", "the rank of its feature maps", images=640),
    "chip": Method("feature_maps.independence", "what its feature maps add to those of its layer", images=640),
    "nisp": Method("nisp.propagated", "its contribution to the last features", across=True, images=1024),
    "pfp": Method(
        "pfp.largest_part",
        "its contribution to the outputs of the next layers",
        across=True,
        images=128,
        unlike="one threshold for the contributions in all layers replaces budgets from an error bound, and "
        "positive and negative contributions are not separated",
    ),
    "taylor": Method("taylor.first_order", "the change of the loss, to the first order", across=True, images=2048),
    "ccp": Method("taylor.pairs", "the change of the loss, with interactions of pairs", across=True, images=2048),
    "dcp": Method("dcp.reselection_order", "the order in which an emptied layer re-selects it", images=256),
    "gal": Method(
        "gal.mask_persistence", "the mean of its mask under a growing penalty", across=True, images=512, after="GAL"
    ),
    "dmc": Method(
        "",
        "a binary gate learned with straight-through gradients",
        across=True,
        after="DMC",
        settings={
            "scores.projection": "free",
            "scores.binary": True,
            "scores.balance": "cost",
            "scores.steer": True,
        },
    ),
    "amc": Method(
        "amc.search_widths",
        "its weights, in layers whose widths are chosen by an agent",
        across=True,
        images=256,
        unlike="60 networks are tried instead of hundreds, their widths are scaled alike to the target size, "
        "and there is no least-squares reconstruction",
    ),
    "nppm": Method(
        "nppm.learned_gates",
        "a gate learned to maximize predicted accuracy",
        across=True,
        images=2048,
        after="NPPM",
    ),
    "random": Method("weights.random_scores", "chance"),
}

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "amc": ("Agent", "LayerObservations", "search_widths", "scores_for_fractions"),
        "dcp": ("selection", "reselection_order"),
        "feature_maps": ("lost_without", "rank"),
        "gal": ("Fista", "mask_persistence"),
        "nisp": ("infinite_selection", "propagated"),
        "nppm": ("Predictor", "CostPenalty", "learned_gates"),
        "pfp": ("largest_part",),
        "ranking": ("SubnetEvaluator", "target_of", "rank_by", "ranked", "check_method"),
        "subject": ("NO_FILTER", "Scores", "Subject", "read_filters", "read_values"),
        "taylor": ("first_order", "pairs"),
        "weights": ("l1_norm", "fpgm_distance", "l2_norm", "norm_scale"),
    },
)
