"""PFP: the largest contribution of a filter to any output of the layers that read it (Liebenwein et al., 2020).

The absolute contribution of a channel to an output is divided by the sum over all channels. The score, between 0
and 1, is the maximum over all outputs, and over a small sample of images and of positions in them. Differences from
PFP: see `unlike` in `METHODS`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .subject import Scores, Subject, chunks, conv_and_linear, read_values, sample_window, with_batch_dim

_POSITIONS = 8  # sampled per batch


def largest_part(subject: Subject) -> Scores:
    """Score filters by their largest relative contribution.

    A filter for which no layer that reads it is found has the highest score, 1.
    """
    random = np.random.default_rng(subject.seed)
    parts: dict[str, Tensor] = {}  # for each reader, the largest contribution of every input channel
    modules = conv_and_linear(subject.model)

    def see(name: str, inputs: Tensor) -> None:
        inputs = with_batch_dim(modules[name], inputs)
        for _ in range(_POSITIONS):
            part = part_of_each(*sample_window(modules[name], inputs, random))
            parts[name] = torch.maximum(parts[name], part) if name in parts else part

    with subject.reading(modules, see):
        subject.look()
    by_filter = read_values(subject.graph, {name: part.cpu().numpy() for name, part in parts.items()})
    return {name: values.max(0).filled(1.0) for name, values in by_filter.items()}


def part_of_each(inputs: Tensor, weight: Tensor) -> Tensor:
    """Return the largest relative contribution of each input channel to any output.

    `inputs` has shape `(samples, groups, channels, taps)` and `weight` `(groups, outputs, channels, taps)`.

    >>> part_of_each(torch.tensor([[[[1.0], [-3.0]]]]), torch.tensor([[[[1.0], [1.0]], [[6.0], [2.0]]]]))
    tensor([0.5000, 0.7500])
    """
    tiny = torch.finfo(inputs.dtype).tiny
    found = []
    for part in chunks(inputs, weight[..., 0].numel()):
        added = torch.einsum("ngck,gock->ngoc", part, weight).abs()
        found.append((added / added.sum(3, keepdim=True).clamp_min(tiny)).amax((0, 2)).flatten())
    return torch.stack(found).amax(0)
