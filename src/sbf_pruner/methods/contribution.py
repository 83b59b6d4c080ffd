"""PFP: the largest part that a filter has in anything the next layers make of it (Liebenwein et al., 2020).

A `Subject` enters; a score for each filter leaves, a part between 0 and 1.  What a channel adds to an output of the
layer that reads it is compared with what all channels add, in absolute values; the largest part over all outputs
and a small sample of images, and of positions in them, counts.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from .origins import NOBODY, read_filters
from .subject import Scores, Subject, pieces

_POSITIONS = 8  # in the maps of each batch


def largest_part(subject: Subject) -> Scores:
    """The largest relative contribution of a filter.  One that nobody is known to read stays: its score is 1."""
    parts = _parts(subject)
    found: Scores = {}
    for name, layer in subject.graph.layers.items():
        largest = np.full(layer.filters, -np.inf)
        for node, numbers in read_filters(subject.graph, name):
            if node.layer in parts:
                mine = numbers != NOBODY
                with np.errstate(invalid="ignore"):  # what is not finite is told by whoever asked
                    np.maximum.at(largest, numbers[mine], parts[node.layer][mine])
        found[name] = np.where(np.isinf(largest), 1.0, largest)
    return found


def _parts(subject: Subject) -> dict[str, NDArray[np.floating]]:
    """Of every layer, the largest part of each input channel in its outputs."""
    random = np.random.default_rng(subject.seed)
    found: dict[str, Tensor] = {}

    asked = {name: m for name, m in subject.model.named_modules() if isinstance(m, _ConvNd | nn.Linear)}

    def see(name: str, inputs: Tensor) -> None:
        inputs = _batched(asked[name], inputs)
        for _ in range(_POSITIONS):
            part = part_of_each(*_met(asked[name], inputs, random))
            found[name] = torch.maximum(found[name], part) if name in found else part

    with subject.reading(list(asked), see):
        subject.look()
    return {name: part.cpu().numpy() for name, part in found.items()}


def part_of_each(inputs: Tensor, weight: Tensor) -> Tensor:
    """The largest part of each input channel in any output.

    Inputs are samples, groups, channels and what a filter meets of each; weights are groups, outputs, channels and
    the same.

    >>> part_of_each(torch.tensor([[[[1.0], [-3.0]]]]), torch.tensor([[[[1.0], [1.0]], [[6.0], [2.0]]]]))
    tensor([0.5000, 0.7500])
    """
    tiny = torch.finfo(inputs.dtype).tiny
    found = []
    for part in pieces(inputs, weight[..., 0].numel()):
        added = torch.einsum("ngck,gock->ngoc", part, weight).abs()
        found.append((added / added.sum(3, keepdim=True).clamp_min(tiny)).amax((0, 2)).flatten())
    return torch.stack(found).amax(0)


def _batched(module: nn.Module, inputs: Tensor) -> Tensor:
    """What a layer reads, behind a dimension of samples also where there was only one without it."""
    least = 2 if isinstance(module, nn.Linear) else 2 + len(module.kernel_size)  # type: ignore[arg-type]
    return inputs.detach().unsqueeze(0) if inputs.dim() < least else inputs.detach()


def _met(module: nn.Module, inputs: Tensor, random: np.random.Generator) -> tuple[Tensor, Tensor]:
    """What a layer reads for one output position, chosen at random, and the weights it meets there."""
    if isinstance(module, nn.Linear):
        inputs = (
            inputs if inputs.dim() == 2 else inputs.flatten(1, -2)[:, random.integers(inputs[0, ..., 0].numel())]
        )
        return inputs[:, None, :, None], module.weight[None, :, :, None]
    assert isinstance(module, _ConvNd)
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
    met = inputs[(slice(None), slice(None), *window)].flatten(2)
    return met.unflatten(1, (groups, -1)), weight
