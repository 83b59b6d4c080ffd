"""Clocks that read no time: a layer takes as long as it has multiply-accumulates, in blocks if asked for."""

from __future__ import annotations

import math
from typing import Any

from sbf_pruner.budget import Selector
from sbf_pruner.graph import ChannelGraph, lay_out
from sbf_pruner.measurement import Conditions, LatencyModel, LayerSpec, Predictor, Table, round_up


def work(site: LayerSpec, inputs: int, filters: int, block: int) -> float:
    """Multiply-accumulates of a layer of one sample, with widths in blocks."""
    inputs, filters = round_up(inputs, block), round_up(filters, block)
    if site.kind == "linear":
        return float(inputs * filters)
    pixels = math.prod(
        (size + 2 * pad - gap * (kernel - 1) - 1) // step + 1
        for size, pad, gap, kernel, step in zip(
            site.size, site.padding, site.dilation, site.kernel, site.stride, strict=True
        )
    )
    return float(max(inputs // max(site.groups, 1), 1) * filters * math.prod(site.kernel) * pixels)


def clock_of(graph: ChannelGraph, block: int = 1, **named: Any) -> LatencyModel:
    """A clock for a network, on no machine there is."""
    place = Conditions("onnxruntime" if block > 1 else "torch", 1, 1, {"cpu": "an abacus"})
    wanted = Predictor(graph, Table(), place.batch).wanted(lay_out(graph, Selector(graph).least()))
    points = {site: {pair: work(site, *pair, block) for pair in pairs} for site, pairs in wanted.items()}
    return LatencyModel(graph, Table(points, block > 1), place, **named)
