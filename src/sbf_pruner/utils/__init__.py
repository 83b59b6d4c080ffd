"""Helpers that do not depend on pruning: files, user models, timing, formatting, distributed processes."""

from .lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "distributed": ("Team",),
        "files": (
            "flat",
            "from_plain",
            "read_tensors",
            "replacing",
            "write_text",
        ),
        "formatting": (
            "DASH",
            "MINUS",
            "counted",
            "rounded",
        ),
        "settings": ("Section",),
        "timing": (
            "Interval",
            "compared",
            "environment",
            "load",
            "median_interval",
            "take_turns",
            "using_threads",
            "version_of",
            "waiting",
        ),
        "user_code": (
            "NAMED",
            "Origin",
            "UNTRUSTED",
        ),
        "user_model": (
            "attached_hooks",
            "call",
            "made_up_inputs",
            "map_tensors",
            "memory_format",
            "meta_copy",
            "other_sizes",
            "real_copy",
            "without_attached",
        ),
    },
)
