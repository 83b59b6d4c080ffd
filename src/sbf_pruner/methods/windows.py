"""What a convolution or linear layer reads for one position: windows of its inputs, and the weights they meet.

A module and what it reads enter; samples, groups, channels and taps leave, and the same of its weights, so that the
output is the sum over channels and taps of their products, whatever the kind of layer.
"""

from __future__ import annotations

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

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
