"""Hooks that put gates on the modules of a user's model.

A gate is folded into the scale and shift that a norm uses in one call, or multiplied into a feature map where there
is no such pair. The model's class, parameters and state dict stay as they are. With all gates open the model
computes what it did before, bit for bit; a closed gate makes its channel exactly zero; a deep copy gets gates of
its own. `FusedGating` and `LeafGates` compute the same numbers faster. `FusedGating` is for eager steps with frozen
weights, in which gating layer by layer launches more kernels than the network itself. `LeafGates` is for compiled
or captured steps, in which a compiler would have to trace every hook.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import PruningError
from ..graph.channel_graph import Site
from ..graph.nodes import Mask
from ..utils.user_model import PrunerHook, pruner_hooks
from .freezing import FrozenNorm

Mode = Literal["off", "soft", "hard"]


class Gates:
    """All gates of one model in two flat vectors: `soft` (scores, one per filter) and `hard` (0 or 1, per channel).

    The scores are a leaf of the autograd graph: a backward pass leaves their gradient in `soft.grad`.
    """

    def __init__(self, model: nn.Module, sites: Sequence[Site], filters: Mapping[str, int]) -> None:
        tensor = next(model.parameters())
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        self.mode: Mode = "off"
        self.soft = torch.ones(sum(filters.values()), dtype=dtype, device=tensor.device)
        self.spans = dict(zip(filters, _consecutive(filters.values()), strict=True))
        widths = [site.edges[0].out.shape[site.edges[0].dim] for site in sites]
        self._hard_spans = _consecutive(widths)
        self.hard = torch.ones(sum(widths), dtype=dtype, device=tensor.device)
        self.all_open = True
        self.pairs: list[GatedParameter] = []
        modules = dict(model.named_modules())
        self._hooks: list[tuple[str, nn.Module, SiteHooks]] = []
        for number, site in enumerate(sites):
            span, module = self.spans.get(site.layer), modules[site.module]
            pairs = [GatedParameter(module, name, span, self._hard_spans[number]) for name in site.parameters]
            ranks = {len(edge.out.shape) for edge in site.edges}
            # A negative index, because inputs may lack the batch dimension, unless calls differ in rank.
            dim = site.dim - ranks.pop() if len(ranks) == 1 else site.dim
            hooks = SiteHooks(self, number, span, dim, pairs)
            self.pairs += pairs
            self._hooks.append((site.module, module, hooks))
            if pairs:
                module.register_forward_pre_hook(hooks.enter)
                module.register_forward_hook(hooks.leave, always_call=True)
            else:
                module.register_forward_hook(hooks.multiply)
        self._products = FusedGating(self.soft, list(self.spans.values()), self.pairs)

    def check_device(self, model: nn.Module) -> None:
        """Raise a PruningError if the model is on another device than its gates."""
        if self.soft.device != next(model.parameters()).device:
            raise PruningError("the model was moved to another device; move it before creating the pruner")

    def check_reach(self, model: nn.Module) -> None:
        """Raise a PruningError if a gated module was replaced or removed, or has lost its gate."""
        modules = dict(model.named_modules())
        for path, module, hooks in self._hooks:
            if change := hooks.lost(module, modules.get(path)):
                raise PruningError(
                    f"{path} {change} after the pruner was created, which removed its gates; restore the module "
                    "(fold norms only in the network that extract() returns), or detach(), create a new pruner and "
                    "load the state_dict() of this one into it"
                )

    def set_hard(self, masks: Sequence[Mask]) -> None:
        """Set the hard gates in place, from one mask per site."""
        flat = torch.cat([torch.from_numpy(mask.copy()).reshape(-1) for mask in masks])
        self.hard.copy_(flat)
        self.all_open = bool(flat.all())

    def read(self, number: int, span: slice | None) -> Tensor | None:
        """Return the gate of a site in the current mode, or None if there is nothing to multiply."""
        if self.mode == "soft":
            return None if span is None else self.soft[span]
        if self.mode == "hard" and not self.all_open:
            return self.hard[self._hard_spans[number]]
        return None

    def products(self, pairs: Sequence[GatedParameter]) -> list[Tensor] | None:
        """Return gated parameters, computed for all sites at once; None if each site has to compute its own."""
        fused = self.mode == "soft" and self.soft.requires_grad and torch.is_grad_enabled()
        if not fused or torch.compiler.is_compiling():
            return None
        if torch._C._are_functorch_transforms_active():  # `_Gated` does not support them
            return None
        return self._products.take(pairs)


def _consecutive(sizes: Iterable[int]) -> list[slice]:
    ends = [0, *accumulate(sizes)]
    return [slice(start, end) for start, end in pairwise(ends)]


_OF_REPLICA = "_sbf_held"


class SiteHooks(PrunerHook):
    """Hooks of one gate site."""

    def __init__(
        self, gates: Gates, number: int, span: slice | None, dim: int, pairs: Sequence[GatedParameter]
    ) -> None:
        self.gates, self.number, self.span, self.dim, self.pairs = gates, number, span, dim, pairs

    def lost(self, module: nn.Module, now: nn.Module | None) -> str:
        """Describe how a module lost its gate; "" if the gate works. `now` is the module at the same path now."""
        if now is not module:
            return "was removed" if now is None else "was replaced"
        hooks = [*module._forward_pre_hooks.values()] if self.pairs else []
        owners = [getattr(hook, "__self__", None) for hook in (*hooks, *module._forward_hooks.values())]
        if owners.count(self) < (2 if self.pairs else 1):
            return "lost its hooks"
        return next((f"lost its {p.name}" for p in self.pairs if module._parameters.get(p.name) is None), "")

    def enter(self, module: nn.Module, args: Any) -> Any:
        replica = _is_replica(module)
        gated = None if replica else self.gates.products(self.pairs)
        if gated is None:
            gate = self.gates.read(self.number, self.span)
            if gate is None:
                return None
            own = {pair.name: getattr(module, pair.name) if replica else pair.parameter for pair in self.pairs}
            gated = [tensor * gate.to(tensor) for tensor in own.values()]
            if replica:  # a replica has its own tensors in `__dict__`, where the gated ones replace them
                module.__dict__[_OF_REPLICA] = own
        # Instance attributes take precedence over registered parameters in attribute lookup, so the forward reads
        # the gated pair while the parameters stay as they are.
        module.__dict__.update({pair.name: product for pair, product in zip(self.pairs, gated, strict=True)})
        return _safe_inputs(module, args)

    def leave(self, module: nn.Module, args: Any, result: Any) -> None:
        if _is_replica(module):
            module.__dict__.update(module.__dict__.pop(_OF_REPLICA, {}))
        else:
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
    """Return contiguous inputs for a group norm that would crash PyTorch, or None if the inputs need no change.

    On the CPU, computing the gradient of a group norm's scale crashes the process if the input is channels-last and
    requires no gradient, which is the case for feature maps before the first layer with scores.
    """
    if not isinstance(module, nn.GroupNorm) or not args or not isinstance(args[0], Tensor):
        return None
    maps = args[0]
    return None if maps.is_cuda or maps.requires_grad or maps.is_contiguous() else (maps.contiguous(), *args[1:])


def _is_replica(module: nn.Module) -> bool:
    """Return True for a copy that `nn.DataParallel` made for one forward, with tensors on a device of its own."""
    return "_is_replica" in module.__dict__


@dataclass(eq=False)
class GatedParameter:
    """A parameter that a gate is folded into, and the position of its gate in the two flat vectors."""

    module: nn.Module
    name: str
    soft: slice | None
    hard: slice

    @property
    def parameter(self) -> Tensor:
        """The parameter itself, also while an attribute of the same name hides it."""
        parameter = self.module._parameters[self.name]
        assert parameter is not None
        return parameter


class FusedGating:
    """Products of frozen parameters and scores, computed for the whole model when the first one is needed.

    Each product is used once, so every forward sees the current scores and weights.
    """

    def __init__(self, scores: Tensor, spans: Sequence[slice], pairs: Sequence[GatedParameter]) -> None:
        self._scores = scores
        self._sizes = [span.stop - span.start for span in spans]
        numbers = {span.start: number for number, span in enumerate(spans)}
        self._pairs = [(pair, numbers[pair.soft.start]) for pair in pairs if pair.soft is not None]
        self._places = torch.arange(len(scores), device=scores.device).split(self._sizes)
        self._products: dict[GatedParameter, tuple[Tensor, Tensor, int]] = {}
        self._version = -1  # of the scores that the products were computed from

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_products": {}}  # products of a forward in progress are not copied

    def take(self, pairs: Sequence[GatedParameter]) -> list[Tensor] | None:
        """Return the gated parameters for one use; None if one has no score or is trained as well."""
        if any(pair.soft is None or pair.parameter.requires_grad for pair in pairs):
            return None
        if not all(self._is_current(pair) for pair in pairs):
            self._compute()
        return [self._products.pop(pair)[0] for pair in pairs]

    def _is_current(self, pair: GatedParameter) -> bool:
        """Return True if the product exists and nothing has changed since it was computed."""
        if self._version != self._scores._version or pair not in self._products:
            return False
        _, parameter, version = self._products[pair]
        return parameter is pair.parameter and version == parameter._version

    def _compute(self) -> None:
        frozen = [(pair, number) for pair, number in self._pairs if not pair.parameter.requires_grad]
        parameters = [pair.parameter for pair, _ in frozen]
        numbers = [number for _, number in frozen]
        products = _Gated.apply(self._scores, self._sizes, numbers, self._places, *parameters)
        self._version = self._scores._version
        self._products = {
            pair: (product, parameter, parameter._version)
            for (pair, _), product, parameter in zip(frozen, products, parameters, strict=True)
        }


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, sizes: list[int], numbers: list[int], places: Sequence[Tensor], *held: Tensor
    ) -> tuple[Tensor, ...]:
        # Not saved with `save_for_backward`: forwards that share these products may run backward one after the
        # other, and activation checkpointing counts saved tensors when it runs a part of the network again.
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
        present = [part for part in parts if part[2] is not None]
        total = None
        if present:
            held, places, found = (list(part) for part in zip(*present, strict=True))
            flat = torch.cat(list(torch._foreach_mul(found, held))).to(ctx.like.dtype)
            total = torch.zeros_like(ctx.like).index_add(0, torch.cat(places), flat)
        return total, None, None, None, *[None] * len(gradients)


class LeafGates:
    """Context in which a model reads gated parameters from the leaf tensors `leaves`, without hooks.

    `refresh` computes the leaves before a forward pass, and the other methods propagate the gradients of the leaves
    to parameters and scores after the backward pass. Leaving the context restores the hooks.
    """

    def __init__(self, model: nn.Module, gates: Gates) -> None:
        self.model, self.gates = model, gates
        soft = gates.mode == "soft"
        self._pairs = [p for p in gates.pairs if not soft or p.soft is not None]
        self.parameters = [pair.parameter for pair in self._pairs]
        vector = gates.soft.detach() if soft else gates.hard
        spans = [p.soft if soft and p.soft is not None else p.hard for p in self._pairs]
        self._gates = [vector[span] for span in spans]
        places = [place for span in spans for place in range(span.start, span.stop)]
        self._places = torch.tensor(places, dtype=torch.int64, device=vector.device)
        self.leaves = [torch.empty_like(p).requires_grad_() for p in self.parameters]
        self._lifted: list[tuple[dict[Any, Any], Any, Any]] = []

    def __enter__(self) -> LeafGates:
        for module, table, key, owner in list(pruner_hooks(self.model)):
            if isinstance(owner, FrozenNorm):
                module.training = False
            elif not (isinstance(owner, SiteHooks) and owner.pairs):
                continue  # hooks that multiply a feature map can be compiled
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
        """Compute the leaves from the current parameters and gates."""
        if self.leaves:  # empty for a network without norms
            torch._foreach_copy_(self.leaves, _products(self.parameters, self._gates))

    def weight_gradients(self) -> None:
        """Propagate the gradients of the leaves to the parameters; a closed gate makes them 0."""
        self._to_weights(self._take_gradients())

    def score_gradients(self) -> Tensor:
        """Return the gradient of the scores, summed over the parameters that each is folded into."""
        return self._to_scores(self._take_gradients())

    def both_gradients(self) -> Tensor:
        """Propagate the gradients of the leaves to the parameters, and return the gradient of the scores."""
        gradients = self._take_gradients()
        self._to_weights(gradients)
        return self._to_scores(gradients)

    @torch.no_grad()
    def _to_weights(self, gradients: list[Tensor | None]) -> None:
        parts = zip(self.parameters, self._gates, gradients, strict=True)
        present = [(parameter, gate, gradient) for parameter, gate, gradient in parts if gradient is not None]
        products = _products([gradient for _, _, gradient in present], [gate for _, gate, _ in present])
        for (parameter, _, _), product in zip(present, products, strict=True):
            parameter.grad = product

    @torch.no_grad()
    def _to_scores(self, gradients: list[Tensor | None]) -> Tensor:
        total = torch.zeros_like(self.gates.soft)
        if not gradients:
            return total
        pairs = zip(self.leaves, gradients, strict=True)
        whole = [torch.zeros_like(leaf) if gradient is None else gradient for leaf, gradient in pairs]
        found = torch.cat(_products(whole, self.parameters))
        return total.index_add_(0, self._places, found.to(total.dtype))

    def _take_gradients(self) -> list[Tensor | None]:
        """Remove and return the gradient of every leaf; None for a leaf that the loss does not depend on."""
        gradients = [leaf.grad for leaf in self.leaves]
        for leaf in self.leaves:
            leaf.grad = None
        return gradients


def _products(first: list[Tensor], second: list[Tensor]) -> list[Tensor]:
    return list(torch._foreach_mul(first, second)) if first else []
