"""Example inputs and made-up ones: what tracing, cutting and measuring share.

A model and its example inputs enter; a call or other inputs leave.  What holds:
a tensor is one argument, a tuple the positional arguments, a dict the keyword arguments, and anything else
is passed as the one argument it is; neither the model nor the inputs are changed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .errors import PruningError


def check_model(model: object) -> None:
    """Refuse what is no network, or only the class of one."""
    if isinstance(model, type) and issubclass(model, nn.Module):
        name = model.__name__
        raise PruningError(f"a model is an nn.Module, not the class of one; make one first: {name}(...)")
    if not isinstance(model, nn.Module):
        raise PruningError(f"a model is an nn.Module, not {type(model).__name__}; pass the network itself")


def call(model: Callable[..., Any], inputs: Any) -> Any:
    """Call the model with its example inputs, spread over its arguments.

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
    """The same nest of tuples, lists and dicts, with `fn` applied to every tensor in it.

    >>> map_tensors({"x": [torch.zeros(2)], "n": 3}, lambda t: t + 1)
    {'x': [tensor([1., 1.])], 'n': 3}
    """
    return pytree.tree_map_only(Tensor, fn, inputs)


def one_more(inputs: Any) -> Any:
    """The same inputs with one more sample, which is the first one again."""
    return map_tensors(inputs, lambda t: _tiled(t, [len(t) + 1, *t.shape[1:]]) if t.dim() else t)


def other_sizes(inputs: Any) -> Iterator[Any]:
    """Yield inputs with one more sample and maps of another size, tiled with the given ones.

    The first are not square.  Small maps grow by about a third and large ones shrink, which takes less time; sizes
    stay divisible by a large power of two if they were.  The second have twice the size, or half of it.

    >>> [list(x.shape) for x in other_sizes(torch.zeros(2, 3, 64, 64))]
    [[3, 3, 96, 128], [3, 3, 128, 128]]
    >>> [list(x.shape) for x in other_sizes(torch.zeros(1, 3, 224, 224))]
    [[2, 3, 160, 128], [2, 3, 112, 112]]
    """
    if any(isinstance(t, Tensor) and t.dim() > 2 for t in pytree.tree_leaves(inputs)):
        for change in (_changed, _doubled):
            yield map_tensors(one_more(inputs), partial(_resized, change=change))


_SMALL = 128  # pixels along a side


def _changed(size: int, place: int) -> int:
    unit = size & -size
    if unit == size > 1:
        unit //= 2 if size <= _SMALL else 4
    step = unit * (max(1, round(size / 3 / unit)) + place)
    return size + step if size <= _SMALL else size - step


def _doubled(size: int, place: int) -> int:
    return size * 2 if size <= _SMALL else size // 2


def _resized(tensor: Tensor, change: Callable[[int, int], int]) -> Tensor:
    return _tiled(tensor, [*tensor.shape[:2], *map(change, tensor.shape[2:], count())])


def _tiled(tensor: Tensor, sizes: Sequence[int]) -> Tensor:
    for dim, size in enumerate(sizes):
        if tensor.shape[dim] not in (0, size):
            tensor = tensor.index_select(dim, torch.arange(size, device=tensor.device) % tensor.shape[dim])
    return tensor


def memory_format(tensor: Tensor) -> torch.memory_format:
    """How a tensor lies in memory: with its channels last, if it does and that is not the plain order as well.

    >>> memory_format(torch.zeros(1, 3, 4, 4).contiguous(memory_format=torch.channels_last))
    torch.channels_last
    """
    for rank, held in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if tensor.dim() == rank and tensor.is_contiguous(memory_format=held) and not tensor.is_contiguous():
            return held
    return torch.contiguous_format


def made_up_inputs(like: Any, batch: int, seed: int = 0) -> Any:
    """Inputs like the ones given, with so many samples: normal numbers, and zeros where there are whole ones.

    >>> [tuple(t.shape) for t in made_up_inputs((torch.zeros(1, 3, 8), torch.ones(1, dtype=torch.int64)), 5)]
    [(5, 3, 8), (5,)]
    """
    generator = torch.Generator().manual_seed(seed)

    def filled(tensor: Tensor) -> Tensor:
        if not tensor.dim():  # one number for all samples
            return torch.zeros_like(tensor, device="cpu") if tensor.is_meta else tensor
        shape = (batch, *tensor.shape[1:])
        if not tensor.is_floating_point():  # an index, say: only zero is sure to be allowed
            return torch.zeros(shape, dtype=tensor.dtype)
        return torch.randn(shape, generator=generator).to(tensor.dtype)

    return map_tensors(like, filled)


@contextmanager
def uncollected() -> Iterator[None]:
    """While entered, or in a function so decorated, Python does not look for garbage.

    A full search goes through everything torch has imported, which takes longer than tracing most networks,
    and the many small objects of a trace would set one off.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
