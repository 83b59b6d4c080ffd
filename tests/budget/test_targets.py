"""A size asked for is a size delivered."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from runs import resnet8
from sbf_pruner import Scores, load, save
from sbf_pruner.budget import (
    RANGE,
    TOLERANCE,
    Budget,
    Constraints,
    Limits,
    ResolvedConstraints,
    ResourceWeights,
    Search,
    Selector,
    Steering,
    coupled,
    filter_prices,
    resolve,
    stream_links,
)
from sbf_pruner.errors import PruningError
from sbf_pruner.graph import network_cost, residual_blocks, trace
from sbf_pruner.measurement import measure
from sbf_pruner.models import resnet20
from sbf_pruner.plan import Plan
from sbf_pruner.pruner import Pruner
from sbf_pruner.surgery import extract
from sbf_pruner.training import fit, load_recipe
from shares import mostly_slow
from zoo import ZOO

IMAGE = torch.zeros(1, 3, 16, 16)


@pytest.fixture(scope="module")
def graph():
    return trace(resnet20(), IMAGE)


def scores(graph, seed=0):
    rng = np.random.default_rng(seed)
    return {name: rng.random(layer.filters) for name, layer in graph.layers.items()}


# -- landing -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [Budget(macs=0.7), Budget(macs=0.15), Budget(params=0.5), Budget(size=0.3)])
def test_landing_meets_the_budget_and_wastes_nothing(graph, budget):
    aim = Selector(graph, budget)
    landing = aim.choose(scores(graph))
    assert landing.usage == aim.count(landing.masks)
    (room,) = aim.limits.room(landing.usage).values()
    assert 0 <= room <= 0.01


def test_of_two_limits_both_are_used_up(graph):
    # By score alone one of them would be reached long before the other.
    dense = network_cost(graph, {})
    values = scores(graph)
    alone = Selector(graph, Budget(params=0.25)).choose(values).usage
    asked = Budget(params=0.25, macs=alone["macs"] / dense.macs + 0.12)
    aim = Selector(graph, asked)
    room = aim.limits.room(aim.choose(values).usage)
    assert all(0 <= part <= 0.02 for part in room.values()), room


def test_landing_takes_the_highest_scores(graph):
    values = scores(graph)
    masks = Selector(graph, Budget(macs=0.5)).choose(values).masks
    kept = np.concatenate([values[n][m] for n, m in masks.items()])
    dropped = np.concatenate([values[n][~m] for n, m in masks.items()])
    assert np.quantile(kept, 0.02) > np.quantile(dropped, 0.98), "but for a few that fitted into the rest"


def test_the_level_separates_what_stays_from_what_goes(graph):
    values = scores(graph)
    landing = Selector(graph, Budget(macs=0.5)).choose(values)
    above = np.concatenate([values[n] > landing.cutoff for n in values])
    kept = np.concatenate([landing.masks[n] for n in values])
    assert (above != kept).mean() < 0.02


def test_where_whole_steps_are_too_large_single_filters_fill_the_rest():
    # One filter of "big" costs 50, one of "small" 1: after the big ones that fit, small ones are added.
    prices_ = {"big": 50.0, "small": 1.0}
    search = Search(
        {"big": np.array([0.9, 0.8, 0.7]), "small": np.array([0.1, 0.3, 0.2])},
        Limits({"macs": 145.0}, {"macs": 153.0}),
        lambda masks: {"macs": sum(prices_[n] * m.sum() for n, m in masks.items())},
    )
    landing = search.best()
    assert landing.usage["macs"] == 103
    assert landing.masks["small"].all()


def test_what_follows_a_filter_too_large_is_not_counted_one_by_one():
    counted = []

    def count(masks):
        counted.append(masks)
        return {"macs": 500.0 * masks["big"].sum() + masks["small"].sum()}

    values = {"big": np.array([0.9]), "small": np.linspace(0.8, 0.1, 1000)}
    landing = Search(values, Limits({"macs": 490.0}, {"macs": 1500.0}), count).best()
    assert landing.usage["macs"] == 475  # the first within a point of the limit
    assert len(counted) < 50


@pytest.mark.parametrize("seed", range(12))
def test_filters_taken_many_at_a_time_are_those_that_one_by_one_would_fit(seed):
    """A layer's first filter brings a whole branch, of any size, with it; the others cost little."""
    rng = np.random.default_rng(seed)
    values = {str(n): rng.random(40) * rng.uniform(0.2, 1) for n in range(12)}
    branch, each = rng.choice([0, 40, 150], 12), rng.uniform(0.1, 4, 12)

    def count(masks):
        kept = [int(mask.sum()) for mask in masks.values()]
        return {"macs": sum(b * (k > 0) + e * k for b, e, k in zip(branch, each, kept, strict=True))}

    order, whole = np.argsort(-np.concatenate(list(values.values()))), count({n: np.ones(40) for n in values})
    limits = Limits({"macs": 0.4 * whole["macs"]}, whole)
    search = Search(values, limits, count)
    landing = search.best()

    wanted = np.zeros(len(order), bool)
    for fitting in range(len(order)):  # what costs more with every filter is searched through from below
        wanted[order[fitting]] = True
        if not limits.hold(count(search.masks(wanted))):
            wanted[order[fitting]] = False
            break
    for filter_ in order[fitting:]:
        if min(limits.room(count(search.masks(wanted))).values()) <= TOLERANCE:
            break
        wanted[filter_] = True
        wanted[filter_] = limits.hold(count(search.masks(wanted)))
    np.testing.assert_array_equal(search.flat(landing.masks), wanted)


class Branches(nn.Module):
    """A stream with residual branches, most of what it costs."""

    def __init__(self, width=16, depth=2):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.branches = nn.ModuleList(
            nn.Sequential(*(m for _ in range(depth) for m in (nn.ReLU(), nn.Conv2d(width, width, 3, padding=1))))
            for _ in range(3)
        )
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2)
        self.head = nn.Linear(2 * width, 10)

    def forward(self, x):
        x = self.stem(x)
        for branch in self.branches:
            x = x + branch(x)
        return self.head(self.down(x.relu()).mean((2, 3)))


def with_closed_branches(graph, seed=0):
    """Scores as those of blocks make them: what a branch adds to the stream scores lower than all the rest."""
    last = {block.layer for block in residual_blocks(graph)}
    return {name: values * 0.1 if name in last else 0.5 + values for name, values in scores(graph, seed).items()}


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("couple", [(), "blocks"])
@pytest.mark.parametrize("asked", [{"macs": 0.2}, {"macs": 0.45}, {"params": 0.5}, {"macs": 0.2, "params": 0.6}])
def test_a_closed_branch_comes_back_in_part_where_the_whole_of_it_does_not_fit(depth, couple, asked):
    graph = trace(Branches(depth=depth), IMAGE)
    guards = resolve(Constraints(couple=couple), graph)
    for seed in range(2):
        values = with_closed_branches(graph, seed)
        aim = Selector(graph, Budget(**asked), guards)
        landing = aim.choose(values)
        assert 0 <= min(aim.limits.room(landing.usage).values()) <= TOLERANCE
        again = aim.choose(values)
        assert all(np.array_equal(mask, again.masks[name]) for name, mask in landing.masks.items())
        for name, mask in graph.settle(landing.masks).items():
            dropped = values[name][~landing.masks[name]]
            assert not mask.any() or values[name][mask].min() > dropped.max(initial=0), "its best ones"


@pytest.mark.parametrize(
    "guards", [Constraints(round_to=4), Constraints(min_filters=3), Constraints(max_removed=0.8)]
)
@pytest.mark.parametrize("seed", range(2))
def test_branches_that_come_back_in_part_are_guarded(guards, seed):
    graph = trace(Branches(), IMAGE)
    aim = Selector(graph, Budget(macs=0.2), guards)
    landing = aim.choose(with_closed_branches(graph, seed))
    assert 0 <= aim.limits.room(landing.usage)["macs"] <= 2 * TOLERANCE  # round widths go in larger steps
    for name, mask in graph.settle(landing.masks).items():
        assert not aim.constraints.allowed(name).lacking(int(mask.sum()), mask.size)


def test_layers_that_are_woken_together_are_woken_in_turns():
    """A way of three layers: two of them score high and are chosen, but closed by the third.  By score alone all of
    the one would come before any of the other, and no part of the way would fit."""

    def living(masks):
        open_ = all(mask.any() for mask in masks.values())
        return {name: mask & open_ for name, mask in masks.items()}

    def count(masks):
        a, b, c = (int(mask.sum()) for mask in living(masks).values())
        return {"macs": 10.0 * a + a * b + b * c}

    ends = {"a": np.linspace(3, 2, 20), "b": np.linspace(1.9, 1, 20), "c": np.linspace(0.2, 0.1, 20)}
    whole = count({name: np.ones(20, bool) for name in ends})
    landing = Search(ends, Limits({"macs": 180.0}, whole), count, living=living).best()
    assert 180 - TOLERANCE * whole["macs"] <= landing.usage["macs"] <= 180
    kept = {name: int(mask.sum()) for name, mask in landing.masks.items()}
    assert min(kept.values()) > 0 and kept["a"] > 5 and kept["b"] > 5
    for mask in landing.masks.values():
        assert mask[: mask.sum()].all(), "the best ones of each"


def test_a_pruner_that_closes_branches_lands_where_was_asked():
    model, images = Branches(), torch.rand(4, 3, 12, 12)
    pruner = Pruner(model, images, budget=Budget(macs=0.2), scores=Scores(blocks=True))
    with torch.no_grad():
        pruner.blocks.logits.fill_(-2.0)
    pruner.land()
    left = measure(pruner.extract(), images).macs / measure(pruner.detach(), images).macs
    assert 0.19 <= left <= 0.2


def test_a_budget_for_everything_keeps_everything(graph):
    plain = {name: np.ones(layer.filters) for name, layer in graph.layers.items()}
    assert Selector(graph, Budget()).limits is None
    assert all(mask.all() for mask in Selector(graph, Budget(macs=1e12)).choose(plain).masks.values())


def test_a_budget_that_cannot_be_met_names_the_smallest_network():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.Flatten(), nn.Linear(4 * 196, 2))
    told = r"the target of 18 params \(1\.0%\) cannot be met: the smallest possible network has 42\d params"
    with pytest.raises(PruningError, match=told):
        Pruner(net, IMAGE, budget=Budget(params=0.01))


@pytest.mark.parametrize("guards", [Constraints(), Constraints(round_to=4), Constraints(min_filters=2)])
def test_the_smallest_size_is_come_to_whatever_the_scores_say(graph, guards):
    # The best filters of layers that are added up are not the same ones, so together they make a wider stream.
    with pytest.raises(PruningError, match="the smallest possible network has") as caught:
        Selector(graph, Budget(macs=2), guards)
    smallest = float(
        re.search(r"smallest possible network has ([\d,]+) macs", str(caught.value))[1].replace(",", "")
    )
    aim = Selector(graph, Budget(macs=smallest), guards)
    for seed in range(3):
        assert aim.choose(scores(graph, seed)).usage["macs"] == smallest
    with pytest.raises(PruningError, match="cannot be met"):
        Selector(graph, Budget(macs=smallest - 1), guards)


@pytest.mark.parametrize("wide_first", [True, False])
def test_of_two_ways_through_the_cheap_one_is_the_smallest(wide_first):
    class Ways(nn.Module):
        def __init__(self):
            super().__init__()
            made = {"wide": lambda: nn.Conv2d(3, 4, 5, padding=2), "thin": lambda: nn.Conv2d(3, 4, 1)}
            for name in sorted(made, reverse=wide_first):
                setattr(self, name, made[name]())
            self.head = nn.Conv2d(4, 2, 1)

        def forward(self, x):
            first, second = (self.wide, self.thin) if wide_first else (self.thin, self.wide)
            return self.head((first(x) + second(x)).relu())

    aim = Selector(trace(Ways(), IMAGE), Budget(params=3 + 1 + 2 + 2))  # one filter of 1x1 and what reads it
    assert aim.choose({"wide": np.ones(4), "thin": np.zeros(4)}).usage["params"] == 8


@pytest.mark.parametrize("name", ["macs", "params", "size"])
def test_the_figure_of_a_refusal_can_be_asked_for(name):
    # Both the amount and the part are rounded up: what they name is there.
    net = resnet8()
    with pytest.raises(PruningError, match="cannot be met") as caught:
        Pruner(net, IMAGE, budget=Budget(**{name: 2}))
    amount, part = re.search(
        r"smallest possible network has ([\d,]+) \w+ \(([\d.]+%)\)", str(caught.value)
    ).groups()
    for asked in (amount.replace(",", ""), part):
        pruner = Pruner(net, IMAGE, budget=Budget(**{name: asked}))
        pruner.land()
        pruner.detach()


def test_guards_that_contradict_the_budget_are_named(graph):
    with pytest.raises(PruningError, match=r"or loosen the constraints \(min_filters = 12\), which contradict it"):
        Selector(graph, Budget(macs=0.1), Constraints(min_filters=12))


# -- what is asked for ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [("macs=0.5", 0.5), ("macs=50%", 0.5), ("params=400k", 4e5), ("size=1MB", 1e6), ("size=2MiB", 2 * 2**20),
     ("macs=1.5e6", 1.5e6), ("size=100", 100), ("params = .25", 0.25)],
)  # fmt: skip
def test_targets_as_they_are_written(text, value):
    assert getattr(Budget.parse([text]), text.partition("=")[0].strip()) == pytest.approx(value)


@pytest.mark.parametrize(
    "text", ["macs", "macs=", "macs=half", "macs=-1", "macs=0", "macs=150%", "params=1MB", "flops=0.5", "macs=1x"]
)
def test_targets_that_say_nothing_are_refused(text):
    with pytest.raises(PruningError, match=r"^target "):
        Budget.parse([text])


def test_macs_are_those_of_one_sample():
    aims = [Selector(trace(resnet20(), IMAGE.expand(n, -1, -1, -1)), Budget(macs=2e6)) for n in (1, 3)]
    values = scores(aims[0].graph)
    first, third = (aim.choose(values) for aim in aims)
    assert first.usage == third.usage and 1.9e6 < first.usage["macs"] <= 2e6


@pytest.mark.parametrize(
    ("name", "written", "value"),
    [("macs", "50%", 0.5), ("macs", "60M", 6e7), ("params", "400k", 4e5), ("size", "1MB", 1e6),
     ("size", " .5 ", 0.5), ("latency", "5ms", 5000.0), ("latency", "800us", 800.0), ("latency", "60%", 0.6),
     ("latency", "0.6", 0.6)],
)  # fmt: skip
def test_a_budget_takes_what_the_command_takes(name, written, value):
    budget = Budget(**{name: written})
    assert getattr(budget, name) == pytest.approx(value)
    assert budget == Budget.parse([f"{name}={written}"]) == Budget(**{name: getattr(budget, name)})
    assert hash(budget) == hash(replace(budget)) and budget.asked


@pytest.mark.parametrize(
    ("name", "written"),
    [("macs", "1e999"), ("latency", "1e400ms"), ("size", "1B"), ("size", "0.5B"), ("params", "0.0005k"),
     ("size", "1\N{LATIN SMALL LETTER LONG S}"), ("macs", 10**400), ("macs", float("inf"))],
)  # fmt: skip
def test_a_budget_refuses_what_no_network_has(name, written):
    with pytest.raises(PruningError, match=name):
        Budget(**{name: written})


def test_microseconds_are_written_with_either_mu():
    assert Budget(latency="5\N{MICRO SIGN}s") == Budget(latency="5\N{GREEK SMALL LETTER MU}s") == Budget(latency=5)


@pytest.mark.parametrize(
    ("name", "written"),
    [("latency", "5"), ("latency", "5MB"), ("macs", "5ms"), ("size", "big"), ("macs", ""), ("params", "120%")],
)
def test_a_budget_refuses_what_the_command_refuses_in_the_same_words(name, written):
    said = []
    for ask in (lambda: Budget(**{name: written}), lambda: Budget.parse([f"{name}={written}"])):
        with pytest.raises(PruningError, match=rf"^target '{name}={written}': ") as caught:
            ask()
        said.append(str(caught.value))
    assert said[0] == said[1]


@pytest.mark.parametrize("given", [None, [0.5], {}])
def test_a_budget_of_something_else_is_one_sentence(given):
    with pytest.raises(
        PruningError, match=r"^size: give a fraction to keep \(0.5\) or an amount above 1 \(1MB\), not "
    ):
        Budget(size=given)


def test_a_budget_with_units_is_landed_on():
    net = resnet20()
    whole = Selector(trace(net, IMAGE)).count({})["params"]
    pruner = Pruner(net, IMAGE, budget=Budget(params=f"{0.4 * whole / 1e3}k", macs="70%"))
    assert pruner.selector.limits is not None
    assert pruner.selector.limits.most["params"] == pytest.approx(0.4 * whole)


def test_a_target_is_given_once():
    with pytest.raises(PruningError, match="target macs is given twice"):
        Budget.parse(["macs=0.5", "macs=0.4"])


class Insisting(nn.Module):
    """Its code counts on channels where they meet a large stored tensor; on which, is its own affair."""

    def __init__(self, insists):
        super().__init__()
        self.stem, self.body = nn.Conv2d(3, 24, 3, padding=1), nn.Conv2d(24, 16, 3, padding=1)
        self.places, self.out = nn.Parameter(torch.rand(1, 16, 16, 16)), nn.Conv2d(16, 4, 1)
        self.insists = insists

    def forward(self, x):
        x = self.insists(F.relu(self.body(F.relu(self.stem(x)))))
        return self.out(x * self.places)


INSISTS = {
    "on the first channels": lambda x: torch.cat([x[:, :4] * 2, x[:, 4:]], 1),
    "on the last channels": lambda x: torch.cat([x[:, :-2] * 2, x[:, -2:]], 1),
    "on widths that no trial comes to": lambda x: x * 2 if x.shape[1] not in (9, 10, 11, 12) else x,
}


@pytest.mark.parametrize("insists", INSISTS)
@pytest.mark.parametrize("seed", range(3))
def test_a_budget_is_kept_whatever_the_code_insists_on(insists, seed):
    torch.manual_seed(seed)
    model = Insisting(INSISTS[insists])
    pruner = Pruner(model, IMAGE, budget=Budget(params=0.65))
    pruner.rank(scores(pruner.graph, seed) | {"body": np.arange(16.0) % 5 - 2})
    whole, left = (sum(p.numel() for p in m.parameters()) for m in (model, pruner.extract()))
    assert left <= 0.65 * whole


@pytest.mark.parametrize("part", [0.0, -1.0, float("nan")])
def test_a_budget_leaves_something(part):
    with pytest.raises(PruningError, match="macs: give a fraction to keep"):
        Budget(macs=part)


@pytest.mark.parametrize("name", ["NonLocal", "Unused", "AuxiliaryHead", "Recurrent"])
@pytest.mark.parametrize("of", ["macs", "params"])
@pytest.mark.parametrize("share", mostly_slow([0.9, 0.8], [0.8]))
def test_what_no_filter_changes_counts_too(name, of, share):
    """Products of activations, parameters nothing reads, heads of training alone, and sizes the code insists on."""
    model, inputs = ZOO[name]()
    pruner = Pruner(model, inputs, budget=Budget(**{of: share}))
    dense = getattr(measure(model, inputs), of)
    assert dense == pruner.selector.whole[of] * (pruner.graph.trace.samples if of == "macs" else 1)
    for seed in range(2):
        landing = pruner.selector.choose(scores(pruner.graph, seed))
        pruner.gate(Plan.from_masks(landing.masks))
        left = getattr(measure(pruner.extract(), inputs), of)
        assert left == landing.usage[of] * (pruner.graph.trace.samples if of == "macs" else 1) <= share * dense


def test_what_leads_nowhere_is_a_part_of_the_dense_network():
    model, inputs = ZOO["Unused"]()
    pruner = Pruner(model, inputs, budget=Budget(params=0.5))
    pruner.rank(scores(pruner.graph, 0))
    left = measure(pruner.extract(), inputs).params / measure(model, inputs).params
    assert 0.4 < left <= 0.5, "one filter more is too much, and what is thrown away needs no filter's place"


def test_where_all_scores_are_equal_all_layers_lose_alike():
    pruner = Pruner(resnet20(), torch.rand(1, 3, 32, 32), budget=Budget(macs=0.5))
    pruner.land()
    kept = [len(places) / pruner.filters[name] for name, places in pruner.plan().keep.items()]
    assert min(kept) > 0.5 and max(kept) < 0.9


def test_nobody_is_told_to_ask_for_more_than_there_is(graph):
    with pytest.raises(
        PruningError, match=r"100\.0%\); loosen the constraints \(max_removed = 0\), which contradict"
    ):
        Selector(graph, Budget(macs=0.5), Constraints(max_removed=0.0))


# -- guards --------------------------------------------------------------------------------------------------

GUARDED = {
    "min_filters": (13, lambda kept, whole: kept >= 13),
    "max_removed": (0.25, lambda kept, whole: kept >= 0.75 * whole),
    "round_to": (8, lambda kept, whole: kept % 8 == 0),
}


@pytest.mark.parametrize("guard", GUARDED)
@pytest.mark.parametrize("budget", [None, Budget(params=0.6)], ids=["no budget", "a budget"])
def test_a_pruner_is_guarded_by_what_it_is_given(guard, budget):
    value, holds = GUARDED[guard]
    kept = {}
    for given in ({}, {guard: value}):
        pruner = Pruner(resnet8(), IMAGE, budget=budget, constraints=Constraints(**given))
        drawn = torch.rand(len(pruner.gates.soft), generator=torch.Generator().manual_seed(0)) ** 4
        with pruner.scoring(), torch.no_grad():
            pruner.gates.soft.copy_(drawn)
        kept[bool(given)] = [
            holds(len(filters), pruner.graph.layers[name].filters) for name, filters in pruner.plan().keep.items()
        ]
    assert all(kept[True]) and not all(kept[False])


@pytest.mark.parametrize("name", ["HardcodedHalf", "Shuffle", "Split"])
@pytest.mark.parametrize("seed", range(4))
def test_a_layer_that_reads_a_part_of_a_stream_keeps_its_least(name, seed):
    """All filters that feed it may be gone: then one of those comes back too."""
    graph = trace(*ZOO[name]())
    aim = Selector(graph, Budget(macs=0.7), Constraints(min_filters=1))
    left = graph.settle(aim.choose(scores(graph, seed)).masks)
    assert min(int(mask.sum()) for mask in left.values()) >= 1
    left = graph.settle(aim.least())
    assert min(int(mask.sum()) for mask in left.values()) >= 1


@pytest.mark.parametrize("share", [0.7, 0.4])
def test_rounded_widths_are_multiples_or_all_there_is(graph, share):
    aim = Selector(graph, Budget(macs=share), Constraints(round_to=8))
    landing = aim.choose(scores(graph))
    small = extract(resnet20(), IMAGE, Plan.from_masks(landing.masks), graph)
    widths = [m.out_channels for m in small.modules() if isinstance(m, nn.Conv2d)]
    assert all(width % 8 == 0 for width in widths), widths
    assert measure(small, IMAGE).macs <= share * network_cost(graph, {}).macs


@pytest.mark.parametrize(("name", "round_to"), [("Grouped", 4), ("GroupNorm", 4), ("Split", 2), ("Shuffle", 2)])
def test_widths_are_round_where_groups_norms_and_slices_have_a_say(name, round_to):
    # A grouped convolution has equal groups, a group norm whole ones, and what a slice drops is not there at all.
    model, inputs = ZOO[name]()
    graph = trace(model, inputs)
    whole = graph.settle({})
    for share, seed in itertools.product((0.6, 0.8), range(4)):
        aim = Selector(graph, Budget(macs=share), Constraints(round_to=round_to))
        left = graph.settle(aim.choose(scores(graph, seed)).masks)
        widths = {layer: int(mask.sum()) for layer, mask in left.items()}
        odd = {layer: n for layer, n in widths.items() if n % round_to and n < whole[layer].sum()}
        assert not odd, (share, seed)


@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
def test_groups_are_read_and_fed_for_round_widths(share):
    # A group of four that goes takes four filters before it along, so groups have to come and go in pairs.
    grouped = nn.Conv2d(32, 32, 3, groups=8, bias=False)
    net = nn.Sequential(nn.Conv2d(3, 32, 1), nn.ReLU(), grouped, nn.ReLU(), nn.Conv2d(32, 2, 1))
    graph = trace(net, IMAGE)
    aim = Selector(graph, Budget(macs=share), Constraints(round_to=8))
    for seed in range(4):
        left = graph.settle(aim.choose(scores(graph, seed)).masks)
        assert [int(mask.sum()) % 8 for mask in left.values()] == [0, 0]


def test_every_layer_keeps_its_least(graph):
    masks = (
        Selector(graph, Budget(macs=0.3), Constraints(min_filters=3, max_removed=0.75)).choose(scores(graph)).masks
    )
    for name, mask in masks.items():
        assert mask.sum() >= max(3, 0.25 * mask.size), name


def test_coupled_layers_keep_the_same_filters_and_the_stream_is_narrower(graph):
    groups = coupled(graph, ["streams"])
    assert any({"conv1", "layer1.0.conv2", "layer1.2.conv2"} <= set(group) for group in groups)
    guards = ResolvedConstraints(groups=groups, links=stream_links(graph, groups))
    masks = Selector(graph, Budget(macs=0.4), guards).choose(scores(graph)).masks
    for group in groups:
        assert all(np.array_equal(masks[name], masks[group[0]]) for name in group)
    small = extract(resnet20(), IMAGE, Plan.from_masks(masks), graph)
    for stage, whole in ((small.layer1, 16), (small.layer2, 32), (small.layer3, 64)):
        width = stage[1].conv2.weight.shape[0]
        assert stage[2].conv1.weight.shape[1] == width < whole


def test_a_stream_knows_what_a_shortcut_brings_into_it(graph):
    groups = coupled(graph, ["streams"])
    found = {(link.source, link.target): link.places for link in stream_links(graph, groups)}
    assert found == {
        (0, 1): (*[-1] * 8, *range(16), *[-1] * 8),
        (0, 2): (*[-1] * 24, *range(16), *[-1] * 24),
        (1, 2): (*[-1] * 16, *range(32), *[-1] * 16),
    }


def test_layers_that_meet_in_different_widths_are_not_coupled():
    class Folded(nn.Module):
        def __init__(self):
            super().__init__()
            self.few, self.many, self.head = nn.Conv2d(3, 2, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 2, 1)

        def forward(self, x):
            stream = F.pixel_unshuffle(self.few(x), 2)
            return self.head((stream + self.many(stream.relu())).relu())

    graph = trace(Folded(), IMAGE)
    assert coupled(graph, ["streams"]) == ()
    assert (
        Pruner(
            Folded(), IMAGE, budget=Budget(macs=0.5), constraints=Constraints(couple="streams"), graph=graph
        ).selector.limits
        is not None
    )


def test_layers_are_coupled_by_pattern(graph):
    (group,) = coupled(graph, ["layer2.*.conv1"])
    assert group == ("layer2.0.conv1", "layer2.1.conv1", "layer2.2.conv1")
    with pytest.raises(PruningError, match=r"couple: the layers that '\*.conv1' matches have different numbers"):
        coupled(graph, ["*.conv1"])
    with pytest.raises(PruningError, match="couple: 'stem' matches 0 layers"):
        coupled(graph, ["stem"])


# -- pressure ------------------------------------------------------------------------------------------------


def test_a_price_is_what_goes_with_a_filter(graph):
    rng = np.random.default_rng(0)
    keep = graph.settle({name: rng.random(layer.filters) < 0.7 for name, layer in graph.layers.items()})
    found, whole, here = filter_prices(graph, keep), network_cost(graph, {}), network_cost(graph, keep)
    for name in ("layer1.1.conv1", "layer2.2.conv1", "layer3.0.conv1"):  # each filter of these costs the same
        less = {**keep, name: keep[name].copy()}
        less[name][np.flatnonzero(keep[name])[1]] = False
        left = network_cost(graph, less)
        assert found["macs"][name] == pytest.approx((here.macs - left.macs) / whole.macs)
        assert found["params"][name] == pytest.approx((here.params - left.params) / whole.params)


def test_scarce_resources_count_more():
    mix = ResourceWeights({"macs": 0.5, "params": 0.8})
    for _ in range(20):
        mix.follow({"macs": 0.0, "params": 0.1})
    weights = mix.weights({"macs": {"a": 4.0, "b": 1.0}, "params": {"a": 1.0, "b": 4.0}}, {"a": 2, "b": 2})
    assert weights == pytest.approx([1.6, 0.4], rel=1e-3)


def test_the_strength_follows_the_level():
    steering = Steering(1e-3, threshold=0.5)
    assert steering.follow(cutoff=0.75, progress=0.5) == pytest.approx(1e-3), "half way the cut is to be half way"
    assert steering.follow(cutoff=0.9, progress=1.0) > 1e-3
    for _ in range(50):
        steering.follow(cutoff=1.0, progress=1.0)
    assert steering.strength == pytest.approx(1e-3 * RANGE), "it does not grow without end"


@pytest.mark.parametrize("start", [1e-5, 1e-4, 1e-3, 1e-2, 1e-1])
@pytest.mark.parametrize("times", [10, 20, 40, 80])
def test_the_level_comes_to_the_threshold_wherever_the_strength_starts(start, times):
    """Scores that move at most three logits in all, the faster the more the penalty outweighs the loss."""
    steering = Steering(start, threshold=0.5)
    level, course = 1.0, []
    for step in range(times):
        progress = min((step + 1) / (0.6 * times), 1)
        outweighs = math.log10(steering.strength / 3e-3)  # where it draws with the loss, which steering cannot know
        level *= math.exp(-3 / times * max(-0.1, min(outweighs, 1.0)))
        course.append(level / (1 - 0.5 * progress))
        steering.follow(level, progress)
    assert 0.85 < course[-1] < 1.15, "it comes to where it is wanted"
    assert min(course) > 0.65, "and does not swing below"


def test_steering_brings_the_scores_themselves_to_the_budget():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 4, 3))
    images = torch.rand(4, 3, 10, 10)
    target = net.eval()(images).detach()
    pruner = Pruner(net, images, budget=Budget(macs=0.5), scores=Scores(speed=0.02, penalty=1e-5, balance="cost"))
    for round_ in range(12):
        pruner.progress = min((round_ + 1) / 8, 1)
        with pruner.scoring():
            for step in range(15):
                loss = (net(images) - target).square().mean()
                (loss + pruner.penalty()).backward()
                pruner.step()
                if step == 7:
                    pruner.steer()
    kept = len(pruner.plan().keep["0"])
    by_threshold = int((pruner.scores()["0"] >= 0.5).sum())
    assert float(pruner.regularizer.strength) != pytest.approx(1e-5)
    assert kept == 16
    assert abs(by_threshold - kept) <= 4


def test_steering_survives_a_stop():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 4, 3))

    def made():
        return Pruner(net, torch.rand(1, 3, 8, 8), budget=Budget(macs=0.5), scores=Scores(balance="cost"))

    pruner = made()
    pruner.progress = 0.25
    with pruner.scoring():
        pass
    state = pruner.state_dict()
    pruner.detach()
    again = made()
    again.load_state_dict(state)
    assert again.progress == pruner.progress == 0.25
    assert again.regularizer.strength == pruner.regularizer.strength != torch.tensor(5e-4)
    assert again.regularizer.steering.state_dict() == pruner.regularizer.steering.state_dict()
    assert torch.equal(again.regularizer.weights, pruner.regularizer.weights)
    assert again.regularizer.mix.parts == pruner.regularizer.mix.parts


@pytest.mark.parametrize("balance", ["area", "cost"])
@pytest.mark.parametrize("before", [None, Budget(macs=0.8), Budget(params=0.8)], ids=str)
def test_scores_go_on_towards_another_budget(before, balance):
    torch.manual_seed(0)
    net, images = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 4, 3)), torch.rand(2, 3, 8, 8)

    def score(pruner):
        with pruner.scoring():
            (net(images).square().mean() + pruner.penalty()).backward()
            pruner.step()

    pruner = Pruner(net, images, budget=before, scores=Scores(speed=0.1, penalty=1e-3))
    score(pruner)
    state = pruner.state_dict()
    pruner.detach()
    again = Pruner(net, images, budget=Budget(macs=0.3), scores=Scores(balance=balance, speed=0.1, penalty=1e-2))
    dense = again.regularizer.weights.clone()
    again.load_state_dict(state)
    assert torch.equal(again.regularizer.weights, dense)  # of what was dear before, nothing is known here
    if before is None:
        assert float(again.regularizer.strength) == pytest.approx(1e-2)
    assert all(torch.equal(a, b) for a, b in zip(again.scores().values(), pruner.scores().values(), strict=True))
    again.land()
    assert measure(again.extract(), images).macs <= 0.3 * measure(net, images).macs
    score(again)
    again.detach()
    without = Pruner(net, images, scores=Scores(speed=0.1, penalty=1e-2))  # and from there towards none
    without.load_state_dict(again.state_dict())
    assert without.plan() == again.plan() and float(without.regularizer.strength) == pytest.approx(1e-2)
    score(without)


# -- runs ----------------------------------------------------------------------------------------------------

SHORT = ["data.name=synthetic", "data.samples=320", "data.image_size=8", "data.channels=1",
         "phases.warmup=1", "phases.cycles=3", "phases.score=1", "phases.weights=1", "phases.finetune=0",
         "dense_control=false", "budget.settled=1", "scores.steer=true", "scores.balance=cost"]  # fmt: skip


def test_a_run_delivers_the_size_its_recipe_asks_for(tmp_path):
    recipe = load_recipe("digits", [*SHORT, "budget.macs=0.4"])
    result = fit(resnet8(in_channels=1), recipe, run=tmp_path / "run")
    dense, small = (result.summary[which]["macs"] for which in ("dense", "pruned"))
    assert 0.39 < small / dense <= 0.4
    assert measure(result.model, torch.zeros(1, 1, 8, 8)).params == result.summary["pruned"]["params"]


def test_a_file_of_the_size_asked_for(tmp_path):
    recipe = load_recipe("digits", [*SHORT, "budget.size=150e3", "constraints.round_to=2"])
    fit(resnet8(in_channels=1), recipe, run=tmp_path / "run")
    assert 0.97 * 150e3 < (tmp_path / "run" / "model.safetensors").stat().st_size <= 150e3
    widths = [m.out_channels for m in load(tmp_path / "run", lambda: resnet8(in_channels=1)).modules()
              if isinstance(m, nn.Conv2d)]  # fmt: skip
    assert all(width % 2 == 0 for width in widths)


@pytest.mark.parametrize(
    "asked", mostly_slow([0.999, 0.3, "200kB", "30%", "smallest"], ["200kB", "30%", "smallest"])
)
def test_a_pruner_keeps_the_file_within_the_size_asked_for(asked, tmp_path):
    net, images = resnet20(), torch.zeros(2, 3, 16, 16)
    dense = extract(net, images, Plan.from_masks(trace(net, images).all_filters()))
    save(dense, tmp_path / "dense")
    whole = (tmp_path / "dense" / "model.safetensors").stat().st_size
    if asked == "smallest":
        with pytest.raises(PruningError, match="cannot be met") as caught:
            Pruner(net, images, budget=Budget(size=0.001))
        asked = float(
            re.search(r"smallest possible network has ([\d,]+) bytes", str(caught.value))[1].replace(",", "")
        )
    budget = Budget(size=asked)
    pruner = Pruner(net, images, budget=budget)
    with torch.no_grad():
        pruner.gates.soft.copy_(torch.rand(len(pruner.gates.soft), generator=torch.Generator().manual_seed(0)))
    pruner.land()
    save(pruner.extract(), tmp_path / "small")
    most = budget.size * whole if budget.size < 1 else budget.size
    assert most - 0.01 * whole <= (tmp_path / "small" / "model.safetensors").stat().st_size <= most


def test_an_impossible_size_is_refused_before_anything_is_written(tmp_path):
    for sets, told in (
        (["budget.macs=1e-5"], "the target of .* macs .* cannot be met"),
        (
            ["budget.size=5e2"],
            r"the target of 500 bytes \(0\.\d+%\) cannot be met: .* has [\d,]+ bytes",
        ),
    ):
        with pytest.raises(PruningError, match=told):
            fit(resnet8(in_channels=1), load_recipe("digits", [*SHORT, *sets]), run=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_branch_that_is_closed_is_not_asked_about_filter_by_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = resnet20()
    pruner = Pruner(model, torch.rand(1, 3, 32, 32), budget=Budget(params=0.7))
    norms = {n: m.weight.detach().flatten(1).norm(dim=1) for n, m in model.named_modules() if n in pruner.filters}
    counted: list[object] = []
    count = Selector.count
    monkeypatch.setattr(Selector, "count", lambda aim, masks: counted.append(masks) or count(aim, masks))
    pruner.rank(norms)
    assert len(counted) < 40, "one by one it would be 70, and thousands in a wider network"
    params = sum(p.numel() for p in pruner.extract().parameters()) / sum(p.numel() for p in model.parameters())
    assert 0.69 < params <= 0.7
