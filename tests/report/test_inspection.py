"""The facts that `sbf inspect` prints."""

from __future__ import annotations

import copy
import json

import pytest
import torch

import sbf_pruner as sbf
from sbf_pruner.models import resolve
from sbf_pruner.report import overview
from zoo import ZOO

COMMON = ["name", "kind", "filters", "kernel", "conv_groups", "map_size", "params", "macs", "macs_share"]
PRUNABLE = ["gated_at", "gate", "later_gates", "groups", "followed_by", "first_filter"]


@pytest.mark.parametrize(
    "name", ["Residual", "Dense", "SqueezeExcite", "FunctionalConv", "WeightNorm", "Recurrent"]
)
def test_the_keys_stay_and_every_layer_is_in_one_list(name):
    model, inputs = ZOO[name]()
    facts = overview(model, inputs)
    keys = ["model", "inputs", "params", "macs", "filters", "layers", "followers", "skipped", "groups"]
    assert list(facts) == keys
    assert json.loads(json.dumps(facts)) == facts
    for kind, more in (("layers", PRUNABLE), ("followers", ["follows"]), ("skipped", ["reason"])):
        for layer in facts[kind]:
            assert list(layer) == COMMON + more
    graph = sbf.trace(model, inputs)
    named = [layer["name"] for kind in ("layers", "followers", "skipped") for layer in facts[kind]]
    assert sorted(named) == sorted([*graph.layers, *graph.followers, *graph.skipped])


def test_costs_add_up():
    model, inputs = resolve("mobilenet_v2"), torch.zeros(1, 3, 32, 32)
    before = copy.deepcopy(model.state_dict())
    facts = overview(model, inputs)
    layers = [layer for kind in ("layers", "followers", "skipped") for layer in facts[kind]]
    assert sum(layer["macs"] for layer in layers) == facts["macs"] == sbf.measure(model, inputs).macs
    assert sum(layer["macs_share"] for layer in layers) == pytest.approx(100)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_an_extracted_network_keeps_its_names():
    model, inputs = resolve("resnet20"), torch.zeros(1, 3, 32, 32)
    small = sbf.extract(model, inputs, sbf.Plan({"layer1.0.conv2": range(3), "layer2.1.conv2": range(5, 9)}))
    facts = overview(small, inputs)
    filters = {layer["name"]: layer["filters"] for layer in facts["layers"]}
    assert filters["layer1.0.conv2"] == 3 and filters["layer2.1.conv2"] == 4
    assert sum(layer["macs"] for layer in (*facts["layers"], *facts["skipped"])) == facts["macs"]
    assert all(layer["params"] > 0 for layer in facts["layers"])
