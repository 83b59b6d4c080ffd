"""Compiled functions that share nothing with one another.

torch keeps what it compiled with the code object of a function, for whoever calls it next.  Two networks of one
process, dressed differently, would meet there: the second could be given what was made for the first, and after
eight of them nothing would be compiled any more.  So every engine compiles copies of its functions.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any, ParamSpec, TypeVar, cast

import torch

Given = ParamSpec("Given")
Result = TypeVar("Result")


def compiled(function: Callable[Given, Result], **settings: Any) -> Callable[Given, Result]:
    """The function, or bound method, compiled for its caller alone."""
    return cast("Callable[Given, Result]", torch.compile(own_code(function), **settings))


def own_code(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """The same function or bound method, with a code object of its own.

    >>> def double(x): return 2 * x
    >>> own_code(double)(3), own_code(double).__code__ is double.__code__
    (6, False)
    """
    if isinstance(function, MethodType):
        return MethodType(own_code(function.__func__), function.__self__)
    assert isinstance(function, FunctionType)
    own = FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    own.__kwdefaults__ = function.__kwdefaults__
    return cast("Callable[Given, Result]", own)
