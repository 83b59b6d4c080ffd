"""The pruner layers: from the frozen filter weights of the whole network to one logit per filter.

The layers' weights enter at the start of a score phase; one flat vector of logits leaves (the layers'
filters one after another), differentiable with respect to `parameters`, which the caller trains with a
fresh Adam in every phase.  What holds: every logit starts at 0; the tensors that `logits` reads are only ever
changed in place, so a compiled or captured step stays valid from phase to phase.  Here is what the forms of it
have in common; each has a file of its own, and `forms` lists them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import PruningError


class Projection(Protocol):
    """What a score phase needs of a pruner layer, whatever its form."""

    parameters: list[Tensor]
    """What the optimiser of the score phase trains."""
    in_phase: bool
    """Between `begin_phase` and `end_phase`; after a load in the middle of a phase, do not begin it again."""

    def groups(self, lr: float) -> list[dict[str, Any]]:
        """The parameters with their learning rates, as an optimiser made within a phase takes them."""

    def begin_phase(self, weights: Sequence[Tensor]) -> None:
        """Take in the weights, one tensor per layer, which stay frozen until the phase ends."""

    def logits(self) -> Tensor:
        """All logits, flat; after a phase, those it ended with."""

    def end_phase(self) -> None:
        """Remember what later phases need of this one."""

    def state_dict(self) -> dict[str, Any]:
        """A snapshot (tensors and ints) from which training goes on exactly, even amid a phase."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a snapshot, in place."""


def dtype_and_device(weights: Sequence[Tensor], filters: Sequence[int]) -> tuple[torch.dtype, torch.device]:
    """The type and place of the logits; at least float32, as steps of 1e-6 would round away in half."""
    if not weights or len(weights) != len(filters):
        raise PruningError(
            f"{len(weights)} weights and {len(filters)} filter counts were given; a projection needs "
            "one of each for every layer, and at least one layer to score"
        )
    return reduce(torch.promote_types, (w.dtype for w in weights), torch.float32), weights[0].device


def check_phase(projection: Projection, weights: Sequence[Tensor], sizes: Sequence[int]) -> None:
    """Refuse to begin a phase within another, or with the weights of another network."""
    if projection.in_phase:
        raise PruningError("a score phase is already under way; end it before the next one begins")
    found = [w.numel() for w in weights]
    if found != list(sizes):
        raise PruningError(
            f"the projection was made for layers of {list(sizes)} weights and is given {found}; "
            "make a new one when the network changes shape"
        )


def restore(slots: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Copy saved tensors into place, all or none."""
    for name, slot in slots.items():
        if name not in state or state[name].shape != slot.shape:
            found = tuple(state[name].shape) if name in state else "nothing"
            raise PruningError(
                f"the saved projection holds {found} for {name!r} where {tuple(slot.shape)} is needed; "
                "load it into the network and the form of projection it was saved from"
            )
    with torch.no_grad():
        for name, slot in slots.items():
            slot.copy_(state[name])
