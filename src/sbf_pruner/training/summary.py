"""What a run came to: the dense network against the pruned one, and where it was measured.

The networks of a run enter, with a way to judge them; plain dictionaries leave, of which `summary.json` is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..files import stored_bytes
from ..graph.channels import ChannelGraph
from ..measuring import Latency, latency, measure
from ..plan import Plan
from ..stored import contents
from .networks import Networks
from .recipe import Recipe
from .schedule import phases

TIMED_SECONDS = 10.0  # about, for both networks together, however large they are
TIMED_AT_ONCE = 64
UNJUDGED = {"accuracy": None, "validation_accuracy": None}


def summarise(
    recipe: Recipe,
    networks: Networks,
    small: nn.Module,
    images: Tensor,
    judged: Callable[[nn.Module], dict[str, float | None]],
    before: dict[str, float | None],
) -> dict[str, Any]:
    """The dense network against the small one.

    Where no control was trained, the dense one has no accuracy but those of `before`, from earlier in the run.
    """
    control, timed = networks.control, networks.timed
    dense = networks.pruner.detach() if control is None else control
    batch = images[:TIMED_AT_ONCE]
    first, second = sizes(dense, small, batch)
    return {
        "name": recipe.name,
        "method": recipe.method,
        "seed": recipe.seed,
        "epochs": sum(phase.epochs for phase in phases(recipe) if phase.kind != "control"),
        "dense": {
            **(UNJUDGED if control is None else judged(control)),
            **before,
            **first,
        },
        "pruned": {**judged(small), **second},
        "latency_batch": len(batch),
        "cut_error": networks.cut_error,
        "layers": widths(networks.pruner.graph, networks.plan),
        **({} if timed is None else {"latency": timed.summary(networks.pruner, networks.plan)}),
    }


def sizes(dense: nn.Module, pruned: nn.Module, images: Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters, MACs of one image, bytes of a file and milliseconds of a pass on `images`, of both networks."""
    first = latency({"dense": dense}, images, pairs=1)["dense"].median / 1e3
    pairs = min(20, max(3, int(TIMED_SECONDS / (2 * first))))
    times = latency({"dense": dense, "pruned": pruned}, images, pairs=pairs)
    return _size(dense, images, times["dense"]), _size(pruned, images, times["pruned"])


def _size(network: nn.Module, images: Tensor, time: Latency) -> dict[str, Any]:
    cost = measure(network, images[:1])
    return {
        "params": cost.params,
        "macs": cost.macs,
        "file_bytes": stored_bytes(*contents(network)),
        "latency_ms": time.median,
        "latency_iqr_ms": time.iqr,
    }


def widths(graph: ChannelGraph, plan: Plan) -> dict[str, dict[str, int]]:
    """The filters of every prunable layer before and after."""
    kept = plan.widths()
    return {
        name: {"before": layer.filters, "after": kept.get(name, layer.filters)}
        for name, layer in graph.layers.items()
    }
