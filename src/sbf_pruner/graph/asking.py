"""Does code of the user's own ask a module for its mode?

A module enters; yes or no leaves.  The code is read, not run: that of the module's classes and hooks, of what it
holds, and of the functions that these call, as far as names lead to them.  A yes too many costs a recording.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType

from torch import Tensor, nn

_NOT_THE_USERS = {"torch", "numpy", __name__.partition(".")[0], *sys.stdlib_module_names}


def asks_for_its_mode(module: nn.Module, without: set[CodeType] | None = None) -> bool:
    """Does code of the user's own read `training`?  Where none does, a run of its own would show nothing new.

    `without` holds code that is known not to, and gets more of it.

    >>> asks_for_its_mode(nn.Dropout())  # which is torch's
    False
    """
    own = [kind for kind in type(module).__mro__ if _is_the_users(kind.__module__)]
    hooks = [
        hook
        for name, table in vars(module).items()
        if name.endswith("_hooks") and isinstance(table, dict)
        for hook in table.values()
    ]
    todo: list[object] = [*hooks, *own, *(vars(module).values() if own else ())]
    known = without if without is not None else set()
    seen: set[CodeType] = set()
    met: set[int] = set()
    while todo:
        held = todo.pop()
        if isinstance(held, FunctionType):
            code = held.__code__
            if code in known or code in seen:
                continue
            seen.add(code)
            if any("training" in (*inner.co_names, *inner.co_consts) for inner in _nested(code)):
                return True
        elif id(held) in met:
            continue
        met.add(id(held))
        todo += _within(held, own)
    known |= seen
    return False


def ignores_its_mode(module: nn.Module) -> bool:
    """Is it a module of torch's whose mode is a note that nothing but code of the user's would read?

    >>> ignores_its_mode(nn.Conv2d(1, 1, 1)), ignores_its_mode(nn.BatchNorm2d(1))
    (True, False)
    """
    kinds = [kind for kind in type(module).__mro__ if kind not in (nn.Module, object)]
    functions = [held for kind in kinds for held in vars(kind).values() if isinstance(held, FunctionType)]
    return all(map(_is_torchs, kinds)) and not any("training" in held.__code__.co_names for held in functions)


def _is_torchs(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "torch"


def _is_the_users(module: str | None) -> bool:
    return bool(module) and str(module).partition(".")[0] not in _NOT_THE_USERS


def _nested(code: CodeType) -> Iterator[CodeType]:
    """A function's code with that of the functions written in it."""
    yield code
    for held in code.co_consts:
        if isinstance(held, CodeType):
            yield from _nested(held)


def _within(held: object, own: Collection[type]) -> list[object]:
    """What may be called by way of something: methods, a function's globals, what is held in lists and objects."""
    if isinstance(held, FunctionType):
        return _reached(held) if _is_the_users(held.__module__) else []
    if isinstance(held, property):
        return [held.fget]
    if isinstance(held, partial):
        return [held.func, *held.args, *held.keywords.values()]
    if isinstance(held, MethodType):
        return [held.__func__, held.__self__]
    if isinstance(held, (staticmethod, classmethod)):
        return [held.__func__]
    if isinstance(held, dict):
        return list(held.values())
    if isinstance(held, (list, tuple, set, frozenset)):
        return list(held)
    if isinstance(held, type):
        # The modules that a class builds are asked themselves.
        strange = issubclass(held, nn.Module) and held not in own
        return [] if strange or not _is_the_users(held.__module__) else list(vars(held).values())
    if isinstance(held, (nn.Module, Tensor, ModuleType)) or not _is_the_users(type(held).__module__):
        return []
    return [*type(held).__mro__, *getattr(held, "__dict__", {}).values()]


def _reached(function: FunctionType) -> list[object]:
    """What the names in a function stand for, where it knows them from its file or from where it was written."""
    cells = [cell.cell_contents for cell in function.__closure__ or () if _filled(cell)]
    names = {name for code in _nested(function.__code__) for name in code.co_names}
    known = [function.__globals__[name] for name in names if name in function.__globals__]
    files = [held for held in known if isinstance(held, ModuleType) and _is_the_users(held.__name__)]
    through = [vars(file)[name] for file in files for name in names if name in vars(file)]
    return [*cells, *known, *through, *(function.__defaults__ or ()), vars(function).get("__wrapped__")]


def _filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # of a name that has no value yet
        return False
