"""Training engines, which run single epochs: eager, or captured as CUDA graphs."""

from ...utils import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "captured": ("CapturedEngine", "BatchCounters", "copy_function", "make_engine"),
        "convolutions": ("TunableConvolutions", "store_choice", "load_choice"),
        "eager": (
            "Average",
            "WeightTrainer",
            "Engine",
            "EpochResult",
            "Teacher",
            "make_optimizer",
            "restore_optimizer",
        ),
        "triton_kernels": ("seconds",),
    },
)
