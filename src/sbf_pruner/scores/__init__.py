"""Filter scores: projections from the weights, gates on the model, and the penalty."""

from ..utils import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "config": ("Scores",),
        "gates": ("LeafGates", "FusedGating"),
        "freezing": ("fresh_statistics", "lagging"),
        "penalty": ("Penalty", "balance_weights", "per_filter", "weighted_l1"),
        "projections": (
            "ACTIVATIONS",
            "FactoredProjection",
            "FreeProjection",
            "LiteralProjection",
            "PROJECTIONS",
            "check_slope",
            "sign_dot",
            "leaky_exponential",
            "literal_bytes",
            "pack_signs",
            "unpack_signs",
        ),
    },
)
