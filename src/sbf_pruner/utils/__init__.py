"""Helpers that do not depend on pruning: files, user models, timing, formatting, distributed processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazy_exports(
    package: str, names: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` for a package that re-exports names of its modules.

    `package` is its `__name__`, and `names` maps each of its modules to the names taken from it. A module is
    imported when one of its names is first used, so importing the package stays fast: `sbf --help` does not import
    torch.
    """
    modules = {name: module for module, exported in names.items() for name in exported}

    def __getattr__(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{modules[name]}"), name)

    return __getattr__, lambda: sorted(modules), sorted(modules)


__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "distributed": ("DistributedContext",),
        "files": ("flatten_keys", "from_plain", "read_tensors", "atomic_path", "write_text"),
        "formatting": ("DASH", "MINUS", "pluralize", "format_percentage"),
        "settings": ("Section",),
        "timing": (
            *("Interval", "busy_cores", "environment", "median_interval", "median_ratio", "synchronizer"),
            *("time_interleaved", "torch_threads", "version_of"),
        ),
        "user_code": ("TRUSTED", "Origin", "UNTRUSTED", "one_line_error"),
        "user_model": (
            *("call", "map_tensors", "memory_format", "meta_copy", "pruner_hooks", "random_inputs", "real_copy"),
            *("remove_pruner_hooks", "resized_inputs"),
        ),
    },
)
