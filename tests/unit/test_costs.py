"""What a plan would cost, counted without extracting, against the extracted network."""

from __future__ import annotations

import numpy as np
import pytest

from cases import random_plans
from sbf_pruner.graph.build import trace
from sbf_pruner.graph.costs import cost
from sbf_pruner.measuring import measure
from sbf_pruner.surgery import extract
from sbf_pruner.trial import note_insisted
from zoo import ZOO


@pytest.mark.parametrize("name", sorted(ZOO))
def test_the_cost_of_a_plan_is_that_of_the_network_it_makes(name):
    model, inputs = ZOO[name]()
    graph = trace(model, inputs)
    note_insisted(model, inputs, graph)
    for plan in random_plans(graph, 3):
        expected = measure(extract(model, inputs, plan, graph), inputs)
        found = cost(graph, plan.masks(graph))
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
