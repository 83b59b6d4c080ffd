"""Verify that a gated network and the network extracted from it compute the same function.

Copies run in float64, where a correct extraction changes outputs by rounding only. Differences are relative to the
largest output. A difference is accepted if the gated network alone differs as much with another seed and slightly
changed inputs, because of random operators, rounding in the forward, or branches that depend on rounding.
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
_NUDGE = 1e-10  # relative change of every input
_UNSURE = 100.0  # differences up to this multiple of the effect of a nudge are accepted


def gated_copy(model: nn.Module, graph: ChannelGraph, flow: Flow) -> nn.Module:
    """Return a copy of a model with binary gates, which are open for the filters that `flow` has as alive."""
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

    Return the largest difference in evaluation mode. If it cannot be computed, log the reason and return None.

    >>> net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1))
    >>> prove(net, net, torch.rand(1, 3, 5, 5))
    0.0
    """
    found: dict[str, float | None] = {}
    for mode in ("evaluation", "training"):
        training = mode == "training"
        found[mode] = _checked_difference(gated, small, example_inputs, "", "widths or training mode", training)
        if found[mode] is None:
            why = _no_output_reason(gated, example_inputs, training)
            _log.warning(
                "in %s mode the extraction was not verified: the gated network has no finite float64 output (%s)",
                mode,
                why,
            )
    difference = found["evaluation"]
    if difference is None:
        return None
    for inputs in resized_inputs(example_inputs):
        other = _difference_at_size(gated, small, inputs)
        if other is not None:
            return max(difference, other)
    _log.info(
        "the extraction was verified for inputs of one size only: the gated network accepts no other that was tried"
    )
    return max(difference, _difference_at_size(gated, small, with_extra_sample(example_inputs)) or 0.0)


def _difference_at_size(gated: nn.Module, small: nn.Module, inputs: Any) -> float | None:
    shapes = [str(tuple(t.shape)) for t in pytree.tree_leaves(inputs) if isinstance(t, Tensor)]
    return _checked_difference(gated, small, inputs, f" for inputs of {', '.join(shapes)}", "their sizes")


def _checked_difference(
    gated: nn.Module, small: nn.Module, inputs: Any, where: str, cause: str, training: bool = False
) -> float | None:
    difference = max_relative_difference(gated, small, inputs, training)
    if difference is None or difference <= _TOLERANCE or _is_unstable(gated, inputs, training, difference):
        return difference
    raise PruningError(
        f"in {'training' if training else 'evaluation'} mode the extracted network differs from the gated one by "
        f"{difference:.1e} of its largest output{where}: some code depends on {cause} in a way that the trace does "
        "not show; exclude the layers that feed it (ignore), and please report the model"
    )


def max_relative_difference(
    gated: nn.Module, small: nn.Module, example_inputs: Any, training: bool = False
) -> float | None:
    """Return the largest difference between outputs, relative to the largest output.

    Return None if the gated network fails or has no finite output. Raise a PruningError if only the other fails.
    """
    try:
        expected = _outputs(gated, example_inputs, training)
    except Exception:  # such as one value per channel in a norm, a fixed dtype, no memory
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


def _is_unstable(gated: nn.Module, example_inputs: Any, training: bool, difference: float) -> bool:
    """Return True if the gated network alone differs as much with another seed and slightly changed inputs."""
    nudged = map_tensors(example_inputs, lambda t: t.double() * (1 + _NUDGE) if t.is_floating_point() else t)
    expected = _outputs(gated, example_inputs, training)
    return not difference > _UNSURE * _difference(_outputs(gated, nudged, training, seed=1), expected)


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
        finite = then.isfinite()
        if bool(finite.any()):
            now, then = now[finite].double(), then[finite].double()
            largest = then.abs().max().clamp_min(torch.finfo(torch.float64).tiny)
            part = float((now - then).abs().max() / largest)
            worst = max(worst, math.inf if math.isnan(part) else part)
    return worst
