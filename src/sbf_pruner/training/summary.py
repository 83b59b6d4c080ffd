"""What a run came to: the dense network against the pruned one, and where it was measured.

Two networks, their graph and a plan enter; plain dictionaries leave, of which `summary.json` is made.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from ..export import MODEL, save
from ..graph.channels import ChannelGraph
from ..measuring import Latency, latency, measure
from ..plan import Plan

TIMED_SECONDS = 10.0  # about, for both networks together, however large they are


def sizes(dense: nn.Module, pruned: nn.Module, images: Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters, MACs of one image, bytes of a file and milliseconds of a pass on `images`, of both networks."""
    images = images.contiguous(memory_format=torch.channels_last)
    first = latency({"dense": dense}, images, pairs=1)["dense"].median / 1e3
    pairs = min(20, max(3, int(TIMED_SECONDS / (2 * first))))
    times = latency({"dense": dense, "pruned": pruned}, images, pairs=pairs)
    return _size(dense, images, times["dense"]), _size(pruned, images, times["pruned"])


def _size(network: nn.Module, images: Tensor, time: Latency) -> dict[str, Any]:
    cost = measure(network, images[:1])
    with TemporaryDirectory() as folder:
        save(network, folder)
        file_bytes = (Path(folder) / MODEL).stat().st_size
    return {
        "params": cost.params,
        "macs": cost.macs,
        "file_bytes": file_bytes,
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
