"""Verify that a gated network and the network extracted from it compute the same function.

Copies run in float64, where a correct extraction changes outputs by rounding only. Differences are relative to the
largest output. A difference does not count if the gated network alone differs as much with another seed and
slightly changed inputs, because of random operators, rounding in the forward, or branches that rounding decides.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils import _pytree as pytree

from ..errors import PruningError
from ..graph.channel_graph import ChannelGraph
from ..graph.nodes import Flow
from ..graph.recorder import as_tree
from ..graph.tracer import fixed_seed
from ..scores.gates import Gates
from ..utils.user_code import cause
from ..utils.user_model import call, map_tensors, real_copy, remove_pruner_hooks, resized_inputs, with_extra_sample

_log = logging.getLogger("sbf_pruner")

_TOLERANCE = 1e-9  # relative to the largest output
_UNTRACED = ": some code depends on {} in a way that the trace does not show"
_NUDGE = 1e-10  # relative change of every input
_UNSURE = 100.0  # differences up to this multiple of the effect of a nudge are accepted


def gated_copy(model: nn.Module, graph: ChannelGraph, flow: Flow) -> nn.Module:
    """Return a copy of a model with hard gates, set as in the given flow."""
    twin = remove_pruner_hooks(real_copy(model))
    gates = Gates(twin, graph.sites, {name: layer.filters for name, layer in graph.layers.items()})
    if graph.sites:
        gates.set_hard([site.open(flow) for site in graph.sites])
    gates.mode = "hard"
    return twin


def prove(gated: nn.Module, small: nn.Module, example_inputs: Any) -> float | None:
    """Raise a PruningError if the outputs of the two networks differ.

    They are compared in both modes on the example inputs and, in evaluation mode, on inputs of another size with
    one more sample. If the gated network takes no other size, for example because it flattens its feature maps,
    this is logged and only the number of samples changes.

    Returns the largest difference in evaluation mode, or None, with the reason logged, if it cannot be computed.

    >>> net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1))
    >>> prove(net, net, torch.rand(1, 3, 5, 5))
    0.0
    """
    found: dict[str, float | None] = {}
    for mode in ("evaluation", "training"):
        training = mode == "training"
        found[mode] = _compared(gated, small, example_inputs, training, _UNTRACED.format("widths or training mode"))
        if found[mode] is None:
            why = _no_output_reason(gated, example_inputs, training)
            _log.warning(
                "in %s mode the extraction was not verified: the gated network has no finite float64 output (%s)",
                mode,
                why,
            )
    apart = found["evaluation"]
    if apart is not None:
        apart = max(apart, _compared_elsewhere(gated, small, example_inputs) or 0.0)
    return apart


def _compared_elsewhere(gated: nn.Module, small: nn.Module, example_inputs: Any) -> float | None:
    for inputs in resized_inputs(example_inputs):
        apart = _compared(gated, small, inputs, False, _of_sizes(inputs))
        if apart is not None:
            return apart
    _log.info(
        "the extraction was verified for inputs of one size only: the gated network accepts no other that was tried"
    )
    inputs = with_extra_sample(example_inputs)
    return _compared(gated, small, inputs, False, _of_sizes(inputs))


def _of_sizes(inputs: Any) -> str:
    shapes = [str(tuple(t.shape)) for t in pytree.tree_leaves(inputs) if isinstance(t, Tensor)]
    return f" for inputs of {', '.join(shapes)}" + _UNTRACED.format("their sizes")


def _compared(gated: nn.Module, small: nn.Module, inputs: Any, training: bool, why: str) -> float | None:
    apart = max_relative_difference(gated, small, inputs, training)
    if apart is not None and not apart <= _TOLERANCE and not _is_unstable(gated, inputs, training, apart):
        mode = "training" if training else "evaluation"
        raise PruningError(
            f"in {mode} mode the extracted network differs from the gated one by {apart:.1e} of its largest "
            f"output{why}; exclude the layers that feed it (ignore), and please report the model"
        )
    return apart


def max_relative_difference(
    gated: nn.Module, small: nn.Module, example_inputs: Any, training: bool = False
) -> float | None:
    """Return the largest difference between outputs, relative to the largest output.

    None if the gated network gives no finite output or does not run; a PruningError if only the small one fails.
    """
    try:
        expected = _outputs(gated, example_inputs, training)
    except Exception:  # one value per channel in a norm, a fixed dtype, out of memory
        return None
    if not any(bool(tensor.isfinite().any()) for tensor in expected):
        return None
    try:
        return _difference(_outputs(small, example_inputs, training), expected)
    except Exception as error:
        raise PruningError(
            f"the extracted network does not run where the gated one does ({cause(error)}); please report the model"
        ) from error


def _no_output_reason(gated: nn.Module, example_inputs: Any, training: bool) -> str:
    try:
        found = _outputs(gated, example_inputs, training)
    except Exception as error:  # for example a norm that needs more than one image
        return cause(error)
    return "none of its outputs is finite" if found else "it is on the meta device"


def _is_unstable(gated: nn.Module, example_inputs: Any, training: bool, apart: float) -> bool:
    """Return True if the gated network alone differs as much with another seed and slightly changed inputs."""
    nudged = map_tensors(example_inputs, lambda t: t.double() * (1 + _NUDGE) if t.is_floating_point() else t)
    expected = _outputs(gated, example_inputs, training)
    return not apart > _UNSURE * _difference(_outputs(gated, nudged, training, seed=1), expected)


@torch.no_grad()
def _outputs(network: nn.Module, inputs: Any, training: bool, seed: int = 0) -> list[Tensor]:
    """Run a copy in float64 without dropout and return its outputs; an empty list for meta tensors."""
    given = [t for t in pytree.tree_leaves(inputs) if isinstance(t, Tensor)]
    if any(tensor.is_meta for tensor in (*network.parameters(), *network.buffers(), *given)):
        return []
    twin = real_copy(network).double().train(training)
    for module in twin.modules():
        if isinstance(module, _DropoutNd):
            module.eval()
    with fixed_seed(twin, seed):
        result = call(twin, map_tensors(inputs, lambda t: t.double() if t.is_floating_point() else t.clone()))
    return [t for t in pytree.tree_leaves(as_tree(result)) if isinstance(t, Tensor)]


def _difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest relative difference; entries expected to be infinite or NaN are not compared."""
    if [t.shape for t in found] != [t.shape for t in expected]:
        return math.inf
    worst = 0.0
    for now, then in zip(found, expected, strict=True):
        told = then.isfinite()
        if bool(told.any()):
            now, then = now[told].double(), then[told].double()
            largest = then.abs().max().clamp_min(torch.finfo(torch.float64).tiny)
            part = float((now - then).abs().max() / largest)
            worst = max(worst, math.inf if math.isnan(part) else part)
    return worst
