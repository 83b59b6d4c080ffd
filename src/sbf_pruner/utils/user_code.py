"""Callables named as "package.module:callable": the decision whether one may be imported, and how it is called.

Where in the user's code something happened: the innermost frame that is neither torch's nor ours.

The stack of the caller, or an exception, enters; a file with its line leaves, or the sentence about it that a user
reads.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import Tensor

from ..errors import PruningError, RunError, nearest


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


_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
_MODELS = os.path.join(_PACKAGE, "models", "")  # of ours, but read like a user's
_QUIET = (
    os.path.join(os.path.dirname(torch.__file__), ""),
    contextlib.__file__,  # whose frames stand around those of a decorated function
    _PACKAGE,
)


def where() -> str:
    """File and line, or "" if no frame is the user's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_users(frame.f_code.co_filename):
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def explain(error: Exception, inputs: Any) -> str:
    """One sentence about a model that failed on its inputs: the line, the cause, and what to do."""
    frames = _frames_of(error)
    if not frames:
        remedy = "give inputs like those it is trained on"
        if not isinstance(inputs, (Tensor, tuple, dict)):
            remedy = f"give a tensor, or a tuple or dict of its arguments, not {type(inputs).__name__}"
        elif isinstance(inputs, dict) and isinstance(error, TypeError):
            remedy = "give a dict of its keyword arguments or, if it takes a dict itself, a tuple with it: (batch,)"
        return f"the model cannot run on the example inputs ({cause(error)}); {remedy}"
    return (
        f"the model cannot run on the example inputs: at {failing_line(error)}; give inputs like those it is "
        "trained on, or repair that line"
    )


def failing_line(error: Exception) -> str:
    """The line of the user's that failed, and how."""
    at = (_frames_of(error) or traceback.extract_tb(error.__traceback__))[-1]
    line = f" (`{at.line}`)" if at.line else ""
    return f"{os.path.basename(at.filename)}:{at.lineno}{line} {type(error).__name__}: {cause(error)}"


def _frames_of(error: Exception) -> list[traceback.FrameSummary]:
    return [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]


def _is_users(filename: str) -> bool:
    return filename.startswith(_MODELS) or not filename.startswith(_QUIET)


def cause(error: Exception) -> str:
    """The first line of what an exception says."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def not_from_torch(line: str) -> str:
    """What is wrong with a tensor that came out of nowhere."""
    return (
        f"at {line} a tensor arrives that torch did not compute from the inputs (NumPy, or a list made from "
        "values?), so what it depends on cannot be followed; keep that step in torch"
    )


def holds_the_model(line: str, name: str) -> str:
    """What is wrong with a copy of a model that reads the tensors of the model itself."""
    return (
        f"at {line} a copy of the model reads {name} of the model itself: a function that it holds is "
        "bound to the one model, by an object or a global name; make it a method"
    )


def nested(line: str) -> str:
    """What is wrong with a tensor of rows that differ in length."""
    return (
        f"at {line} a nested tensor arises, whose sizes cannot be followed; pad what goes in, and give an "
        "nn.TransformerEncoder enable_nested_tensor=False"
    )
