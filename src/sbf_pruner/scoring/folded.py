"""The gated pairs of a whole model as tensors of their own, for steps that are compiled and captured.

Hooks that fold a gate at every call are right for any training loop, but a compiler must see through each of
them.  Here the hooks are lifted off for a while and every gated parameter is shadowed by one leaf tensor; a
few kernels refresh all leaves before a forward and carry their gradients back after it.  What holds: the
numbers are those of the hooks, and leaving the context puts the hooks back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..attached import attached_hooks
from .frozen import FrozenNorm
from .gates import Fold, Gates


class Folded:
    """While entered, the model reads its gated pairs from `leaves`."""

    def __init__(self, model: nn.Module, gates: Gates) -> None:
        self.model, self.gates = model, gates
        soft = gates.mode == "soft"
        self._pairs = [p for p in gates.pairs if not soft or p.soft is not None]
        self.parameters = [pair.held for pair in self._pairs]
        vector = gates.soft.detach() if soft else gates.hard
        spans = [p.soft if soft and p.soft is not None else p.hard for p in self._pairs]
        self._gates = [vector[span] for span in spans]
        places = [place for span in spans for place in range(span.start, span.stop)]
        self._places = torch.tensor(places, dtype=torch.int64, device=vector.device)
        self.leaves = [torch.empty_like(p).requires_grad_() for p in self.parameters]
        self._lifted: list[tuple[dict[Any, Any], Any, Any]] = []

    def __enter__(self) -> Folded:
        for module, table, key, owner in list(attached_hooks(self.model)):
            if isinstance(owner, FrozenNorm):
                module.training = False
            elif not (isinstance(owner, Fold) and owner.pairs):
                continue  # it multiplies a map, and a compiler follows that
            self._lifted.append((table, key, table.pop(key)))
        for pair, leaf in zip(self._pairs, self.leaves, strict=True):
            pair.module.__dict__[pair.name] = leaf
        self.refresh()
        return self

    def __exit__(self, *_: object) -> None:
        for pair in self._pairs:
            pair.module.__dict__.pop(pair.name, None)
        for table, key, hook in self._lifted:
            table[key] = hook
        self._lifted.clear()

    @torch.no_grad()
    def refresh(self) -> None:
        """Gate the parameters anew."""
        if self.leaves:  # there are none where a network has no norms
            torch._foreach_copy_(self.leaves, _products(self.parameters, self._gates))

    def weight_gradients(self) -> None:
        """Carry the leaves' gradients back to the parameters; a closed gate lets nothing through."""
        self._to_weights(self._taken_gradients())

    def score_gradients(self) -> Tensor:
        """The leaves' gradients carried back to the scores, added over each pair."""
        return self._to_scores(self._taken_gradients())

    def both_gradients(self) -> Tensor:
        """The leaves' gradients carried back to the parameters, and to the scores, whose are returned."""
        taken = self._taken_gradients()
        self._to_weights(taken)
        return self._to_scores(taken)

    @torch.no_grad()
    def _to_weights(self, taken: list[Tensor | None]) -> None:
        reached = [number for number, gradient in enumerate(taken) if gradient is not None]
        gradients = _products([g for g in taken if g is not None], [self._gates[number] for number in reached])
        for number, gradient in zip(reached, gradients, strict=True):
            self.parameters[number].grad = gradient

    @torch.no_grad()
    def _to_scores(self, taken: list[Tensor | None]) -> Tensor:
        gradients = torch.zeros_like(self.gates.soft)
        if not taken:
            return gradients
        pairs = zip(self.leaves, taken, strict=True)
        whole = [torch.zeros_like(leaf) if gradient is None else gradient for leaf, gradient in pairs]
        found = torch.cat(_products(whole, self.parameters))
        return gradients.index_add_(0, self._places, found.to(gradients.dtype))

    def _taken_gradients(self) -> list[Tensor | None]:
        """Of each leaf its gradient; none of one that the loss does not depend on."""
        taken = [leaf.grad for leaf in self.leaves]
        for leaf in self.leaves:
            leaf.grad = None
        return taken


def _products(first: list[Tensor], second: list[Tensor]) -> list[Tensor]:
    return list(torch._foreach_mul(first, second)) if first else []
