"""Pruning targets, constraints on layers, the search for filters that fit, and steering of the penalty."""

from ..utils import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "constraints": ("Constraints", "WidthLimits", "at_least"),
        "controller": ("RANGE", "ResourceWeights", "Selector", "Steering", "filter_prices"),
        "file_size": ("FileSize", "saved_bytes"),
        "search": ("Search",),
        "targets": ("TOLERANCE", "Budget", "Limits"),
        "widths": ("ResolvedConstraints", "coupled", "resolve", "stream_links", "whole_branches"),
    },
)
