"""Measure or predict the parameters, MACs, accuracy and latency of a network."""

from ..utils.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "calibration": (
            "Chosen",
            "WAYS",
            "cache_folder",
            "choose_way",
            "get_model",
            "guarded",
            "here",
            "made_up",
            "same_place",
        ),
        "counts": (
            "Latency",
            "Measurement",
            "accuracy",
            "latency",
            "measure",
            "saved_activations",
        ),
        "latency_model": (
            "Conditions",
            "LatencyModel",
            "Predictor",
            "fit",
            "from_dict",
            "nonnegative",
            "read_model",
        ),
        "latency_table": (
            "Site",
            "Table",
            "round_up",
            "widths_of",
        ),
        "runtimes": ("RUNTIMES",),
        "stopwatch": (
            "Pairs",
            "layer_seconds",
            "passes",
            "rehearse",
            "time_layers",
        ),
    },
)
