"""Data classes of a trace: tensors (`Value`), module calls (`Call`), operators (`Op`) and the whole `Trace`.

All compare and hash by identity, so each can be a dictionary key. An in-place write gives a tensor a new `Value`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

REMAP, ZEROS, STALE = "sbf.remap", "sbf.zeros", "sbf.stale_alias"  # operators of this package
INSTANCE_NORM = "aten.instance_norm"  # torch decomposes it before dispatch; the recorder restores it


@dataclass(eq=False)
class Value:
    """A tensor until its next in-place write: an input, a parameter or buffer, a constant, or a result."""

    shape: tuple[int, ...]
    kind: str  # "input", "state", "constant" or "result"
    name: str = ""  # qualified name of a parameter or buffer
    data: Tensor | None = field(default=None, repr=False)  # numbers of a parameter, buffer or literal
    trained: bool = False  # True for a parameter
    transpose_of: Value | None = None  # the tensor whose transpose this is
    made_of: tuple[Value, ...] | None = None  # its parameters and buffers, for a result computed from those alone

    @property
    def is_table(self) -> bool:
        """True for a tensor of integers or booleans with known values, such as an index table."""
        return self.data is not None and not self.data.is_floating_point()

    @property
    def roots(self) -> tuple[Value, ...] | None:
        """Parameters and buffers that the value is computed from; None if it depends on the network's inputs."""
        if self.kind == "state":
            return (self,)
        return () if self.kind == "constant" else self.made_of


@dataclass(eq=False)
class Call:
    """One call of a module: its input and output tensors, and its operators `Trace.ops[first:last]`."""

    module: str
    inputs: tuple[Value, ...]
    first: int
    parent: Call | None
    outputs: tuple[Value, ...] = ()
    last: int = -1
    overwritten: tuple[Value, ...] = ()  # new values of inputs that were written in place
    kept: bool = False  # a hook or the module stored its result, and it was read from there

    def within(self, module: str) -> Call | None:
        """Return the innermost call of `module` among this call and those around it; None if there is none."""
        at: Call | None = self
        while at is not None and at.module != module:
            at = at.parent
        return at


@dataclass(eq=False)
class Op:
    """One operator that ran; `args` and `kwargs` hold a `Value` in place of each tensor."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[Value, ...]
    outputs: tuple[Value | None, ...]
    call: Call | None
    where: str  # file:line in the user's code
    overload: Any = None
    mutates: bool = False
    position: int = -1  # index in `Trace.ops`
    returned: float | None = None  # a Python number that was returned, as by `tensor.item()`

    @cached_property
    def results(self) -> list[Value]:
        """The outputs that are tensors."""
        return [value for value in self.outputs if value is not None]

    def inside(self, modules: Collection[str]) -> bool:
        """Return True if the operator runs inside a call of any of these modules."""
        call = self.call
        while call is not None and call.module not in modules:
            call = call.parent
        return call is not None

    def number(self, position: int, name: str, default: float | None) -> float | None:
        """Return a numeric argument by position or name; NaN if a tensor is given instead."""
        given = self.args[position] if len(self.args) > position else self.kwargs.get(name, default)
        return given if given is None or isinstance(given, (int, float)) else float("nan")

    def dim(self, position: int, default: int) -> int:
        """Return the argument `dim`, given by position or name."""
        return int(self.number(position, "dim", default) or 0)


@dataclass(eq=False)
class Trace:
    """Record of one forward pass."""

    ops: list[Op]
    inputs: list[Value]
    outputs: list[Value]
    calls: dict[str, list[Call]]  # by qualified name of the module
    states: dict[str, Value]  # parameters and buffers that were read, by qualified name
    literals: list[tuple[str, Tensor]]  # file:line and tensor of each `torch.tensor(...)`; empty on meta
    strangers: list[tuple[str, Tensor]]  # the same for tensors that no operator returned
    training: tuple[str, ...] = ()  # modules that ran in training mode
    on_meta: bool = True  # the forward pass ran on meta tensors
    otherwise: dict[str, str] = field(default_factory=dict)  # layer -> line that reads it in training mode only
    unused: int = 0  # elements of the parameters that no operator read
    added: frozenset[int] = frozenset()  # positions of operators that run in training mode only
    other: Trace | None = None  # trace in the other mode, if some module depends on its mode
    apart: frozenset[int] = frozenset()  # of an `other` trace: positions of operators that run only in it
    drawn: frozenset[int] = frozenset()  # of an `other` trace: positions of operators that read only random numbers
    keeps: bool = False  # the warm-up call stored tensors on the model, which may be read here
    random_calls: bool = False  # the forward pass drew random numbers from Python or NumPy
    cold: bool = False  # traced without a warm-up call
    first: Trace | None = None  # the trace without a warm-up call, if `keeps`

    @property
    def samples(self) -> int:
        """Batch size: the first dimension of the first input."""
        first = self.inputs[0].shape if self.inputs else ()
        return first[0] if first else 1


class Literals(TorchFunctionMode):
    """Create tensors from Python numbers on the CPU and move them to the meta device, while active.

    A meta tensor has no values, so the recorder takes them from the CPU tensor. A number may be a width, as in
    `torch.tensor(x.shape[1], device=x.device)`, which differs in a smaller network.
    """

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
    """Return True if two tensors have equal shapes and values, with NaN equal to NaN.

    >>> same_numbers(torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]))
    True
    """
    return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())


_MAKERS = {torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor}
_INDEXING = {Tensor.__getitem__, Tensor.__setitem__}


def _with_tables(index: Any) -> Any:
    """Replace every list of integers in an index by a tensor, so that its values are recorded."""
    if isinstance(index, tuple):
        return tuple(map(_with_tables, index))
    if isinstance(index, list) and index and all(isinstance(i, int) for i in index):
        return torch.tensor(index).to("meta")
    return index
