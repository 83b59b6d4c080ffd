"""Deep copies of user models, this package's hooks on them, and calls with example inputs.

Unlike with `copy.deepcopy`, functions that capture the model or its tensors in closures, defaults, partials or
hooks are rebound to the copy. Every hook of this package is a `PrunerHook` object or a method of one, so that it
can be found and removed, also in copies. Models and inputs are not changed, except by `remove_pruner_hooks`.
"""

from __future__ import annotations

import copy
import gc
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from types import CellType, FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import PruningError

Model = TypeVar("Model", bound=nn.Module)


def meta_copy(model: Model) -> Model:
    """Return a deep copy with meta tensors; running it computes shapes only.

    >>> meta_copy(nn.Linear(2, 3)).weight.device
    device(type='meta')
    """
    # Tensors stored as plain attributes are included, which `Module.to` would not move.
    return _copied(model, {id(t): _meta_twin(t) for t in all_tensors(model)})


def real_copy(model: Model, instead: Mapping[int, Tensor] | None = None) -> Model:
    """Return a deep copy; non-leaf tensors, which the old weight_norm stores, are detached and cloned.

    `instead` maps the `id` of a tensor to the tensor that replaces it in the copy.

    >>> real_copy(nn.Linear(2, 3)).out_features
    3
    """
    computed = {id(t): t.detach().clone() for t in all_tensors(model) if not t.is_leaf}
    return _copied(model, computed | dict(instead or {}))


def all_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Yield all tensors of a model: parameters, buffers, and plain attributes, also inside containers."""
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, Tensor):
                yield value
            elif isinstance(value, (dict, list, tuple, deque)) and value:
                yield from (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))


def _copied(model: Model, instead: dict[int, Tensor]) -> Model:
    # Most attributes of a module are empty hook tables, on which deepcopy would spend most of its time. Mapping
    # them to new empty tables in its memo avoids that.
    values = (value for module in model.modules() for value in vars(module).values())
    memo: dict[int, Any] = {id(v): type(v)() for v in values if type(v) in (dict, OrderedDict) and not v}
    memo |= instead
    made = copy.deepcopy(model, memo)
    for old, new in zip(model.modules(), made.modules(), strict=False):
        new.training = old.training  # A copy of a torch.fx.GraphModule loses it.
    members = {id(module) for module in model.modules()} | {id(tensor) for tensor in all_tensors(model)}
    rebinding = _Rebinding(members, memo)
    for module in made.modules():
        for name, value in vars(module).items():
            vars(module)[name] = rebinding.of(value)
    return made


def _meta_twin(tensor: Tensor) -> Tensor:
    twin = torch.empty_like(tensor, device="meta", requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(twin, requires_grad=tensor.requires_grad)
    return twin.requires_grad_(tensor.requires_grad)


class _Rebinding:
    """Rebuilds functions that refer to parts of a model so that they refer to the same parts of its copy."""

    def __init__(self, members: set[int], memo: dict[int, Any]) -> None:
        self._members = members
        self._memo = memo  # of deepcopy: copies by the id of their originals
        self._made: dict[int, FunctionType] = {}

    def of(self, value: Any) -> Any:
        """Return a value of the copy with such functions rebound, or the same object if it contains none."""
        if isinstance(value, FunctionType):
            return self._function(value) if self._refers(value, set()) else value
        if isinstance(value, partial):
            before = (value.func, value.args, value.keywords)
            function, args, named = after = tuple(map(self.of, before))
            return value if _same(after, before) else type(value)(function, *args, **named)
        if isinstance(value, dict | list | deque):  # Changed in place, because it may be referenced elsewhere too.
            for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
                if (new := self.of(item)) is not item:
                    value[key] = new
        elif type(value) in (tuple, set, frozenset):
            items = list(value)
            rebound = list(map(self.of, items))
            return value if _same(rebound, items) else type(value)(rebound)
        return value

    def _refers(self, value: Any, seen: set[int]) -> bool:
        """Return True if a value refers to a part of the model, directly or in containers, methods or functions."""
        if id(value) in self._members:
            return True
        if id(value) in seen:
            return False
        seen.add(id(value))
        inner: Iterable[Any] = ()
        if isinstance(value, FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
            inner = (*cells, value.__defaults__, value.__kwdefaults__, value.__dict__)
        elif isinstance(value, MethodType):
            inner = (value.__self__,)
        elif isinstance(value, partial):
            inner = (value.func, value.args, value.keywords)
        elif isinstance(value, dict):
            inner = value.values()
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            inner = value
        return any(self._refers(each, seen) for each in inner)

    def _function(self, old: FunctionType) -> FunctionType:
        if id(old) in self._made:
            return self._made[id(old)]
        cells = tuple(CellType() for _ in old.__closure__ or ())
        new = FunctionType(old.__code__, old.__globals__, old.__name__, None, cells)
        self._made[id(old)] = new  # before its cells are filled, because it may refer to itself
        for cell, original in zip(cells, old.__closure__ or (), strict=True):
            if original != CellType():
                cell.cell_contents = self._twin(original.cell_contents)
        new.__defaults__, new.__kwdefaults__ = self._twin(old.__defaults__), self._twin(old.__kwdefaults__)
        new.__qualname__, new.__annotations__, new.__doc__ = old.__qualname__, old.__annotations__, old.__doc__
        new.__dict__.update(self._twin(old.__dict__))  # such as __wrapped__
        return new

    def _twin(self, value: Any) -> Any:
        if not self._refers(value, set()):
            return value
        if isinstance(value, FunctionType):
            return self._function(value)
        return self.of(copy.deepcopy(value, self._memo))


def _same(after: Sequence[Any], before: Sequence[Any]) -> bool:
    return all(new is old for new, old in zip(after, before, strict=True))


class PrunerHook:
    """Base class of all hooks that this package adds to a model."""


def pruner_hooks(model: nn.Module) -> Iterator[tuple[nn.Module, dict[Any, Any], Any, PrunerHook]]:
    """Yield every hook of this package: its module, the dict that stores it, its key, and its `PrunerHook` object.

    A `forward` set on an instance, which overrides that of the class, counts as a hook; its dict is `__dict__`.
    """
    for module in model.modules():
        tables: tuple[dict[Any, Any], ...] = (module._forward_pre_hooks, module._forward_hooks)
        entries = [(table, key) for table in tables for key in table]
        if "forward" in module.__dict__:
            entries.append((module.__dict__, "forward"))
        for table, key in entries:
            owner = getattr(table[key], "__self__", table[key])
            if isinstance(owner, PrunerHook):
                yield module, table, key, owner


def check_no_pruner_hooks(model: nn.Module) -> None:
    """Raise a PruningError if `model` is not an nn.Module or already has hooks of this package."""
    check_model(model)
    if any(pruner_hooks(model)):
        raise PruningError(
            "the model already has a pruner, or is a copy of a model that had one; detach() that pruner first, or, "
            "if it no longer exists, remove its gates with sbf_pruner.utils.remove_pruner_hooks(model)"
        )


def remove_pruner_hooks(model: nn.Module) -> nn.Module:
    """Remove all hooks of this package from a model, in place, and return the model."""
    for module, table, key, _ in list(pruner_hooks(model)):
        del table[key]
        module._forward_hooks_always_called.pop(key, None)
        module._forward_hooks_with_kwargs.pop(key, None)
        module._forward_pre_hooks_with_kwargs.pop(key, None)
    return model


def check_model(model: object) -> None:
    """Raise a PruningError if `model` is not an nn.Module instance."""
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise PruningError(
            f"a model is an nn.Module instance, not a class; create one first: {model.__name__}(...)"
        )
    if not isinstance(model, nn.Module):
        raise PruningError(f"a model is an nn.Module, not {type(model).__name__}; pass the network itself")


def call(model: Callable[..., Any], inputs: Any) -> Any:
    """Call a model with example inputs: a tuple as positional, a dict as keyword arguments, else one argument.

    >>> call(torch.add, (torch.tensor(1), torch.tensor(2)))
    tensor(3)
    >>> call(torch.square, {"input": torch.tensor(3)})
    tensor(9)
    """
    if isinstance(inputs, tuple):
        return model(*inputs)
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(inputs)


def map_tensors(inputs: Any, fn: Callable[[Tensor], Any]) -> Any:
    """Apply `fn` to every tensor in nested tuples, lists and dicts.

    >>> map_tensors({"x": [torch.zeros(2)], "n": 3}, lambda t: t + 1)
    {'x': [tensor([1., 1.])], 'n': 3}
    """
    return pytree.tree_map_only(Tensor, fn, inputs)


def with_extra_sample(inputs: Any) -> Any:
    """Append a copy of the first sample to every input tensor."""
    return map_tensors(inputs, lambda t: _tiled(t, [len(t) + 1, *t.shape[1:]]) if t.dim() else t)


def resized_inputs(inputs: Any) -> Iterator[Any]:
    """Yield inputs with one more sample and other spatial sizes, tiled from the given ones.

    The first inputs are not square: sizes up to 128 grow by about a third, and larger ones shrink, which saves
    time; sizes divisible by a large power of two stay so. The second inputs have twice the size, or half if it is
    over 128. Nothing is yielded if no tensor has more than two dimensions.

    >>> [list(x.shape) for x in resized_inputs(torch.zeros(2, 3, 64, 64))]
    [[3, 3, 96, 128], [3, 3, 128, 128]]
    >>> [list(x.shape) for x in resized_inputs(torch.zeros(1, 3, 224, 224))]
    [[2, 3, 160, 128], [2, 3, 112, 112]]
    """
    if any(isinstance(t, Tensor) and t.dim() > 2 for t in pytree.tree_leaves(inputs)):
        for change in (_by_a_third, _doubled):
            yield map_tensors(with_extra_sample(inputs), partial(_resized, change=change))


_SMALL = 128  # pixels along a side


def _by_a_third(size: int, axis: int) -> int:
    unit = size & -size
    if unit == size > 1:
        unit //= 2 if size <= _SMALL else 4
    step = unit * (max(1, round(size / 3 / unit)) + axis)
    return size + step if size <= _SMALL else size - step


def _doubled(size: int, axis: int) -> int:
    return size * 2 if size <= _SMALL else size // 2


def _resized(tensor: Tensor, change: Callable[[int, int], int]) -> Tensor:
    return _tiled(tensor, [*tensor.shape[:2], *map(change, tensor.shape[2:], count())])


def _tiled(tensor: Tensor, sizes: Sequence[int]) -> Tensor:
    for dim, size in enumerate(sizes):
        if tensor.shape[dim] not in (0, size):
            tensor = tensor.index_select(dim, torch.arange(size, device=tensor.device) % tensor.shape[dim])
    return tensor


def memory_format(tensor: Tensor) -> torch.memory_format:
    """Return channels_last or channels_last_3d if a tensor has only that layout, else contiguous_format.

    >>> memory_format(torch.zeros(1, 3, 4, 4).contiguous(memory_format=torch.channels_last))
    torch.channels_last
    """
    found = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    if found is None or tensor.is_contiguous() or not tensor.is_contiguous(memory_format=found):
        return torch.contiguous_format
    return found


def random_inputs(like: Any, batch: int, seed: int = 0) -> Any:
    """Return random inputs with `batch` samples, shaped like `like`: normal values, zeros for integer dtypes.

    >>> [tuple(t.shape) for t in random_inputs((torch.zeros(1, 3, 8), torch.ones(1, dtype=torch.int64)), 5)]
    [(5, 3, 8), (5,)]
    """
    generator = torch.Generator().manual_seed(seed)

    def filled(tensor: Tensor) -> Tensor:
        if not tensor.dim():  # a scalar shared by all samples
            return torch.zeros_like(tensor, device="cpu") if tensor.is_meta else tensor
        shape = (batch, *tensor.shape[1:])
        if not tensor.is_floating_point():  # It may be an index, for which only zero is surely valid.
            return torch.zeros(shape, dtype=tensor.dtype)
        return torch.randn(shape, generator=generator).to(tensor.dtype)

    return map_tensors(like, filled)


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable garbage collection in the block or the decorated function.

    A full collection visits everything torch has imported, which takes longer than tracing most networks, and the
    many small objects of a trace would trigger one.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
