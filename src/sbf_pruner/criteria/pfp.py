"""PFP: the largest part that a filter has in anything the next layers make of it (Liebenwein et al., 2020).

A `Subject` enters; a score for each filter leaves, a part between 0 and 1.  What a channel adds to an output of the
layer that reads it is compared with what all channels add, in absolute values; the largest part over all outputs
and a small sample of images, and of positions in them, counts.  This is not PFP as published yet: see `unlike` in
`METHODS`.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .subject import Scores, Subject, batched, met, pieces, read_values, summing

_POSITIONS = 8  # in the maps of each batch


def largest_part(subject: Subject) -> Scores:
    """The largest relative contribution of a filter.  One that nobody is known to read stays: its score is 1."""
    held = read_values(subject.graph, _parts(subject))
    return {name: values.max(0).filled(1.0) for name, values in held.items()}


def _parts(subject: Subject) -> dict[str, NDArray[np.floating]]:
    """Of every layer, the largest part of each input channel in its outputs."""
    random = np.random.default_rng(subject.seed)
    found: dict[str, Tensor] = {}
    asked = summing(subject.model)

    def see(name: str, inputs: Tensor) -> None:
        inputs = batched(asked[name], inputs)
        for _ in range(_POSITIONS):
            part = part_of_each(*met(asked[name], inputs, random))
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
