"""The same networks through Torch-Pruning and through this package, in one process each.

python benchmarks/vs_torch_pruning.py [--only NAME ...] [--missing] [--failed]

Torch-Pruning (`pip install --no-deps torch-pruning==1.6.1`) halves every group by group magnitude.  A network
of its that runs in evaluation and in training mode works; it is exact if it gives what the whole network does
with the same channels zeroed behind their batch norms (not defined where it cuts a layer or group norm, whose
statistics change).  Ours keeps the filters that Torch-Pruning kept, layer by layer; where that failed, the
larger half of each layer.  The two take turns in going first.  Seconds are of the process, on one thread.
"""

from __future__ import annotations

import copy
import signal
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import numpy as np
import torch
import zoos
from coverage import connected, error_between, leaves, train_a_step, warm_up
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from sbf_pruner import Plan, Pruner, Scores, extract, measure, trace
from sbf_pruner.graph import ChannelGraph

RATIO = 0.5
LIMIT = 120  # seconds of Torch-Pruning on one model; two of them never end
Gone = dict[str, np.ndarray]
CLASSES = (1000, 21)  # what the networks' last layers give


def work(name: str) -> zoos.Row:
    model, images = zoos.build(name)
    warm_up()
    _warm_up_theirs()
    dense = measure(model, images[:1]).macs
    row: zoos.Row = {"ok": True, "size": images.shape[-1], "macs": dense}
    ours_first = zlib.crc32(name.encode()) % 2 == 0
    row["first"] = "ours" if ours_first else "theirs"
    analysed = _analyse(model, images) if ours_first else None
    twin = copy.deepcopy(model)
    gone: Gone | None = None
    try:
        with _at_most(LIMIT):
            gone, seconds = _halve(twin, images)
        row["theirs"] = {"works": True, "seconds": seconds} | _check_theirs(model, twin, images, gone, dense)
    except Exception as error:
        row["theirs"] = {"works": False, "why": _said(error)}
    graph, traced = analysed or _analyse(model, images)
    works = row["theirs"]["works"]
    row["ours"] = _ours(model, images, graph, traced, gone if works else None, dense)
    return row


# -- Torch-Pruning ---------------------------------------------------------------------------------------------


def _warm_up_theirs() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3))
    _halve(net, torch.zeros(1, 3, 8, 8))


def _halve(model: nn.Module, images: Tensor) -> tuple[Gone, float]:
    """Prune in place; the channels that are gone from each module, and the seconds it took."""
    import torch_pruning

    names = {id(module): name for name, module in model.named_modules()}
    there: dict[str, np.ndarray] = {}
    whole: dict[str, int] = {}
    heads = [m for m in model.modules() if _width(m) in CLASSES and isinstance(m, (nn.Linear, _ConvNd))]
    start = time.process_time()
    pruner = torch_pruning.pruner.BasePruner(
        model,
        images[:1],
        importance=torch_pruning.importance.GroupMagnitudeImportance(p=2),
        pruning_ratio=RATIO,
        ignored_layers=heads,
    )
    for group in pruner.step(interactive=True):
        for dependency, numbers in group:
            module = dependency.target.module
            out = pruner.DG.is_out_channel_pruning_fn(dependency.handler)
            if id(module) in names and _width(module) and (out or not isinstance(module, (nn.Linear, _ConvNd))):
                name = names[id(module)]
                whole.setdefault(name, _width(module))
                there.setdefault(name, np.arange(whole[name]))
                # The same channels may stand in a group twice; numbers are those of the module as it is now.
                left = np.ones(len(there[name]), bool)
                left[sorted({int(n) for n in numbers})] = False
                there[name] = there[name][left] if len(there[name]) == _width(module) else there[name]
        group.prune()
    seconds = time.process_time() - start
    return {name: np.setdiff1d(np.arange(whole[name]), kept) for name, kept in there.items()}, seconds


def _width(module: Any) -> int:
    for name in ("out_channels", "out_features", "num_features"):
        if isinstance(getattr(module, name, None), int):
            return int(getattr(module, name))
    shape = getattr(module, "normalized_shape", None)
    return int(shape[-1]) if shape else int(getattr(module, "num_channels", 0) or 0)


def _check_theirs(model: nn.Module, small: nn.Module, images: Tensor, gone: Gone, dense: int) -> zoos.Row:
    with torch.no_grad():
        found = leaves(small.eval()(images))
    train_a_step(small, images)
    row: zoos.Row = {"macs_left": measure(small.eval(), images[:1]).macs / dense}
    shared = [n for n in gone if isinstance(model.get_submodule(n), (nn.LayerNorm, nn.GroupNorm))]
    row["error"] = None if shared else error_between(found, _masked(model, images, gone))
    return row


@torch.no_grad()
def _masked(model: nn.Module, images: Tensor, gone: Gone) -> list[Tensor]:
    """What the whole network gives with those channels zeroed behind their norms."""
    twin = copy.deepcopy(model)
    for name, channels in gone.items():
        module = twin.get_submodule(name)
        if isinstance(module, (nn.Linear, _ConvNd, _BatchNorm)):
            axis = 1 if getattr(module, "transposed", False) else 0
            for key, dim in (("weight", axis), ("bias", 0)):
                tensor = getattr(module, key, None)
                if tensor is not None:
                    tensor.data.index_fill_(dim, torch.from_numpy(channels), 0)
    return leaves(twin(images))


# -- ours ------------------------------------------------------------------------------------------------------


def _analyse(model: nn.Module, images: Tensor) -> tuple[ChannelGraph | Exception, float]:
    start = time.process_time()
    try:
        return trace(model, images), time.process_time() - start
    except Exception as error:
        return error, 0.0


def _ours(
    model: nn.Module,
    images: Tensor,
    graph: ChannelGraph | Exception,
    traced: float,
    gone: Gone | None,
    dense: int,
) -> zoos.Row:
    if isinstance(graph, Exception):
        return {"works": False, "why": _said(graph)}
    try:
        # Torch-Pruning weighs the filters in its time, so we do in ours.
        start = time.process_time()
        plan = _plan(model, graph, gone)
        small = extract(model, images, plan, graph)
        seconds = traced + time.process_time() - start
        pruner = Pruner(model, images, graph=graph, scores=Scores(projection="free"))
        pruner.gate(plan)
        with torch.no_grad():
            error = error_between(leaves(small.eval()(images)), leaves(model(images)))
        train_a_step(small, images)
        left = measure(small.eval(), images[:1]).macs / dense
    except Exception as failure:
        return {"works": False, "why": _said(failure)}
    return {"works": bool(error <= 1e-10), "seconds": seconds, "error": error, "macs_left": left}


def _plan(model: nn.Module, graph: ChannelGraph, gone: Gone | None) -> Plan:
    masks = {}
    for name, layer in graph.layers.items():
        masks[name] = np.ones(layer.filters, bool)
        if gone is None:
            weight = model.get_parameter(layer.weight).detach()
            axis = 1 if "Transpose" in layer.kind else 0
            size = weight.movedim(axis, 0).flatten(1).norm(dim=1).numpy()
            size = size if size.size == layer.filters else np.arange(layer.filters)
            masks[name][np.argsort(size)[: layer.filters // 2]] = False
        else:
            masks[name][gone.get(name, np.array([], int))] = False
    return Plan.from_masks(connected(graph, masks, np.random.default_rng(0)))


# -- running and telling -----------------------------------------------------------------------------------------


@contextmanager
def _at_most(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in what runs inside when it has used that much of the processor."""

    def ring(*_: Any) -> None:
        raise TimeoutError(f"not done after {seconds} s")

    before: Callable[..., Any] | int | None = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:300]


def summary(models: dict[str, zoos.Row]) -> zoos.Row:
    rows = {n: r for n, r in models.items() if r["ok"]}
    both = {n: r for n, r in rows.items() if r["ours"]["works"] and r["theirs"]["works"]}
    defined = [r["theirs"]["error"] for r in rows.values() if r["theirs"].get("error") is not None]
    told: zoos.Row = {
        "models": len(rows),
        "ours": sum(r["ours"]["works"] for r in rows.values()),
        "theirs": sum(r["theirs"]["works"] for r in rows.values()),
        "not_run": sorted(set(models) - set(rows)),
        "both": len(both),
        "theirs_exact": [sum(e <= 1e-10 for e in defined), len(defined)],
        "sources": sorted({r["source"] for r in models.values()}),
    }
    if both:
        for who in ("ours", "theirs"):
            told[f"{who}_median_seconds"] = median(r[who]["seconds"] for r in both.values())
            told[f"{who}_median_macs_left"] = median(r[who]["macs_left"] for r in both.values())
        ratios = {n: r["theirs"]["seconds"] / r["ours"]["seconds"] for n, r in both.items()}
        told["median_speed_ratio"] = median(ratios.values())
        told["densenet201_ratio"] = ratios.get("torchvision:densenet201")
    return told


def line(name: str, row: zoos.Row) -> str:
    if not row["ok"]:
        return f"FAIL {name}: {row['error']}"
    return f"{name:44} ours {_cell(row['ours'])}; theirs {_cell(row['theirs'])}"


def _cell(side: zoos.Row) -> str:
    if not side["works"]:
        return f"FAILS ({side.get('why') or side.get('error')})"[:110]
    error = "undefined" if side["error"] is None else f"{side['error']:.0e}"
    return f"{side['seconds']:7.2f} s, MACs left {side['macs_left']:5.1%}, error {error}"


def main() -> int:
    told = zoos.begin("vs_torch_pruning", __doc__ or "", 400, work, summary, line)
    for key, value in (told or {}).items():
        print(f"{key}: {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
