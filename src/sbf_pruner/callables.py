"""Callables named as "package.module:callable": the decision whether one may be imported, and how it is called."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from .errors import PruningError, RunError, nearest


@dataclass(frozen=True)
class Origin:
    """Where a name was read, which decides whether the code it stands for may be imported.

    A recipe that the user names is code, like a script.  A recipe in the folder of a run is data: what it names is
    imported only if the user says so (`--trust`).
    """

    trusted: bool = False
    runs: tuple[Path, ...] = ()
    """folders of runs, which nothing is imported from, trusted or not"""
    otherwise: str = ""
    """ends the message that refuses a name"""

    def check(self, key: str, value: Any, what: str) -> None:
        """Raise a RunError unless the origin is trusted; `what` says what the value of `key` would cause."""
        if not self.trusted:
            raise RunError(
                f"{key} = {value!r} {what} only for a recipe that you trust; add --trust (trust=True) if you trust "
                f"this one{self.otherwise}"
            )

    def find(self, key: str, name: str) -> Any:
        """Import what "package.module:attribute" stands for; modules in the current directory are found too."""
        module, _, inner = name.partition(":")
        if not module or not inner:
            raise PruningError(f"{name!r} is half a name; write package.module:callable")
        self.check(key, name, "names code, which is imported")
        with _current_directory_importable():
            try:
                target: Any = self.import_module(module)
            except ModuleNotFoundError as error:
                other = error.name
                if other is not None and module != other and not module.startswith(f"{other}."):
                    raise PruningError(f"{name}: {module} imports {other!r}, which is not installed") from error
                hint = f"; write {module.removesuffix('.py')}:{inner}" if module.endswith(".py") else ""
                where = f"no module named {other!r} here or among the installed"
                raise PruningError(f"{name}: {where}{hint}") from error
            except Exception as error:
                raise PruningError(f"{name}: importing {module} failed with {said(error)}") from error
        for part in inner.split("."):
            if not hasattr(target, part):
                public = [word for word in getattr(target, "__dict__", ()) if not word.startswith("_")]
                raise PruningError(f"{name}: {module} has no {inner!r}; {nearest(part, public)}")
            target = getattr(target, part)
        return target

    def import_module(self, name: str) -> ModuleType:
        """Import a module by its name, which fails if it or one that it imports lies in the folder of a run."""
        guard = _Guard(self.runs)
        sys.meta_path.insert(0, guard)
        try:
            return importlib.import_module(name)
        finally:
            sys.meta_path.remove(guard)


NAMED = Origin(trusted=True)
"""of a name that the user gave on the command line or in Python"""
UNTRUSTED = Origin()
"""of a name that was read from any other file"""


class _Guard:
    """A finder that refuses modules inside some folders and leaves all others to the finders after it."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = {place for folder in folders for place in (folder.absolute(), folder.resolve())}

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        found = PathFinder.find_spec(name, path) if self._folders else None
        places = [] if found is None else [found.origin, *(found.submodule_search_locations or ())]
        for place in places:
            if place and self._folders & {up for at in _spellings(place) for up in (at, *at.parents)}:
                raise ImportError(f"{place} lies in the folder of a run, from which nothing is imported", name=name)
        return None


def _spellings(place: str) -> tuple[Path, Path]:
    return Path(place).absolute(), Path(place).resolve()


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
