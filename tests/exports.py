"""A tiny run to export, made without training."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import torch
from torch import nn

import sbf_pruner as sbf
from sbf_pruner.export import ExportOptions
from sbf_pruner.models import resolve
from sbf_pruner.training import load_recipe

RECIPE = """
name = "tiny"
[model]
name = "zoo:OptionA"
num_classes = 4
in_channels = 3
[data]
name = "synthetic"
image_size = 8
channels = 3
samples = 64
"""
IMAGES = torch.rand(5, 3, 8, 8)
asked = partial(ExportOptions, trust=True)  # the recipe names a network of the tests


def dense() -> nn.Module:
    torch.manual_seed(0)
    return resolve("zoo:OptionA", num_classes=4, in_channels=3)


def write_run(folder: Path) -> Path:
    """Write a folder as a finished run leaves it."""
    folder.mkdir()
    (folder / "recipe.toml").write_text(RECIPE)
    (folder / "recipe.toml").write_text(load_recipe(folder / "recipe.toml").to_toml())
    model = dense()
    graph = sbf.trace(model, IMAGES[:1])
    keep = {name: range(0, layer.filters, 2) for name, layer in graph.layers.items() if name.endswith("conv1")}
    small = sbf.extract(model, IMAGES[:1], sbf.Plan(keep), graph)
    sbf.save(small, folder)
    sizes = {name: sbf.measure(net, IMAGES[:1]) for name, net in (("dense", model), ("pruned", small))}
    figures = {name: {"accuracy": 50.0, "params": s.params, "macs": s.macs} for name, s in sizes.items()}
    (folder / "summary.json").write_text(json.dumps({**figures, "layers": {}}))
    return folder
