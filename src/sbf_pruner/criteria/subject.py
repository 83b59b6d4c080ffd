"""A trained network, and how methods look at it: its filters, what its layers give, what the loss thinks of that.

A model, its channel graph and labelled images enter; each method reads what it judges filters by.  What holds: the
model is in evaluation mode and comes out as it went in; what a layer "gives" is taken where its gate would stand,
behind the norm, before an addition makes it one of many.

Whose filter is it that a later layer reads?

A channel graph enters; for every convolution and linear layer the filters of other layers that its input channels
are leave, and what is said of channels is told of them.  A channel that is made of several filters of one layer
counts as that of none.

What a convolution or linear layer reads for one position: windows of its inputs, and the weights they meet.

A module and what it reads enter; samples, groups, channels and taps leave, and the same of its weights, so that the
output is the sum over channels and taps of their products, whatever the kind of layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.utils._pytree import tree_leaves

from ..budget.controller import Aim
from ..errors import PruningError
from ..graph.channel_graph import ChannelGraph
from ..graph.layer_nodes import Contract
from ..graph.nodes import Mask, along, shrink
from ..utils.user_model import call, map_tensors

Batch = tuple[Any, Tensor]  # images, or all that the network is called with, and labels
Scores = dict[str, NDArray[np.floating]]
AT_ONCE = 2**25  # numbers that are made of images at a time: large maps would fill the memory
See = Callable[[str, Tensor], Tensor | None]  # a layer, and what it gives or reads


@dataclass(frozen=True)
class Subject:
    """What a method may look at."""

    model: nn.Module
    graph: ChannelGraph
    batches: Sequence[Batch]
    """the images it may look at and their labels, where the model is"""
    seed: int = 0
    aim: Aim | None = None
    """what is to be left, for those who have to know"""

    def rows(self, name: str) -> Tensor:
        """The weights of a layer as it uses them, in double precision, one row for each filter."""
        weight = self._by_group(name, self._used(name))
        return weight.reshape(self.graph.layers[name].filters, -1).double()

    def check_stored(self) -> None:
        """Raise a PruningError where a weight is no parameter itself: without one, weight_norm divides by zero."""
        for name, layer in self.graph.layers.items():
            if not layer.nodes[0].stored:
                raise PruningError(
                    f"the weight of {name} is computed from others, so its filters cannot be emptied"
                )

    @torch.no_grad()
    def empty(self, keep: Mapping[str, Mask]) -> None:
        """Set the weights of all filters but these to zero, where they are; they may grow again."""
        self.check_stored()
        for name, mask in keep.items():
            weight = self._by_group(name, self._stored(name))
            kept = torch.from_numpy(mask.copy()).to(weight).view(*weight.shape[:2])
            weight *= kept.view(*kept.shape, *[1] * (weight.dim() - 2))

    def _stored(self, name: str) -> Tensor:
        held = dict(self.model.named_buffers()) | dict(self.model.named_parameters())
        return held[self.graph.layers[name].weight].detach()

    def _used(self, name: str) -> Tensor:
        """The weight that a layer's module shows, where it makes one of what is stored (weight_norm); else that."""
        stored, module = self._stored(name), dict(self.model.named_modules()).get(name)
        if module is None or self.graph.layers[name].nodes[0].stored:
            return stored
        made = [hook for hook in module._forward_pre_hooks.values() if hasattr(hook, "compute_weight")]
        used = made[0].compute_weight(module) if made else getattr(module, "weight", None)
        return used.detach() if isinstance(used, Tensor) and used.shape == stored.shape else stored

    def _by_group(self, name: str, weight: Tensor) -> Tensor:
        """The weights of a layer, seen as groups, filters of the group, and the weights of each."""
        layer = self.graph.layers[name]
        if layer.nodes[0].transposed:  # stored as inputs, then the filters of one group
            return weight.unflatten(0, (layer.groups, -1)).transpose(1, 2)
        return weight.movedim(layer.nodes[0].out_axis, 0).unflatten(0, (layer.groups, -1))

    @contextmanager
    def watched(self, see: See) -> Iterator[None]:
        """While it is open, what every layer gives is shown, call by call; what is returned takes its place."""
        modules = dict(self.model.named_modules())
        with ExitStack() as hooks:
            for name, layer in self.graph.layers.items():

                def show(module: nn.Module, args: Any, given: Tensor, name: str = name) -> Tensor | None:
                    return see(name, given)

                hooks.enter_context(modules[layer.site.module].register_forward_hook(show))
            yield

    @contextmanager
    def reading(self, names: Sequence[str], see: See) -> Iterator[None]:
        """While it is open, what these layers read is shown, call by call, where they are modules."""
        modules = dict(self.model.named_modules())
        with ExitStack() as hooks:
            for name in dict.fromkeys(names):

                def show(module: nn.Module, args: Any, named: dict[str, Any], name: str = name) -> None:
                    see(name, args[0] if args else named["input"])

                if name in modules:
                    hooks.enter_context(modules[name].register_forward_pre_hook(show, with_kwargs=True))
            yield

    def upright(self, name: str, given: Tensor) -> Tensor:
        """What a layer gives with its filters in the second dimension, behind the samples."""
        return given.movedim(self.graph.layers[name].site.dim, 1)

    def per_filter(self, name: str, given: Tensor) -> Tensor:
        """The sum over all positions, samples by filters."""
        upright = self.upright(name, given)
        return upright.flatten(2).sum(2) if upright.dim() > 2 else upright

    @torch.no_grad()
    def look(self) -> None:
        """Pass the images through the model, for hooks to see."""
        for images, _ in self.batches:
            call(self.model, images)

    def sensitivities(self) -> dict[str, Tensor]:
        """The derivative of each image's loss by a factor before each filter: images by filters, for every layer.

        Taylor's expansion says of it, with the sign turned, how the loss would change if the filter went.
        """
        found: dict[str, list[Tensor]] = {name: [] for name in self.graph.layers}

        def see(name: str, given: Tensor) -> None:
            # What comes behind may change it in place.
            value = given.detach().clone()
            if given.requires_grad:  # else it does not depend on the images
                given.register_hook(lambda slope: found[name].append(self.per_filter(name, value * slope)))

        for images, labels in self.batches:
            calls = {name: len(held) for name, held in found.items()}
            with self.watched(see), torch.enable_grad():
                # Whatever is frozen: a gradient of the images passes through all of it, and none stays behind.
                images = map_tensors(images, _followed)
                loss = F.cross_entropy(logits(self.model, images), labels, reduction="sum")
                torch.autograd.grad(loss, [x for x in tree_leaves(images) if _slopes(x)], allow_unused=True)
            for name, first in calls.items():  # a layer that is called twice has two parts in the loss
                found[name][first:] = [torch.stack(found[name][first:]).sum(0)] if found[name][first:] else []
        return {name: torch.cat(held).double() for name, held in found.items() if held}


def logits(model: nn.Module, images: Any) -> Tensor:
    """What a network gives for images; a PruningError where that is more than one tensor."""
    outputs = call(model, images)
    if not isinstance(outputs, Tensor):
        raise PruningError("the network gives several outputs, and the loss needs logits alone")
    return outputs


def pieces(inputs: Tensor, each: int) -> Iterator[Tensor]:
    """Samples in as few parts as may be, where `each` makes so many numbers.

    >>> [len(part) for part in pieces(torch.zeros(5), AT_ONCE // 2)]
    [2, 2, 1]
    """
    yield from inputs.split(max(AT_ONCE // each, 1))


def _followed(inputs: Tensor) -> Tensor:
    """The same, so that a gradient of it can be taken; of whole numbers there is none."""
    return inputs.detach().requires_grad_() if inputs.is_floating_point() else inputs


def _slopes(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


NOBODY = -1


def readers(graph: ChannelGraph) -> list[Contract]:
    """The layers that add channels up; a depthwise one passes each of them on by itself."""
    return [node for node in graph.nodes if isinstance(node, Contract) and not node.depthwise]


def read_filters(graph: ChannelGraph, name: str) -> Iterator[tuple[Contract, NDArray[np.int64]]]:
    """Every reader of a layer, and for each of its input channels the number of the filter that it is.

    Filters have numbers, and numbers have digits: those whose digit is 1 are sent through the graph, then those
    whose digit is 0, and where only one of both arrives, that is the digit of what arrives.

    >>> import torch
    >>> from torch import nn
    >>> from ..graph.build import trace
    >>> net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.ChannelShuffle(2), nn.Conv2d(4, 2, 1))
    >>> [numbers for _, numbers in read_filters(trace(net, torch.zeros(1, 3, 4, 4)), "0")]
    [array([0, 2, 1, 3])]
    """
    filters = np.arange(graph.layers[name].filters)
    digits = range(max(int(filters[-1]).bit_length(), 1))
    sent = [[_arrived(graph, name, (filters >> digit & 1) == value) for value in (0, 1)] for digit in digits]
    for place, node in enumerate(readers(graph)):
        numbers = np.zeros(node.x.shape[1], np.int64)
        told = np.ones(node.x.shape[1], bool)
        for digit, (zero, one) in enumerate(sent):
            told &= zero[place] != one[place]
            numbers |= one[place].astype(np.int64) << digit
        if told.any():
            yield node, np.where(told, numbers, NOBODY)


def read_values(
    graph: ChannelGraph, values: Mapping[str, NDArray[np.floating]]
) -> dict[str, np.ma.MaskedArray[Any, np.dtype[np.floating]]]:
    """What each reader's input channels are worth, told of the filters that they are: readers by filters.

    A filter that a reader gets several times counts as the best of them, and one that it does not get is masked.
    """
    found = {}
    for name, layer in graph.layers.items():
        rows = [np.full(layer.filters, -np.inf)]  # also where nobody reads it
        for node, numbers in read_filters(graph, name):
            if node.layer in values:
                mine = numbers != NOBODY
                rows.append(np.full(layer.filters, -np.inf))
                with np.errstate(invalid="ignore"):  # what is not finite is told by whoever asked
                    np.maximum.at(rows[-1], numbers[mine], values[node.layer][mine])
        found[name] = np.ma.masked_equal(np.stack(rows), -np.inf)
    return found


def _arrived(graph: ChannelGraph, name: str, chosen: Mask) -> list[Mask]:
    """Which input channels of every reader some filters of a layer get to."""
    flow = graph.carried({name: chosen})
    return [shrink(flow.alive[node.x], along(1, node.x.shape)).reshape(-1) for node in readers(graph)]


Summing = _ConvNd | nn.Linear  # makes every output of a sum over its inputs


def summing(model: nn.Module) -> dict[str, Summing]:
    """The modules that can be asked, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Summing)}


def batched(module: Summing, inputs: Tensor) -> Tensor:
    """What a layer reads, behind a dimension of samples also where there was only one without it."""
    least = 2 if isinstance(module, nn.Linear) else 2 + len(module.kernel_size)
    return inputs.detach().unsqueeze(0) if inputs.dim() < least else inputs.detach()


def spots(module: Summing, inputs: Tensor) -> int:
    """How many positions each sample has in what a layer reads."""
    return inputs[0].numel() // inputs.shape[-1 if isinstance(module, nn.Linear) else 1]


def met(module: Summing, inputs: Tensor, random: np.random.Generator) -> tuple[Tensor, Tensor]:
    """What a layer reads for one output position, chosen at random, and the weights it meets there."""
    if isinstance(module, nn.Linear):
        inputs = inputs if inputs.dim() == 2 else inputs.flatten(1, -2)[:, random.integers(spots(module, inputs))]
        return inputs[:, None, :, None], module.weight[None, :, :, None]
    groups = module.groups
    if isinstance(module, _ConvTransposeNd):  # every input is spread: each tap of the kernel is an output
        window = [slice(at, at + 1) for at in (int(random.integers(size)) for size in inputs.shape[2:])]
        weight = module.weight.flatten(1).unflatten(0, (groups, -1)).mT.unsqueeze(3)
    else:
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        inputs = F.pad(inputs, module._reversed_padding_repeated_twice, mode=mode)
        window = []
        shape = zip(inputs.shape[2:], module.kernel_size, module.stride, module.dilation, strict=True)
        for size, taps, stride, apart in shape:
            reach = (taps - 1) * apart + 1
            first = stride * int(random.integers((size - reach) // stride + 1))
            window.append(slice(first, first + reach, apart))
        weight = module.weight.flatten(2).unflatten(0, (groups, -1))
    return inputs[(slice(None), slice(None), *window)].flatten(2).unflatten(1, (groups, -1)), weight
