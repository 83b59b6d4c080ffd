"""Projections from frozen filter weights to logits (the paper's pruner layers), and activations of logits.

A projection reads the weights at the start of a score phase and returns one flat vector of logits, the filters of
all layers one after another. It is differentiable with respect to `parameters`, which the caller trains with a
fresh Adam in every phase. Every logit starts at 0, which the activations map to a score of exactly 1, so attaching
scores does not change the output of a network. Tensors that `logits` reads are only changed in place, so a compiled
or captured step stays valid from phase to phase.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, reduce
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import PruningError
from ..utils.timing import available_memory


def leaky_exponential(x: Tensor, leak: float = 0.1) -> Tensor:
    """The paper's activation (Eq. 3): `exp(x)` below zero and `1 + leak * x` above it.

    The two branches meet at 0 with slopes 1 and `leak`. The slope at 0 is that of the exponential, 1: every logit
    starts at 0, so the first step can go either way even with `leak=0`. The gradient is finite for every finite
    logit.

    >>> leaky_exponential(torch.tensor([0.0, 10.0]))
    tensor([1., 2.])
    """
    positive = x > 0
    # `where` differentiates the branch not taken as well, and 0 * inf is NaN, so exp must not overflow there. The
    # mask fixes the slope at 0; `clamp(max=0)` has a slope of 0 there since torch 2.14.
    return torch.where(positive, 1 + leak * x, x.masked_fill(positive, 0).exp())


@cache
def check_slope() -> None:
    """Raise a PruningError unless backward gives the leaky exponential a slope of 1 at 0; run once per process.

    Every logit starts at 0. If a version of torch changes a subgradient there, no score moves, without any error.
    """
    with torch.inference_mode(False), torch.enable_grad():
        start = torch.zeros((), device="cpu", requires_grad=True)
        slope = torch.autograd.grad(leaky_exponential(start), start)[0].item()
    if slope != 1:
        raise PruningError(
            f"torch {torch.__version__} gives the activation of scores a slope of {slope:g} at 0 instead of 1, so "
            "no score would move; install a version of torch that sbf-pruner supports"
        )


def doubled_sigmoid(x: Tensor, leak: float = 0.0) -> Tensor:
    """Sigmoid scaled to 1 at 0, for comparison: it saturates on both sides and never exceeds 2. Ignores `leak`.

    >>> doubled_sigmoid(torch.tensor([0.0]))
    tensor([1.])
    """
    return 2 * torch.sigmoid(x)


ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "leaky_exponential": leaky_exponential,
    "sigmoid": doubled_sigmoid,
}


ScoresByLayer = Mapping[str, Tensor | NDArray[np.floating]]


def normalize_scores(given: ScoresByLayer, filters: Mapping[str, int]) -> dict[str, NDArray[np.floating]]:
    """Validate external scores and scale them to values between 0 and 1 in float64 that preserve their order.

    Raises a PruningError unless there is one finite score for every filter of exactly these layers.

    >>> normalize_scores({"conv": np.array([-1.0, 0.0, 3.0])}, {"conv": 3})
    {'conv': array([0.  , 0.25, 1.  ])}
    """
    if not isinstance(given, Mapping):
        raise PruningError(
            f"scores must be a dict {{layer name: one number per filter}}, not {type(given).__name__}"
        )
    if wrong := sorted(given.keys() ^ filters.keys()):
        raise PruningError(
            f"scores must name exactly the layers that can be pruned; {wrong[0]} is missing or is not one of them"
        )
    values = {}
    for name, count in filters.items():
        own = given[name]
        values[name] = np.array(own.detach().double().cpu().numpy() if isinstance(own, Tensor) else own, np.float64)
        if values[name].shape != (count,) or not np.isfinite(values[name]).all():
            raise PruningError(f"{name}: expected {count} finite scores, one per filter")
    largest = max(float(np.abs(each).max()) for each in values.values()) or 1.0
    # None may be negative, because the search divides scores by relative costs if there are several limits.
    least = min(0.0, *(float((each / largest).min()) for each in values.values()))
    values = {name: each / largest - least for name, each in values.items()}
    highest = max(float(each.max()) for each in values.values()) or 1.0
    return {name: each / highest for name, each in values.items()}


class Projection:
    """Base class of projections."""

    parameters: list[Tensor]
    """Tensors that the optimizer of a score phase trains."""
    in_phase = False
    """True between `begin_phase` and `end_phase`. A phase whose state was loaded must not begin again."""

    def __init__(self, weights: Sequence[Tensor], filters: Sequence[int], *, even: bool = False) -> None:
        self._like = torch.empty(0, dtype=common_dtype(weights, filters), device=weights[0].device)
        self._sizes = [w.numel() for w in weights]
        self._even = even

    def groups(self, lr: float) -> list[dict[str, Any]]:
        """Return parameter groups with their learning rates, for an optimizer made within a phase."""
        return [{"params": self.parameters, "lr": lr}]

    @torch.no_grad()
    def begin_phase(self, weights: Sequence[Tensor]) -> None:
        """Read the weights, one tensor per layer, which stay frozen until the phase ends."""
        if self.in_phase:
            raise PruningError("a score phase is already under way; end it before the next one begins")
        found = [w.numel() for w in weights]
        if found != self._sizes:
            raise PruningError(
                f"the projection was made for layers of {self._sizes} weights and is given {found}; "
                "make a new one when the network changes shape"
            )
        self._read(weights)
        self.in_phase = True

    def logits(self) -> Tensor:
        """Return all logits as a flat vector; after a phase, those it ended with."""
        raise NotImplementedError

    def end_phase(self) -> None:
        """End the phase, and store its values that later phases need."""
        self.in_phase = False

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state (tensors and ints), to resume from exactly, also within a phase."""
        state: dict[str, Any] = {name: tensor.detach().clone() for name, tensor in self._tensors().items()}
        return state | {"in_phase": int(self.in_phase)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state in place; if a tensor is missing or has another shape, raise an error, change nothing."""
        tensors = self._tensors()
        for name, tensor in tensors.items():
            if name not in state or state[name].shape != tensor.shape:
                found = tuple(state[name].shape) if name in state else "nothing"
                raise PruningError(
                    f"the saved projection holds {found} for {name!r} where {tuple(tensor.shape)} is needed; "
                    "load it into the network and the form of projection it was saved from"
                )
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(state[name])
        self.in_phase = bool(state["in_phase"])

    def _read(self, weights: Sequence[Tensor]) -> None:
        pass

    def _tensors(self) -> dict[str, Tensor]:
        """Tensors of constant shape that belong to the state, by name."""
        raise NotImplementedError


def common_dtype(weights: Sequence[Tensor], filters: Sequence[int]) -> torch.dtype:
    """Return the dtype of the logits: at least float32, since half precision loses steps of 1e-6."""
    if not weights or len(weights) != len(filters):
        raise PruningError(
            f"{len(weights)} weights and {len(filters)} filter counts were given; a projection needs "
            "one of each for every layer, and at least one layer to score"
        )
    return reduce(torch.promote_types, (w.dtype for w in weights), torch.float32)


def pack_signs(values: Tensor) -> Tensor:
    """Pack the signs of a flat tensor at two bits each: 0 for negative, 1 for exactly zero, 2 for positive.

    >>> pack_signs(torch.tensor([-3.0, 0.0, 5.0, 1.0, -1.0]))
    tensor([164,   0], dtype=torch.uint8)
    """
    codes = (values >= 0).to(torch.uint8) + (values > 0).to(torch.uint8)
    a, b, c, d = torch.nn.functional.pad(codes, (0, -len(codes) % 4)).view(-1, 4).unbind(1)
    return a | b << 2 | c << 4 | d << 6


def unpack_signs(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Unpack signs to -1, 0 and 1, four for every byte, which can be up to three more than were packed.

    >>> unpack_signs(torch.tensor([164], dtype=torch.uint8), torch.float32)
    tensor([-1.,  0.,  1.,  1.])
    """
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=packed.device)
    return (packed[:, None] >> shifts & 3).flatten().to(dtype) - 1


def sign_dot(packed: Tensor, vector: Tensor, chunk: int = 1 << 20) -> Tensor:
    """Return the dot product of packed signs and a vector; unpack `4 * chunk` signs at a time to limit memory."""
    pairs = zip(packed.split(chunk), vector.split(4 * chunk), strict=True)
    return torch.stack([(unpack_signs(s, v.dtype)[: len(v)] * v).sum() for s, v in pairs]).sum()


class LiteralProjection(Projection):
    """The paper's layer (Eq. 1): `vec(F) @ W`, where `W` has shape `(weights of the layer, filters)`.

    It is a reference implementation for small networks. Raises a PruningError, before allocating, if training would
    not fit in the memory of the device.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        filters: Sequence[int],
        *,
        even: bool = False,
        limit_bytes: int | None = None,
    ) -> None:
        super().__init__(weights, filters, even=even)
        limit = available_memory(self._like.device) if limit_bytes is None else limit_bytes
        literal_bytes(weights, filters, limit_bytes=limit)
        shapes = zip(self._sizes, filters, strict=True)
        self.parameters = [self._like.new_zeros(size, count).requires_grad_() for size, count in shapes]
        self._vectors = [self._like.new_zeros(size) for size in self._sizes]

    def _read(self, weights: Sequence[Tensor]) -> None:
        for vector, weight in zip(self._vectors, weights, strict=True):
            vector.copy_(weight.flatten())

    def groups(self, lr: float) -> list[dict[str, Any]]:
        if not self._even:
            return super().groups(lr)
        norms = [float(v.abs().sum()) for v in self._vectors]
        return [{"params": [w], "lr": lr / n if n else lr} for w, n in zip(self.parameters, norms, strict=True)]

    def logits(self) -> Tensor:
        return torch.cat([v @ w for v, w in zip(self._vectors, self.parameters, strict=True)])

    def _tensors(self) -> dict[str, Tensor]:
        vectors = {f"vector.{i}": vector for i, vector in enumerate(self._vectors)}
        return vectors | {f"matrix.{i}": matrix for i, matrix in enumerate(self.parameters)}


def literal_bytes(weights: Sequence[Tensor], filters: Sequence[int], *, limit_bytes: int | None = None) -> int:
    """Return the bytes of all literal `W`; raise a PruningError if training takes more than `limit_bytes`.

    >>> literal_bytes([torch.empty(16, 3, 3, 3)], [16])
    27648
    """
    dtype = common_dtype(weights, filters)
    entries = sum(w.numel() * count for w, count in zip(weights, filters, strict=True))
    alone = entries * dtype.itemsize
    total = 4 * alone  # W, its gradient, and the two moments of Adam
    if limit_bytes is not None and total > limit_bytes:
        raise PruningError(
            f"the literal projection's W has {entries:,} entries, {alone / 1e9:.1f} GB, and takes "
            f"{total / 1e9:.1f} GB with its gradient and Adam's state, but {weights[0].device} has "
            f"{limit_bytes / 1e9:.1f} GB; "
            'use projection="factored", which follows the same trajectory in almost no memory'
        )
    return alone


class FactoredProjection(Projection):
    """The scores of `LiteralProjection`, computed without its matrix `W`.

    Instead of `W` it stores one number per filter and phase, and two bits per weight and phase; the scores are the
    same in the limit of Adam's eps going to 0. `F[p]` are the weights of the layer, which are frozen in score phase
    p, `W_f` is the column of `W` that belongs to filter f, and `g_f` the gradient of the filter's logit.

    In a phase the gradient of `W_f` is `g_f * vec(F)`, and Adam divides each entry by its own magnitude: every
    entry moves by the same amount, along the sign of its weight. So `W_f` is the sum over all phases p of
    `t_f[p] * sign(F[p])`, with one trained number `t_f[p]` per phase, and in phase q the logit is

        x_f = base_f + t_f * |F[q]|_1,   base_f = sum over p < q of t_f[p] * <sign F[p], F[q]>.

    Adam's eps slows the entries of small weights more than others. To first order in eps, the entries together move
    as if every nonzero weight had the mean magnitude of them all. The true gradient of `t_f` is `g_f * |F|_1`; here
    it is `g_f` times that mean magnitude, so that eps has the same effect. The scale of the gradient is therefore
    wrong, and `parameters` need Adam or another optimizer that does not depend on it.

    If `even` is true, `t` is in units of logits: the logits of every layer change equally fast, as if its learning
    rate were divided by its `|F|_1`. The gradient of `t` is then that of the logit. Otherwise eps would hold the
    scores at 1 in a layer whose weights decay to 1e-8, and such useless filters would never be removed.
    """

    def __init__(self, weights: Sequence[Tensor], filters: Sequence[int], *, even: bool = False) -> None:
        super().__init__(weights, filters, even=even)
        self._bytes = [-(-size // 4) for size in self._sizes]
        device, total = self._like.device, sum(filters)
        self._layer = torch.arange(len(filters)).repeat_interleave(torch.tensor(filters)).to(device)
        self._base, self._l1, self._typical, self._t = (self._like.new_zeros(total) for _ in range(4))
        self._signs = torch.zeros(sum(self._bytes), dtype=torch.uint8, device=device)
        self._past_t = self._like.new_zeros(0, total)
        self._past_signs = self._signs.new_zeros(0, len(self._signs))
        self.parameters = [self._t.requires_grad_()]

    def _read(self, weights: Sequence[Tensor]) -> None:
        vectors = [w.flatten().to(self._t.dtype) for w in weights]
        before = self._base + self._t
        norms = torch.stack([v.abs().sum() for v in vectors])
        nonzero = torch.stack([v.count_nonzero() for v in vectors])
        self._l1.copy_(norms[self._layer])
        self._typical.copy_((norms / nonzero.clamp(min=1))[self._layer])
        self._signs.copy_(torch.cat([pack_signs(v) for v in vectors]))
        self._base.zero_()
        for signs, t in zip(self._past_signs, self._past_t, strict=True):
            products = [sign_dot(s, v) for s, v in zip(signs.split(self._bytes), vectors, strict=True)]
            self._base += t * torch.stack(products)[self._layer]
        if self._even:  # a layer whose weights are all zero keeps its previous logits
            self._base.copy_(self._base.where(self._l1 > 0, before))
        self._t.zero_()

    def logits(self) -> Tensor:
        if self._even:
            return self._base + self._t
        t = self._t.detach()
        # The last term is exactly 0 and makes the gradient `typical`, the mean magnitude of the nonzero weights.
        return self._base + self._l1 * t + self._typical * (self._t - t)

    @torch.no_grad()
    def end_phase(self) -> None:
        if self.in_phase and self._t.any():
            # A layer whose weights are all zero has logits of 0, whatever the divisor.
            entries = self._t / self._l1.where(self._l1 > 0, 1) if self._even else self._t
            if len(self._past_signs) and torch.equal(self._signs, self._past_signs[-1]):
                self._past_t[-1] += entries  # no sign has changed, so both phases share an entry
            else:
                self._past_t = torch.cat([self._past_t, entries[None]])
                self._past_signs = torch.cat([self._past_signs, self._signs[None]])
        super().end_phase()

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"past_t": self._past_t.clone(), "past_signs": self._past_signs.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._past_t = state["past_t"].to(self._past_t, copy=True)
        self._past_signs = state["past_signs"].to(self._past_signs, copy=True)

    def _tensors(self) -> dict[str, Tensor]:
        return {
            "base": self._base,
            "l1": self._l1,
            "typical": self._typical,
            "t": self._t,
            "signs": self._signs,
        }


class FreeProjection(Projection):
    """Ablation: one logit per filter, independent of the weights, so that a new phase does not change it.

    A logit changes by about `lr` in one step of Adam in every layer, so `even` makes no difference.
    """

    def __init__(self, weights: Sequence[Tensor], filters: Sequence[int], *, even: bool = False) -> None:
        super().__init__(weights, filters)
        self.parameters = [self._like.new_zeros(sum(filters)).requires_grad_()]

    def logits(self) -> Tensor:
        return self.parameters[0]

    def _tensors(self) -> dict[str, Tensor]:
        return {"logits": self.parameters[0]}


PROJECTIONS: dict[str, Callable[..., Projection]] = {
    "factored": FactoredProjection,
    "literal": LiteralProjection,
    "free": FreeProjection,
}
