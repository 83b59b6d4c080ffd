"""What a user names as "package.module:callable": found, and called with what it asks for.

A name enters; what it stands for leaves, or one sentence that says which part of the name leads nowhere.  Modules
in the current folder are found as installed ones are.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .errors import PruningError, nearest


def find_callable(name: str) -> Any:
    """What "package.module:attribute" stands for."""
    module, _, inner = name.partition(":")
    if not module or not inner:
        raise PruningError(f"{name!r} is half a name; write package.module:callable")
    with _current_directory_importable():
        try:
            target: Any = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is not None and module != error.name and not module.startswith(f"{error.name}."):
                raise PruningError(f"{name}: {module} imports {error.name!r}, which is not installed") from error
            hint = f"; write {module.removesuffix('.py')}:{inner}" if module.endswith(".py") else ""
            raise PruningError(
                f"{name}: no module named {error.name!r} here or among the installed{hint}"
            ) from error
        except Exception as error:
            raise PruningError(f"{name}: importing {module} failed with {said(error)}") from error
    for part in inner.split("."):
        if not hasattr(target, part):
            public = (
                [word for word in vars(target) if not word.startswith("_")] if hasattr(target, "__dict__") else []
            )
            raise PruningError(f"{name}: {module} has no {inner!r}; {nearest(part, public)}")
        target = getattr(target, part)
    return target


def wanted(target: Callable[..., Any], offers: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the offers that a callable has parameters for.

    >>> wanted(lambda seed: seed, {"seed": 3, "path": ""})
    {'seed': 3}
    """
    parameters = signature(target)
    if parameters is None or takes_anything(parameters):
        return dict(offers)
    return {name: value for name, value in offers.items() if name in parameters.parameters}


def needed(target: Callable[..., Any]) -> list[str]:
    """The parameters of a callable that have no default.

    >>> needed(lambda path, seed=0: path)
    ['path']
    """
    found = signature(target)
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = found.parameters.values() if found is not None else ()
    return [p.name for p in parameters if p.kind in plain and p.default is p.empty]


def signature(target: Callable[..., Any]) -> inspect.Signature | None:
    """The parameters of a callable, if they can be known."""
    try:
        return inspect.signature(target)
    except (TypeError, ValueError):  # some callables written in C tell nothing
        return None


def takes_anything(found: inspect.Signature) -> bool:
    """Does it take arguments of any name?"""
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in found.parameters.values())


def said(error: Exception) -> str:
    """An error in one line."""
    return ": ".join([type(error).__name__, *str(error).splitlines()[:1]])


@contextlib.contextmanager
def _current_directory_importable() -> Iterator[None]:
    here = os.getcwd()
    sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the imported module may have tidied sys.path itself
            sys.path.remove(here)
