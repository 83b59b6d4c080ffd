"""A model under gates: which filters they let through, and the smaller network that stands for.

A model with its channel graph, and plans, enter; the same model, gated, leaves, and what `extract` cuts from it.
How a filter earns its place is another matter (`pruner`).
"""

from __future__ import annotations

from typing import Any

from torch import nn

from .attached import without_attached
from .errors import PruningError
from .graph.channels import ChannelGraph
from .graph.masks import Mask
from .plan import Plan, check_plan
from .scoring.gates import Gates
from .surgery import extract


class Gated:
    """Gates on a model, all open at first."""

    def __init__(self, model: nn.Module, example_inputs: Any, graph: ChannelGraph) -> None:
        self.model, self.example_inputs, self.graph = model, example_inputs, graph
        self.filters = {name: layer.filters for name, layer in graph.layers.items()}
        self.gates = Gates(model, graph.sites, self.filters)
        self._held = graph.all_filters()
        self._attached = True

    def plan(self) -> Plan:
        """The filters the gates let through: those held since the last score phase or `gate`."""
        return Plan.from_masks(self._held)

    def alive(self) -> tuple[int, int]:
        """How many filters the gates let through, and how many there are."""
        return sum(int(m.sum()) for m in self._held.values()), sum(m.size for m in self._held.values())

    def gate(self, plan: Plan) -> None:
        """Set the gates from any plan."""
        self._check_ready("gate")
        check_plan(plan)
        masks = plan.masks(self.graph)
        self.graph.check_connected(masks)
        self._hold(masks)

    def extract(self, *, prove: bool = False) -> nn.Module:
        """A new, smaller module that computes what the gated model computes; with `prove`, both run to show it."""
        self._check_settled("extract")  # it would be frozen too, and cut by the gates of an earlier phase
        if self._attached:
            self.gates.check_reach(self.model)  # or what was trained without them is cut by them
        return extract(self.model, self.example_inputs, self.plan(), self.graph, prove=prove)

    def detach(self) -> nn.Module:
        """Take the gates off the model and return it as it was (with the weights it has now)."""
        self._check_settled("detach")
        self._attached = False
        return without_attached(self.model)

    def _hold(self, masks: dict[str, Mask]) -> None:
        self._held, flow = self.graph.settled(masks)
        self.gates.set_hard([site.open(flow) for site in self.graph.sites])
        self.gates.mode = "hard"

    def _check_ready(self, call: str) -> None:
        """Refuse to set gates that are gone, or that a score phase is about to set."""
        self._check_attached()
        self._check_settled(call)

    def _check_attached(self) -> None:
        if not self._attached:
            raise PruningError("this pruner was detached; make a new one")
        self.gates.check_device(self.model)
        self.gates.check_reach(self.model)

    def _check_settled(self, call: str) -> None:
        if self.gates.soft.requires_grad:
            raise PruningError(f"{call}() belongs behind `with pruner.scoring():`, whose end sets the gates")
