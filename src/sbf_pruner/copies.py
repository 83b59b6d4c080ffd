"""Copies of networks: with their weights, or with shapes alone, and with functions that know the copy.

A model enters, a deep copy leaves.  What holds: the model is not changed, and the copy does not lead back to it.
Python copies no functions: a hook or a lambda that knows its model by a closure would go on with that one.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

Model = TypeVar("Model", bound=nn.Module)


def meta_copy(model: Model) -> Model:
    """A deep copy whose tensors have shapes and types but no storage: running it computes sizes alone.

    >>> meta_copy(nn.Linear(2, 3)).weight.device
    device(type='meta')
    """
    # Tensors held as plain attributes must move too.
    return _copied(model, {id(t): _meta_twin(t) for t in held_tensors(model)})


def real_copy(model: Model, instead: Mapping[int, Tensor] | None = None) -> Model:
    """A deep copy, also of a model with tensors computed in an earlier call, as the old weight_norm leaves them.

    `instead` holds tensors to put in the place of others, by the identity of those.

    >>> real_copy(nn.Linear(2, 3)).out_features
    3
    """
    computed = {id(t): t.detach().clone() for t in held_tensors(model) if not t.is_leaf}
    return _copied(model, computed | dict(instead or {}))


def held_tensors(model: nn.Module) -> Iterator[Tensor]:
    """All tensors of a model: parameters, buffers, and those that are plain attributes of its modules."""
    for module in model.modules():
        for held in vars(module).values():
            if isinstance(held, Tensor):
                yield held
            elif isinstance(held, (dict, list, tuple, deque)) and held:
                yield from (leaf for leaf in pytree.tree_leaves(held) if isinstance(leaf, Tensor))


def _copied(model: Model, instead: dict[int, Tensor]) -> Model:
    twins: dict[int, Any] = _empty_tables(model) | instead
    made = copy.deepcopy(model, twins)
    for old, new in zip(model.modules(), made.modules(), strict=False):
        new.training = old.training  # which a graph of torch.fx forgets
    members = {id(module) for module in model.modules()} | {id(tensor) for tensor in held_tensors(model)}
    binding = _Binding(members, twins)
    for module in made.modules():
        for name, held in vars(module).items():
            vars(module)[name] = binding.of(held)
    return made


def _empty_tables(model: nn.Module) -> dict[int, Any]:
    """A twin for every empty table of a module's own, by its identity.

    A module is mostly these, for hooks it has not; one by one they take deepcopy more time than all the rest.
    """
    held = (table for module in model.modules() for table in vars(module).values())
    return {id(table): type(table)() for table in held if type(table) in (dict, OrderedDict) and not table}


def _meta_twin(tensor: Tensor) -> Tensor:
    twin = torch.empty_like(tensor, device="meta", requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(twin, requires_grad=tensor.requires_grad)
    return twin.requires_grad_(tensor.requires_grad)


class _Binding:
    """Functions that know parts of a model, by a closure or a default, made anew for its copy."""

    def __init__(self, members: set[int], twins: dict[int, Any]) -> None:
        self._members = members
        self._twins = twins  # what deepcopy has made, by the identity of what it was made of
        self._made: dict[int, FunctionType] = {}

    def of(self, held: Any) -> Any:
        """What a module of the copy is to hold; the same, if no such function is in it."""
        if isinstance(held, FunctionType):
            return self._function(held) if self._knows(held, set()) else held
        if isinstance(held, partial):
            before = (held.func, held.args, held.keywords)
            function, args, named = found = tuple(map(self.of, before))
            return held if _same(found, before) else type(held)(function, *args, **named)
        if isinstance(held, dict | list | deque):  # in place: others may hold it too
            for key, value in list(held.items() if isinstance(held, dict) else enumerate(held)):
                if (new := self.of(value)) is not value:
                    held[key] = new
        elif type(held) in (tuple, set, frozenset):
            parts = list(held)
            new = list(map(self.of, parts))
            return held if _same(new, parts) else type(held)(new)
        return held

    def _knows(self, held: Any, seen: set[int]) -> bool:
        """Does a part of the model stand in a plain container, behind a method or in a function's closure?"""
        if id(held) in self._members:
            return True
        if id(held) in seen:
            return False
        seen.add(id(held))
        if isinstance(held, FunctionType):
            known = (held.__defaults__, held.__kwdefaults__, held.__dict__)
            inner = [*map(_contents, held.__closure__ or ()), *known]
        elif isinstance(held, MethodType):
            inner = [held.__self__]
        elif isinstance(held, partial):
            inner = [held.func, held.args, held.keywords]
        elif isinstance(held, dict):
            inner = list(held.values())
        else:
            inner = list(held) if isinstance(held, (list, tuple, set, frozenset, deque)) else []
        return any(self._knows(each, seen) for each in inner)

    def _function(self, old: FunctionType) -> FunctionType:
        if id(old) in self._made:
            return self._made[id(old)]
        cells = tuple(CellType() for _ in old.__closure__ or ())
        new = FunctionType(old.__code__, old.__globals__, old.__name__, None, cells)
        self._made[id(old)] = new  # before its cells are filled: it may know itself
        for cell, held in zip(cells, old.__closure__ or (), strict=True):
            if held != CellType():
                cell.cell_contents = self._twin(held.cell_contents)
        new.__defaults__, new.__kwdefaults__ = self._twin(old.__defaults__), self._twin(old.__kwdefaults__)
        new.__qualname__, new.__annotations__, new.__doc__ = old.__qualname__, old.__annotations__, old.__doc__
        new.__dict__.update(self._twin(old.__dict__))  # such as the function that it wraps
        return new

    def _twin(self, held: Any) -> Any:
        if not self._knows(held, set()):
            return held
        if isinstance(held, FunctionType):
            return self._function(held)
        return self.of(copy.deepcopy(held, self._twins))


def _same(found: Sequence[Any], before: Sequence[Any]) -> bool:
    return all(new is old for new, old in zip(found, before, strict=True))


def _contents(cell: CellType) -> Any:
    return None if cell == CellType() else cell.cell_contents
