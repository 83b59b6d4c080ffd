"""How layers hang together, and what one filter is worth."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import sbf_pruner as sbf
from cases import traced
from sbf_pruner.graph import FilterCosts, trace
from sbf_pruner.models import resolve
from shares import mostly_slow
from zoo import ZOO


def relations(name):
    return traced(name).relations


def test_layers_of_a_residual_stage_share_a_layout():
    found = trace(resolve("resnet20"), torch.zeros(1, 3, 32, 32)).relations
    assert [group.meet for group in found.groups] == [("add",)] * 3
    assert found.groups[0].layers == ("conv1", "layer1.0.conv2", "layer1.1.conv2", "layer1.2.conv2")
    assert found.followers == {} and found.later_gates == {}


def test_a_dense_block_is_one_concatenation_and_gates_again():
    found = relations("Dense")
    assert {group.meet for group in found.groups} == {("concatenate",)}
    members = [set(group.layers) for group in found.groups]
    assert not any(one < other for one in members for other in members)
    assert found.later_gates


FOLLOWERS = {
    "Depthwise": {"3.depthwise.0": ("3.expand.0",), "4.depthwise.0": ("4.expand.0",)},
    "SqueezeExcite": {"first.3.restore": ("stem.0", "first.0"), "second.3.restore": ("second.0",)},
    "SharedParameter": {},  # the owner of the weight is left alone, so there is nothing to follow
    "Plain": {},
    "Grouped": {},
}


@pytest.mark.parametrize("name", FOLLOWERS)
def test_followers_are_named_with_those_they_follow(name):
    assert relations(name).followers == FOLLOWERS[name]


@pytest.mark.parametrize("name", ZOO)
def test_every_relation_names_layers_of_the_graph(name):
    graph = traced(name)
    found = graph.relations
    known = {*graph.layers, *graph.unscored}
    assert set(found.followers) <= set(graph.unscored)
    assert all(set(leaders) <= set(graph.layers) for leaders in found.followers.values())
    assert all(set(group.layers) <= known and len(group.layers) > 1 for group in found.groups)
    assert set(found.later_gates) <= set(graph.layers)


# Where surgery keeps more than liveness asks for: what it cannot slice, or cannot put a remap before.
KEPT_WHOLE = {"NormBeforeConvOrder", "PlainListModules", "LayerNorm", "Recurrent", "Transformer", "NormInside"}
TRAINING_ONLY = {"AuxiliaryHead"}  # a head that `measure`, in evaluation mode, does not see
NOT_COUNTED = {"StoredMap"}  # parameters of no layer with more than one dimension


EXACT = [name for name in ZOO if name not in KEPT_WHOLE | TRAINING_ONLY | NOT_COUNTED]


@pytest.mark.parametrize("name", mostly_slow(EXACT, EXACT[::2]))
def test_a_first_filter_is_worth_what_extraction_saves(name):
    model, inputs = ZOO[name]()
    graph = trace(model, inputs)
    appraiser = FilterCosts(graph)
    whole = {layer: range(each.filters) for layer, each in graph.layers.items()}
    dense = sbf.measure(sbf.extract(model, inputs, sbf.Plan(whole), graph), inputs)
    for layer in [layer for layer, each in graph.layers.items() if each.filters > 1][:2]:
        plan = sbf.Plan({**whole, layer: whole[layer][1:]})
        small = sbf.measure(sbf.extract(model, inputs, plan, graph), inputs)
        worth = appraiser.first_filter(layer)
        assert (dense.macs - small.macs, dense.params - small.params) == (worth.macs, worth.params), layer


def test_all_of_a_deep_network_is_appraised_quickly():
    graph = trace(resolve("resnet56"), torch.zeros(1, 3, 32, 32))
    began = time.perf_counter()
    found, appraiser = graph.relations, FilterCosts(graph)
    worths = [appraiser.first_filter(name) for name in graph.layers]
    assert time.perf_counter() - began < 2  # some 0.1 s on a quiet machine
    assert len(found.groups) == 3 and all(worth.macs > 0 for worth in worths)


@pytest.mark.parametrize("batch", [1, 2, 8])
def test_what_is_stored_for_a_product_is_there_once_for_all_samples(batch):
    class Mixing(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.mix = nn.Conv2d(3, 6, 1), nn.Parameter(torch.randn(1, 5, 6))
            self.out = nn.Linear(5, 4)

        def forward(self, x):
            return self.out(torch.bmm(self.mix.expand(len(x), -1, -1), self.conv(x).flatten(2)).mean(2))

    graph = trace(Mixing(), torch.randn(batch, 3, 4, 4))
    assert FilterCosts(graph).first_filter("conv").params == 3 + 1 + 5
