"""Pruning targets, constraints on layers, the search for filters that fit, and steering of the penalty."""

from ..utils import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "constraints": ("Constraints", "WidthLimits", "at_least"),
        "controller": (
            "Selector",
            "ResourceWeights",
            "RANGE",
            "Steering",
            "filter_prices",
        ),
        "file_size": ("FileSize", "saved_bytes"),
        "search": (
            "SearchSpace",
            "land",
        ),
        "targets": (
            "Budget",
            "Limits",
            "TOLERANCE",
        ),
        "widths": ("ResolvedConstraints", "coupled", "resolve", "stream_links", "whole_branches"),
    },
)
