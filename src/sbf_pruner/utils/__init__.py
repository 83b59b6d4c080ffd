"""Helpers that do not depend on pruning: files, user models, timing, formatting, distributed processes."""

from .lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "distributed": ("DistributedContext",),
        "files": ("flatten_keys", "from_plain", "read_tensors", "atomic_path", "write_text"),
        "formatting": ("DASH", "MINUS", "pluralize", "format_percentage"),
        "settings": ("Section",),
        "timing": (
            "Interval",
            "median_ratio",
            "environment",
            "busy_cores",
            "median_interval",
            "time_interleaved",
            "torch_threads",
            "version_of",
            "synchronizer",
        ),
        "user_code": ("TRUSTED", "Origin", "UNTRUSTED"),
        "user_model": (
            "pruner_hooks",
            "call",
            "random_inputs",
            "map_tensors",
            "memory_format",
            "meta_copy",
            "resized_inputs",
            "real_copy",
            "remove_pruner_hooks",
        ),
    },
)
