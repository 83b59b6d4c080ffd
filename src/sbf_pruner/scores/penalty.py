"""Penalty on the scores (Eq. 5) and its strength and weights, scores of residual blocks, and checks of gradients.

`Penalty` keeps the strength and the weights in tensors that are filled in place, so a captured step sees them
change. With a budget the strength is adjusted towards it. If the balance is "cost", the weight of a filter is its
cost in the limited resources, given the filters that neighboring layers keep now; a scarce resource counts more.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..budget.controller import ResourceWeights, Selector, Steering
from ..budget.search import Selection
from ..errors import PruningError, check_version
from ..graph.channel_graph import ChannelGraph
from ..graph.nodes import Mask
from ..utils.distributed import DistributedContext


def balance_weights(kind: str, spatial: Sequence[tuple[int, ...]]) -> list[float]:
    """Return one weight per layer, from the spatial size of its input relative to the smallest one of the network.

    `area` compares numbers of pixels, so weights are in the ratio of MACs per parameter; `side` compares geometric
    means of side lengths; `none` and `cost` give 1 to every layer (`cost` as a start for weights from costs). An
    input without spatial dimensions (`()`, of a linear layer) counts as one pixel, like that of a convolution on a
    pooled 1x1 feature map. Such layers weigh less than 1 and do not count as the smallest, or one of them would
    multiply the penalty of all the others.

    >>> balance_weights("area", [(32, 32), (16, 16), (8, 8), ()])
    [16.0, 4.0, 1.0, 0.015625]
    """
    if kind in ("none", "cost"):  # costs come from the channel graph and change as filters are removed
        return [1.0] * len(spatial)
    sizes = [float(prod(size)) if kind == "area" or not size else prod(size) ** (1 / len(size)) for size in spatial]
    smallest = min((size for size in sizes if size > 1), default=1.0)
    return [size / smallest for size in sizes]


def per_filter(values: Sequence[float], filters: Sequence[int]) -> Tensor:
    """Repeat each layer's value for each of its filters, in the order of the flat scores.

    >>> per_filter([4.0, 1.0], [1, 2])
    tensor([4., 1., 1.])
    """
    return torch.tensor(values).repeat_interleave(torch.tensor(filters))


def weighted_l1(scores: Tensor, weights: Tensor, penalty: float | Tensor) -> Tensor:
    """Return `penalty * sum(weights * |scores|)`; a tensor as `penalty` can change inside a captured step.

    >>> weighted_l1(torch.tensor([1.0, 2.0]), torch.tensor([4.0, 1.0]), 0.5)
    tensor(3.)
    """
    return penalty * (weights * scores.abs()).sum()


class Penalty:
    """Penalty of a pruner: one strength, and one weight per filter."""

    def __init__(
        self,
        graph: ChannelGraph,
        selector: Selector,
        strength: float,
        balance: str,
        steering: Steering | None = None,
    ) -> None:
        self.graph, self.selector, self.steering = graph, selector, steering
        self.mix = ResourceWeights(selector.excess_fractions()) if balance == "cost" else None
        self.strength = torch.tensor(strength)
        weights = balance_weights(balance, [layer.map_size for layer in graph.layers.values()])
        self.weights = per_filter(weights, [layer.filters for layer in graph.layers.values()])
        if self.mix is not None:
            self.weights = self._costs(self.mix, graph.all_filters())

    def to(self, scores: Tensor) -> None:
        """Move to the device and dtype of the scores."""
        self.strength, self.weights = self.strength.to(scores), self.weights.to(scores)

    def on(self, scores: Tensor) -> Tensor:
        """Return the penalty of the scores."""
        return weighted_l1(scores, self.weights, self.strength)

    def steer(self, cutoff: float, progress: float) -> None:
        """Update the strength, if it is steered, from the score that separates kept from removed filters."""
        if self.steering is not None:
            self.strength.fill_(self.steering.follow(cutoff, progress))

    def follow(self, selection: Selection, progress: float) -> None:
        """If the balance is "cost", update the weights from the resources and the filters that a selection uses."""
        if self.mix is not None:
            if self.selector.limits is not None:
                self.mix.follow(self.selector.limits.eased(progress).room(selection.usage))
            self.weights.copy_(self._costs(self.mix, self.graph.settle(selection.masks)))

    def state_dict(self) -> dict[str, Any]:
        """Return what training has changed."""
        return {
            "strength": float(self.strength),
            "weights": self.weights.clone(),
            "mix": None if self.mix is None else dict(self.mix.parts),
            "steering": None if self.steering is None else self.steering.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state; parts that were not in use when it was saved keep their current values."""
        first = {"strength": state["strength"], "error": 0.0}  # for states saved before the error was stored
        if self.steering is not None and (steered := state.get("steering", first)) is not None:
            self.steering.load_state_dict(steered)
            self.strength.fill_(state["strength"])
        if self.mix is not None and (state["mix"] or {}).keys() == self.mix.parts.keys():
            self.mix = ResourceWeights(state["mix"])
            self.weights.copy_(state["weights"])

    def _costs(self, mix: ResourceWeights, keep: Mapping[str, Mask]) -> Tensor:
        filters = {name: layer.filters for name, layer in self.graph.layers.items()}
        return per_filter(mix.weights(self.selector.priced(keep), filters), list(filters.values()))


SPEED = 1e-3  # learning rate of blocks' logits if no speed is given for filters


class BlockScores:
    """Scores of residual branches, each multiplied into those of the filters that its branch adds to the stream.

    All start at 1. If the score of a block falls, the scores of all its filters fall, and the gates of the whole
    branch close together: removing a block saves more time than thinning its layers. Other filters have factor 1.

    >>> blocks = BlockScores(["b"], {"a": slice(0, 2), "b": slice(2, 3)}, torch.ones(3))
    >>> blocks.load_state_dict({"logits": torch.tensor([-1.0])})
    >>> blocks.factors(torch.relu).tolist()
    [1.0, 1.0, 0.0]
    """

    def __init__(self, layers: Sequence[str], spans: Mapping[str, slice], like: Tensor) -> None:
        self.layers = tuple(dict.fromkeys(layers))
        self.logits = torch.zeros(len(self.layers), dtype=like.dtype, device=like.device, requires_grad=True)
        block = torch.zeros(len(like), dtype=torch.long)  # index 0 is the factor of filters in no block
        for place, name in enumerate(self.layers, start=1):
            block[spans[name]] = place
        self._block = block.to(like.device)

    def group(self, speed: float) -> dict[str, Any]:
        """Return a parameter group for the optimizer, with the learning rate `speed` or, if that is 0, `SPEED`."""
        return {"params": [self.logits], "lr": speed or SPEED}

    def factors(self, activation: Callable[[Tensor], Tensor]) -> Tensor:
        """Return one factor per filter."""
        scores = activation(self.logits)
        return torch.cat([torch.ones_like(scores[:1]), scores]).index_select(0, self._block)

    def state_dict(self) -> dict[str, Any]:
        """Return what training has changed."""
        return {"logits": self.logits.detach().clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        with torch.no_grad():
            self.logits.copy_(state["logits"])


_STILL = 0.1  # largest distance of all scores from their start, 1, below which they hardly rank the filters

_log = logging.getLogger("sbf_pruner")


class Gradient:
    """Gradient of the scores, made safe for a step of Adam.

    It is averaged over all ranks and unscaled. A gradient that is not finite, or whose square overflows, becomes
    zero: Adam's second moment would stay infinite, and no score would move again.
    """

    def __init__(self, scores: Tensor) -> None:
        self.scores = scores
        # The margin is for the filter weights, by which the gradient is multiplied before Adam squares it.
        self.largest = math.sqrt(torch.finfo(scores.dtype).max) / 1000
        self.lost = torch.zeros((), dtype=torch.int64, device=scores.device)  # unusable gradients in this phase
        self.stepped = False  # whether this phase had a step

    def take(self, scaler: torch.amp.GradScaler | None = None) -> Tensor:
        """Remove and return the gradient of the scores; zeros if an entry is not finite or its square is not."""
        found = self.scores.grad
        if found is None:
            raise PruningError("step() found no gradient; call loss.backward() with pruner.penalty() in the loss")
        DistributedContext.present().average([found])
        if scaler is not None:
            scaler.unscale_(torch.optim.SGD([self.scores]))  # `unscale_` accepts only an optimizer
        # No host synchronization, so this is safe inside a CUDA graph.
        usable = (found.abs() <= self.largest).all()
        # While a GradScaler adapts its scale, gradients that are not finite are expected, so they are not counted.
        lost = ~usable if scaler is None else ~usable & found.isfinite().all()
        found.masked_fill_(~usable, 0)
        self.lost += lost
        self.scores.grad, self.stepped = None, True
        return found

    def warn_if_still(self, scores: Tensor) -> None:
        """Warn if steps were made but no score has moved far from 1."""
        furthest = float((scores.detach() - 1).abs().max())
        if self.stepped and furthest < _STILL:
            _log.warning(
                "the budget is met, but no score has moved further than %.2g from 1, so the scores hardly rank the "
                "filters; set speed (how far a logit moves in a step) to about 3 / number of all score steps",
                furthest,
            )

    def report(self) -> None:
        """Warn of unused gradients and of lost steps at the end of a phase, and reset the counters."""
        if self.scores.grad is not None and not self.stepped:
            _log.warning("no score moved in this score phase: step() was not called after backward()")
        if lost := int(self.lost):
            _log.warning(
                "%d of the steps of this score phase moved no score, because the gradient of the scores was not "
                "finite or above %.0e; look for the cause in the loss, or lower the penalty",
                lost,
                self.largest,
            )
        self.lost.zero_()
        self.stepped = False


_DEVICE_FLAGS = ("capturable", "fused", "foreach")  # flags of an optimizer that depend on the device


STATE_FORMAT = "sbf-pruner state 1"


def check_saved(state: Mapping[str, Any], filters: Mapping[str, int], *, blocks: bool) -> None:
    """Raise a PruningError unless a state is from a pruner with the same layers and the same use of block scores.

    >>> check_saved({}, {"conv": 4}, blocks=False)
    Traceback (most recent call last):
    sbf_pruner.errors.PruningError: this is not the state of a pruner; give what its state_dict() returned
    """
    if isinstance(state, Mapping):
        check_version(state.get("format"), STATE_FORMAT, "the state")
    if not isinstance(state, Mapping) or not {"projection", "held", "scores"} <= state.keys():
        raise PruningError("this is not the state of a pruner; give what its state_dict() returned")
    saved = {name: len(mask) for name, mask in state["held"].items()}
    if odd := [name for name in (*filters, *saved) if filters.get(name) != saved.get(name)]:
        raise PruningError(
            f"the saved state has {saved.get(odd[0], 0)} filters to prune in {odd[0]} where the model has "
            f"{filters.get(odd[0], 0)}; load it into a pruner of the same network with the same layers ignored"
        )
    if (state.get("blocks") is not None) != blocks:
        raise PruningError(
            f"the state was saved with blocks={not blocks}; create the pruner with blocks={not blocks}"
        )


def for_this_device(state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return a saved optimizer state with the flags of `optimizer` that depend on the device.

    A state saved on a GPU may select a kind of step that the CPU does not support.
    """
    groups = [
        saved | {flag: group[flag] for flag in _DEVICE_FLAGS if flag in group}
        for saved, group in zip(state["param_groups"], optimizer.param_groups, strict=True)
    ]
    return {**state, "param_groups": groups}
