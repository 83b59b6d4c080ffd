"""The paper's pruner layer taken literally: a matrix from all weights of a layer to its filters.

The reference that the factored form is held against, for small networks; what would not fit in the device's
memory is refused before anything is allocated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import PruningError
from ..memory import memory_of
from .projection import check_phase, dtype_and_device, restore


class LiteralProjection:
    """The paper's layer (Eq. 1): `vec(F) @ W`, with a `W` of as many entries as the layer has weights times
    filters.  The reference for small networks; it refuses what does not fit in the device's memory.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        filters: Sequence[int],
        *,
        even: bool = False,
        limit_bytes: int | None = None,
    ) -> None:
        dtype, device = dtype_and_device(weights, filters)
        self._even = even
        literal_bytes(weights, filters, limit_bytes=memory_of(device) if limit_bytes is None else limit_bytes)
        self.in_phase = False
        self.parameters: list[Tensor] = [
            torch.zeros(w.numel(), count, dtype=dtype, device=device, requires_grad=True)
            for w, count in zip(weights, filters, strict=True)
        ]
        self._vectors = [torch.zeros(w.numel(), dtype=dtype, device=device) for w in weights]

    @torch.no_grad()
    def begin_phase(self, weights: Sequence[Tensor]) -> None:
        check_phase(self, weights, [vector.numel() for vector in self._vectors])
        for vector, weight in zip(self._vectors, weights, strict=True):
            vector.copy_(weight.flatten())
        self.in_phase = True

    def groups(self, lr: float) -> list[dict[str, Any]]:
        if not self._even:
            return [{"params": self.parameters, "lr": lr}]
        norms = [float(v.abs().sum()) for v in self._vectors]
        return [{"params": [w], "lr": lr / n if n else lr} for w, n in zip(self.parameters, norms, strict=True)]

    def logits(self) -> Tensor:
        return torch.cat([v @ w for v, w in zip(self._vectors, self.parameters, strict=True)])

    def end_phase(self) -> None:
        self.in_phase = False

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"in_phase": int(self.in_phase)}
        for i, (vector, matrix) in enumerate(zip(self._vectors, self.parameters, strict=True)):
            state |= {f"vector.{i}": vector.clone(), f"matrix.{i}": matrix.detach().clone()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        slots = {f"vector.{i}": vector for i, vector in enumerate(self._vectors)}
        slots |= {f"matrix.{i}": matrix for i, matrix in enumerate(self.parameters)}
        restore(slots, state)
        self.in_phase = bool(state["in_phase"])


def literal_bytes(weights: Sequence[Tensor], filters: Sequence[int], *, limit_bytes: int | None = None) -> int:
    """The bytes of the literal `W` alone; refuses when training it would take more than `limit_bytes`.

    >>> literal_bytes([torch.empty(16, 3, 3, 3)], [16])
    27648
    """
    dtype, device = dtype_and_device(weights, filters)
    entries = sum(w.numel() * count for w, count in zip(weights, filters, strict=True))
    alone = entries * dtype.itemsize
    total = 4 * alone  # W, its gradient, and the two moments of Adam
    if limit_bytes is not None and total > limit_bytes:
        raise PruningError(
            f"the literal projection's W has {entries:,} entries, {alone / 1e9:.1f} GB, and takes "
            f"{total / 1e9:.1f} GB with its gradient and Adam's state, but {device} has "
            f"{limit_bytes / 1e9:.1f} GB; "
            'use projection="factored", which follows the same trajectory in almost no memory'
        )
    return alone
