"""The pruner layer as it is used: one number per filter in place of the paper's matrix.

What holds: it follows the same trajectory as the literal form, exactly as Adam's eps goes to 0; the phases that are
over are kept as the signs of their weights, at two bits each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .projection import check_phase, dtype_and_device, restore
from .signs import inner, pack_signs


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
