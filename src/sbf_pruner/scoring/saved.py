"""Does the saved state of a pruner fit the one that is to go on from it?

A state, and the layers that can be pruned, enter; what does not fit is refused before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import PruningError


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
