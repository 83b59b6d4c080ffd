"""Where knowledge of a network's time comes from: a file, the cache, or the clock.

A network and conditions enter; a `LatencyModel` leaves.  What was measured is kept in the user's cache, layers by
machine, whole networks by machine and network, so nothing is measured twice.  What holds: a file is whole or not
there, and one that does not fit is measured anew.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..budget.aim import Aim
from ..copies import real_copy
from ..environment import load
from ..errors import PruningError
from ..files import user_cache, write_text
from ..graph.build import trace
from ..graph.channels import ChannelGraph
from ..graph.costs import lay_out
from ..latency.model import BLOCKWISE, Conditions, LatencyModel, from_dict, read_model, signature
from ..latency.predictor import Predictor
from ..latency.table import Table
from .calibration import calibrate, measure_layers
from .runtimes import RUNTIMES
from .whole import rehearse

BUSY = 0.5  # of a core: more than that is somebody else's work
Report = Callable[[str], None]


def here(runtime: str, batch: int, threads: int) -> Conditions:
    """The conditions on this machine."""
    return Conditions(runtime, batch, threads, RUNTIMES[runtime].facts())


def same_place(one: Conditions, other: Conditions) -> bool:
    """Would both measure the same?"""
    return one == other and None not in other.machine.values()


def get_model(
    network: nn.Module,
    example: Any,
    conditions: Conditions,
    *,
    ignore: tuple[str, ...] = (),
    fresh: bool = False,
    report: Report = lambda line: None,
) -> LatencyModel:
    """What is known of a network under these conditions, from the cache or measured now."""
    graph = trace(network, example, ignore=ignore)
    mine = signature(Predictor(graph, Table(), conditions.batch))
    kept = cache_folder() / f"latency-{_digest(conditions)}-{mine}.json"
    if kept.is_file() and not fresh:
        try:
            known = read_model(kept, graph)
            if (known.calibration.get("load") or 0.0) > BUSY:
                report("this clock was measured while the machine was busy; `sbf latency --again` measures it anew")
            return known
        except PruningError:  # written by another version, or damaged: it is only a cache
            pass
    rehearse(network, example, conditions)
    busy = load()
    if busy is not None and busy > BUSY:
        report(f"the machine is busy (load {busy:.1f}); times that are taken now will be worth less")
    table = _layers(conditions, fresh)
    wanted = Predictor(graph, table, conditions.batch).wanted(lay_out(graph, Aim(graph).least()))
    if measure_layers(table, wanted, conditions, report):
        _keep_layers(table, conditions, fresh)
    found = calibrate(network, example, graph, table.of(wanted), conditions, report)
    found.calibration["load"] = busy
    found.write(kept)
    return found


def clock_here(
    network: nn.Module,
    images: Tensor,
    graph: ChannelGraph,
    conditions: Conditions,
    *,
    ignore: tuple[str, ...] = (),
    report: Report = lambda line: None,
) -> LatencyModel:
    """The same for a network that is in use, wherever it is: a clock for its own graph."""
    dense = real_copy(network).cpu().eval()
    found = get_model(dense, images[:1].cpu(), conditions, ignore=ignore, report=report)
    return from_dict(found.to_dict(), graph)


def cache_folder() -> Path:
    """Where measurements are kept: $SBF_CACHE, or the user's cache."""
    given = os.environ.get("SBF_CACHE")
    return Path(given).expanduser() if given else user_cache()


def _layers(conditions: Conditions, fresh: bool) -> Table:
    blocks = conditions.runtime in BLOCKWISE
    path = _layers_file(conditions)
    if fresh or not path.is_file():
        return Table(blocks=blocks)
    try:
        return Table.from_dict(json.loads(path.read_text("utf-8")), blocks)
    except (OSError, ValueError, TypeError, AttributeError):
        return Table(blocks=blocks)


def _keep_layers(table: Table, conditions: Conditions, fresh: bool) -> None:
    """Write the layers beside those there now: another process may have kept some since ours were read."""
    held = _layers(conditions, fresh=False)
    for site, seconds in table.points.items():
        if fresh:  # times of one layer are compared with each other: none from before stays among them
            held.points.pop(site, None)
        held.add(site, seconds)
    write_text(_layers_file(conditions), json.dumps(held.to_dict()) + "\n")


def _layers_file(conditions: Conditions) -> Path:
    return cache_folder() / f"layers-{_digest(conditions)}.json"


def _digest(conditions: Conditions) -> str:
    held = [conditions.runtime, conditions.batch, conditions.threads, sorted(conditions.machine.items())]
    return hashlib.sha256(json.dumps(held).encode()).hexdigest()[:12]
