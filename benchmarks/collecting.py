"""Finished runs as one file of results: an entry per run, with all that a table or a picture needs.

Run folders enter; JSON leaves, in one step.  Collecting twice changes nothing, and runs that lie elsewhere by
now stay in the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import torch
from jobs import Run
from torch import Tensor, nn

from sbf_pruner.training import Recipe, RunFolder, build_dense
from sbf_pruner.utils import write_text


def collect(runs: Iterable[Run], path: Path) -> list[str]:
    """Add the finished runs to the results; returns the names of those that are new or changed."""
    held = json.loads(path.read_text("utf-8"))["runs"] if path.is_file() else []
    entries = {entry["name"]: entry for entry in held}
    made = {run.name: entry_of(run) for run in runs if run.finished}
    found = {name: entry for name, entry in made.items() if not _same(entry, entries.get(name))}
    new = list(found)
    if new:
        entries |= found
        ordered = [entries[name] for name in sorted(entries)]
        write_text(path, json.dumps({"benchmark": path.stem, "runs": ordered}, indent=1) + "\n")
    return new


def entry_of(run: Run) -> dict[str, Any]:
    """What a finished run came to."""
    folder = RunFolder(run.folder)
    summary, recipe = folder.read_summary(), folder.read_recipe()
    dense, pruned, layers = summary["dense"], summary["pruned"], summary["layers"]
    sequential = sequential_count(recipe, {name: layer["after"] for name, layer in layers.items()})
    whole = {"params": dense["params"], "macs": dense["macs"]}
    return {
        "name": run.name,
        "date": date.fromtimestamp(folder.summary.stat().st_mtime).isoformat(),
        "seed": summary["seed"],
        "epochs": summary["epochs"],
        "accuracy": pruned["accuracy"],
        "validation_accuracy": pruned["validation_accuracy"],
        "dense_accuracy": dense["accuracy"],
        "warmup_accuracy": dense["warmup_accuracy"],
        **({"dense_from": Path(summary["dense_from"]).name} if "dense_from" in summary else {}),
        "dense": whole,
        "left": _shares({"params": pruned["params"], "macs": pruned["macs"]}, whole),
        "sequential": _shares(sequential, whole),
        "cut_error": summary["cut_error"],
        "seconds": summary["seconds"],
        "layers": {name: [layer["before"], layer["after"]] for name, layer in layers.items()},
        "environment": summary["environment"],
        "recipe": recipe.to_dict(),
    }


def _same(entry: Mapping[str, Any], held: Mapping[str, Any] | None) -> bool:
    """Is it the run that is held already?  Then its recipe stays as it was written down then.

    Read again after settings were added, a recipe would claim that the run had them at what is usual now.
    """
    return held is not None and all(held.get(key) == value for key, value in entry.items() if key != "recipe")


def _shares(left: Mapping[str, int], whole: Mapping[str, int]) -> dict[str, float]:
    """Counts with the percentages removed beside them."""
    return {**left, **{f"{key}_removed": 100 * (1 - left[key] / whole[key]) for key in whole}}


def sequential_count(recipe: Recipe, kept: Mapping[str, int], size: int = 32) -> dict[str, int]:
    """Parameters and MACs if each layer read just the filters that the layer before it keeps.

    That is how a chain is counted; in a residual network a layer really reads whatever its stream carries,
    and more is left.  Stated beside the real count because the paper does not say how it counts.
    """
    config, model = recipe.model, build_dense(recipe)
    counts = {"params": 0, "macs": 0}
    width = config.in_channels
    names = {module: name for name, module in model.named_modules()}

    def count(module: nn.Module, inputs: Any, output: Tensor) -> None:
        nonlocal width
        if isinstance(module, nn.Conv2d | nn.Linear):
            filters = kept.get(names[module], module.weight.shape[0])
            weights = width * filters * module.weight[0, 0].numel()
            counts["params"] += weights + (0 if module.bias is None else filters)
            counts["macs"] += weights * (output[0, 0].numel() if output.dim() > 2 else 1)
            width = filters
        elif isinstance(module, nn.BatchNorm2d):
            counts["params"] += 2 * width

    for module in model.modules():
        module.register_forward_hook(count)
    with torch.no_grad():
        model.eval()(torch.zeros(1, config.in_channels, size, size))
    return counts
