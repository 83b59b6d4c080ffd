"""What a network's time is reckoned by: no test here reads a clock."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from torch import nn

from clocks import clock_of, work
from sbf_pruner.budget import (
    Budget,
    Constraints,
    Limits,
    ResolvedConstraints,
    Search,
    Selector,
    coupled,
    whole_branches,
)
from sbf_pruner.errors import PruningError
from sbf_pruner.graph import lay_out, network_cost, trace
from sbf_pruner.measurement import (
    LayerSpec,
    Predictor,
    Table,
    choose_coupling,
    constraints_for,
    fit,
    measured_widths,
    nnls,
    read_model,
    round_up,
    synthetic_scores,
)
from sbf_pruner.models import resnet20
from sbf_pruner.pruner import Pruner

IMAGE = torch.zeros(1, 3, 16, 16)


@pytest.fixture(scope="module")
def graph():
    return trace(resnet20(), IMAGE)


@pytest.fixture(scope="module")
def smooth(graph):
    """A clock on which a layer takes as long as it has multiply-accumulates."""
    return clock_of(graph)


@pytest.fixture(scope="module")
def blockwise(graph):
    """A clock that computes filters and inputs in blocks of 16, as ONNX Runtime does here."""
    return clock_of(graph, block=16)


# -- sites and tables ----------------------------------------------------------------------------------------


def test_a_site_is_all_that_time_depends_on_but_for_the_widths():
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=8),
        nn.ConvTranspose2d(8, 4, 2, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 2),
    )
    sites = [layer.site for layer in Predictor(trace(net, torch.zeros(2, 3, 16, 16)), Table(), 1).operators.layers]
    assert sites == [
        LayerSpec("conv", (3, 3), (2, 2), (1, 1), (1, 1), 1, (16, 16)),
        LayerSpec("conv", (3, 3), (1, 1), (2, 2), (2, 2), 0, (8, 8)),
        LayerSpec("transposed", (2, 2), (2, 2), (0, 0), (1, 1), 1, (8, 8)),
        LayerSpec("linear", size=(1,)),
    ]
    assert [LayerSpec.parse(str(site)) for site in sites] == sites


def test_narrow_layers_are_measured_at_every_step_and_wide_ones_sparsely():
    assert measured_widths(64, True) == [4, 8, 12, 16, 24, 32, 40, 48, 56, 64]
    assert measured_widths(512, True) == [64, 128, 256, 384, 512]
    assert measured_widths(512, False) == [512]
    assert measured_widths(24, True, multiple=6) == [6, 12, 18, 24]


def test_a_table_interpolates_between_inputs_and_steps_with_filters():
    site = LayerSpec("linear", size=(1,))
    table = Table({site: {(i, o): i * o * 1.0 for i in (16, 32) for o in (16, 24, 32)}})
    assert table.seconds(site, 20, 16) == 20 * 16
    assert table.seconds(site, 16, 17) == table.seconds(site, 16, 24) == 16 * 24
    assert table.seconds(site, 2, 16) == 16 * 16  # a layer is not free because it is thin
    steps = Table(table.points, blocks=True)
    assert steps.seconds(site, 17, 16) == 24 * 16


def test_a_measurement_that_was_disturbed_never_makes_a_narrow_layer_slower_than_a_wide_one():
    site = LayerSpec("linear", size=(1,))
    points = {(i, o): i * o * 1.0 for i in (8, 16, 24) for o in (8, 16, 24)}
    points[8, 16] = 1e6
    table = Table({site: points})
    assert table.seconds(site, 8, 16) == 8 * 24  # as the next wider one


def test_a_depthwise_layer_is_measured_along_one_line():
    net = nn.Sequential(nn.Conv2d(3, 16, 1), nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.Conv2d(16, 4, 1))
    clock = clock_of(trace(net, IMAGE))
    (site,) = (site for site in clock.table.points if site.groups == 0)
    assert list(clock.table.points[site]) == [(4, 4), (8, 8), (12, 12), (16, 16)]
    assert clock.table.seconds(site, 8, 8) == clock.table.points[site][8, 8]


def test_a_table_of_one_network_has_no_gaps_from_another():
    site = LayerSpec("linear", size=(1,))
    table = Table({site: {(8, 8): 1.0, (16, 8): 2.0, (1, 4): 9.0}})
    wanted = {site: [(8, 8), (16, 8)]}
    assert table.missing(wanted) == {} and table.missing({site: [(8, 8), (2, 2)]}) == {site: [(2, 2)]}
    assert table.of(wanted).seconds(site, 12, 8) == 1.5


# -- coefficients --------------------------------------------------------------------------------------------


def test_coefficients_are_found_again_in_spite_of_a_hiccup():
    rng = np.random.default_rng(0)
    rows = [{"a": float(a), "b": float(b)} for a, b in rng.uniform(1, 5, (12, 2))]
    seconds = [2 * row["a"] + 0.5 * row["b"] for row in rows]
    seconds[3] *= 1.8
    found = fit(rows, seconds, ["a", "b"])
    assert found["a"] == pytest.approx(2, rel=0.02) and found["b"] == pytest.approx(0.5, rel=0.05)


def test_no_coefficient_is_negative_and_none_would_do_better():
    rng = np.random.default_rng(1)
    for _ in range(20):
        matrix, wanted = rng.normal(size=(9, 4)), rng.normal(size=9)
        found = nnls(matrix, wanted)
        assert (found >= 0).all()
        slope = matrix.T @ (wanted - matrix @ found)
        assert (slope <= 1e-6).all()  # more of any coefficient makes it worse,
        assert np.abs(slope[found > 0]).max(initial=0) < 1e-6  # and of those above zero less does too


def test_what_rows_say_nothing_about_stays_as_expected():
    found = fit([{"a": 1.0}], [2.0], ["a", "b"], expected={"a": 2.0, "b": 0.0})
    assert found == {"a": pytest.approx(2.0), "b": 0.0}


# -- foretelling ---------------------------------------------------------------------------------------------


def test_with_a_table_of_macs_the_dense_network_takes_its_macs(graph, smooth):
    assert smooth.predictor.seconds(lay_out(graph, {})) == pytest.approx(network_cost(graph, {}).macs)


def test_a_branch_that_is_gone_takes_no_time(graph, smooth):
    layers = ("layer1.1.conv1", "layer1.1.conv2")
    for layer in layers:
        left = smooth.predictor.seconds(lay_out(graph, {layer: np.zeros(graph.layers[layer].filters, bool)}))
        gone = 2 * 16 * 16 * 9 * 16 * 16
        assert left == pytest.approx(network_cost(graph, {}).macs - gone)


def test_a_branch_with_fewer_filters_than_its_stream_saves_nothing_unless_it_is_moved(graph):
    keep = {"layer1.1.conv2": np.arange(16) < 8}
    laid = lay_out(graph, keep)
    clock = clock_of(graph)
    terms = clock.predictor.terms_of(laid).terms
    whole = network_cost(graph, {}).macs
    assert terms["zeros"]["layers"] == pytest.approx(whole) and terms["zeros"]["moved"] == 0
    assert terms["moves"]["layers"] == pytest.approx(whole - 16 * 8 * 9 * 256)
    assert terms["moves"]["moved"] == 16 * 256
    clock.predictor.coefficients = {"layers": 1.0, "moved": 1e6}
    assert clock.predictor.seconds(laid) == pytest.approx(whole)  # then rather zeros


def test_a_coupled_stream_makes_its_readers_narrower(graph, smooth):
    (group, *_) = coupled(graph, ["streams"])
    keep = {name: np.arange(16) < 8 for name in group}
    laid = lay_out(graph, keep)
    widths = {layer.node.layer: layer.widths(laid) for layer in smooth.predictor.operators.layers}
    assert widths["layer1.2.conv1"] == (8, 16, 16) and widths["layer1.2.conv2"] == (16, 8, 8)
    assert widths["layer2.0.conv1"][0] == 8  # through the shortcut's padding too


def test_the_price_of_a_filter_is_its_share_of_the_time_that_goes_with_its_layer(graph, smooth):
    keep = graph.all_filters()
    prices = smooth.prices(lay_out(graph, {}), keep)
    gone = 2 * 16 * 16 * 9 * 256 / network_cost(graph, {}).macs
    assert prices["layer1.1.conv1"] == pytest.approx(gone / 16) == prices["layer1.1.conv2"]
    keep["layer1.1.conv1"] = np.arange(16) < 8
    fewer = smooth.prices(lay_out(graph, keep), keep)
    assert fewer["layer1.1.conv1"] == pytest.approx(gone / 2 / 8)


def test_a_filter_that_costs_nothing_by_itself_still_has_a_price(graph, blockwise):
    keep = graph.all_filters()
    one_less = {**keep, "layer1.1.conv1": np.arange(16) > 0}
    assert blockwise.ratio(one_less) == 1.0
    assert blockwise.prices(lay_out(graph, {}), keep)["layer1.1.conv1"] > 0


# -- landing -------------------------------------------------------------------------------------------------


def landed(graph, clock, share, way):
    """The filters that made-up scores keep in a part of the dense network's time."""
    guards = constraints_for(graph, Constraints(), way)
    return Selector(graph, Budget(latency=share), guards, clock).choose(synthetic_scores(graph, guards)).masks


@pytest.mark.parametrize("share", [0.7, 0.3])
@pytest.mark.parametrize("way", ["filters", "streams", "blocks"])
def test_landing_comes_to_the_time_asked_for(graph, smooth, way, share):
    masks = landed(graph, smooth, share, way)
    assert share - 0.012 <= smooth.ratio(graph.settle(masks)) <= share


def test_a_layer_is_widened_as_long_as_there_is_time():
    # One filter of "big" takes 50, a block of 16 of "small" takes 1: the second big one does not fit, and what is
    # left over is for the small ones, block after block.
    search = Search(
        {"big": np.array([0.9, 0.8]), "small": np.array([1.0, *np.linspace(0.1, 0.2, 63)])},
        Limits({"latency": 53.0}, {"latency": 104.0}),
        lambda masks: {"latency": 50.0 * masks["big"].sum() + -(-masks["small"].sum() // 16)},
    )
    landing = search.best()
    assert [int(mask.sum()) for mask in landing.masks.values()] == [1, 48]


def test_a_time_and_a_size_hold_together(graph, smooth):
    aim = Selector(graph, Budget(latency=0.5, params=0.4), latency_model=smooth)
    usage = aim.choose(synthetic_scores(graph, ResolvedConstraints())).usage
    room = aim.limits.room(usage)
    assert all(left >= 0 for left in room.values()) and min(room.values()) <= 0.01
    assert aim.limits.told("latency", usage).endswith("%)")


def test_time_is_only_counted_where_it_is_asked_for(graph, smooth):
    assert "latency" not in Selector(graph, Budget(macs=0.5), latency_model=smooth).count({})
    assert Selector(graph, Budget(latency=0.5), latency_model=smooth).count({})["latency"] == pytest.approx(
        1e6 * smooth.dense_seconds
    )


def test_whole_branches_stay_or_go_but_for_one(graph, smooth):
    masks = landed(graph, smooth, 0.5, "blocks")
    branches = whole_branches(graph)
    assert len(branches) == 9
    counts = [sum(int(masks[name].sum()) for name in branch) for branch in branches]
    sizes = [sum(masks[name].size for name in branch) for branch in branches]
    partial = [c for c, s in zip(counts, sizes, strict=True) if 0 < c < s]
    assert len(partial) <= 1 and counts.count(0) >= 3


def test_in_blocks_of_sixteen_whole_branches_keep_the_most_and_the_way_says_so(graph, blockwise):
    chosen = choose_coupling(graph, blockwise, Budget(latency=0.4), Constraints())
    assert chosen.way == "blocks"
    assert chosen.told().startswith("way: blocks, which keeps") and "filters" in chosen.told()
    shares = {way: share for way, share in chosen.macs.items() if share is not None}
    assert max(shares, key=shares.__getitem__) == "blocks"


def test_a_way_that_cannot_reach_the_target_is_left_out(graph, blockwise):
    chosen = choose_coupling(graph, blockwise, Budget(latency=0.06), Constraints(min_filters=1))
    assert chosen.macs["blocks"] is None or chosen.macs["filters"] is None
    assert "cannot reach the target" in chosen.told()


def test_a_plain_network_has_but_one_way():
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3))
    graph = trace(net, IMAGE)
    assert (
        constraints_for(graph, Constraints(), "streams") is None
        and constraints_for(graph, Constraints(), "blocks") is None
    )
    assert list(choose_coupling(graph, clock_of(graph), Budget(latency=0.5), Constraints()).macs) == ["filters"]


# -- files ---------------------------------------------------------------------------------------------------


def test_a_file_gives_the_same_clock_again(graph, blockwise, tmp_path):
    blockwise.write(tmp_path / "table.json")
    again = read_model(tmp_path / "table.json", graph)
    keep = {"layer2.1.conv1": np.arange(32) < 9}
    assert again.ratio(keep) == blockwise.ratio(keep) and again.conditions == blockwise.conditions
    assert again.to_dict() == blockwise.to_dict()
    assert json.loads((tmp_path / "table.json").read_text())["format"] == "sbf-pruner latency 1"


def test_a_pruner_takes_the_file(graph, smooth, tmp_path):
    smooth.write(tmp_path / "table.json")
    net = resnet20()
    pruner = Pruner(net, IMAGE, budget=Budget(latency=0.5), clock=tmp_path / "table.json")
    pruner.land()
    kept = {name: np.asarray(mask) for name, mask in pruner.plan().masks(pruner.graph).items()}
    assert smooth.ratio(kept) <= 0.5


def first_layer(held):
    """The widths and times of the first layer of a written table."""
    return next(iter(held["table"].values()))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda held: held.update(network="0"), "was measured for another network, or other images"),
        (lambda held: held.update(format="sbf-pruner plan 1"), "was not written by `sbf latency`"),
        (lambda held: held.pop("table"), "was not written by `sbf latency`"),
        (lambda held: held.update(table={"a conv": []}), "was not written by `sbf latency`"),
        (lambda held: first_layer(held).clear(), "was not written by `sbf latency`"),
        (lambda held: first_layer(held)[0].__setitem__(0, math.inf), "was not written by `sbf latency`"),
        (lambda held: first_layer(held)[0].__setitem__(2, math.nan), "was not written by `sbf latency`"),
        (lambda held: first_layer(held)[0].__setitem__(2, -1.0), "was not written by `sbf latency`"),
        (lambda held: held.update(dense_seconds=0), "was not written by `sbf latency`"),
        (lambda held: held.update(coefficients={}), "was not written by `sbf latency`"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(graph, smooth, tmp_path, change, said):
    held = smooth.to_dict()
    change(held)
    (tmp_path / "table.json").write_text(json.dumps(held))
    with pytest.raises(PruningError, match=said):
        read_model(tmp_path / "table.json", graph)


def test_work_in_blocks_is_what_the_tests_think_it_is():
    site = LayerSpec("conv", (3, 3), (1, 1), (1, 1), (1, 1), 1, (8, 8))
    assert work(site, 3, 5, 16) == work(site, 16, 16, 1)
    assert round_up(17, 16) == 32 and math.isclose(work(site, 2, 4, 1), 2 * 4 * 9 * 64)
