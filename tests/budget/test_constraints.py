"""Limits by layer: what each may lose at most, by patterns of names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from runs import Small, small_recipe, small_run
from sbf_pruner.budget import Budget, Constraints, ResolvedConstraints, Selector, WidthLimits, at_least, resolve
from sbf_pruner.compare import FrontierOptions, read_scored, run_frontier
from sbf_pruner.criteria import METHODS, rank_by
from sbf_pruner.errors import PruningError
from sbf_pruner.graph import ChannelGraph, trace
from sbf_pruner.measurement import constraints_for, synthetic_scores
from sbf_pruner.models import resnet20
from sbf_pruner.pruner import Pruner
from sbf_pruner.surgery import extract
from sbf_pruner.training import build_pruner, load_recipe
from zoo import ZOO

IMAGE = torch.zeros(1, 3, 16, 16)


@pytest.fixture(scope="module")
def graph() -> ChannelGraph:
    return trace(resnet20(), IMAGE)


def scores(graph: ChannelGraph, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {name: rng.random(layer.filters) for name, layer in graph.layers.items()}


def widths(masks: dict[str, Any]) -> dict[str, int]:
    return {name: int(mask.sum()) for name, mask in masks.items()}


# -- what is asked of a layer ----------------------------------------------------------------------------------


def test_the_last_pattern_that_matches_counts_and_the_rest_has_the_default():
    tables = {"min_filters": {"layer1.*": 4, "*.conv2": 6}, "max_removed": {"*": 0.9, "stem": 0}, "round_to": 8}
    found = Constraints(**tables)
    assert found.for_layer("layer1.0.conv1") == WidthLimits(4, 0.9, 8)
    assert found.for_layer("layer1.0.conv2") == WidthLimits(6, 0.9, 8)
    assert found.for_layer("stem") == WidthLimits(0, 0, 8)
    empty = Constraints(min_filters={}, max_removed={}, round_to={})
    assert empty == Constraints() and empty.for_layer("stem") == WidthLimits()


def test_tables_that_say_the_same_for_all_do_what_numbers_do(graph):
    for number in ({"min_filters": 5}, {"max_removed": 0.6}, {"round_to": 4}, {"min_filters": 3, "round_to": 8}):
        table = {key: {"*": value} for key, value in number.items()}
        for couple, budget in (((), Budget(macs=0.5)), ("streams", Budget(params=0.6)), ((), None)):
            one, other = (
                Selector(graph, budget, resolve(Constraints(**asked, couple=couple), graph))
                .choose(scores(graph))
                .masks
                for asked in (number, table)
            )
            assert all(np.array_equal(one[name], other[name]) for name in graph.layers), (number, couple)


def test_guards_keep_no_callers_table_and_are_told_as_in_a_recipe():
    table = {"*": 0.9, "stem": 0.0}
    guards = Constraints(max_removed=table, round_to=4, couple="streams")
    table["*"] = 0.1
    assert guards.describe() == 'max_removed = {"*" = 0.9, "stem" = 0}, round_to = 4, couple = [\'streams\']'
    assert guards.limit_widths and not Constraints(min_filters={}).limit_widths


def test_coupled_layers_have_the_strictest_of_their_limits():
    settings = Constraints(min_filters={"a": 2, "c": 9}, max_removed={"b": 0.5}, round_to={"a": 4, "b": 6, "c": 5})
    asked = ResolvedConstraints(settings, groups=(("a", "b"),))
    assert asked.allowed("a") == asked.allowed("b") == WidthLimits(2, 0.5, 12)
    assert asked.allowed("c") == WidthLimits(9, 1.0, 5)


@pytest.mark.parametrize(
    ("asked", "found"),
    [(0, 1), (3, 3), ({"a": 4}, {"*": 1, "a": 4}), ({"a": 0, "?": 2}, {"a": 1, "?": 2}), ({"*": 0}, {"*": 1})],
)
def test_a_least_for_all_layers_beside_what_is_asked(asked, found):
    assert at_least(asked, 1, ["a", "b"]) == found
    if isinstance(found, dict):
        assert list(at_least(asked, 1, ["a", "b"])) == list(found), "in this order"


# -- landing ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "budget", [Budget(macs=0.2), Budget(params=0.15), Budget(macs=0.3, size=0.4), None], ids=str
)
def test_a_limit_of_some_layers_holds_exactly_while_others_are_cut_deeper(graph, budget):
    limits = {"*": 1.0, "layer1.*": 0.25, "layer1.2.conv1": 0.5}
    values = scores(graph) | {name: 0.1 * own for name, own in scores(graph).items() if name.startswith("layer1")}
    aim = Selector(graph, budget, resolve(Constraints(max_removed=limits), graph))
    masks = aim.choose(values).masks
    left = widths(graph.settle(masks))
    assert left == widths(masks) or budget is not None
    inside = {name: count for name, count in left.items() if name.startswith("layer1")}
    # Their scores are the lowest of all, so they keep just what they must.
    assert inside == {name: 8 if name == "layer1.2.conv1" else 12 for name in inside}
    if budget is not None:
        assert min(count / graph.layers[name].filters for name, count in left.items()) < 0.25
        assert aim.limits.hold(aim.count(masks))


@pytest.mark.parametrize("couple", [(), "streams", "blocks"])
@pytest.mark.parametrize(
    "asked",
    [
        {"min_filters": {"layer2.*": 9}},
        {"max_removed": {"conv1": 0.0}, "min_filters": {"layer3.1.conv1": 1}},
        {"round_to": {"*": 8, "layer3.*": 3}},
        {"min_filters": {"*": 1, "layer1.0.*": 5}, "max_removed": {"layer3.*": 0.9}, "round_to": {"layer2.*": 4}},
    ],
    ids=str,
)
def test_limits_by_layer_hold_for_what_is_left(graph, asked, couple):
    guards = resolve(Constraints(**asked, couple=couple), graph)
    for budget in (Budget(macs=0.35), None):
        aim = Selector(graph, budget, guards)
        for masks in (aim.choose(scores(graph)).masks, aim.least()):
            for name, mask in graph.settle(masks).items():
                assert not guards.allowed(name).lacking(int(mask.sum()), mask.size), name
            for group in guards.groups:
                assert len({masks[name].tobytes() for name in group}) == 1


def test_a_branch_is_opened_for_the_layer_that_must_keep_filters_and_no_further(graph):
    aim = Selector(graph, None, Constraints(min_filters={"layer2.1.conv1": 5, "layer3.2.conv2": 3}))
    left = widths(graph.settle(aim.least()))
    assert {name: count for name, count in left.items() if count} == {
        "conv1": 1,
        "layer2.1.conv1": 5,
        "layer2.1.conv2": 1,
        "layer3.2.conv1": 1,
        "layer3.2.conv2": 3,
    }


def test_of_several_layers_that_could_read_it_the_best_one_is_opened():
    class Ways(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.stem = nn.Conv2d(3, 6, 1), nn.Conv2d(3, 4, 1)
            self.left, self.right, self.head = nn.Conv2d(6, 4, 1), nn.Conv2d(6, 4, 1), nn.Conv2d(4, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            inner = self.first(x).relu()
            return self.head((self.stem(x) + self.left(inner) + self.right(inner)).relu())

    aim = Selector(trace(Ways(), IMAGE), None, Constraints(min_filters={"first": 3}))
    values = {"first": np.zeros(6), "stem": np.full(4, 0.9), "left": np.full(4, 0.2), "right": np.full(4, 0.3)}
    assert widths(aim.choose(values).masks) == {"first": 3, "stem": 4, "left": 0, "right": 1}


@pytest.mark.parametrize("name", ["Residual", "Concat", "Grouped", "Shuffle", "Split", "SqueezeExcite", "Unet"])
def test_limits_by_layer_hold_in_any_network(name):
    graph = trace(*ZOO[name]())
    whole = graph.settle({})
    for seed, layer in enumerate(graph.layers):
        guards = resolve(Constraints(max_removed={layer: 0.5}), graph)
        for masks in (
            Selector(graph, None, guards).choose(scores(graph, seed), 0.9).masks,
            Selector(graph, None, guards).least(),
        ):
            left = int(graph.settle(masks)[layer].sum())
            assert not guards.allowed(layer).lacking(left, int(whole[layer].sum())), layer


def test_the_smallest_network_and_its_refusal_know_the_limits(graph):
    guards = Constraints(max_removed={"layer1.*": 0.0})
    told = r'or loosen the constraints \(max_removed = {"layer1.\*" = 0}\), which contradict it'
    with pytest.raises(PruningError, match=told) as caught:
        Selector(graph, Budget(macs=0.1), guards)
    smallest = float(
        re.search(r"smallest possible network has ([\d,]+) macs", str(caught.value))[1].replace(",", "")
    )
    aim = Selector(graph, Budget(macs=smallest), guards)
    for seed in range(2):
        landing = aim.choose(scores(graph, seed))
        assert landing.usage["macs"] == smallest
        assert all(landing.masks[name].all() for name in graph.layers if name.startswith("layer1"))


@pytest.mark.parametrize("way", ["filters", "streams", "blocks"])
def test_they_hold_in_every_way_that_a_time_can_be_come_to(graph, way):
    guards = constraints_for(graph, Constraints(round_to={"layer3.*": 8}, min_filters={"layer1.0.conv1": 7}), way)
    assert guards is not None
    left = graph.settle(Selector(graph, Budget(macs=0.4), guards).choose(synthetic_scores(graph, guards)).masks)
    assert left["layer1.0.conv1"].sum() >= 7
    assert all(mask.sum() % 8 == 0 for name, mask in left.items() if name.startswith("layer3"))


# -- wherever filters are chosen -------------------------------------------------------------------------------


def test_a_pruner_extracts_what_its_limits_allow():
    model = resnet20()
    pruner = Pruner(
        *(model, IMAGE),
        budget=Budget(macs=0.3),
        constraints=Constraints(max_removed={"*": 0.9, "conv1": 0.0}, round_to={"layer3.*": 8}),
    )
    with torch.no_grad():
        pruner.gates.soft.copy_(torch.rand(len(pruner.gates.soft), generator=torch.Generator().manual_seed(0)))
    pruner.land()
    kept = pruner.plan()
    for name, width in kept.widths().items():
        assert width >= 0.1 * pruner.graph.layers[name].filters
        assert width % 8 == 0 or not name.startswith("layer3")
    small = extract(pruner.detach(), IMAGE, kept, pruner.graph)
    assert small.conv1.out_channels == 16


@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if not method.learned])
def test_every_method_keeps_to_them(method):
    torch.manual_seed(0)
    images = torch.rand(8, 1, 8, 8)
    pruner = Pruner(
        Small(),
        images[:2],
        budget=Budget(macs=0.4),
        constraints=Constraints(max_removed={"*": 1.0, "blocks.0.*": 0.25}),
    )
    rank_by(pruner, method, [(images, torch.arange(8) % 4)])
    kept = pruner.plan().widths()
    assert min(kept["blocks.0.conv1"], kept["blocks.0.conv2"]) >= 6 > min(kept.values())


def test_a_run_its_recipe_and_its_frontier_keep_to_them(tmp_path: Path):
    asked = {"max_removed": {"*": 1.0, "blocks.1.*": 0.25}, "round_to": {"stem": 4}}
    model = {"name": "runs:Small", "num_classes": 4, "in_channels": 1}
    short = {"warmup": 1, "cycles": 1, "score": 1, "weights": 1, "finetune": 1}
    changes = {
        "model": model,
        "constraints": asked,
        "phases": short,
        "budget": {"macs": 0.5},
        "dense_control": False,
    }
    result = small_run(tmp_path / "run", **changes)
    kept = result.plan.widths()
    assert min(kept["blocks.1.conv1"], kept["blocks.1.conv2"]) >= 6 and kept["stem"] % 4 == 0
    written = load_recipe(tmp_path / "run" / "recipe.toml")
    assert written == small_recipe(**changes)
    assert written.constraints.to_dict() == small_recipe(**changes).constraints.to_dict()
    scored = read_scored(tmp_path / "run", trust=True)
    aim = scored.networks.pruner.selector
    assert aim.constraints.settings.max_removed == asked["max_removed"]
    assert aim.constraints.settings.round_to == asked["round_to"]
    found = run_frontier(tmp_path / "run", FrontierOptions(at=("0.45", "0.05"), trust=True))
    assert [point["reached"] for point in found["points"]] == [True, False]
    assert found["smallest"]["filters"] == 6 + 6 + 4, "of the branch and the stem; the other branch is gone"


def test_where_the_models_code_asks_for_a_filter_everywhere_limits_stay(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sbf_pruner.training.networks.try_cuts", lambda *_: "it would fail")
    recipe = small_recipe(constraints={"min_filters": {"blocks.0.*": 3}}, budget={"macs": 0.5})
    pruner, _ = build_pruner(Small(), torch.rand(2, 1, 8, 8), recipe, 64)
    asked = {name: pruner.selector.constraints.allowed(name).min_filters for name in pruner.graph.layers}
    assert asked == {name: 3 if name.startswith("blocks.0") else 1 for name in asked} and len(asked) == 5


def test_a_pattern_for_no_layer_is_refused_before_anything_is_tried(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sbf_pruner.training.networks.try_cuts", None)
    recipe = small_recipe(constraints={"min_filters": {"block.0.*": 3}})
    with pytest.raises(PruningError, match=r"^min_filters: no layer is called 'block\.0\.\*'; "):
        build_pruner(Small(), torch.rand(2, 1, 8, 8), recipe, 64)


def test_streams_are_spelled_as_a_word_or_as_a_list_of_one(graph: ChannelGraph) -> None:
    for couple in ("streams", "blocks"):
        assert resolve(Constraints(couple=couple), graph) == resolve(Constraints(couple=[couple]), graph)
        assert load_recipe("digits", [f"constraints.couple={couple}"]).constraints.couple == (couple,)


class Trunk(nn.Module):
    """A residual branch, and a convolution in groups further on in the trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3)
        self.a, self.b = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.down, self.depthwise = nn.Conv2d(16, 24, 3), nn.Conv2d(24, 24, 3, groups=24)
        self.grouped = nn.Conv2d(24, 24, 3, groups=4)
        self.head = nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        x = torch.relu(x + self.b(torch.relu(self.a(x))))
        return self.head(torch.relu(self.grouped(self.depthwise(torch.relu(self.down(x))))).mean((2, 3)))


def test_round_widths_of_a_convolution_in_groups_do_not_widen_what_it_does_not_read() -> None:
    """All that was upstream of it got a filter more, and so a width more."""
    found = trace(Trunk(), IMAGE)
    aim = Selector(found, Budget(macs=0.3), Constraints(round_to=8))
    least = {name: int(mask.sum()) for name, mask in found.settled(aim.smallest)[0].items()}
    assert least["a"] == least["b"] == 0 and least["stem"] == 8
    landed = found.settled(aim.choose(scores(found)).masks)[0]
    assert all(int(mask.sum()) % 8 == 0 for mask in landed.values())
