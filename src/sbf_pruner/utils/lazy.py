"""Lazy imports of the public names of a package."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazy_exports(
    package: str, names: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` for a package that re-exports names of its modules.

    `names` maps each module of the package to the names taken from it. A module is imported when one of its names
    is first used, so importing the package stays fast: `sbf --help` does not import torch.

    Args:
        package: `__name__` of the package.
        names: The exported names by module, relative to the package.
    """
    modules = {name: module for module, exported in names.items() for name in exported}

    def __getattr__(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{modules[name]}"), name)

    return __getattr__, lambda: sorted(modules), sorted(modules)
