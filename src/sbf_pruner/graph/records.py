"""What a recording consists of: tensors, calls of modules, operators, and all of them together.

Plain data, made by `recorder` and read by every other file here.  What holds: two values are equal only if they are
the same tensor at the same moment, so each of these may be the key of a table.

Tensors that a forward makes of numbers, made so that those numbers are known.

On the meta device tensors have none.  But what a forward writes down may be a width, as in
`torch.tensor(x.shape[1], device=x.device)`, and that it is another one in a smaller network has to show.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

REMAP, ZEROS, STALE = "sbf.remap", "sbf.zeros", "sbf.stale_alias"  # operators of our own
INSTANCE_NORM = "aten.instance_norm"  # which torch takes apart before we see it


@dataclass(eq=False)
class Value:
    """One tensor at one moment: an input, a parameter or buffer, a constant, or an operator's result."""

    shape: tuple[int, ...]
    kind: str  # "input", "state", "constant" or "result"
    name: str = ""  # of a parameter or buffer: its qualified name
    data: Tensor | None = field(default=None, repr=False)  # of a parameter, buffer or literal: the real numbers
    trained: bool = False  # it is a parameter
    transpose_of: Value | None = None  # the tensor this is the transpose of
    made_of: tuple[Value, ...] | None = None  # of a result: the parameters and buffers, if of nothing else

    @property
    def roots(self) -> tuple[Value, ...] | None:
        """The parameters and buffers it is made of; None if of inputs too."""
        if self.kind == "state":
            return (self,)
        return () if self.kind == "constant" else self.made_of


@dataclass(eq=False)
class Call:
    """One call of one module: what went in and came out, and the range of operators it ran."""

    module: str
    inputs: tuple[Value, ...]
    first: int
    parent: Call | None
    outputs: tuple[Value, ...] = ()
    last: int = -1
    overwritten: tuple[Value, ...] = ()  # what it wrote over its inputs
    kept: bool = False  # what it gave is read from where a hook or the module itself has put it, too

    def within(self, module: str) -> Call | None:
        """The call of `module` that this call is part of (or is itself)."""
        at: Call | None = self
        while at is not None and at.module != module:
            at = at.parent
        return at


@dataclass(eq=False)
class Op:
    """One operator that ran; `args` and `kwargs` are its own, with a `Value` in place of each tensor."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[Value, ...]
    outputs: tuple[Value | None, ...]
    call: Call | None
    where: str  # file:line in the user's code
    overload: Any = None
    mutates: bool = False
    position: int = -1  # in the recording
    told: float | None = None  # the Python number it gave, if it did (`tensor.item()`)

    def inside(self, modules: Collection[str]) -> bool:
        """Does it run in a call of any of these modules?"""
        call = self.call
        while call is not None and call.module not in modules:
            call = call.parent
        return call is not None

    def number(self, position: int, name: str, default: float | None) -> float | None:
        """A number among the arguments; nan where a tensor stands in its place."""
        given = self.args[position] if len(self.args) > position else self.kwargs.get(name, default)
        return given if given is None or isinstance(given, (int, float)) else float("nan")


@dataclass(eq=False)
class Trace:
    """Everything one forward pass did."""

    ops: list[Op]
    inputs: list[Value]
    outputs: list[Value]
    calls: dict[str, list[Call]]  # by module
    states: dict[str, Value]  # parameters and buffers that were used, by qualified name
    literals: list[tuple[str, Tensor]]  # tensors the forward made of numbers, if it had numbers; with their lines
    strangers: list[tuple[str, Tensor]]  # tensors from outside of it, likewise
    training: tuple[str, ...] = ()  # the modules that ran in training mode
    on_meta: bool = True  # it ran without numbers
    otherwise: dict[str, str] = field(default_factory=dict)  # layer -> the line it feeds in training mode alone
    unused: int = 0  # entries of the parameters that no operator read
    added: frozenset[int] = frozenset()  # positions of the operators that run in training mode alone
    other: Trace | None = None  # the same in the other mode, if something there asks for it
    apart: frozenset[int] = frozenset()  # of that recording: positions of what runs there alone
    drawn: frozenset[int] = frozenset()  # and of what sees nothing but random numbers
    keeps: bool = False  # a call before this one has left tensors that it found
    lucky: bool = False  # it drew random numbers that torch does not know of
    cold: bool = False  # there was no call before it
    first: Trace | None = None  # such a first call, where something is kept from it

    @property
    def samples(self) -> int:
        """How many samples it saw: a batch comes first, as everywhere."""
        first = self.inputs[0].shape if self.inputs else ()
        return first[0] if first else 1


class Literals(TorchFunctionMode):
    """While entered, what is made of numbers for the meta device is made on the CPU and moved from there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _MAKERS:
            like, given = (args[0], args[1:]) if func is Tensor.new_tensor else (None, args)
            device = kwargs.get("device") or (None if like is None else like.device)
            if str(device) == "meta" and not any(isinstance(a, Tensor) for a in (*given, *kwargs.values())):
                return func(*args, **{**kwargs, "device": "cpu"}).to(device)
        elif func in _INDEXING and args[0].is_meta:
            args = (args[0], _with_tables(args[1]), *args[2:])
        return func(*args, **kwargs)


def same_numbers(one: Tensor, other: Tensor) -> bool:
    """Are two tensors equal, also where neither has a number?

    >>> same_numbers(torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]))
    True
    """
    return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())


_MAKERS = {torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor}
_INDEXING = {Tensor.__getitem__, Tensor.__setitem__}


def _with_tables(index: Any) -> Any:
    """An index with a tensor in the place of every list of whole numbers."""
    if isinstance(index, tuple):
        return tuple(map(_with_tables, index))
    if isinstance(index, list) and index and all(isinstance(i, int) for i in index):
        return torch.tensor(index).to("meta")
    return index
