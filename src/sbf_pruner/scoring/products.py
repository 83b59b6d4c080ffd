"""The gated pairs of a whole model at once, for eager steps under frozen weights.

The parameters that gates are folded into enter; their products with the scores leave, all made by a few kernels
when the first is asked for, and their gradients come back together.  Layer by layer that takes more kernels than
the network itself.  What holds: the numbers are those of single products; each is given out once, so the next
forward makes them anew from the scores and weights of its time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(eq=False)
class Pair:
    """A parameter that a gate is folded into, and where its gate stands in the two flat vectors."""

    module: nn.Module
    name: str
    soft: slice | None
    hard: slice

    @property
    def there(self) -> bool:
        """Return True if the module still has the parameter."""
        return self.module._parameters.get(self.name) is not None

    @property
    def held(self) -> Tensor:
        """The parameter itself, whatever the module is shown instead."""
        held = self.module._parameters[self.name]
        assert held is not None
        return held


class Products:
    """Products of parameters and scores."""

    def __init__(self, scores: Tensor, spans: Sequence[slice], pairs: Sequence[Pair]) -> None:
        self._scores = scores
        self._sizes = [span.stop - span.start for span in spans]
        numbers = {span.start: number for number, span in enumerate(spans)}
        self._pairs = [(pair, numbers[pair.soft.start]) for pair in pairs if pair.soft is not None]
        self._places = torch.arange(len(scores), device=scores.device).split(self._sizes)
        self._made: dict[Pair, tuple[Tensor, Tensor, int]] = {}
        self._made_from = -1

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_made": {}}  # what belongs to a forward under way is not copied

    def take(self, pairs: Sequence[Pair]) -> list[Tensor] | None:
        """The gated parameters, for one use of them; None where there is no score, or a weight is trained, too."""
        if any(pair.soft is None or pair.held.requires_grad for pair in pairs):
            return None
        if not all(self._stands(pair) for pair in pairs):
            self._make()
        return [self._made.pop(pair)[0] for pair in pairs]

    def _stands(self, pair: Pair) -> bool:
        """Whether a product is there, and nothing has changed since."""
        if self._made_from != self._scores._version or pair not in self._made:
            return False
        _, held, version = self._made[pair]
        return held is pair.held and version == held._version

    def _make(self) -> None:
        frozen = [(pair, number) for pair, number in self._pairs if not pair.held.requires_grad]
        held = [pair.held for pair, _ in frozen]
        products = _Gated.apply(self._scores, self._sizes, [number for _, number in frozen], self._places, *held)
        self._made_from = self._scores._version
        self._made = {
            pair: (product, tensor, tensor._version)
            for (pair, _), product, tensor in zip(frozen, products, held, strict=True)
        }


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, sizes: list[int], numbers: list[int], places: Sequence[Tensor], *held: Tensor
    ) -> tuple[Tensor, ...]:
        # Not saved by autograd: forwards that share these products may go backward one after the other, and a
        # checkpoint that runs a part of the network again would count what is saved.
        ctx.held, ctx.places, ctx.like = held, [places[number] for number in numbers], scores
        ctx.versions = [tensor._version for tensor in held]
        ctx.set_materialize_grads(False)
        parts = {dtype: scores.to(dtype).split(sizes) for dtype in {tensor.dtype for tensor in held}}
        gates = [parts[tensor.dtype][number] for tensor, number in zip(held, numbers, strict=True)]
        return tuple(torch._foreach_mul(held, gates))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.versions != [tensor._version for tensor in ctx.held]:
            raise RuntimeError("the scale or shift of a norm was changed in place between forward and backward")
        parts = zip(ctx.held, ctx.places, gradients, strict=True)
        there = [part for part in parts if part[2] is not None]
        total = None
        if there:
            held, places, found = (list(part) for part in zip(*there, strict=True))
            flat = torch.cat(list(torch._foreach_mul(found, held))).to(ctx.like.dtype)
            total = torch.zeros_like(ctx.like).index_add(0, torch.cat(places), flat)
        return total, None, None, None, *[None] * len(gradients)
