"""Measure or predict the parameters, MACs, accuracy and latency of a network."""

from ..utils import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "calibration": (
            "CouplingChoice",
            "COUPLINGS",
            "cache_folder",
            "choose_coupling",
            "load_or_calibrate",
            "constraints_for",
            "conditions_here",
            "synthetic_scores",
            "comparable_conditions",
        ),
        "counts": ("Latency", "Measurement", "accuracy", "latency", "measure", "saved_activations"),
        "latency_model": (
            *(
                "Conditions",
                "LatencyModel",
                "LayerSpec",
                "Predictor",
                "Table",
                "fit",
                "from_dict",
                "measured_widths",
            ),
            *("nnls", "read_model", "round_up"),
        ),
        "stopwatch": ("LAYER_TIMERS", "PlanTimer", "layer_seconds", "passes", "rehearse", "time_layers"),
    },
)
