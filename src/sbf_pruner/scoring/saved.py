"""Does a saved state fit the pruner, and the device, that is to go on from it?

A state, and the layers that can be pruned, enter; what does not fit is refused before anything is loaded, and what
belongs to the device it was saved on is left behind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..errors import PruningError

_OF_DEVICE = ("capturable", "fused", "foreach")  # how an optimiser steps, where it is


def check_saved(state: Mapping[str, Any], filters: Mapping[str, int], *, blocks: bool) -> None:
    """Refuse what no pruner has saved, or one with other layers, or with scores of blocks where these have none.

    >>> check_saved({}, {"conv": 4}, blocks=False)
    Traceback (most recent call last):
    sbf_pruner.errors.PruningError: this is not the state of a pruner; give what its state_dict() returned
    """
    if not isinstance(state, Mapping) or not {"projection", "held", "scores"} <= state.keys():
        raise PruningError("this is not the state of a pruner; give what its state_dict() returned")
    saved = {name: len(mask) for name, mask in state["held"].items()}
    if odd := [name for name in (*filters, *saved) if filters.get(name) != saved.get(name)]:
        there, here = saved.get(odd[0], 0), filters.get(odd[0], 0)
        raise PruningError(
            f"the saved state has {there} filters to prune in {odd[0]} where the model has {here}; load it into a "
            "pruner of the same network with the same layers ignored"
        )
    if (state.get("blocks") is not None) != blocks:
        raise PruningError(f"the state was saved with blocks={not blocks}; make the pruner so, too")


def for_this_device(state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A saved optimiser's state, to go on as `optimizer` runs here: a GPU wants other steps than a CPU can do."""
    here = [{flag: group[flag] for flag in _OF_DEVICE if flag in group} for group in optimizer.param_groups]
    groups = [{**saved, **own} for saved, own in zip(state["param_groups"], here, strict=True)]
    return {**state, "param_groups": groups}
