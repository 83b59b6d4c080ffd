"""Pruning targets, constraints on layers, the search for filters that fit, and steering of the penalty."""

from ..utils import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "constraints": (
            "WidthLimits",
            "Constraints",
            "coupled",
            "stream_links",
            "at_least",
            "whole_branches",
            "with_coupled",
        ),
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
    },
)
