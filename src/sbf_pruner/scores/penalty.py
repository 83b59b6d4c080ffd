"""What a score costs: the weighted l1 norm of the scores (Eq. 5), and the balance between the layers.

The sizes of the layers' input maps enter, then the scores as one flat vector; a differentiable scalar
leaves.  What holds: under "area" two layers' weights stand in the ratio of the multiplications that each
of their parameters causes; the smallest map of the network has weight 1.

The pressure on the scores: how strong the penalty is, and how it is spread over the layers.

A balance, or a budget to follow, enters; a differentiable scalar leaves for every step.  Strength and weights
lie in tensors that are filled in place, so a captured step sees them change.  With a budget the strength is
steered towards it; under the balance "cost" a filter's weight is what it costs among the neighbours it has now,
in the units of the limits, each counted the more the scarcer it is.

One score for a whole residual branch, multiplied into the scores of its filters.

The residual blocks of a network enter; factors leave, one per filter, 1 for filters of no branch.  What holds: at
first every factor is 1; where a block's score falls, all filters that its branch adds to the stream fall
together, and the gates close the branch as one: runtimes are gladder of a block less than of its channels.

The gradient of the scores, made safe for a step of Adam.

It is averaged over all processes and divided by the factor of a gradient scaler.  A batch whose gradient is not
finite, or so large that its square overflows, is skipped: Adam's second moment would stay infinite, and no score
would ever move again.

Does a saved state fit the pruner, and the device, that is to go on from it?

A state, and the layers that can be pruned, enter; what does not fit is refused before anything is loaded, and what
belongs to the device it was saved on is left behind.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ..budget.controller import Aim, Mix, Steering
from ..budget.search import Landing
from ..errors import PruningError, nearest
from ..graph.channel_graph import ChannelGraph
from ..graph.nodes import Mask
from ..utils.distributed import Team

Balance = Literal["area", "side", "none", "cost"]


def balance_weights(kind: Balance, spatial: Sequence[tuple[int, ...]]) -> list[float]:
    """One weight per layer, from the spatial size of its input map relative to the smallest map.

    `area` compares numbers of pixels, `side` geometric-mean side lengths, `none` gives 1 to every layer.
    So does `cost`, for whoever weighs layers by what their filters cost to start from.
    A layer that sees no map (a linear layer, `()`) counts as one pixel, just as a convolution on a pooled
    1x1 map does; such layers weigh less than 1 and are left out of the search for the smallest map, or one
    of them would multiply the penalty of all the others.

    >>> balance_weights("area", [(32, 32), (16, 16), (8, 8), ()])
    [16.0, 4.0, 1.0, 0.015625]
    """
    if kind not in get_args(Balance):
        raise PruningError(f"no balance is called {kind!r}: {nearest(kind, get_args(Balance))}")
    if kind in ("none", "cost"):  # costs come from the channel graph, and change as filters go
        return [1.0] * len(spatial)
    sizes = [float(prod(size)) if kind == "area" or not size else prod(size) ** (1 / len(size)) for size in spatial]
    smallest = min((size for size in sizes if size > 1), default=1.0)
    return [size / smallest for size in sizes]


def per_filter(values: Sequence[float], filters: Sequence[int]) -> Tensor:
    """Each layer's value repeated for each of its filters: a flat vector that lines up with the scores.

    >>> per_filter([4.0, 1.0], [1, 2])
    tensor([4., 1., 1.])
    """
    return torch.tensor(values).repeat_interleave(torch.tensor(filters))


def weighted_l1(scores: Tensor, weights: Tensor, penalty: float | Tensor) -> Tensor:
    """`penalty * sum(weights * |scores|)`; a tensor as penalty can be steered inside a captured step.

    >>> weighted_l1(torch.tensor([1.0, 2.0]), torch.tensor([4.0, 1.0]), 0.5)
    tensor(3.)
    """
    return penalty * (weights * scores.abs()).sum()


class Pressure:
    """The penalty of a pruner."""

    def __init__(
        self, graph: ChannelGraph, aim: Aim, strength: float, balance: Balance, steering: Steering | None = None
    ) -> None:
        self.graph, self.aim, self.steering = graph, aim, steering
        self.mix = Mix(aim.scarce()) if balance == "cost" else None
        self.strength = torch.tensor(strength)
        self.weights = self._spread(balance_weights(balance, [layer.map_size for layer in graph.layers.values()]))
        if self.mix is not None:
            self.weights = self._costs(self.mix, graph.all_filters())

    def to(self, scores: Tensor) -> None:
        """Lie where the scores are."""
        self.strength, self.weights = self.strength.to(scores), self.weights.to(scores)

    def on(self, scores: Tensor) -> Tensor:
        """The penalty of the scores."""
        return weighted_l1(scores, self.weights, self.strength)

    def steer(self, level: float, progress: float) -> None:
        """Follow the budget: `level` is the score that would separate what stays from what goes."""
        if self.steering is not None:
            self.strength.fill_(self.steering.follow(level, progress))

    def follow(self, landing: Landing, progress: float) -> None:
        """Take up what a landing tells: what was scarce, and which neighbours filters have."""
        if self.mix is not None:
            if self.aim.limits is not None:
                self.mix.follow(self.aim.limits.eased(progress).room(landing.usage))
            self.weights.copy_(self._costs(self.mix, self.graph.settle(landing.masks)))

    def state_dict(self) -> dict[str, Any]:
        """What following has changed."""
        mixed = None if self.mix is None else dict(self.mix.parts)
        steered = None if self.steering is None else self.steering.state_dict()
        return {
            "strength": float(self.strength),
            "weights": self.weights.clone(),
            "mix": mixed,
            "steering": steered,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state; what it does not know, because nothing was followed then, is as it was given here."""
        first = {"strength": state["strength"], "error": 0.0}  # of a version that knew no error
        if self.steering is not None and (steered := state.get("steering", first)) is not None:
            self.steering.load_state_dict(steered)
            self.strength.fill_(state["strength"])
        if self.mix is not None and (state["mix"] or {}).keys() == self.mix.parts.keys():
            self.mix = Mix(state["mix"])
            self.weights.copy_(state["weights"])

    def _costs(self, mix: Mix, keep: Mapping[str, Mask]) -> Tensor:
        filters = {name: layer.filters for name, layer in self.graph.layers.items()}
        return self._spread(mix.weights(self.aim.priced(keep), filters))

    def _spread(self, weights: Sequence[float]) -> Tensor:
        return per_filter(weights, [layer.filters for layer in self.graph.layers.values()])


SPEED = 1e-3  # how far a block's logit moves in a step where filters have no speed in logits


class BlockScores:
    """Scores of residual branches.

    >>> blocks = BlockScores(["b"], {"a": slice(0, 2), "b": slice(2, 3)}, torch.ones(3))
    >>> blocks.load_state_dict({"logits": torch.tensor([-1.0])})
    >>> blocks.factors(torch.relu).tolist()
    [1.0, 1.0, 0.0]
    """

    def __init__(self, layers: Sequence[str], spans: Mapping[str, slice], like: Tensor) -> None:
        self.layers = tuple(dict.fromkeys(layers))
        self.logits = torch.zeros(len(self.layers), dtype=like.dtype, device=like.device, requires_grad=True)
        block = torch.zeros(len(like), dtype=torch.long)  # the first of the factors is that of no block
        for place, name in enumerate(self.layers, start=1):
            block[spans[name]] = place
        self._block = block.to(like.device)

    def group(self, speed: float) -> dict[str, Any]:
        """What an optimiser trains, as fast as the filters if they have a speed."""
        return {"params": [self.logits], "lr": speed or SPEED}

    def factors(self, activation: Callable[[Tensor], Tensor]) -> Tensor:
        """One factor per filter."""
        scores = activation(self.logits)
        return torch.cat([torch.ones_like(scores[:1]), scores]).index_select(0, self._block)

    def state_dict(self) -> dict[str, Any]:
        """What training has changed."""
        return {"logits": self.logits.detach().clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a state."""
        with torch.no_grad():
            self.logits.copy_(state["logits"])


_STILL = 0.1  # scores begin at 1; as long as all are this near to it, they tell little of which filter matters

_log = logging.getLogger("sbf_pruner")


class Gradient:
    """What backward passes leave on `scores`."""

    def __init__(self, scores: Tensor) -> None:
        self.scores = scores
        # A gradient of the scores is multiplied by weights before Adam squares it.
        self.largest = math.sqrt(torch.finfo(scores.dtype).max) / 1000
        self.lost = torch.zeros((), dtype=torch.int64, device=scores.device)  # steps, in the phase under way
        self.taken = False  # in that phase, at least once

    def take(self, scaler: torch.amp.GradScaler | None = None) -> Tensor:
        """Take the gradient off the scores; zeros if a part of it is not finite or too large to be squared."""
        found = self.scores.grad
        if found is None:
            raise PruningError("step() found no gradient; call loss.backward() with pruner.penalty() in the loss")
        Team.present().average([found])
        if scaler is not None:
            scaler.unscale_(torch.optim.SGD([self.scores]))  # it looks only at what an optimiser holds
        # No host synchronisation, so this is safe inside a CUDA graph.
        usable = (found.abs() <= self.largest).all()
        # A scaler that seeks its factor makes gradients that are not finite, and handles them.
        lost = ~usable if scaler is None else ~usable & found.isfinite().all()
        found.masked_fill_(~usable, 0)
        self.lost += lost
        self.scores.grad, self.taken = None, True
        return found

    def tell_if_still(self, scores: Tensor) -> None:
        """Say that a budget was met by scores that have hardly moved, if steps were made and they have not."""
        furthest = float((scores.detach() - 1).abs().max())
        if self.taken and furthest < _STILL:
            _log.warning(
                "the budget is met, but no score has moved further than %.2g from 1, so they tell little of which "
                "filters matter; give a speed (how far a logit moves in a step), about 3 / all score steps to come",
                furthest,
            )

    def tell(self) -> None:
        """Say how many steps were lost in a phase that ends, or that there was none."""
        if self.scores.grad is not None and not self.taken:
            _log.warning("no score moved in this score phase: step() was not called after backward()")
        if lost := int(self.lost):
            _log.warning(
                "%d of the steps of this score phase moved no score, because the gradient of the scores was not "
                "finite or above %.0e; look for the cause in the loss, or lower the penalty",
                lost,
                self.largest,
            )
        self.lost.zero_()
        self.taken = False


_OF_DEVICE = ("capturable", "fused", "foreach")  # how an optimiser steps, where it is


def check_saved(state: Mapping[str, Any], filters: Mapping[str, int], *, blocks: bool) -> None:
    """Refuse what no pruner has saved, or one with other layers, or with scores of blocks where these have none.

    >>> check_saved({}, {"conv": 4}, blocks=False)
    Traceback (most recent call last):
    sbf_pruner.errors.PruningError: this is not the state of a pruner; give what its state_dict() returned
    """
    if not isinstance(state, Mapping) or not {"projection", "held", "scores"} <= state.keys():
        raise PruningError("this is not the state of a pruner; give what its state_dict() returned")
    saved = {name: len(mask) for name, mask in state["held"].items()}
    if odd := [name for name in (*filters, *saved) if filters.get(name) != saved.get(name)]:
        there, here = saved.get(odd[0], 0), filters.get(odd[0], 0)
        raise PruningError(
            f"the saved state has {there} filters to prune in {odd[0]} where the model has {here}; load it into a "
            "pruner of the same network with the same layers ignored"
        )
    if (state.get("blocks") is not None) != blocks:
        raise PruningError(f"the state was saved with blocks={not blocks}; make the pruner so, too")


def for_this_device(state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A saved optimiser's state, to go on as `optimizer` runs here: a GPU wants other steps than a CPU can do."""
    here = [{flag: group[flag] for flag in _OF_DEVICE if flag in group} for group in optimizer.param_groups]
    groups = [{**saved, **own} for saved, own in zip(state["param_groups"], here, strict=True)]
    return {**state, "param_groups": groups}
