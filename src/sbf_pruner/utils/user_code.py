"""Import of callables named "package.module:callable", and source locations in the user's code.

`Origin` decides whether a name may be imported, depending on where it was read. Errors of tracing name the
innermost stack frame that belongs neither to torch nor to this package.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..errors import PruningError, RunError, suggestion


@dataclass(frozen=True)
class Origin:
    """Where a name was read, which decides whether the code it refers to may be imported.

    A recipe that the user passes is code, like a script. A recipe in a run folder is data: the code it names is
    imported only if the user trusts it (`--trust`).
    """

    trusted: bool = False
    runs: tuple[Path, ...] = ()  # run folders; nothing is imported from them, trusted or not
    otherwise: str = ""  # text appended to the message that refuses a name

    def check(self, key: str, value: Any, what: str) -> None:
        """Raise a RunError unless the origin is trusted; `what` describes what the value of `key` would do."""
        if not self.trusted:
            raise RunError(
                f"{key} = {value!r} {what} only for a recipe that you trust; add --trust (trust=True) if you trust "
                f"this one{self.otherwise}"
            )

    def find(self, key: str, name: str) -> Any:
        """Import and return "package.module:attribute"; the current directory is searched for modules too."""
        module, _, inner = name.partition(":")
        if not module or not inner:
            raise PruningError(f"{name!r} is not a complete name; write package.module:callable")
        self.check(key, name, "names code, which is imported")
        with _current_directory_importable():
            try:
                target: Any = self.import_module(module)
            except ModuleNotFoundError as error:
                missing = error.name
                if missing is not None and module != missing and not module.startswith(f"{missing}."):
                    raise PruningError(f"{name}: {module} imports {missing!r}, which is not installed") from error
                hint = f"; write {module.removesuffix('.py')}:{inner}" if module.endswith(".py") else ""
                where = f"no module named {missing!r} in this folder or among the installed packages"
                raise PruningError(f"{name}: {where}{hint}") from error
            except Exception as error:
                raise PruningError(f"{name}: importing {module} failed with {one_line_error(error)}") from error
        for part in inner.split("."):
            if not hasattr(target, part):
                public = [word for word in getattr(target, "__dict__", ()) if not word.startswith("_")]
                raise PruningError(f"{name}: {module} has no {inner!r}; {suggestion(part, public)}")
            target = getattr(target, part)
        return target

    def import_module(self, name: str) -> ModuleType:
        """Import a module; raise an ImportError if it, or a module it imports, lies in a run folder."""
        guard = _Guard(self.runs)
        sys.meta_path.insert(0, guard)
        try:
            return importlib.import_module(name)
        finally:
            sys.meta_path.remove(guard)


TRUSTED = Origin(trusted=True)  # origin of a name given by the user on the command line or in Python
UNTRUSTED = Origin()  # origin of a name read from any other file


class _Guard:
    """A `sys.meta_path` finder that refuses modules inside some folders and passes on all others."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = {path for folder in folders for path in (folder.absolute(), folder.resolve())}

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        found = PathFinder.find_spec(name, path) if self._folders else None
        locations = [] if found is None else [found.origin, *(found.submodule_search_locations or ())]
        for location in filter(None, locations):
            spellings = Path(location).absolute(), Path(location).resolve()
            if self._folders & {up for at in spellings for up in (at, *at.parents)}:
                raise ImportError(
                    f"{location} is in the folder of a run, from which nothing is imported", name=name
                )
        return None


def matching_arguments(target: Callable[..., Any], offers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the items of `offers` that a callable has parameters for; all if it takes **kwargs.

    >>> matching_arguments(lambda seed: seed, {"seed": 3, "path": ""})
    {'seed': 3}
    """
    accepted = accepted_parameters(target)
    return {name: value for name, value in offers.items() if accepted is None or name in accepted}


def accepted_parameters(target: Callable[..., Any]) -> list[str] | None:
    """Return the names of the parameters of a callable; None if it takes **kwargs or cannot be inspected."""
    parameters = _parameters(target)
    if parameters is None or any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return [p.name for p in parameters]


def required_parameters(target: Callable[..., Any]) -> list[str]:
    """Return the names of the parameters of a callable that have no default.

    >>> required_parameters(lambda path, seed=0: path)
    ['path']
    """
    parameters = _parameters(target) or ()
    return [
        p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.default is p.empty
    ]


def _parameters(target: Callable[..., Any]) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError):  # Some callables written in C have no signature.
        return None


def one_line_error(error: BaseException) -> str:
    """Return the type of an error and the first line of its message, without ANSI colors and a final full stop.

    >>> one_line_error(ValueError("no such size.\\nMore lines"))
    'ValueError: no such size'
    """
    lines = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


@contextlib.contextmanager
def _current_directory_importable() -> Iterator[None]:
    here = os.getcwd()
    sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # The imported module may have changed sys.path.
            sys.path.remove(here)


_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
_MODELS = os.path.join(_PACKAGE, "models", "")  # part of this package, but treated as user code
# Files whose frames are not the user's; frames of contextlib surround those of decorated functions.
_QUIET = (os.path.join(os.path.dirname(torch.__file__), ""), contextlib.__file__, _PACKAGE)


def user_location() -> str:
    """Return "file:line" of the innermost user frame of the current stack, or "" if there is none."""
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        if _is_users(frame.f_code.co_filename):
            return f"{os.path.basename(frame.f_code.co_filename)}:{line}"
    return ""


def explain(error: Exception, inputs: Any) -> str:
    """Describe in one sentence why a model failed on its example inputs: line, cause and remedy."""
    remedy = "give inputs like those it is trained on"
    if _frames_of(error):
        where = failing_line(error)
        return f"the model cannot run on the example inputs: at {where}; {remedy}, or repair that line"
    if not isinstance(inputs, (Tensor, tuple, dict)):
        remedy = f"give a tensor, or a tuple or dict of its arguments, not {type(inputs).__name__}"
    elif isinstance(inputs, dict) and isinstance(error, TypeError):
        remedy = "give a dict of its keyword arguments or, if it takes a dict itself, a tuple with it: (batch,)"
    return f"the model cannot run on the example inputs ({cause(error)}); {remedy}"


def failing_line(error: Exception) -> str:
    """Describe the innermost user frame of an error: file, line, source text, error type and message."""
    at = (_frames_of(error) or traceback.extract_tb(error.__traceback__))[-1]
    line = f" (`{at.line}`)" if at.line else ""
    return f"{os.path.basename(at.filename)}:{at.lineno}{line} {type(error).__name__}: {cause(error)}"


def _frames_of(error: Exception) -> list[traceback.FrameSummary]:
    return [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]


def _is_users(filename: str) -> bool:
    return filename.startswith(_MODELS) or not filename.startswith(_QUIET)


def cause(error: Exception) -> str:
    """Return the first line of the message of an exception, or its type if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def not_from_torch(line: str) -> str:
    """Message for a tensor that torch did not compute from the inputs."""
    return (
        f"at {line} a tensor was not computed by torch operators from the inputs (NumPy, or a list made from "
        "values?), so its dependencies cannot be traced; keep that step in torch"
    )


def holds_the_model(line: str, name: str) -> str:
    """Message for a copy of a model that reads tensors of the original."""
    return (
        f"at {line} a function in a copy of the model still uses {name} of the original, to which it is bound by "
        "an object or a global name; make it a method"
    )


def nested(line: str) -> str:
    """Message for a nested tensor."""
    return (
        f"at {line} a nested tensor is created, whose sizes cannot be traced; pad the inputs, and create an "
        "nn.TransformerEncoder with enable_nested_tensor=False"
    )
