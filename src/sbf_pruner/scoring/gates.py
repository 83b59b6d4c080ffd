"""Gates on the user's own model: put on, set, taken off.

The sites of a channel graph enter; hooks on the model's modules leave, which fold a gate into the scale and
shift a norm uses in this call (or multiply a map where there is no such pair).  The model's class, its
parameters and its state_dict stay as they are.  What holds: with every gate open the model computes bit for
bit what it did before; a closed gate makes its channel exactly zero; a deep copy gets gates of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..attached import Attached
from ..graph.channels import Site
from ..graph.masks import Mask

Mode = Literal["off", "soft", "hard"]


@dataclass
class Pair:
    """A parameter that a gate is folded into, and where its gate stands in the two flat vectors."""

    module: nn.Module
    name: str
    soft: slice | None
    hard: slice


class Gates:
    """All gates of one model, in two flat vectors: scores (soft, one per filter) and switches (hard).

    The scores are a leaf of the autograd graph: a backward pass leaves their gradient in `soft.grad`.
    """

    def __init__(self, model: nn.Module, sites: Sequence[Site], filters: Mapping[str, int]) -> None:
        tensor = next(model.parameters())
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        self.mode: Mode = "off"
        self.soft = torch.ones(sum(filters.values()), dtype=dtype, device=tensor.device)
        spans, start = {}, 0
        for name, count in filters.items():
            spans[name] = slice(start, start + count)
            start += count
        self.spans = spans
        self._hard_spans: list[slice] = []
        start = 0
        for site in sites:
            width = site.edges[0].out.shape[site.edges[0].dim]
            self._hard_spans.append(slice(start, start + width))
            start += width
        self.hard = torch.ones(start, dtype=dtype, device=tensor.device)
        self.all_open = True
        self.pairs: list[Pair] = []
        modules = dict(model.named_modules())
        for number, site in enumerate(sites):
            fold = Fold(self, number, spans.get(site.layer), site)
            module = modules[site.module]
            hard = self._hard_spans[number]
            self.pairs += [Pair(module, name, spans.get(site.layer), hard) for name in site.parameters]
            if site.parameters:
                module.register_forward_pre_hook(fold.enter)
                module.register_forward_hook(fold.leave, always_call=True)
            else:
                module.register_forward_hook(fold.multiply)

    def set_hard(self, masks: Sequence[Mask]) -> None:
        """Set the switches, one mask per site, in place."""
        flat = torch.cat([torch.from_numpy(mask.copy()).reshape(-1) for mask in masks])
        self.hard.copy_(flat)
        self.all_open = bool(flat.all())

    def read(self, number: int, span: slice | None) -> Tensor | None:
        """The gate of a site in the present mode; None where there is nothing to multiply."""
        if self.mode == "soft":
            return None if span is None else self.soft[span]
        if self.mode == "hard" and not self.all_open:
            return self.hard[self._hard_spans[number]]
        return None


class Fold(Attached):
    """The hooks of one site."""

    def __init__(self, gates: Gates, number: int, span: slice | None, site: Site) -> None:
        self.gates, self.number, self.span = gates, number, span
        self.parameters, self.dim = site.parameters, site.dim

    def enter(self, module: nn.Module, args: Any) -> None:
        gate = self.gates.read(self.number, self.span)
        if gate is not None:
            for name in self.parameters:
                held = module._parameters[name]
                assert held is not None
                # An instance attribute goes before a registered parameter when the module looks it up, so
                # the forward reads the gated pair while the parameters stay where and what they are.
                module.__dict__[name] = held * gate.to(held.dtype)

    def leave(self, module: nn.Module, args: Any, result: Any) -> None:
        for name in self.parameters:
            module.__dict__.pop(name, None)

    def multiply(self, module: nn.Module, args: Any, result: Tensor) -> Tensor | None:
        gate = self.gates.read(self.number, self.span)
        if gate is None:
            return None
        shape = [1] * result.dim()
        shape[self.dim] = -1
        return result * gate.to(result.dtype).view(shape)
