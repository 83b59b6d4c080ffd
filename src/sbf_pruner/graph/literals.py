"""Tensors that a forward makes of numbers, made so that those numbers are known.

On the meta device tensors have none.  But what a forward writes down may be a width, as in
`torch.tensor(x.shape[1], device=x.device)`, and that it is another one in a smaller network has to show.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


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
