"""Equivalent forms of a network for different runtimes, and the choice of the fastest by timing.

A `Form` says how a captured network is rewritten; all forms compute the same function. `choose` times the
candidates on this machine in the target runtime. Forms are timed in turns, slow ones drop out, and the minimum time
decides, because other load on the machine can only add time. A network that cannot be captured is kept as it is,
with the reason. The model that is passed in is never changed.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..errors import PruningError, suggestion
from .capture import Node, capture_graph, output_shape, remove_dead, suppress_exporter_output
from .rewrite import merge_remaps, no_remap, shortcuts_as_convolutions, simplify, write_in_place, write_remaps
from .widths import widen

aten = torch.ops.aten
BRANCHES = ("zeros", "gather", "add", "convolution", "mixed")


@dataclass(frozen=True)
class Form:
    """How a captured network is rewritten for a runtime."""

    branches: str = "zeros"
    """how the output of a branch with fewer filters is mapped to the residual stream: "zeros" (zero filters in its
    last layer), "gather" (index_select after padding with a zero channel), "add" (index_add), "convolution" (a 1x1
    convolution of zeros and ones), "mixed" ("convolution" where that saves a whole unit, else "zeros")"""
    unit: int = 1
    """numbers of channels are rounded up to a multiple of this"""
    small: int = 0
    """numbers of channels up to this are not rounded"""
    shortcuts: bool = False
    """write strided shortcuts (slices) as 1x1 convolutions"""
    channels_last: bool = False
    """use the channels_last memory format"""
    in_place: bool = False
    """use in-place operators where the input is not read again"""

    def __post_init__(self) -> None:
        if self.branches not in BRANCHES:
            raise PruningError(f"branches: unknown value {self.branches!r}; {suggestion(self.branches, BRANCHES)}")

    def __str__(self) -> str:
        words = [self.branches, f"unit {self.unit}" + (f" above {self.small}" if self.small else "")]
        flags = {"shortcuts": self.shortcuts, "channels last": self.channels_last, "in place": self.in_place}
        return ", ".join(words + [word for word, there in flags.items() if there])

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return asdict(self)

    def rounded(self, width: int) -> int:
        """Return a number of channels rounded up as in this form."""
        unit = 1 if width <= self.small else self.unit
        return -(-width // unit) * unit

    def saves_nothing(self, node: Node) -> bool:
        """Return True if the layer before a remap needs as many units without zero filters as with them."""
        before, behind = output_shape(node.args[0])[1], output_shape(node)[1]
        return -(-before // self.unit) >= -(-behind // self.unit)


class CapturedNetwork:
    """A network captured and simplified once, from which any number of forms can be made."""

    def __init__(self, model: nn.Module, example_inputs: Any) -> None:
        self.graph = capture_graph(model, example_inputs)
        simplify(self.graph)
        self.example_inputs = example_inputs

    def form(self, form: Form) -> fx.GraphModule:
        """Return the network in a form, as a `GraphModule` in evaluation mode for any batch size."""
        with suppress_exporter_output():
            graph = copy.deepcopy(self.graph)
        if form.shortcuts:
            shortcuts_as_convolutions(graph)
        # Selecting input channels of a layer copies the feature map; zero columns in its weight cost less.
        rows = {"zeros": _always, "mixed": form.saves_nothing}.get(form.branches, no_remap)
        merge_remaps(graph, rows, _always, sink=True)
        widen(graph, form.rounded)
        write_remaps(graph, "convolution" if form.branches == "mixed" else form.branches)
        if form.channels_last:
            _keep_channels_last(graph)
        remove_dead(graph)
        if form.in_place:
            write_in_place(graph)
        graph.recompile()
        return graph.eval()


def _always(node: Node) -> bool:
    return True


def _keep_channels_last(graph: fx.GraphModule) -> None:
    """Convert inputs and 4-d weights to channels_last; operators propagate the format."""
    for node in list(graph.graph.nodes):
        if node.target is aten.view.default:  # view fails on channels_last strides
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


def make_forms(deployable: CapturedNetwork, forms: Mapping[str, Form]) -> dict[str, fx.GraphModule]:
    """Return the network in each of the forms, without duplicates of earlier ones."""
    networks: dict[str, fx.GraphModule] = {}
    for name, form in forms.items():
        made = deployable.form(form)
        if not any(same_network(made, other) for other in networks.values()):
            networks[name] = made
    return networks


def same_network(one: fx.GraphModule, other: fx.GraphModule) -> bool:
    """Return True if two forms have equal code and tensor layouts, as most do where nothing was pruned."""
    shapes = [[(name, t.shape, t.stride()) for name, t in n.state_dict().items()] for n in (one, other)]
    return one.code == other.code and shapes[0] == shapes[1]
