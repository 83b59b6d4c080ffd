"""A trained network, and how methods look at it: its filters, what its layers give, what the loss thinks of that.

A model, its channel graph and labelled images enter; each method reads what it judges filters by.  What holds: the
model is in evaluation mode and comes out as it went in; what a layer "gives" is taken where its gate would stand,
behind the norm, before an addition makes it one of many.
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
from torch.utils._pytree import tree_leaves

from ..budget.aim import Aim
from ..errors import PruningError
from ..graph.channels import ChannelGraph
from ..graph.masks import Mask
from ..inputs import call, map_tensors

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
