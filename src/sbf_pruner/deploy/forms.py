"""The forms a network may take where it runs: all compute the same, each suits another runtime.

A network, example inputs and a `Form` enter; a `GraphModule` in evaluation mode leaves, for a batch of any size.
What holds: the canonical network, the one that is saved, is not changed.
"""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..errors import PruningError, nearest
from .captured import Node, capture, quietly, shape, tidy
from .inplace import write_in_place
from .remaps import merge_remaps, never
from .simplify import simplify
from .widths import widen
from .written import shortcuts_as_convolutions, write_remaps

aten = torch.ops.aten
BRANCHES = ("zeros", "gather", "add", "convolution", "mixed")


@dataclass(frozen=True)
class Form:
    """How a network is written for a runtime."""

    branches: str = "zeros"
    """how a branch with fewer filters comes into the common layout: "zeros" (filters of zeros in its last layer),
    "gather" (its channels are picked out beside a zero), "add" (added at their places), "convolution" (a 1x1
    convolution of zeros and ones), "mixed" ("convolution" where that saves a whole unit, else "zeros")"""
    unit: int = 1
    """widths are rounded up to a multiple of this"""
    small: int = 0
    """widths up to this stay as they are"""
    shortcuts: bool = False
    """is a shortcut that skips pixels a 1x1 convolution?"""
    channels_last: bool = False
    """are maps kept with their channels last?"""
    in_place: bool = False
    """may an operator write over its input, where nobody reads that again?"""

    def __post_init__(self) -> None:
        if self.branches not in BRANCHES:
            raise PruningError(f"branches: no way is called {self.branches!r}; {nearest(self.branches, BRANCHES)}")

    def __str__(self) -> str:
        words = [self.branches, f"unit {self.unit}" + (f" above {self.small}" if self.small else "")]
        flags = {"shortcuts": self.shortcuts, "channels last": self.channels_last, "in place": self.in_place}
        return ", ".join(words + [word for word, there in flags.items() if there])

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    def rounded(self, width: int) -> int:
        """What a width becomes in this form."""
        unit = 1 if width <= self.small else self.unit
        return -(-width // unit) * unit

    def saves_nothing(self, node: Node) -> bool:
        """Has the layer before a remap as many whole units of filters as with zeros added?"""
        before, behind = shape(node.args[0])[1], shape(node)[1]
        return -(-before // self.unit) >= -(-behind // self.unit)


class Deployable:
    """A network captured and simplified once, of which any number of forms can be made."""

    def __init__(self, model: nn.Module, example_inputs: Any) -> None:
        self.graph = capture(model, example_inputs)
        simplify(self.graph)
        self.example_inputs = example_inputs

    def form(self, form: Form) -> fx.GraphModule:
        """The network in one form."""
        with quietly():
            graph = copy.deepcopy(self.graph)
        if form.shortcuts:
            shortcuts_as_convolutions(graph)
        # A remap that selects from what a layer reads costs a copy of the map; columns of zeros cost less.
        rows = {"zeros": _always, "mixed": form.saves_nothing}.get(form.branches, never)
        merge_remaps(graph, rows, _always, sink=True)
        widen(graph, form.rounded)
        write_remaps(graph, "convolution" if form.branches == "mixed" else form.branches)
        if form.channels_last:
            _keep_channels_last(graph)
        tidy(graph)
        if form.in_place:
            write_in_place(graph)
        graph.recompile()
        return graph.eval()


def _always(node: Node) -> bool:
    return True


def _keep_channels_last(graph: fx.GraphModule) -> None:
    """Put the maps that enter, and the filters, with their channels last; the rest follows."""
    for node in list(graph.graph.nodes):
        if node.target is aten.view.default:  # which asks for plain strides
            node.target = aten.reshape.default
        if node.op != "placeholder":
            continue
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.dim() == 4 and node.users:
            readers = list(node.users)
            with graph.graph.inserting_after(node):
                last = graph.graph.call_function(
                    aten.contiguous.default, (node,), {"memory_format": torch.channels_last}
                )
            last.meta["val"] = value
            for reader in readers:
                reader.replace_input_with(node, last)
    for held in graph.parameters():
        if held.dim() == 4:
            held.data = held.data.contiguous(memory_format=torch.channels_last)
