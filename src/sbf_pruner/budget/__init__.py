"""Pruning targets, constraints on layers, the search for filters that fit, and steering of the penalty."""

from ..utils.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "constraints": (
            "Allowed",
            "Guards",
            "coupled",
            "links",
            "raised",
            "whole_branches",
            "with_coupled",
        ),
        "controller": (
            "Aim",
            "Mix",
            "RANGE",
            "Steering",
            "prices",
        ),
        "file_size": ("Stored", "saved_bytes"),
        "search": (
            "Field",
            "land",
        ),
        "targets": (
            "Budget",
            "Limits",
            "POINT",
        ),
    },
)
