"""Hooks that this package puts on a user's model, and how to take them off.

Every such hook is an `Attached` object or one of its methods, so that a copy of the model can be cleaned of
them wherever the bare model is wanted: for tracing, for surgery, and when a pruner is detached.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from .errors import PruningError
from .inputs import check_model


class Attached:
    """The base of everything this package hooks into a model."""


def attached_hooks(model: nn.Module) -> Iterator[tuple[nn.Module, dict[Any, Any], Any, Attached]]:
    """Every hook of ours: the module, the table it stands in, its key there, and the object behind it.

    A forward that goes before that of the module's class counts as one; its table is the module's attributes.
    """
    for module in model.modules():
        tables: tuple[dict[Any, Any], ...] = (module._forward_pre_hooks, module._forward_hooks)
        places = [(table, key) for table in tables for key in table]
        if "forward" in module.__dict__:
            places.append((module.__dict__, "forward"))
        for table, key in places:
            owner = getattr(table[key], "__self__", table[key])
            if isinstance(owner, Attached):
                yield module, table, key, owner


def check_unattached(model: nn.Module) -> None:
    """Refuse what is no model, or one that has hooks of ours already."""
    check_model(model)
    if any(attached_hooks(model)):
        raise PruningError(
            "the model has a pruner already, or is a copy of one that had; detach() that one first, or, if it is "
            "gone, take its gates off with sbf_pruner.attached.without_attached(model)"
        )


def without_attached(model: nn.Module) -> nn.Module:
    """Take every hook of ours off a model, in place."""
    for module, table, key, _ in list(attached_hooks(model)):
        del table[key]
        module._forward_hooks_always_called.pop(key, None)
        module._forward_hooks_with_kwargs.pop(key, None)
        module._forward_pre_hooks_with_kwargs.pop(key, None)
    return model
