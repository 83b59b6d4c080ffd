"""Training engines, which run single epochs: eager, or captured as CUDA graphs."""

from ...utils.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "captured": (
            "CapturedEngine",
            "Counters",
            "make_engine",
        ),
        "convolutions": (
            "TunableConvolutions",
            "keep",
            "recall",
        ),
        "cuda_graphs": ("own_code",),
        "eager": (
            "Average",
            "Descent",
            "Engine",
            "Tally",
            "Teacher",
            "make_optimizer",
            "restore_optimizer",
        ),
        "triton_kernels": ("seconds",),
    },
)
