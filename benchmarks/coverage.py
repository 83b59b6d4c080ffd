"""Every network of the zoos: what of it can be pruned, and is the smaller network the gated one?

python benchmarks/coverage.py [--only NAME ...] [--missing] [--stale] [--failed] [--jobs 2]

Each network is traced, then cut by random plans that keep 70, 50 and 20% of every layer, and by plans with
empty layers.  In float64 and evaluation mode the extracted network must give what the gated one does, to 1e-10
of the largest output, also for images and batches of another size if the network takes them, and must take a
training step.  A filter counts as prunable if a plan can name it, or if
it goes with others where every layer keeps but one.  Seconds are those of the process on one thread, so that
other work on the machine does not count.
"""

from __future__ import annotations

import copy
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
import zoos
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils import _pytree as pytree

from sbf_pruner import Plan, Pruner, Scores, extract, measure, trace
from sbf_pruner.graph import ChannelGraph
from sbf_pruner.modules import RemappedModule
from sbf_pruner.utils import resized_inputs

TOLERANCE = 1e-10
KEEP = (0.7, 0.5, 0.2)
Masks = dict[str, np.ndarray]


def work(name: str) -> zoos.Row:
    model, images = zoos.build(name)
    warm_up()
    start = time.process_time()
    graph = trace(model, images)
    traced = time.process_time() - start
    row: zoos.Row = {"size": images.shape[-1], "family": zoos.family(name), "trace_seconds": traced}
    dense = measure(model, images[:1])
    row |= {"params": dense.params, "macs": dense.macs, "layers": len(graph.layers), "skipped": len(graph.unscored)}
    row |= _share(model, images, graph, dense.by_module, dense.macs)
    row["plans"] = {}
    if not graph.layers:
        reason, count = Counter(graph.unscored.values()).most_common(1)[0]
        return row | {"ok": False, "error": f"nothing can be pruned; {count} layers: {reason}"}
    pruner = Pruner(model, images, graph=graph, scores=Scores(projection="free"))
    with torch.no_grad():
        whole = leaves(model(images))
    others = other_images(model, images)
    row["other_size"] = None if others is None else list(others.shape)
    for label, plan in _plans(graph):
        start = time.process_time()
        small = extract(model, images, plan, graph)
        seconds = time.process_time() - start
        pruner.gate(plan)
        with torch.no_grad():
            gated, found = leaves(model(images)), leaves(small.eval()(images))
            errors = [error_between(found, gated)]
            if others is not None:
                errors.append(error_between(leaves(small(others)), leaves(model(others))))
        row["plans"][label] = {
            "error": worst(errors),
            "change": error_between(gated, whole),
            "seconds": seconds,
        }
        if label == "50%":
            cut = measure(small, images[:1])
            row |= {"macs_left": cut.macs / dense.macs, "params_left": cut.params / dense.params}
        if label in ("50%", "empty"):
            train_a_step(small, images)
        del small
    row["error"] = worst([p["error"] for p in row["plans"].values()])
    row["seconds"] = traced + row["plans"]["50%"]["seconds"]
    row["ok"] = bool(row["error"] <= TOLERANCE)
    if not row["ok"]:
        wrong = [label for label, p in row["plans"].items() if not p["error"] <= TOLERANCE]
        row["error_text"] = f"gated and extracted differ by {row['error']:.1e} with the plans {', '.join(wrong)}"
    return row


def warm_up() -> None:
    """What torch loads at the first use is not the model's time."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3))
    extract(net, torch.zeros(1, 3, 8, 8), Plan({"0": [1]}))


# -- plans ---------------------------------------------------------------------------------------------------


def _plans(graph: ChannelGraph) -> Iterator[tuple[str, Plan]]:
    rng = np.random.default_rng(0)
    sizes = {name: layer.filters for name, layer in graph.layers.items()}
    for ratio in KEEP:
        masks = {n: rng.permutation(size) < max(1, round(ratio * size)) for n, size in sizes.items()}
        yield f"{100 - round(100 * ratio)}%", Plan.from_masks(connected(graph, masks, rng))
    for label, count in (("one empty", 1), ("empty", max(2, len(sizes) // 3))):
        masks = {n: rng.permutation(size) < max(1, size // 2) for n, size in sizes.items()}
        for name in rng.choice(list(sizes), min(count, len(sizes)), replace=False):
            masks[name][:] = False
        yield label, Plan.from_masks(connected(graph, masks, rng))


def _one_each(graph: ChannelGraph, which: int) -> Masks:
    masks = {}
    for name, layer in graph.layers.items():
        masks[name] = np.zeros(layer.filters, bool)
        masks[name][which] = True
    return connected(graph, masks, np.random.default_rng(0))


def connected(graph: ChannelGraph, masks: Masks, rng: np.random.Generator) -> Masks:
    """Give layers filters back until the output depends on the input: half of the empty ones at a time."""
    while not graph.connected(masks):
        empty = [name for name, mask in masks.items() if not mask.any()]
        for name in rng.permutation(empty)[: (len(empty) + 1) // 2]:
            masks[name][rng.integers(masks[name].size)] = True
        if not empty:  # filters are left, but meet nothing: the factors of a product
            for name in graph.disconnecting_layers(masks):
                masks[name][:] = True
    return masks


# -- what can go ---------------------------------------------------------------------------------------------


OUTPUTS = "its filters are the network's outputs"


def _share(model: nn.Module, images: Tensor, graph: ChannelGraph, macs: Mapping[str, int], total: int) -> zoos.Row:
    """The share of filters and of multiply-accumulates that some plan removes, and why others stay."""
    gone = _removable(model, images, graph)
    filters: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    prunable = 0.0
    for name, module in model.named_modules():
        if not isinstance(module, (_ConvNd, nn.Linear)) or graph.unscored.get(name) == OUTPUTS:
            continue  # how many outputs there are is the user's choice, not the pruner's
        width = module.out_channels if isinstance(module, _ConvNd) else module.out_features
        left = width if name in graph.layers else gone.get(name, 0)
        prunable += macs.get(name, 0) * left / width
        if isinstance(module, _ConvNd):
            filters["all"] += width
            filters["prunable"] += left
            if left < width:
                reasons[graph.unscored[name]] += width - left
    return {
        "filters": filters["all"],
        "filters_prunable": filters["prunable"] / max(1, filters["all"]),
        "macs_prunable": prunable / total,  # products outside such modules, as in attention, are in the total
        "reasons": dict(reasons.most_common(12)),
    }


def _removable(model: nn.Module, images: Tensor, graph: ChannelGraph) -> dict[str, int]:
    """How many filters of each layer are gone in one of two networks with one filter per layer.

    The weights of a copy hold the numbers of their filters, so what is left of them tells which are there.
    """
    numbered = copy.deepcopy(model).float()
    widths = {}
    for name, module in numbered.named_modules():
        if isinstance(module, (_ConvNd, nn.Linear)) and isinstance(module._parameters.get("weight"), nn.Parameter):
            weight = module._parameters["weight"]
            assert weight is not None
            axis = 1 if getattr(module, "transposed", False) else 0
            shape = [-1 if d == axis else 1 for d in range(weight.dim())]
            weight.data = torch.arange(weight.shape[axis]).float().reshape(shape).expand_as(weight).contiguous()
            widths[name] = (weight.shape[axis], axis)
    stays = {name: np.ones(width, bool) for name, (width, _) in widths.items()}
    for which in (0, -1):
        plan = Plan.from_masks(_one_each(graph, which))
        small = dict(extract(numbered, images.float(), plan, graph).named_modules())
        for name, (width, axis) in widths.items():
            module = small[name]
            module = module.module if isinstance(module, RemappedModule) else module
            weight = module._parameters.get("weight")
            there = np.zeros(width, bool)
            if weight is not None:
                there[weight.data.movedim(axis, 0).flatten(1)[:, 0].long().numpy()] = True
            stays[name] &= there
    return {name: int((~mask).sum()) for name, mask in stays.items()}


# -- comparison ----------------------------------------------------------------------------------------------


def leaves(nest: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(nest) if isinstance(t, Tensor)]


def error_between(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest difference, relative to the largest number; nan where there is one."""
    if [t.shape for t in found] != [t.shape for t in wanted]:
        raise AssertionError(f"outputs of shapes {[tuple(t.shape) for t in found]} are not those wanted")
    errors = [
        float((f - w).abs().max() / w.abs().max().clamp(min=1e-300)) for f, w in zip(found, wanted, strict=True)
    ]
    return worst(errors)


def worst(errors: list[float]) -> float:
    return max(errors, key=lambda e: float("inf") if e != e else e)


@torch.no_grad()
def other_images(model: nn.Module, images: Tensor) -> Tensor | None:
    """Images and a batch of another size, or None if the network takes images of one size only."""
    for others in resized_inputs(images):
        with suppress(Exception):
            model(others)
            return torch.randn_like(others)
    return None


def train_a_step(small: nn.Module, images: Tensor) -> None:
    small = copy.deepcopy(small).train()
    before = [p.detach().clone() for p in small.parameters()]
    optimizer = torch.optim.SGD(small.parameters(), 1e-3)
    outputs = leaves(small(images))
    sum((o * torch.randn_like(o)).sum() for o in outputs).backward()  # type: ignore[union-attr]
    optimizer.step()
    moved = sum(not torch.equal(a, b) for a, b in zip(before, small.parameters(), strict=True))
    if not moved or not all(bool(p.isfinite().all()) for p in small.parameters()):
        raise AssertionError("a training step of the extracted network changed nothing, or left no numbers")


# -- printing ------------------------------------------------------------------------------------------------


def summary(models: dict[str, zoos.Row]) -> zoos.Row:
    good = [r for r in models.values() if r["ok"]]
    zoo = Counter(n.partition(":")[0] for n in models)
    passed = Counter(n.partition(":")[0] for n, r in models.items() if r["ok"])
    return {
        "models": len(models),
        "pass": len(good),
        "by_zoo": {z: [passed[z], zoo[z]] for z in zoo},
        "worst_error": max((r["error"] for r in good), default=None),
        "median_seconds": float(np.median([r["seconds"] for r in good])) if good else None,
        "failures": {n: why(r) for n, r in sorted(models.items()) if not r["ok"]},
        "sources": sorted({r["source"] for r in models.values()}),
    }


def why(row: zoos.Row) -> str:
    return str(row.get("error_text") or row["error"])


def line(name: str, row: zoos.Row) -> str:
    if not row["ok"]:
        return f"FAIL {name:44} {why(row)}"
    shares = f"{row['filters_prunable']:6.1%} {row['macs_prunable']:6.1%}"
    cost = f"{row['seconds']:6.2f} s, MACs left at 50%: {row['macs_left']:5.1%}"
    return f"ok   {name:44} {shares} error {row['error']:.0e} {cost}"


def main() -> int:
    told = zoos.begin("coverage", __doc__ or "", 300, work, summary, line)
    if told is None:
        return 0
    print(f"{told['pass']} of {told['models']} pass")
    for name, reason in told["failures"].items():
        print(f"  {name}: {reason}")
    return 1 if told["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
