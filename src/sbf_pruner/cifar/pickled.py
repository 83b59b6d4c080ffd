"""Pickles read as data: nothing in them is imported, called or run.

The bytes of a pickle enter; lists, tuples, dictionaries, texts, numbers and uint8 arrays leave.  Python's own
unpickler calls whatever a pickle names, and even a restricted one lets it set attributes on what it finds, so
the few operations that data needs are carried out here, on a stack of plain values.  A name in a pickle stays
a name; those that NumPy writes for an array have a row in `CALLS`, any other is a `DataError`.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError


@dataclass(frozen=True)
class Name:
    """A function or class that the pickle names; here only its spelling."""

    text: str


class Unbuilt:
    """An array whose shape and bytes are still to come."""


def read_pickle(data: bytes, where: str) -> Any:
    """The value that a pickle of plain data and uint8 arrays stands for; `where` opens any error.

    >>> import pickle
    >>> read_pickle(pickle.dumps({"labels": [6, 9]}, protocol=2), "data_batch_1")
    {'labels': [6, 9]}
    """
    try:
        return _run(data, where)
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
        raise DataError(f"{where}: damaged or incomplete, not a whole pickle of arrays; get it again") from error


def _run(data: bytes, where: str) -> Any:
    stack: list[Any] = []
    outer: list[list[Any]] = []  # the stacks below each open mark
    memo: dict[int, Any] = {}
    argument: Any
    for opcode, argument, _ in pickletools.genops(data):
        match opcode.name:
            case "PROTO" | "FRAME":
                pass
            case "STOP":
                return stack.pop()
            case "MARK":
                outer.append(stack)
                stack = []
            case name if name in LITERALS:
                stack.append(argument)
            case name if name in FRESH:
                stack.append(FRESH[name]())
            case "TUPLE":
                items, stack = tuple(stack), outer.pop()
                stack.append(items)
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = int(opcode.name[-1])
                stack[-count:] = [tuple(stack[-count:])]
            case "APPEND":
                item = stack.pop()
                stack[-1].append(item)
            case "APPENDS":
                added, stack = stack, outer.pop()
                stack[-1].extend(added)
            case "SETITEM":
                value, key = stack.pop(), stack.pop()
                stack[-1][key] = value
            case "SETITEMS":
                added, stack = stack, outer.pop()
                stack[-1].update(zip(added[::2], added[1::2], strict=True))
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "GLOBAL":  # genops parts module and name by a space
                stack.append(_allowed(argument.replace(" ", "."), where))
            case "STACK_GLOBAL":
                name, module = stack.pop(), stack.pop()
                stack.append(_allowed(f"{module}.{name}", where))
            case "REDUCE":
                arguments, called = stack.pop(), stack.pop()
                stack.append(CALLS[called.text](*arguments))
            case "BUILD":
                state = stack.pop()
                stack[-1] = _built(stack[-1], state)
            case _:
                raise DataError(
                    f"{where}: holds the pickle operation {opcode.name}, which arrays and lists do not need; "
                    "it was not run, so get the file again from where it is published"
                )
    raise ValueError("no STOP")


def _allowed(name: str, where: str) -> Name:
    if name not in CALLS and name != "numpy.ndarray":
        raise DataError(
            f"{where}: the pickle names {name}, which arrays and lists do not need; it was not run, so get "
            "the file again from where it is published"
        )
    return Name(name)


def _built(target: Any, state: Any) -> Any:
    """What `target` becomes with its state: a byte order for a type, shape and content for an array."""
    if isinstance(target, np.dtype):
        return target  # one byte has no order
    if not isinstance(target, Unbuilt):
        raise TypeError(f"cannot build {type(target)}")
    _, shape, dtype, by_columns, content = state
    return _array(content, dtype, shape, "F" if by_columns else "C")


def _array(content: Any, dtype: Any, shape: Any, order: Any = "C") -> NDArray[np.uint8]:
    if dtype != np.uint8:
        raise ValueError(f"pixels are {dtype}")
    data = content.encode("latin-1") if isinstance(content, str) else content
    if not isinstance(data, bytes | bytearray):
        raise TypeError(f"pixels in {type(data)}")
    return np.frombuffer(data, dtype=np.uint8).reshape(shape, order="F" if order == "F" else "C")


def _dtype(code: str, *_: Any) -> np.dtype[np.uint8]:
    if code not in ("u1", "|u1"):
        raise ValueError(f"pixels are {code}")
    return np.dtype(np.uint8)


# Texts of Python 2, in which the official batches were written, arrive here decoded as latin-1.
LITERALS = {
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("SHORT_BINSTRING", "BINSTRING"),
    *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
    *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"),
}
FRESH: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_TUPLE": tuple,
}
CALLS: dict[str, Callable[..., Any]] = {
    "numpy.core.multiarray._reconstruct": lambda *_: Unbuilt(),
    "numpy._core.multiarray._reconstruct": lambda *_: Unbuilt(),
    "numpy.core.numeric._frombuffer": _array,
    "numpy._core.numeric._frombuffer": _array,
    "numpy.dtype": _dtype,
    "_codecs.encode": lambda text, _: text.encode("latin-1"),  # how protocol 2 writes bytes in Python 3
}
