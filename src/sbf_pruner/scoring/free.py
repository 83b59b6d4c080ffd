"""A pruner layer without weights, to compare with: what is lost if a score does not follow from its filter?

The layers' weights enter, of which only the numbers of filters count; one logit per filter leaves, as in
`projection`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .projection import check_phase, dtype_and_device, restore


class FreeProjection:
    """The ablation: one free logit per filter, blind to the weights, so that a phase changes nothing.

    A logit moves by about `lr` in one step of Adam, in every layer alike: it is `even` already.
    """

    def __init__(self, weights: Sequence[Tensor], filters: Sequence[int], *, even: bool = False) -> None:
        dtype, device = dtype_and_device(weights, filters)
        self.in_phase = False
        self.parameters: list[Tensor] = [torch.zeros(sum(filters), dtype=dtype, device=device, requires_grad=True)]

    def begin_phase(self, weights: Sequence[Tensor]) -> None:
        check_phase(self, weights, [w.numel() for w in weights])
        self.in_phase = True

    def groups(self, lr: float) -> list[dict[str, Any]]:
        return [{"params": self.parameters, "lr": lr}]

    def logits(self) -> Tensor:
        return self.parameters[0]

    def end_phase(self) -> None:
        self.in_phase = False

    def state_dict(self) -> dict[str, Any]:
        return {"logits": self.parameters[0].detach().clone(), "in_phase": int(self.in_phase)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        restore({"logits": self.parameters[0]}, state)
        self.in_phase = bool(state["in_phase"])
