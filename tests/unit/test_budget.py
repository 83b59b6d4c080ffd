"""A size asked for is a size delivered."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from sbf_pruner.budget import Budget, land
from sbf_pruner.errors import PruningError
from sbf_pruner.graph.build import trace
from sbf_pruner.graph.costs import cost
from sbf_pruner.measuring import measure
from sbf_pruner.models.resnet import resnet20
from sbf_pruner.pruner import Pruner
from sbf_pruner.training.loop import fit
from sbf_pruner.training.recipe import load_recipe

IMAGE = torch.zeros(1, 3, 16, 16)


@pytest.fixture(scope="module")
def graph():
    return trace(resnet20(), IMAGE)


def scores(graph, seed=0):
    rng = np.random.default_rng(seed)
    return {name: rng.random(layer.filters) for name, layer in graph.layers.items()}


@pytest.mark.parametrize("budget", [Budget(macs=0.7), Budget(macs=0.3), Budget(params=0.5), Budget(0.4, 0.5)])
def test_landing_meets_the_budget_and_wastes_nothing(graph, budget):
    dense = cost(graph, {})
    found = cost(graph, land(graph, scores(graph), budget))
    assert budget.holds(found, dense)
    assert max(found.params / dense.params - budget.params, found.macs / dense.macs - budget.macs) > -0.01


def test_landing_takes_the_highest_scores(graph):
    values = scores(graph)
    masks = land(graph, values, Budget(macs=0.5))
    kept = np.concatenate([values[n][m] for n, m in masks.items()])
    dropped = np.concatenate([values[n][~m] for n, m in masks.items()])
    assert np.quantile(kept, 0.02) > np.quantile(dropped, 0.98), "but for a few that fitted into the rest"


def test_a_budget_for_everything_keeps_everything(graph):
    assert all(mask.all() for mask in land(graph, scores(graph), Budget()).values())


def test_a_budget_that_cannot_be_met_names_the_smallest_network():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.Flatten(), nn.Linear(4 * 196, 2))
    pruner = Pruner(net, IMAGE, budget=Budget(params=0.01))
    with (
        pytest.raises(PruningError, match=r"smallest network .* keeps \d+\.\d% of the parameters"),
        pruner.scoring(),
    ):
        pass


@pytest.mark.parametrize("part", [0.0, 1.5, -1.0])
def test_a_budget_is_a_part(part):
    with pytest.raises(PruningError, match="macs is the part to keep, above 0 and at most 1"):
        Budget(macs=part)


def test_a_run_delivers_the_size_its_recipe_asks_for(tmp_path):
    sets = ["phases.warmup=1", "phases.cycles=3", "phases.score=1", "phases.weights=1"]
    sets += ["phases.finetune=0", "dense_control=false", "budget.macs=0.4", "budget.settled=1"]
    recipe = load_recipe("digits", sets)
    net = resnet20(in_channels=1)
    result = fit(net, recipe, run=tmp_path / "run")
    dense, small = (result.summary[which]["macs"] for which in ("dense", "pruned"))
    assert 0.39 < small / dense <= 0.4
    assert measure(result.model, torch.zeros(1, 1, 8, 8)).params == result.summary["pruned"]["params"]
