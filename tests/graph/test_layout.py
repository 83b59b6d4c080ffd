"""Which channels are there: the smallest layout in which every operator can run."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from cases import traced
from sbf_pruner.graph import Boundary, FixedSizes, equalize_groups, shrink, solve_layout, trace
from sbf_pruner.plan import Plan
from zoo import ZOO


def bits(text):
    return np.array([[c == "1" for c in row] for row in text.split()])


def test_shrink_asks_for_any():
    mask = bits("100 000")
    assert shrink(mask, (2, 3)).tolist() == mask.tolist()
    assert shrink(mask, (2, 1)).tolist() == [[True], [False]]
    assert shrink(mask, (1, 3)).tolist() == [[True, False, False]]
    assert shrink(mask, (3,)).tolist() == [True, False, False]
    assert shrink(np.array([True]), (4,)).tolist() == [True] * 4


def test_level_fills_groups_up_to_the_fullest():
    assert (equalize_groups(bits("1010 0001 0000"), np.array([1, 1, 0], bool)) == bits("1010 1001 0000")).all()
    assert (equalize_groups(bits("1010 0001 0000"), np.array([1, 1, 1], bool)) == bits("1010 1001 1100")).all()
    assert (equalize_groups(bits("000 000"), np.array([0, 1], bool)) == bits("000 100")).all(), (
        "never an empty group"
    )


def widths(name, keep):
    """The channels that are there at the edges of every module."""
    graph = trace(*ZOO[name]())
    flow = graph.flow(graph.settle(Plan(keep).masks(graph)))
    layout = solve_layout(graph, flow)
    edges = [node for node in graph.nodes if isinstance(node, Boundary)]
    return {(e.module, e.side): (layout.indices(e.x, e.dim), layout.indices(e.out, e.dim)) for e in edges}


def test_a_chain_needs_no_remap():
    found = widths("Plain", {"0": [1, 5], "4": [0, 2, 3]})
    assert found["0", "out"] == ([1, 5], [1, 5])
    assert found["4", "in"] == ([1, 5], [1, 5])
    assert found["7", "in"] == ([0, 2, 3], [0, 2, 3])


def test_a_sum_has_one_layout():
    found = widths("EmptyBranch", {"stem.0": [0, 1], "left.0": [1, 2], "right.0": [3], "biased": [5]})
    stream = [0, 1, 2, 5]
    assert found["stem.1", "out"] == ([0, 1], stream)
    assert found["left.1", "out"] == ([1, 2], stream)
    assert found["biased", "out"] == ([5], stream)
    assert found["left.0", "in"] == (stream, [0, 1]), "but only two of them are alive there"
    assert found["right.1", "out"] == ([3], [3])


def test_the_outputs_of_the_network_are_whole():
    found = widths("MultiOutput", {"stem.0": [0], "middle.0": [1]})
    assert found["last.1", "out"][1] == list(range(6))


def test_a_view_is_a_whole_box():
    """Channels 1 and 6 of 2 x 4 are in columns 1 and 2, so all four corners are there."""
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Unflatten(1, (2, 4)), nn.Flatten(1, 2), nn.Conv2d(8, 2, 1))
    graph = trace(model, torch.rand(1, 3, 4, 4))
    layout = solve_layout(graph, graph.flow(Plan({"0": [1, 6]}).masks(graph)))
    (box,) = (v for v in graph.grids if len(v.shape) == 5)
    assert (layout.indices(box, 1), layout.indices(box, 2)) == ([0, 1], [1, 2])
    edges = {(n.module, n.side): n for n in graph.nodes if isinstance(n, Boundary)}
    assert layout.indices(edges["0", "out"].x, 1) == [1, 6]
    assert layout.indices(edges["0", "out"].out, 1) == [1, 2, 5, 6]
    assert layout.indices(edges["3", "in"].out, 1) == [1, 6]


def test_pinned_operators_get_everything():
    graph = trace(*ZOO["Plain"]())
    flow = graph.flow(graph.settle(Plan({"0": [1]}).masks(graph)))
    pool = next(op for op in graph.trace.ops if "max_pool" in op.name)
    layout = solve_layout(graph, flow, FixedSizes({pool.position}))
    (node,) = (n for n in graph.nodes if n.op.position == pool.position)
    assert layout.sizes(node.inputs[0])[1] == 8
    edges = {(n.module, n.side): n for n in graph.nodes if isinstance(n, Boundary)}
    assert layout.indices(edges["0", "out"].x, 1) == [1], "the filters are gone all the same"


def test_nothing_has_width_zero():
    found = widths("EmptyBranch", {"left.0": [], "right.0": []})
    assert all(before and after for before, after in found.values())


# -- what is computed only where something changed -------------------------------------------------------------


def random_masks(graph, seed):
    rng = np.random.default_rng(seed)
    share = rng.uniform(0, 1.2, len(graph.layers))
    return {n: rng.random(lr.filters) < p for p, (n, lr) in zip(share, graph.layers.items(), strict=True)}


@pytest.mark.parametrize("name", ZOO)
def test_what_is_alive_does_not_depend_on_what_was_asked_before(name):
    graph = traced(name)
    for seed in range(4):
        keep = random_masks(graph, seed)
        if seed == 2:  # nearly the same as before, and some layers are not named
            keep = dict(list(random_masks(graph, 1).items())[1:])
        now, anew = graph.flow(keep), dataclasses.replace(graph).flow(keep)
        assert now.reached == anew.reached
        for value, mask in anew.alive.items():
            np.testing.assert_array_equal(now.alive[value], mask)


def test_a_mask_may_be_written_to_after_it_was_asked_about():
    graph = trace(*ZOO["Plain"]())
    keep = graph.all_filters()
    graph.settle(keep)
    keep["0"][2:] = False
    assert graph.settle(keep)["0"].sum() == 2
