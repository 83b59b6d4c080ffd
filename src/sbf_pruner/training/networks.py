"""The networks a run trains one after another: the dense one under its scores, the small one, the control.

A model and a recipe enter; the network of each phase leaves.  Removal happens here, once, when the first
phase asks for the small network, and is proved on the spot: in float64 the gated network and the extracted
one must give the same outputs.  `state` holds all that training changed, and `restore` brings it back.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..attached import without_attached
from ..copies import real_copy
from ..errors import PruningError, RunError
from ..measuring import measure
from ..phases import Phase
from ..plan import Plan
from ..proof import prove
from ..pruner import Pruner
from ..stored import tensors_of
from ..surgery import extract
from .checkpoint import ELSEWHERE
from .data import Data
from .feed import Feed
from .machine import lay_out
from .recipe import Recipe
from .schedule import closing_cycles
from .scorer import attach
from .start import check_fit, load_weights
from .timed import rehearse, timer_here

FINETUNE_ON = {"cpu": "small", "cuda": "gated"}  # what is quickest there
STEERED = 4  # times in an epoch of scores; a landing is reckoned each time, an eighth of a second for ResNet-56
PROVED_ON = 32  # images; in float64 a large network needs much memory for each


class Networks:
    """The dense network with its pruner, then the small one, then the control."""

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        data: Data,
        feed: Feed,
        device: torch.device,
        measured: Path | None = None,
    ) -> None:
        self.images, self.order = feed.images, feed.order
        self.dense = lay_out(real_copy(model).to(device), self.order)
        if recipe.model.weights:
            load_weights(self.dense, Path(os.path.expanduser(recipe.model.weights)))
        check_fit(self.dense, self.images[:2], data)
        self.initial = _snapshot(self.dense)
        self._recipe = recipe
        self.pruner, self.timed = attach(self.dense, self.images, recipe, len(data.train), measured)
        asked = recipe.finetune_on
        self._finetune_on = FINETUNE_ON.get(device.type, "small") if asked == "auto" else asked
        self.small: nn.Module | None = None
        self.control: nn.Module | None = None
        self.plan = self.pruner.plan()
        self.cut_error: float | None = None
        self._dense_cost = self._small_cost = measure(self.dense, self.images[:1])

    def of(self, phase: Phase) -> tuple[nn.Module, Pruner | None]:
        """The network that a phase trains, and the pruner whose gates stand in it."""
        if phase.kind == "control":
            return self._controlled(), None
        if phase.kind != "finetune" or self._finetune_on == "gated":
            return self.dense, self.pruner
        return self.pruned(), None

    def pruned(self) -> nn.Module:
        """The small network; the first call removes the filters, and proves that nothing else changed."""
        if self.small is None:
            # A time is measured where the scores land, and a forecast may be further off than the measurement.
            small = self._extract() if self.timed is not None else lay_out(self.pruner.extract(), self.order)
            try:
                self.cut_error = prove(self.dense, small, self.images[:PROVED_ON])
            except PruningError as error:
                raise RunError(str(error)) from error
            self.small = small
        return self.small

    def bare_copy(self) -> nn.Module:
        """The dense network as it is now, without gates, to be looked at and not trained."""
        return without_attached(real_copy(self.dense)).eval().requires_grad_(False)

    def scored(self) -> dict[str, Any]:
        """The dense network with the scores it has come to, to choose other sizes from; before anything is cut."""
        return {
            "dense": self.dense.state_dict(),
            "scores": self.pruner.scores(),
            "plan": {name: list(kept) for name, kept in self.plan.keep.items()},
        }

    def cost(self, phase: Phase) -> dict[str, int]:
        """Filters, parameters and MACs of what a phase trains, without what its gates hold back."""
        alive, filters = self.pruner.alive()
        cost = self._dense_cost if phase.kind == "control" else self._small_cost
        alive = filters if phase.kind == "control" else alive
        return {"filters": alive, "filters_total": filters, "params": cost.params, "macs": cost.macs}

    def after_step(self, phase: Phase, epoch: int, step: int, steps: int) -> None:
        """So many steps of an epoch of scores are done."""
        if step < steps and step * STEERED // steps > (step - 1) * STEERED // steps:
            self.closes_in(phase, epoch - phase.first + step / steps)

    def closes_in(self, phase: Phase, epochs: float) -> None:
        """A score phase has come so many epochs far: what the gates may leave is less, and the penalty follows."""
        closing = closing_cycles(self._recipe)
        self.pruner.progress = min((phase.cycle - 1 + epochs / phase.epochs) / closing, 1.0)
        if epochs < phase.epochs:  # at the end of the phase the gates are set, and the penalty follows then
            self.pruner.steer()

    def check_timer(self) -> None:
        """Can a time that was asked for be taken, if it is to be taken here?"""
        if self.timed is not None:
            rehearse(self.timed.clock, self.bare_copy(), self.images)

    def come_in_time(self) -> None:
        """The last scores have landed: correct where, if a time was asked for and can be taken here."""
        if self.timed is None:
            return
        timer = timer_here(self.timed.clock, self.bare_copy(), self.images)
        if timer is not None:
            self.timed.come_in_time(self.pruner, timer)

    def gates_changed(self) -> None:
        """Count anew: a score phase has ended."""
        self.plan = self.pruner.plan()
        self._small_cost = measure(self._extract(), self.images[:1])

    def state(self) -> dict[str, Any]:
        """Everything that training has changed so far."""
        pruning = self.small is None
        return {
            "dense": self.dense.state_dict() if pruning else None,
            "pruner": self.pruner.state_dict() if pruning else None,
            "plan": {name: list(kept) for name, kept in self.plan.keep.items()},
            "small": None if self.small is None else self.small.state_dict(),
            "control": None if self.control is None else self.control.state_dict(),
            "cut_error": self.cut_error,
        }

    def restore(self, state: dict[str, Any], initial: dict[str, Tensor]) -> None:
        """Go back to a state, whatever weights the model came with this time."""
        self.begin_with(initial)
        if state["small"] is None:
            self.dense.load_state_dict(state["dense"])
            self.pruner.load_state_dict(state["pruner"])
        else:
            self.pruner.gate(Plan(state["plan"]))
            self.small = self._extract()
            self.small.load_state_dict(state["small"])
        if state["control"] is not None:
            self._controlled().load_state_dict(state["control"])
        self.cut_error = state["cut_error"]
        self.gates_changed()

    def begin_with(self, initial: dict[str, Tensor]) -> None:
        """Be the network that a run was begun with, whatever weights the model came with this time."""
        if _shapes(initial) != _shapes(self.initial):
            raise RunError(f"the run was begun with another network; resume it with the same model, {ELSEWHERE}")
        self.initial = initial
        self.dense.load_state_dict(initial)

    def take_over(self, weights: dict[str, Tensor]) -> None:
        """Begin with the weights of a dense stage that is over."""
        if _shapes(weights) != _shapes(self.initial):
            raise RunError("the dense stage is that of another network; take over one of this very network")
        self.dense.load_state_dict(weights)

    def _extract(self) -> nn.Module:
        """What the gates let through now, which need not meet the budget yet."""
        pruner = self.pruner
        return lay_out(extract(self.dense, pruner.example_inputs, pruner.plan(), pruner.graph), self.order)

    def _controlled(self) -> nn.Module:
        if self.control is None:
            self.pruned()  # before its weights are gone: the control is the dense network over again
            self.control = self.pruner.detach()
            self.control.load_state_dict(self.initial)
        return self.control


def _snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors_of(model).items()}


def _shapes(state: dict[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in state.items()}
