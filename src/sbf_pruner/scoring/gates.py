"""Gates on the user's own model: put on, set, taken off.

The sites of a channel graph enter; hooks on the model's modules leave, which fold a gate into the scale and
shift a norm uses in this call (or multiply a map where there is no such pair).  The model's class, its
parameters and its state_dict stay as they are.  What holds: with every gate open the model computes bit for
bit what it did before; a closed gate makes its channel exactly zero; a deep copy gets gates of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..attached import Attached
from ..errors import PruningError
from ..graph.channels import Site
from ..graph.masks import Mask
from .products import Pair, Products

Mode = Literal["off", "soft", "hard"]


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
        self._folds: list[tuple[str, nn.Module, Fold]] = []
        for number, site in enumerate(sites):
            span, module, hard = spans.get(site.layer), modules[site.module], self._hard_spans[number]
            pairs = [Pair(module, name, span, hard) for name in site.parameters]
            ranks = {len(edge.out.shape) for edge in site.edges}
            # From the end, because a batch may be left out, unless calls have maps of several ranks.
            dim = site.dim - ranks.pop() if len(ranks) == 1 else site.dim
            fold = Fold(self, number, span, dim, pairs)
            self.pairs += pairs
            self._folds.append((site.module, module, fold))
            if pairs:
                module.register_forward_pre_hook(fold.enter)
                module.register_forward_hook(fold.leave, always_call=True)
            else:
                module.register_forward_hook(fold.multiply)
        self._products = Products(self.soft, list(spans.values()), self.pairs)

    def check_device(self, model: nn.Module) -> None:
        """Refuse a model that is on another device than its gates."""
        if self.soft.device != next(model.parameters()).device:
            raise PruningError("the model was moved to another device; move it first, then make the pruner")

    def check_reach(self, model: nn.Module) -> None:
        """Refuse a model of which a gated module was exchanged, removed, or stripped of its gate."""
        modules = dict(model.named_modules())
        for path, module, fold in self._folds:
            if change := fold.lost(module, modules.get(path)):
                raise PruningError(
                    f"{path} {change} after the pruner was made, and its gates went with it; put it back (fold "
                    "norms only in what extract() gives), or detach(), make a new pruner and load the state_dict() "
                    "of this one into it"
                )

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

    def products(self, pairs: Sequence[Pair]) -> list[Tensor] | None:
        """The pairs times their scores, made with those of all sites; None where each is better made by itself."""
        if self.mode != "soft" or not self.soft.requires_grad:
            return None
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return None
        if torch._C._are_functorch_transforms_active():  # they cannot follow a gradient of our own
            return None
        return self._products.take(pairs)


_HELD = "_sbf_held"


class Fold(Attached):
    """The hooks of one site."""

    def __init__(self, gates: Gates, number: int, span: slice | None, dim: int, pairs: Sequence[Pair]) -> None:
        self.gates, self.number, self.span, self.dim, self.pairs = gates, number, span, dim, pairs

    def lost(self, module: nn.Module, now: nn.Module | None) -> str:
        """What happened to the gate of a module that is `now` in its place; "" if the gate still works."""
        if now is not module:
            return "was removed" if now is None else "was replaced"
        hooks = [*module._forward_pre_hooks.values()] if self.pairs else []
        owners = [getattr(hook, "__self__", None) for hook in (*hooks, *module._forward_hooks.values())]
        if owners.count(self) < (2 if self.pairs else 1):
            return "lost its hooks"
        return next((f"lost its {pair.name}" for pair in self.pairs if not pair.there), "")

    def enter(self, module: nn.Module, args: Any) -> Any:
        replica = _is_replica(module)
        gated = None if replica else self.gates.products(self.pairs)
        if gated is None:
            gate = self.gates.read(self.number, self.span)
            if gate is None:
                return None
            held = [getattr(module, pair.name) if replica else pair.held for pair in self.pairs]
            gated = [tensor * gate.to(tensor) for tensor in held]
            if replica:  # which has its tensors where the gated ones go
                module.__dict__[_HELD] = {pair.name: tensor for pair, tensor in zip(self.pairs, held, strict=True)}
        # An instance attribute goes before a registered parameter when the module looks it up, so the forward
        # reads the gated pair while the parameters stay where and what they are.
        module.__dict__.update({pair.name: product for pair, product in zip(self.pairs, gated, strict=True)})
        return _safe_inputs(module, args)

    def leave(self, module: nn.Module, args: Any, result: Any) -> None:
        if _is_replica(module):
            module.__dict__.update(module.__dict__.pop(_HELD, {}))
            return
        for pair in self.pairs:
            module.__dict__.pop(pair.name, None)

    def multiply(self, module: nn.Module, args: Any, result: Tensor) -> Tensor | None:
        gate = self.gates.read(self.number, self.span)
        if gate is None:
            return None
        shape = [1] * result.dim()
        shape[self.dim] = -1
        return result * gate.to(result).view(shape)


def _safe_inputs(module: nn.Module, args: Any) -> Any:
    """Other inputs where torch would crash on these; None where all is well.

    On the CPU its gradient of a group norm's scale ends the process where the map has its channels last and needs
    no gradient itself, as before the first layer that is scored.
    """
    if not isinstance(module, nn.GroupNorm) or not args or not isinstance(args[0], Tensor):
        return None
    maps = args[0]
    return None if maps.is_cuda or maps.requires_grad or maps.is_contiguous() else (maps.contiguous(), *args[1:])


def _is_replica(module: nn.Module) -> bool:
    """Whether it is a copy that `nn.DataParallel` made for one pass, with tensors on a device of its own."""
    return "_is_replica" in module.__dict__
