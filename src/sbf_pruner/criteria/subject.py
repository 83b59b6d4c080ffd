"""What criteria read from a trained network: weights, outputs and inputs of layers, and derivatives of the loss.

The model is in evaluation mode and stays unchanged, except for `Subject.empty`. The output of a layer is taken
where its gate would be: after the norm, and before an addition merges it with others. `read_filters` finds the
filter that produces each input channel of a later layer; a channel that depends on several filters of one layer has
none. `sample_window` samples what a convolution or linear layer reads for one output position, with shape
`(samples, groups, channels, taps)`. For every kind of layer, the output is a sum over channels and taps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.utils._pytree import tree_leaves

from ..budget.controller import Selector
from ..errors import PruningError
from ..graph.channel_graph import ChannelGraph
from ..graph.nodes import Mask, along, shrink
from ..graph.operators.layers import LayerNode
from ..utils.user_model import call, map_tensors

Batch = tuple[Any, Tensor]  # images, or whatever the network is called with, and labels
Scores = dict[str, NDArray[np.floating]]
# Largest number of elements computed from images at a time, as large feature maps would fill the memory
MAX_ELEMENTS = 2**25
Observer = Callable[[str, Tensor], Tensor | None]  # called with the name of a layer, and its output or input


@dataclass(frozen=True)
class Subject:
    """A network to score, with its channel graph, images and target for the criteria."""

    model: nn.Module
    graph: ChannelGraph
    batches: Sequence[Batch]
    """images and their labels, on the device of the model"""
    seed: int = 0
    selector: Selector | None = None
    """the target, for criteria that need it"""

    def rows(self, name: str) -> Tensor:
        """Return the effective weights of a layer in float64, of shape `(filters, weights per filter)`."""
        weight = self._by_group(name, self._used(name))
        return weight.reshape(self.graph.layers[name].filters, -1).double()

    def check_stored(self) -> None:
        """Raise a PruningError if the weight of a layer is no parameter itself.

        Zeroing its filters may be impossible: `weight_norm` would divide by zero.
        """
        for name, layer in self.graph.layers.items():
            if not layer.nodes[0].stored:
                raise PruningError(
                    f"the weight of {name} is not a parameter itself (weight_norm?), so its filters cannot be "
                    "zeroed"
                )

    @torch.no_grad()
    def empty(self, keep: Mapping[str, Mask]) -> None:
        """Zero the weights of all filters that are not in `keep`, in place; they can be trained again."""
        self.check_stored()
        for name, mask in keep.items():
            weight = self._by_group(name, self._stored(name))
            kept = torch.from_numpy(mask.copy()).to(weight).view(*weight.shape[:2])
            weight *= kept.view(*kept.shape, *[1] * (weight.dim() - 2))

    def _stored(self, name: str) -> Tensor:
        tensors = dict(self.model.named_buffers()) | dict(self.model.named_parameters())
        return tensors[self.graph.layers[name].weight].detach()

    def _used(self, name: str) -> Tensor:
        """Return the weight that a module computes (weight_norm), or the stored one if it computes none."""
        stored, module = self._stored(name), dict(self.model.named_modules()).get(name)
        if module is None or self.graph.layers[name].nodes[0].stored:
            return stored
        made = [hook for hook in module._forward_pre_hooks.values() if hasattr(hook, "compute_weight")]
        used = made[0].compute_weight(module) if made else getattr(module, "weight", None)
        return used.detach() if isinstance(used, Tensor) and used.shape == stored.shape else stored

    def _by_group(self, name: str, weight: Tensor) -> Tensor:
        """Return a view of a layer's weights of shape `(groups, filters per group, *dimensions of one filter)`."""
        layer = self.graph.layers[name]
        if layer.nodes[0].transposed:  # Stored as `(input channels, filters per group, *kernel)`.
            return weight.unflatten(0, (layer.groups, -1)).transpose(1, 2)
        return weight.movedim(layer.nodes[0].out_axis, 0).unflatten(0, (layer.groups, -1))

    def watched(self, see: Observer) -> ExitStack:
        """Register hooks that call `see` with the output of every layer; the returned context removes them.

        A tensor that `see` returns replaces the output.
        """
        modules, hooks = dict(self.model.named_modules()), ExitStack()
        for name, layer in self.graph.layers.items():

            def show(module: nn.Module, args: Any, output: Tensor, name: str = name) -> Tensor | None:
                return see(name, output)

            hooks.enter_context(modules[layer.site.module].register_forward_hook(show))
        return hooks

    def reading(self, names: Iterable[str], see: Observer) -> ExitStack:
        """Register hooks that call `see` with the input of the named modules; the returned context removes them."""
        modules, hooks = dict(self.model.named_modules()), ExitStack()
        for name in modules.keys() & names:

            def show(module: nn.Module, args: Any, kwargs: dict[str, Any], name: str = name) -> None:
                see(name, args[0] if args else kwargs["input"])

            hooks.enter_context(modules[name].register_forward_pre_hook(show, with_kwargs=True))
        return hooks

    def filters_second(self, name: str, output: Tensor) -> Tensor:
        """Return the output of a layer with its filters moved to dimension 1, `(samples, filters, ...)`."""
        return output.movedim(self.graph.layers[name].site.dim, 1)

    def per_filter(self, name: str, output: Tensor) -> Tensor:
        """Return the output of a layer summed over all positions, of shape `(samples, filters)`."""
        output = self.filters_second(name, output)
        return output.flatten(2).sum(2) if output.dim() > 2 else output

    @torch.no_grad()
    def look(self) -> None:
        """Run the images through the model without gradients, for hooks to read."""
        for images, _ in self.batches:
            call(self.model, images)

    def sensitivities(self) -> dict[str, Tensor]:
        """Return, per layer, derivatives of each image's loss by a factor on each filter: `(images, filters)`.

        To the first order of a Taylor expansion, the negative is the change of the loss if the filter is removed.
        """
        found: dict[str, list[Tensor]] = {name: [] for name in self.graph.layers}

        def see(name: str, output: Tensor) -> None:
            # Copied, because a later operator may change the output in place.
            value = output.detach().clone()
            if output.requires_grad:  # Otherwise it does not depend on the images.
                output.register_hook(lambda slope: found[name].append(self.per_filter(name, value * slope)))

        for images, labels in self.batches:
            counts = {name: len(calls) for name, calls in found.items()}
            with self.watched(see), torch.enable_grad():
                # The gradient of the images passes through all layers, even if their parameters are frozen, and
                # leaves no `.grad`.
                images = map_tensors(images, lambda x: x.detach().requires_grad_() if x.is_floating_point() else x)
                loss = F.cross_entropy(logits(self.model, images), labels, reduction="sum")
                sources = [x for x in tree_leaves(images) if isinstance(x, Tensor) and x.requires_grad]
                torch.autograd.grad(loss, sources, allow_unused=True)
            for name, count in counts.items():  # Sum over the calls of a layer that is called several times.
                if calls := found[name][count:]:
                    found[name][count:] = [torch.stack(calls).sum(0)]
        return {name: torch.cat(parts).double() for name, parts in found.items() if parts}


def logits(model: nn.Module, images: Any) -> Tensor:
    """Return the outputs of a network for images; raise a PruningError if they are not a single tensor."""
    outputs = call(model, images)
    if not isinstance(outputs, Tensor):
        raise PruningError("the network gives several outputs, and the loss needs logits alone")
    return outputs


def chunks(inputs: Tensor, each: int) -> Iterator[Tensor]:
    """Split samples into as few parts as `MAX_ELEMENTS` allows, if each sample needs `each` elements.

    >>> [len(part) for part in chunks(torch.zeros(5), MAX_ELEMENTS // 2)]
    [2, 2, 1]
    """
    yield from inputs.split(max(MAX_ELEMENTS // each, 1))


NO_FILTER = -1


def readers(graph: ChannelGraph) -> list[LayerNode]:
    """Return the nodes of layers that sum over input channels, which depthwise layers do not."""
    return [node for node in graph.nodes if isinstance(node, LayerNode) and not node.depthwise]


def read_filters(graph: ChannelGraph, name: str) -> Iterator[tuple[LayerNode, NDArray[np.int64]]]:
    """Yield every reader of a layer, with the index of the source filter of each input channel, or `NO_FILTER`.

    The indices are found bit by bit: liveness is propagated from the filters whose index has this bit set, then
    from the others. If only one of the two sets reaches a channel, this determines the bit.

    >>> import torch
    >>> from torch import nn
    >>> from ..graph.build import trace
    >>> net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.ChannelShuffle(2), nn.Conv2d(4, 2, 1))
    >>> [numbers for _, numbers in read_filters(trace(net, torch.zeros(1, 3, 4, 4)), "0")]
    [array([0, 2, 1, 3])]
    """
    filters = np.arange(graph.layers[name].filters)
    nodes = readers(graph)

    def reached(chosen: Mask) -> list[Mask]:
        """Return the input channels of every reader that these filters reach."""
        alive = graph.carried({name: chosen}).alive
        return [shrink(alive[node.x], along(1, node.x.shape)).reshape(-1) for node in nodes]

    digits = range(max(int(filters[-1]).bit_length(), 1))
    by_digit = [[reached((filters >> digit & 1) == value) for value in (0, 1)] for digit in digits]
    for place, node in enumerate(nodes):
        numbers = np.zeros(node.x.shape[1], np.int64)
        known = np.ones(node.x.shape[1], bool)
        for digit, (zero, one) in enumerate(by_digit):
            known &= zero[place] != one[place]
            numbers |= one[place].astype(np.int64) << digit
        if known.any():
            yield node, np.where(known, numbers, NO_FILTER)


def read_values(
    graph: ChannelGraph, values: Mapping[str, NDArray[np.floating]]
) -> dict[str, np.ma.MaskedArray[Any, np.dtype[np.floating]]]:
    """Map values of the input channels of layers to the filters that produce them.

    Returns, for each layer, a masked array of shape `(1 + readers, filters)`, whose first row is masked. If several
    channels of a reader come from one filter, the largest value counts; a filter that it does not read is masked.
    """
    found = {}
    for name, layer in graph.layers.items():
        rows = [np.full(layer.filters, -np.inf)]  # Masked row, so that layers without readers have one.
        for node, numbers in read_filters(graph, name):
            if node.layer in values:
                mine = numbers != NO_FILTER
                rows.append(np.full(layer.filters, -np.inf))
                with np.errstate(invalid="ignore"):  # The caller reports values that are not finite.
                    np.maximum.at(rows[-1], numbers[mine], values[node.layer][mine])
        found[name] = np.ma.masked_equal(np.stack(rows), -np.inf)
    return found


ConvOrLinear = _ConvNd | nn.Linear  # Every output is a weighted sum over inputs.


def conv_and_linear(model: nn.Module) -> dict[str, ConvOrLinear]:
    """Return the convolutions and linear layers of a model by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, ConvOrLinear)}


def with_batch_dim(module: ConvOrLinear, inputs: Tensor) -> Tensor:
    """Return the detached input of a layer, with a batch dimension added if it has none."""
    least = 2 if isinstance(module, nn.Linear) else 2 + len(module.kernel_size)
    return inputs.detach().unsqueeze(0) if inputs.dim() < least else inputs.detach()


def positions_per_sample(module: ConvOrLinear, inputs: Tensor) -> int:
    """Return the number of positions per sample in the input of a layer."""
    return inputs[0].numel() // inputs.shape[-1 if isinstance(module, nn.Linear) else 1]


def sample_window(module: ConvOrLinear, inputs: Tensor, random: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Sample what a layer reads for one random output position, and the weights applied to it.

    The shapes are `(samples, groups, channels, taps)` and `(groups, outputs, channels, taps)`.
    """
    if isinstance(module, nn.Linear):
        if inputs.dim() > 2:
            inputs = inputs.flatten(1, -2)[:, random.integers(positions_per_sample(module, inputs))]
        return inputs[:, None, :, None], module.weight[None, :, :, None]
    groups = module.groups
    if isinstance(module, _ConvTransposeNd):  # An input position adds to one output position per kernel tap.
        window = [slice(at, at + 1) for at in (int(random.integers(size)) for size in inputs.shape[2:])]
        weight = module.weight.flatten(1).unflatten(0, (groups, -1)).mT.unsqueeze(3)
    else:
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        inputs = F.pad(inputs, module._reversed_padding_repeated_twice, mode=mode)
        window = []
        shape = zip(inputs.shape[2:], module.kernel_size, module.stride, module.dilation, strict=True)
        for size, taps, stride, dilation in shape:
            extent = (taps - 1) * dilation + 1
            first = stride * int(random.integers((size - extent) // stride + 1))
            window.append(slice(first, first + extent, dilation))
        weight = module.weight.flatten(2).unflatten(0, (groups, -1))
    return inputs[(slice(None), slice(None), *window)].flatten(2).unflatten(1, (groups, -1)), weight
