"""Filter scores: projections from the weights, gates on the model, and the penalty."""

from ..utils.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "gates": (
            "Folded",
            "Products",
        ),
        "norm_statistics": (
            "fresh_statistics",
            "lagging",
        ),
        "penalty": (
            "Pressure",
            "balance_weights",
            "per_filter",
            "weighted_l1",
        ),
        "projections": (
            "ACTIVATIONS",
            "FactoredProjection",
            "FreeProjection",
            "LiteralProjection",
            "PROJECTIONS",
            "check_slope",
            "inner",
            "leaky_exponential",
            "literal_bytes",
            "pack_signs",
            "unpack_signs",
        ),
    },
)
