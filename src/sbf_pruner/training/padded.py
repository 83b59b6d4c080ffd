"""The gated network without most of what its gates hold back, at widths a GPU likes.

A pruner with its gates set enters; a smaller network leaves, with gates of its own, that trains exactly the
weights the gated one would.  It keeps a few filters more than the plan: widths are rounded up, because a
GPU's kernels are slow at odd ones, and what meets in a residual stream is kept at the width of the stream,
so that nothing needs to be moved.  The filters too many stand behind closed gates.  `write_back` puts
what was trained into the large network, where checkpoints and the final extraction find it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from ..copies import real_copy
from ..graph.channels import ChannelGraph
from ..graph.layout import solve
from ..plan import Plan
from ..pruner import Pruner
from ..surgery import extract

_UNIT = 8  # filters: 16 bytes of a pixel in bfloat16, which is what tensor cores are fed with
_WIDTHS = 4  # at most so many different widths for layers of one size: each is tuned anew when it is compiled


class Padded:
    """A stand-in for the gated network in fine-tuning.

    >>> net = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 4, 3))
    >>> pruner = Pruner(net, torch.rand(1, 3, 8, 8))
    >>> pruner.gate(Plan({"0": [1, 3, 17]}))
    >>> padded = Padded(pruner)
    >>> padded.network[0].out_channels, padded.pruner.alive()
    (8, (3, 8))
    """

    def __init__(self, pruner: Pruner, plan: Plan | None = None) -> None:
        self._large = pruner.model
        plan = plan or rounded_up(pruner.graph, pruner.plan())
        self.network = extract(pruner.model, pruner.example_inputs, plan, pruner.graph)
        numbered = extract(_numbered(pruner.model), pruner.example_inputs, plan, pruner.graph)
        self._numbers = _flat(numbered).long()
        self.pruner = Pruner(self.network, pruner.example_inputs)
        self.pruner.gate(_within(self._kept(), pruner.plan(), self.pruner.graph))

    def _kept(self) -> Plan:
        plans: tuple[Plan, ...] = self.network.sbf_plans  # type: ignore[assignment]
        return plans[-1]

    @torch.no_grad()
    def write_back(self) -> None:
        """Put the network's parameters and statistics where they came from."""
        flat = _flat(self._large)
        flat[self._numbers] = _flat(self.network)
        start = 0
        for tensor in _states(self._large):
            tensor.copy_(flat[start : start + tensor.numel()].view(tensor.shape))
            start += tensor.numel()


def rounded_up(graph: ChannelGraph, plan: Plan, *, unit: int = _UNIT, widths: int = _WIDTHS) -> Plan:
    """The plan with filters added to the layers that keep any, so that every width is a multiple of `unit`.

    Layers whose outputs are added up are also given what the others have, so that streams are whole.
    """
    masks = {name: mask.copy() for name, mask in plan.masks(graph).items()}
    layout = solve(graph, graph.flow(masks))
    for name, mask in masks.items():
        edge = graph.layers[name].site.edges[0]
        there = layout.masks[edge.out][edge.dim]
        if mask.any() and there is not None and there.size == mask.size:
            mask |= there
    for mask in masks.values():
        # Lowest first: the layers of a stream that are equal so far stay equal.
        missing = -int(mask.sum()) % max(unit, mask.size // widths)
        mask[np.flatnonzero(~mask)[:missing]] = True
    return Plan.from_masks(masks)


def _within(outer: Plan, inner: Plan, graph: ChannelGraph) -> Plan:
    """`inner` in terms of the network that `outer` gave; layers that have vanished are in neither."""
    return Plan(
        {
            name: tuple(outer.keep[name].index(i) for i in kept)
            for name, kept in inner.keep.items()
            if name in graph.layers
        }
    )


def _numbered(model: nn.Module) -> nn.Module:
    """A copy whose stored numbers say where each of them stands: surgery on it tells what goes where."""
    model, start = real_copy(model), 0
    for tensor in _states(model):
        tensor.data = torch.arange(start, start + tensor.numel(), device=tensor.device).double().view(tensor.shape)
        start += tensor.numel()
    return model


def _states(model: nn.Module) -> list[Tensor]:
    return [tensor for tensor in model.state_dict(keep_vars=True).values() if isinstance(tensor, Tensor)]


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1).double() for tensor in _states(model)])
