"""What a plan would cost, counted without extracting, against the extracted network."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from cases import random_plans
from sbf_pruner.graph import network_cost, trace
from sbf_pruner.measurement import measure
from sbf_pruner.plan import Plan
from sbf_pruner.pruner import record_fixed_sizes
from sbf_pruner.surgery import extract
from shares import mostly_slow
from zoo import ZOO

NETS = sorted(ZOO)


@pytest.mark.parametrize(
    ("name", "plans"), mostly_slow([(n, p) for n in NETS for p in (1, 4)], [(n, 1) for n in NETS[::2]])
)
def test_the_cost_of_a_plan_is_that_of_the_network_it_makes(name, plans):
    model, inputs = ZOO[name]()
    graph = trace(model, inputs)
    record_fixed_sizes(model, inputs, graph)
    for plan in random_plans(graph, 2 + plans)[2:]:
        expected = measure(extract(model, inputs, plan, graph), inputs)
        found = network_cost(graph, plan.masks(graph))
        assert (found.params, found.macs) == (expected.params, expected.macs)


@pytest.mark.parametrize("name", mostly_slow(NETS, NETS[1::4]))
def test_the_cost_of_a_plan_for_a_network_that_was_cut_before_is_that_of_the_network_it_makes(name):
    model, inputs = ZOO[name]()
    graph = trace(model, inputs)
    model = extract(model, inputs, random_plans(graph, 6)[5], graph)
    graph = trace(model, inputs)
    if not graph.layers:
        return
    record_fixed_sizes(model, inputs, graph)
    for plan in (Plan({}), *random_plans(graph, 4)[2:]):
        expected = measure(extract(model, inputs, plan, graph), inputs)
        found = network_cost(graph, plan.masks(graph))
        assert (found.params, found.macs) == (expected.params, expected.macs)


@pytest.mark.parametrize("name", ["Residual", "Grouped", "Shuffle", "GatedUnit"])
def test_the_flow_that_settling_ends_with_is_that_of_what_it_leaves(name):
    graph = trace(*ZOO[name]())
    for plan in random_plans(graph, 6):
        held, flow = graph.settled(plan.masks(graph))
        again = graph.flow(held)
        for found, wanted in ((flow.alive, again.alive), (flow.needed, again.needed)):
            assert found.keys() == wanted.keys()
            assert all(np.array_equal(found[value], wanted[value]) for value in found)
        assert all(map(np.array_equal, graph.settle(held).values(), held.values()))


class TwoNames(nn.Module):
    """A block that runs twice, under a name each."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 1)
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.again = self.block
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x):
        return self.head(self.again(self.block(self.stem(x))))


def test_a_module_under_two_names_has_its_parameters_once_and_its_products_in_every_call():
    model, images = TwoNames().eval(), torch.rand(1, 3, 4, 4)
    graph, half = trace(model, images), np.arange(8) % 2 == 0
    for network, found in (
        (model, network_cost(graph, {})),
        (extract(model, images, Plan.from_masks(dict.fromkeys(("stem", "block.0"), half))),
         network_cost(graph, dict.fromkeys(("stem", "block.0"), half))),
    ):  # fmt: skip
        with FlopCounterMode(display=False) as flops:
            network(images)
        expected = sum(p.numel() for p in network.parameters()), flops.get_total_flops() // 2
        assert (found.params, found.macs) == expected
        assert (measure(network, images).params, measure(network, images).macs) == expected
        assert network.again is network.block
