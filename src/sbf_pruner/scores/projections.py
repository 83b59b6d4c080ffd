"""Activations that map logits to positive scores.

A logit of 0 gives a score of exactly 1, so attaching scores to a network does not change its output.  The gradient
is finite for every finite logit and non-zero at 0.

Scores that were not learned here: one number for each filter, from whoever ranks filters.

Any numbers enter, the higher the better; the same in order, between 0 and 1 and in double precision, leave.  What
does not fit the network is refused.

The pruner layers: from the frozen filter weights of the whole network to one logit per filter.

The layers' weights enter at the start of a score phase; one flat vector of logits leaves (the layers'
filters one after another), differentiable with respect to `parameters`, which the caller trains with a
fresh Adam in every phase.  What holds: every logit starts at 0; the tensors that `logits` reads are only ever
changed in place, so a compiled or captured step stays valid from phase to phase.  Here is what the forms of it
have in common; each has a file of its own, and `forms` lists them.

The signs of weights at two bits each, and their product with other weights.

Flat tensors enter; bytes leave that hold four signs each.  Zero is a sign of its own.  A product unpacks a piece
at a time, so it needs little memory however large the layer is.

The paper's pruner layer taken literally: a matrix from all weights of a layer to its filters.

The reference that the factored form is held against, for small networks; what would not fit in the device's
memory is refused before anything is allocated.

The pruner layer as it is used: one number per filter in place of the paper's matrix.

What holds: it follows the same trajectory as the literal form, exactly as Adam's eps goes to 0; the phases that are
over are kept as the signs of their weights, at two bits each.

A pruner layer without weights, to compare with: what is lost if a score does not follow from its filter?

The layers' weights enter, of which only the numbers of filters count; one logit per filter leaves, as in
`projection`.

The forms of the pruner layer, by the name a recipe or a caller gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, reduce
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import PruningError
from ..utils.timing import memory_of


def leaky_exponential(x: Tensor, leak: float = 0.1) -> Tensor:
    """The paper's activation (Eq. 3): `exp(x)` below zero and `1 + leak * x` above it.

    The two branches meet at 0 with slopes 1 and `leak`.  The slope used there is that of the exponential, 1:
    every logit starts at 0, and so the first step can go either way even with `leak=0`.

    >>> leaky_exponential(torch.tensor([0.0, 10.0]))
    tensor([1., 2.])
    """
    positive = x > 0
    # `where` differentiates the branch not taken as well, and 0 * inf is nan, so exp must not overflow there.  The
    # mask fixes the slope at 0; `clamp(max=0)` has a slope of 0 there since torch 2.14.
    return torch.where(positive, 1 + leak * x, x.masked_fill(positive, 0).exp())


@cache
def check_slope() -> None:
    """Raise a PruningError unless backward gives the leaky exponential a slope of 1 at 0; run once per process.

    Every logit starts at 0.  If a version of torch changes a subgradient there, no score moves, without any error.
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
    """A sigmoid that is 1 at 0, to compare with: it is flat on both sides, and never above 2.

    >>> doubled_sigmoid(torch.tensor([0.0]))
    tensor([1.])
    """
    return 2 * torch.sigmoid(x)


ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "leaky_exponential": leaky_exponential,
    "sigmoid": doubled_sigmoid,
}


Given = Mapping[str, Tensor | NDArray[np.floating]]


def comparable(given: Given, filters: Mapping[str, int]) -> dict[str, NDArray[np.floating]]:
    """Scores for exactly these layers, scaled alike.

    >>> comparable({"conv": np.array([-1.0, 0.0, 3.0])}, {"conv": 3})
    {'conv': array([0.  , 0.25, 1.  ])}
    """
    if not isinstance(given, Mapping):
        raise PruningError(
            f"scores are wanted by layer, {{name: one for each filter}}, not as {type(given).__name__}"
        )
    if wrong := sorted(given.keys() ^ filters.keys()):
        raise PruningError(f"scores are wanted for exactly the layers that can be pruned; look at {wrong[0]}")
    values = {name: _doubles(given[name]) for name in filters}
    for name, count in filters.items():
        if values[name].shape != (count,) or not np.isfinite(values[name]).all():
            raise PruningError(f"{name}: {count} finite scores are wanted, one for each filter")
    largest = max(float(np.abs(each).max()) for each in values.values()) or 1.0
    # Where limits are weighed against each other scores are divided, so none is below 0.
    least = min(0.0, *(float((each / largest).min()) for each in values.values()))
    values = {name: each / largest - least for name, each in values.items()}
    highest = max(float(each.max()) for each in values.values()) or 1.0
    return {name: each / highest for name, each in values.items()}


def _doubles(given: Tensor | NDArray[np.floating]) -> NDArray[np.floating]:
    return np.array(given.detach().double().cpu().numpy() if isinstance(given, Tensor) else given, np.float64)


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


def pack_signs(values: Tensor) -> Tensor:
    """The signs of a flat tensor at two bits each: 0 for negative, 1 for exactly zero, 2 for positive.

    >>> pack_signs(torch.tensor([-3.0, 0.0, 5.0, 1.0, -1.0]))
    tensor([164,   0], dtype=torch.uint8)
    """
    codes = (values >= 0).to(torch.uint8) + (values > 0).to(torch.uint8)
    a, b, c, d = torch.nn.functional.pad(codes, (0, -len(codes) % 4)).view(-1, 4).unbind(1)
    return a | b << 2 | c << 4 | d << 6


def unpack_signs(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """The signs as -1, 0 and 1, four for every byte: up to three more than were packed.

    >>> unpack_signs(torch.tensor([164], dtype=torch.uint8), torch.float32)
    tensor([-1.,  0.,  1.,  1.])
    """
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=packed.device)
    return (packed[:, None] >> shifts & 3).flatten().to(dtype) - 1


def inner(packed: Tensor, vector: Tensor, chunk: int = 1 << 20) -> Tensor:
    """<signs, vector>, unpacking at most 4 * chunk signs at a time."""
    pairs = zip(packed.split(chunk), vector.split(4 * chunk), strict=True)
    return torch.stack([(unpack_signs(s, v.dtype)[: len(v)] * v).sum() for s, v in pairs]).sum()


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


class FactoredProjection:
    """The same trajectory with one number per filter and phase, and two bits per weight and phase.

    While the weights are frozen, the gradient of column f of `W` is `g_f * vec(F)`, and Adam normalises each
    entry by its own size: every entry moves by the same amount, in the direction of its weight's sign.
    So `W_f = sum over phases p of t_f[p] * sign(F[p])`, and in phase q the logit is

        x_f = base_f + t_f * |F[q]|_1,   base_f = sum over p < q of t_f[p] * <sign F[p], F[q]>.

    Adam's eps is the one thing that tells the entries apart: it holds back those of small weights more.  To
    first order in eps they act together as if each weight had the mean magnitude of the nonzero ones, so `t`
    is shown the logit's gradient times that magnitude instead of its own gradient, which has `|F|_1` there.
    Hence `parameters` are meant for Adam, or another optimiser that is blind to the gradient's scale.

    With `even`, `t` is counted in logits: every layer moves as fast as any other, as if each had a learning
    rate of its own, divided by its `|F|_1`.  It is shown the logit's own gradient then.  Weight decay can bring a
    whole layer down to 1e-8, where eps would hold its scores at 1 and keep for good what does nothing.
    """

    def __init__(self, weights: Sequence[Tensor], filters: Sequence[int], *, even: bool = False) -> None:
        dtype, device = dtype_and_device(weights, filters)
        self._even = even
        self.in_phase = False
        self._sizes = [w.numel() for w in weights]
        self._bytes = [-(-size // 4) for size in self._sizes]
        self._layer = torch.arange(len(filters)).repeat_interleave(torch.tensor(filters)).to(device)
        total = len(self._layer)
        self._base, self._l1, self._typical, self._t = (
            torch.zeros(total, dtype=dtype, device=device) for _ in range(4)
        )
        self._signs = torch.zeros(sum(self._bytes), dtype=torch.uint8, device=device)
        self._past_t = torch.zeros(0, total, dtype=dtype, device=device)
        self._past_signs = torch.zeros(0, len(self._signs), dtype=torch.uint8, device=device)
        self.parameters: list[Tensor] = [self._t.requires_grad_()]

    @torch.no_grad()
    def begin_phase(self, weights: Sequence[Tensor]) -> None:
        check_phase(self, weights, self._sizes)
        vectors = [w.flatten().to(self._t.dtype) for w in weights]
        before = self._base + self._t
        norms = torch.stack([v.abs().sum() for v in vectors])
        nonzero = torch.stack([v.count_nonzero() for v in vectors])
        self._l1.copy_(norms[self._layer])
        self._typical.copy_((norms / nonzero.clamp(min=1))[self._layer])
        self._signs.copy_(torch.cat([pack_signs(v) for v in vectors]))
        self._base.zero_()
        for signs, t in zip(self._past_signs, self._past_t, strict=True):
            products = [inner(s, v) for s, v in zip(signs.split(self._bytes), vectors, strict=True)]
            self._base += t * torch.stack(products)[self._layer]
        if self._even:  # weights of zero alone say nothing; what was known of them still holds
            self._base.copy_(self._base.where(self._l1 > 0, before))
        self._t.zero_()
        self.in_phase = True

    def groups(self, lr: float) -> list[dict[str, Any]]:
        return [{"params": self.parameters, "lr": lr}]

    def logits(self) -> Tensor:
        if self._even:
            return self._base + self._t
        held = self._t.detach()
        # The last term is exactly 0; it is there for its gradient, `typical`.
        return self._base + self._l1 * held + self._typical * (self._t - held)

    @torch.no_grad()
    def end_phase(self) -> None:
        if self.in_phase and self._t.any():
            # A layer of zeros alone gives no logit, whatever its rate.
            entries = self._t / self._l1.where(self._l1 > 0, 1) if self._even else self._t
            if len(self._past_signs) and torch.equal(self._signs, self._past_signs[-1]):
                self._past_t[-1] += entries  # no sign changed since: the two phases are one
            else:
                self._past_t = torch.cat([self._past_t, entries[None]])
                self._past_signs = torch.cat([self._past_signs, self._signs[None]])
        self.in_phase = False

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {name: slot.detach().clone() for name, slot in self._slots().items()}
        state |= {"past_t": self._past_t.clone(), "past_signs": self._past_signs.clone()}
        return state | {"in_phase": int(self.in_phase)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        restore(self._slots(), state)
        self._past_t = state["past_t"].to(self._past_t, copy=True)
        self._past_signs = state["past_signs"].to(self._past_signs, copy=True)
        self.in_phase = bool(state["in_phase"])

    def _slots(self) -> dict[str, Tensor]:
        return {
            "base": self._base,
            "l1": self._l1,
            "typical": self._typical,
            "t": self._t,
            "signs": self._signs,
        }


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


PROJECTIONS: dict[str, Callable[..., Projection]] = {
    "factored": FactoredProjection,
    "literal": LiteralProjection,
    "free": FreeProjection,
}
