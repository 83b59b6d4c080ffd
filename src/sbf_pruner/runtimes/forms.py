"""Equivalent forms of a network for different runtimes.

A `Form` describes how a captured network is rewritten; all forms compute the same function, and the model that is
passed in is never changed. Numbers of channels are rounded up to multiples that suit a runtime by adding zero
filters. Tensors whose channels correspond (added, multiplied, or passed through depthwise convolution or pooling)
form a group. Either all tensors of a group get the added channels or none: the layers that write the group get zero
filters, and the layers that read it get zero columns (input channels), so that no output changes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..errors import PruningError, suggestion
from .capture import (
    NORM,
    REMAP,
    Layer,
    Node,
    add_tensor,
    capture_graph,
    fake_with_channels,
    insert_after,
    is_tensor,
    layer_of,
    output_shape,
    remove_dead,
    replace_layer_weights,
    stored_tensor,
    suppress_exporter_output,
)
from .rewrite import POINTWISE, merge_remaps, shortcuts_as_convolutions, simplify, write_in_place, write_remaps

aten = torch.ops.aten
BRANCHES = ("zeros", "gather", "add", "convolution", "mixed")

# Operators that process each channel separately and return finite values for an added channel.
_BY_CHANNEL = (
    POINTWISE
    | {
        getattr(aten, name).default
        for name in (
            *("max_pool1d", "max_pool2d", "avg_pool2d", "adaptive_max_pool2d", "clone", "contiguous"),
            *("adaptive_avg_pool1d", "adaptive_avg_pool2d", "_adaptive_avg_pool2d"),
            *("upsample_nearest2d", "upsample_bilinear2d"),
        )
    }
    | {aten.upsample_nearest2d.vec, aten.upsample_bilinear2d.vec, aten.flatten.using_ints}
)
_ELEMENTWISE_BINARY = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor)


@dataclass(frozen=True)
class Form:
    """How a captured network is rewritten for a runtime."""

    branches: str = "zeros"
    """how the output of a branch with fewer filters is mapped to the residual stream: "zeros" (zero filters in its
    last layer), "gather" (index_select after padding with a zero channel), "add" (index_add), "convolution" (a 1x1
    convolution of zeros and ones), "mixed" ("zeros", or "convolution" where it saves at least `unit` filters)"""
    unit: int = 1  # numbers of channels are rounded up to a multiple of this
    small: int = 0  # numbers of channels up to this are not rounded
    shortcuts: bool = False  # write strided shortcuts (slices) as 1x1 convolutions
    channels_last: bool = False  # use the channels_last memory format
    in_place: bool = False  # use in-place operators where the input is not read again

    def __post_init__(self) -> None:
        if self.branches not in BRANCHES:
            raise PruningError(f"branches: unknown value {self.branches!r}; {suggestion(self.branches, BRANCHES)}")

    def __str__(self) -> str:
        words = [self.branches, f"unit {self.unit}" + (f" above {self.small}" if self.small else "")]
        flags = {"shortcuts": self.shortcuts, "channels last": self.channels_last, "in place": self.in_place}
        return ", ".join(words + [word for word, is_set in flags.items() if is_set])

    def rounded(self, width: int) -> int:
        """Return a number of channels rounded up as in this form."""
        unit = 1 if width <= self.small else self.unit
        return -(-width // unit) * unit

    def saves_nothing(self, node: Node) -> bool:
        """Return True if a remap's zero filters do not raise the rounded-up width of the layer before it."""
        before, behind = output_shape(node.args[0])[1], output_shape(node)[1]
        return -(-before // self.unit) >= -(-behind // self.unit)


class CapturedNetwork:
    """A network captured and simplified once, from which any number of forms can be made."""

    def __init__(self, model: nn.Module, example_inputs: Any) -> None:
        self.graph = capture_graph(model, example_inputs)
        simplify(self.graph)

    def form(self, form: Form) -> fx.GraphModule:
        """Return the network in a form, as a `GraphModule` in evaluation mode for any batch size."""
        with suppress_exporter_output():
            graph = copy.deepcopy(self.graph)
        if form.shortcuts:
            shortcuts_as_convolutions(graph)
        # Selecting input channels of a layer copies the feature map; zero columns in its weight cost less.
        rows = {"zeros": lambda node: True, "mixed": form.saves_nothing}.get(form.branches, lambda node: False)
        merge_remaps(graph, rows)
        for group in groups(graph):
            if (more := form.rounded(group.width) - group.width) > 0:
                widen(graph, group, more)
        write_remaps(graph, "convolution" if form.branches == "mixed" else form.branches)
        if form.channels_last:
            _keep_channels_last(graph)
        remove_dead(graph)
        if form.in_place:
            write_in_place(graph)
        graph.recompile()
        return graph.eval()


def _keep_channels_last(graph: fx.GraphModule) -> None:
    """Convert inputs and 4-d weights to channels_last; operators propagate the format."""
    for node in list(graph.graph.nodes):
        if node.target is aten.view.default:  # view fails on channels_last strides
            node.target = aten.reshape.default
        if node.op == "placeholder" and is_tensor(node) and node.meta["val"].dim() == 4 and node.users:
            readers = list(node.users)
            last = insert_after(
                node, aten.contiguous.default, (node,), node.meta["val"], memory_format=torch.channels_last
            )
            for reader in readers:
                reader.replace_input_with(node, last)
    for weight in graph.parameters():
        if weight.dim() == 4:
            weight.data = weight.data.contiguous(memory_format=torch.channels_last)


def make_forms(captured: CapturedNetwork, forms: Mapping[str, Form]) -> dict[str, fx.GraphModule]:
    """Return the network in each form, by the name of the form.

    A form is left out if its network equals that of an earlier form: the same code and the same tensor layouts. If
    nothing was pruned, most forms are equal.
    """
    networks: dict[str, fx.GraphModule] = {}
    seen = []
    for name, form in forms.items():
        made = captured.form(form)
        layout = made.code, [(key, t.shape, t.stride()) for key, t in made.state_dict().items()]
        if layout not in seen:
            seen.append(layout)
            networks[name] = made
    return networks


@dataclass
class Group:
    """Tensors whose channels correspond, with the layers that write and read them."""

    width: int
    nodes: list[Node] = field(default_factory=list)
    writers: list[Layer] = field(default_factory=list)
    readers: list[Layer] = field(default_factory=list)
    fixed: bool = False  # an operator depends on the exact number of channels


def groups(graph: fx.GraphModule) -> list[Group]:
    """Return the groups that can get more channels, in graph order."""
    group_of: dict[Node, Group] = {}

    def join(one: Node, other: Node) -> None:
        kept, replaced = group_of[one], group_of[other]
        kept.fixed |= replaced.fixed
        group_of.update({node: kept for node, group in group_of.items() if group is replaced})

    for node in graph.graph.nodes:
        if node.op == "get_attr":
            continue
        # A norm returns a tuple; its first element has the channels.
        if node.target is NORM or (
            is_tensor(node) and len(output_shape(node)) >= 2 and isinstance(output_shape(node)[1], int)
        ):
            group_of[node] = Group(output_shape(node)[1])
        inputs = [x for x in node.all_input_nodes if x in group_of]
        alike = _same_channels(graph, node, inputs) if node in group_of else None
        for x in alike or ():
            join(node, x)
        if alike is None:
            for tensor in (*inputs, *([node] if node in group_of else ())):
                group_of[tensor].fixed = True
    for node, group in group_of.items():
        group.nodes.append(node)
        layer = layer_of(graph, node)
        if layer is not None and layer.groups == 1 and layer.x in group_of:
            group.writers.append(layer)
            group_of[layer.x].readers.append(layer)
    found = {id(group): group for group in group_of.values()}
    return [group for group in found.values() if not group.fixed and group.writers]


def _same_channels(graph: fx.GraphModule, node: Node, inputs: list[Node]) -> list[Node] | None:
    """Return the inputs whose channels correspond to those of the output: [] for a layer without channel groups.

    Return None for an operator whose effect on channels is not known; its tensors cannot get more channels.
    """
    layer = layer_of(graph, node)
    if layer is not None and layer.dim == 1 and layer.x in inputs:
        return [] if layer.groups == 1 else [layer.x] if layer.depthwise else None
    if node.target is REMAP:
        return [] if node.args[2] == 1 and inputs else None
    if node.target in _ELEMENTWISE_BINARY:
        return inputs if inputs and _operands_agree(graph, node, inputs) else None
    return inputs if len(inputs) == 1 and _by_channel(graph, node, inputs[0]) else None


def _by_channel(graph: fx.GraphModule, node: Node, x: Node) -> bool:
    """Return True for an operator that processes each channel of its input separately."""
    sizes = output_shape(x)
    if node.target is aten.flatten.using_ints:
        return node.args[1:] in ((1,), (1, -1)) and sizes[2:] == [1] * (len(sizes) - 2)
    if node.target is aten.mean.dim:
        return not {0, 1} & {dim % len(sizes) for dim in node.args[1]}
    if node.target is NORM:
        stored = [a for a in node.args[1:5] if a is not None]
        return all(stored_tensor(graph, a) is not None and len(a.users) == 1 for a in stored)
    if x.target is NORM:
        return node.args[1:] == (0,)
    return node.target in _BY_CHANNEL


def _operands_agree(graph: fx.GraphModule, node: Node, inputs: list[Node]) -> bool:
    """Return True if each operand has the output's channels, is a stored scalar, or stores a number per channel."""
    sizes = output_shape(node)
    if any(output_shape(x)[1] != sizes[1] or len(output_shape(x)) != len(sizes) for x in inputs):
        return False
    for other in (a for a in node.args if isinstance(a, fx.Node) and a not in inputs):
        stored = stored_tensor(graph, other)
        if stored is None or (stored.numel() != 1 and not _is_per_channel(graph, other, node)):
            return False
    return True


def _is_per_channel(graph: fx.GraphModule, node: Node, like: Node) -> bool:
    """Return True for a stored tensor with one number per channel of `like`, read by a single operator."""
    stored, sizes = stored_tensor(graph, node), output_shape(like)
    if stored is None or len(node.users) > 1 or stored.dim() != len(sizes):
        return False
    return bool(1 < stored.numel() == stored.shape[1] == sizes[1])


def widen(graph: fx.GraphModule, group: Group, more: int) -> None:
    """Add channels to a group, as zero filters of its writers and zero columns of its readers."""
    for writer in group.writers:
        _pad_rows(graph, writer.node, more)
    for reader in group.readers:
        layer = layer_of(graph, reader.node)  # Read again: it may have got zero filters above.
        assert layer is not None
        replace_layer_weights(graph, layer, _pad_dim(layer.weight, 1, more), layer.bias)
    for node in group.nodes:
        if node.target is NORM:
            for index, filler in ((1, 0.0), (2, 0.0), (3, 0.0), (4, 1.0)):
                _pad_argument(graph, node, index, 0, more, filler)
        elif node.target in _ELEMENTWISE_BINARY:
            for index, given in enumerate(node.args):
                if isinstance(given, fx.Node) and _is_per_channel(graph, given, node):
                    _pad_argument(graph, node, index, 1, more)
        elif node.target is REMAP:
            node.args = (node.args[0], [*node.args[1], *[-1] * more], 1)
        elif (depthwise := layer_of(graph, node)) is not None and depthwise.depthwise:
            _pad_rows(graph, node, more, groups=group.width + more)
        if isinstance(node.meta.get("val"), Tensor):
            node.meta["val"] = fake_with_channels(node.meta["val"], group.width + more)


def _pad_rows(graph: fx.GraphModule, node: Node, more: int, groups: int = 0) -> None:
    layer = layer_of(graph, node)
    assert layer is not None
    bias = None if layer.bias is None else _pad_dim(layer.bias, 0, more)
    replace_layer_weights(graph, layer, _pad_dim(layer.weight, 0, more), bias, groups)


def _pad_argument(graph: fx.GraphModule, node: Node, index: int, dim: int, more: int, filler: float = 0.0) -> None:
    """Replace a stored tensor among the arguments of a node by one with `more` entries `filler` along `dim`."""
    given = node.args[index]
    stored = stored_tensor(graph, given)
    if stored is not None:
        longer = add_tensor(graph, node, str(given.target), _pad_dim(stored, dim, more, filler))
        node.update_arg(index, longer)


def _pad_dim(tensor: Tensor, dim: int, more: int, filler: float = 0.0) -> Tensor:
    sizes = list(tensor.shape)
    sizes[dim] = more
    return torch.cat([tensor, tensor.new_full(sizes, filler)], dim)
