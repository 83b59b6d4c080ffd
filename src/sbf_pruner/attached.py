"""Hooks that this package puts on a user's model, and how to take them off.

Every such hook is an `Attached` object or one of its methods, so that a copy of the model can be cleaned of
them wherever the bare model is wanted: for tracing, for surgery, and when a pruner is detached.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn


class Attached:
    """The base of everything this package hooks into a model."""


def attached_hooks(model: nn.Module) -> Iterator[tuple[nn.Module, dict[int, Any], int, Attached]]:
    """Every hook of ours: the module, the table it stands in, its key there, and the object behind it."""
    for module in model.modules():
        for table in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in list(table.items()):
                owner = getattr(hook, "__self__", hook)
                if isinstance(owner, Attached):
                    yield module, table, key, owner


def without_attached(model: nn.Module) -> nn.Module:
    """Take every hook of ours off a model, in place."""
    for module, table, key, _ in list(attached_hooks(model)):
        del table[key]
        module._forward_hooks_always_called.pop(key, None)
        module._forward_hooks_with_kwargs.pop(key, None)
        module._forward_pre_hooks_with_kwargs.pop(key, None)
    return model
