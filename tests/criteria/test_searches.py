"""Methods that try sub-networks: an agent that chooses widths, and gates that follow a prediction."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sbf_pruner as sbf
from runs import ranked_run
from sbf_pruner.budget import Selector
from sbf_pruner.criteria import (
    Agent,
    CostPenalty,
    LayerObservations,
    Predictor,
    Scores,
    Subject,
    SubnetEvaluator,
    amc,
    learned_gates,
    nppm,
    ranked,
    scores_for_fractions,
    search_widths,
    target_of,
)
from sbf_pruner.errors import PruningError
from sbf_pruner.training import run

Judge = Callable[[Subject], Scores]
SEARCHES = {"amc": search_widths, "nppm": learned_gates}


class TwoWays(nn.Module):
    """Classes are told by what goes one way; nobody looks at what goes the other."""

    def __init__(self) -> None:
        super().__init__()
        self.useful, self.useless = (nn.Conv2d(1, 16, 3, padding=1) for _ in range(2))
        self.head = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        ways = torch.cat([way(x).relu().mean((2, 3)) for way in (self.useful, self.useless)], 1)
        logits: Tensor = self.head(ways)
        return logits


def patterns(count: int) -> tuple[Tensor, Tensor]:
    """Stripes and checks of eight kinds, with noise."""
    random = torch.Generator().manual_seed(0)
    labels = torch.randint(8, (count,), generator=random)
    rows, columns = torch.meshgrid(torch.arange(8), torch.arange(8), indexing="ij")
    ways = (rows, columns, rows + columns, rows - columns)
    kinds = torch.stack([(way // wide) % 2 for way in ways for wide in (1, 2)]).float()
    return kinds[labels][:, None] + 0.2 * torch.randn(count, 1, 8, 8, generator=random), labels


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    torch.manual_seed(0)
    net, (images, labels) = TwoWays(), patterns(256)
    nn.init.zeros_(net.head.weight[:, 16:].detach())
    descent = torch.optim.Adam(net.parameters(), lr=0.02)
    for _ in range(100):
        descent.zero_grad()
        nn.functional.cross_entropy(net(images), labels).backward()
        net.head.weight.grad[:, 16:] = 0  # type: ignore[index]
        descent.step()
    descent.zero_grad()
    assert float((net(images).argmax(1) == labels).float().mean()) > 0.9
    return net.eval()


def subject_of(net: nn.Module, share: float = 0.5, seed: int = 0, count: int = 256) -> Subject:
    images, labels = patterns(count)
    graph = sbf.trace(net, images[:2])
    batches = list(zip(images.split(32), labels.split(32), strict=True))
    return Subject(net, graph, batches, seed, Selector(graph, sbf.Budget(macs=share)))


# -- what both have in common --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SEARCHES)
def test_a_layer_that_is_good_for_nothing_keeps_fewer_filters(
    name: str, trained: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nppm, "_COST", 1.0)  # of so few filters each is a large part of the cost
    for seed in (0, 1):
        subject = subject_of(trained, seed=seed, count=512)
        aim = target_of(subject)
        masks = aim.choose(SEARCHES[name](subject)).masks
        assert masks["useless"].sum() < masks["useful"].sum() - 3
        assert 0.49 * aim.count({})["macs"] < aim.count(masks)["macs"] <= 0.5 * aim.count({})["macs"]


@pytest.mark.parametrize("name", SEARCHES)
def test_a_seed_says_what_is_found_and_nothing_else_is_touched(name: str, trained: nn.Module) -> None:
    trained.train().requires_grad_(True)
    trained.useless.eval()
    flags = [module.training for module in trained.modules()]
    held = {key: tensor.clone() for key, tensor in trained.state_dict().items()}
    random = torch.get_rng_state()
    found = [SEARCHES[name](subject_of(trained, seed=seed, count=16)) for seed in (3, 3, 4)]
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in trained.modules()] == flags
    assert all(parameter.grad is None and parameter.requires_grad for parameter in trained.parameters())
    assert all(torch.equal(tensor, held[key]) for key, tensor in trained.state_dict().items())
    assert not any([*module._forward_hooks, *module._forward_pre_hooks] for module in trained.modules())
    trained.eval()
    first, again, other = found
    assert all(np.array_equal(first[layer], again[layer]) for layer in first)
    assert any(not np.array_equal(first[layer], other[layer]) for layer in first)


@pytest.mark.parametrize("name", SEARCHES)
def test_the_size_asked_for_changes_what_is_found(
    name: str, trained: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(amc, "_WALKS", 8)
    with torch.no_grad():  # whatever the caller does
        found = [SEARCHES[name](subject_of(trained, share)) for share in (0.8, 0.3)]
    assert any(not np.array_equal(found[0][layer], found[1][layer]) for layer in found[0])


def test_where_nobody_asks_half_of_the_macs_may_stay(trained: nn.Module) -> None:
    graph = sbf.trace(trained, patterns(2)[0])
    aim = target_of(Subject(trained, graph, []))
    assert aim.limits is not None and aim.limits.most == {"macs": 0.5 * aim.count({})["macs"]}
    narrow = nn.Sequential(nn.Conv2d(1, 1, 3), nn.Conv2d(1, 4, 1)).eval()
    aim = target_of(Subject(narrow, graph := sbf.trace(narrow, torch.rand(2, 1, 8, 8)), []))
    assert aim.limits is not None and aim.limits.most == {"macs": aim.count(graph.all_filters())["macs"]}


def test_the_accuracy_of_a_sub_network_is_that_of_the_network_that_is_cut() -> None:
    torch.manual_seed(0)
    net = (
        nn.Sequential(
            *(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 8)),
        )
        .double()
        .eval()
    )
    images, labels = patterns(64)
    images = images.double()
    graph = sbf.trace(net, images[:2])
    masked = SubnetEvaluator(Subject(net, graph, [(images[:40], labels[:40]), (images[40:], labels[40:])]))
    for keep in ({"0": np.arange(8) < 3, "3": np.arange(8) % 2 == 0}, graph.all_filters()):
        small = sbf.extract(net, images[:2], sbf.Plan.from_masks(keep)).train()
        right = sum(int((small(x).argmax(1) == y).sum()) for x, y in masked.batches)
        assert masked.accuracy(keep) == right / 64
    accuracy, slope = masked.accuracy_and_gradient(torch.ones(16, dtype=torch.float64), masked.batches[0])
    assert accuracy == float((net(images[:40]).argmax(1) == labels[:40]).double().mean())
    below, above = (torch.ones(16, dtype=torch.float64) for _ in range(2))
    below[5], above[5] = 1 - 1e-6, 1 + 1e-6
    losses = [_loss(net, gates, images[:40], labels[:40]) for gates in (below, above)]
    assert float(slope[5]) == pytest.approx((losses[1] - losses[0]) / 2e-6, rel=1e-4)


def _loss(net: nn.Sequential, gates: Tensor, images: Tensor, labels: Tensor) -> float:
    maps = net[1](net[0](images)) * gates[:8, None, None]
    maps = net[4](net[3](maps.relu())) * gates[8:, None, None]
    return float(nn.functional.cross_entropy(net[6:](maps.relu()), labels).detach())


@pytest.mark.parametrize("name", SEARCHES)
def test_a_run_asks_for_the_size_of_its_recipe(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    monkeypatch.setattr(amc, "_WALKS", 8)

    def seen(name: str, subject: Subject) -> Scores:
        aim = subject.selector
        assert aim is not None and aim.limits is not None
        asked.append(aim.limits.most["macs"] / aim.limits.whole["macs"])
        return ranked(name, subject)

    monkeypatch.setattr(run, "ranked", seen)
    result = ranked_run(tmp_path / "run", name, changes={"budget": {"macs": 0.4}})
    assert asked == [0.4] and result.summary["pruned"]["macs"] <= 0.4 * result.summary["dense"]["macs"]
    again = ranked_run(tmp_path / "again", name, changes={"budget": {"macs": 0.4}})
    assert again.plan == result.plan


# -- the agent -----------------------------------------------------------------------------------------------------


def test_scores_land_on_the_parts_that_were_chosen() -> None:
    net = nn.Sequential(nn.Conv2d(3, 20, 1), nn.ReLU(), nn.Conv2d(20, 10, 1), nn.ReLU(), nn.Conv2d(10, 2, 1)).eval()
    graph = sbf.trace(net, torch.zeros(1, 3, 4, 4))
    places = {"0": np.random.default_rng(0).permutation(20) + 1, "2": np.arange(10, 0, -1)}
    chosen = {"0": places["0"] <= 5, "2": places["2"] <= 8}
    scores = scores_for_fractions({"0": 5 / 20, "2": 8 / 10}, places)
    share = Selector(graph).count(chosen)["macs"] / Selector(graph).count({})["macs"]
    found = Selector(graph, sbf.Budget(macs=share + 1e-9)).choose(scores).masks
    assert all(np.array_equal(found[name], mask) for name, mask in chosen.items())
    half = Selector(graph, sbf.Budget(macs=share / 2)).choose(scores).masks  # both layers get narrower alike
    assert half["0"].mean() / half["2"].mean() == pytest.approx(5 / 16, abs=0.1)


def test_what_an_agent_sees_of_the_way() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.Conv2d(8, 4, 2, stride=2, bias=False), nn.Conv2d(4, 2, 1)
    ).eval()
    way = LayerObservations(sbf.trace(net, torch.zeros(1, 3, 6, 6)))
    macs = np.array([8 * 3 * 9 * 16, 4 * 8 * 4 * 4]) / (8 * 3 * 9 * 16 + 4 * 8 * 4 * 4)
    first, second = way.state([]), way.state([0.25])
    # Index, filters, inputs, pixels, stride, kernel, MACs and rest, each from 0 to 1; reduced; the last part.
    assert first.tolist() == [0, 1, 0, 1, 0, 1, 1, 1, 0, 1] and way.features == 10
    assert second.tolist() == pytest.approx([1, 0, 1, 0, 1, 0, 0, 0, 0.75 * macs[0], 0.25])


def test_an_agent_learns_what_is_rewarded() -> None:
    student = Agent(1, seed=0)
    states = [torch.tensor([0.0]), torch.tensor([1.0])]
    for _ in range(300):
        actions = [student.act(state, 0.5) for state in states]
        student.remember(states, actions, 1 - abs(actions[0] - 0.8) - abs(actions[1] - 0.2))
        student.learn()
    low, high = student.act(states[1]), student.act(states[0])
    assert high == pytest.approx(0.8, abs=0.15) and low == pytest.approx(0.2, abs=0.15)


def test_actions_are_parts_of_a_layer_and_noise_is_around_them() -> None:
    student = Agent(1, seed=0)
    state = torch.tensor([0.5])
    # A normal distribution, and one as good as uniform.
    for noise, mean, spread in ((0.05, student.act(state), 0.05), (amc._RANDOM, 0.55, 0.9 / 12**0.5)):
        drawn = np.array([student.act(state, noise) for _ in range(400)])
        assert drawn.min() >= amc._LEAST and drawn.max() <= 1
        assert drawn.std() == pytest.approx(spread, rel=0.15)
        assert drawn.mean() == pytest.approx(mean, abs=0.04)


def test_there_are_no_more_walks_than_images(trained: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    walked: list[float] = []
    monkeypatch.setattr(SubnetEvaluator, "accuracy", lambda self, keep: walked.append(0.0) or 0.0)
    for count, expected in ((2, 2), (256, amc._WALKS)):
        walked.clear()
        search_widths(subject_of(trained, count=count))
        assert len(walked) == expected


# -- the prediction ------------------------------------------------------------------------------------------------


def test_a_predictor_learns_which_gates_accuracy_hangs_on() -> None:
    random = np.random.default_rng(0)
    predictor = Predictor(12, seed=0)
    for _ in range(100):
        gates = torch.from_numpy(random.integers(2, size=12)).double()
        predictor.remember(gates, 0.1 + 0.2 * float(gates[:4].sum()))
        predictor.learn()
    slope = predictor.slope(torch.full((12,), 0.5, dtype=torch.float64))
    assert float(slope[:4].min()) > 3 * float(slope[4:].abs().max())
    none, all_ = predictor.predict(torch.tensor([[0.0], [1.0]], dtype=torch.float64).expand(2, 12)).tolist()
    assert none < 0.35 and all_ > 0.65


def test_gates_follow_what_is_foretold(trained: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nppm, "_COST", 1.0)
    apart = []
    for counts in (1.0, 0.0):
        monkeypatch.setattr(nppm, "_ACCURACY", counts)
        scores = learned_gates(subject_of(trained, count=512))
        apart.append(scores["useful"].mean() - scores["useless"].mean())
    assert apart[0] > apart[1] + 1  # the loss alone sees less well which way accuracy comes from


def test_a_full_memory_forgets_what_is_most_like_the_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nppm, "_REMEMBERED", 2)
    predictor = Predictor(4, seed=0)
    for gates, accuracy in (([1.0, 1, 1, 1], 0.9), ([0.0, 0, 0, 0], 0.1), ([1.0, 1, 1, 0], 0.8)):
        predictor.remember(torch.tensor(gates, dtype=torch.float64), accuracy)
    held = [(gates.tolist(), accuracy) for gates, accuracy in predictor.memory]
    assert held == [([1.0, 1, 1, 0], 0.8), ([0.0, 0, 0, 0], 0.1)]


def test_the_toll_is_the_slope_of_the_logarithm_of_what_is_too_much(trained: nn.Module) -> None:
    subject = subject_of(trained)
    aim, keep = target_of(subject), subject.graph.all_filters()
    slopes, whole = CostPenalty(aim).slope(keep), aim.count(keep)["macs"]
    without = aim.count(keep | {"useful": np.arange(16) > 0})["macs"]
    assert slopes["useful"] == pytest.approx((whole - without) / whole) and slopes["useful"] > 0
    few = {"useful": np.arange(16) < 8, "useless": np.arange(16) < 7}
    assert CostPenalty(aim).slope(few) == {"useful": 0.0, "useless": 0.0}


def test_outputs_that_are_not_finite_are_told(trained: nn.Module) -> None:
    images = torch.full((4, 1, 8, 8), torch.inf)
    subject = Subject(trained, sbf.trace(trained, images[:2]), [(images, torch.zeros(4, dtype=torch.int64))])
    for name in SEARCHES:
        said = f"^method {name}: the network's outputs contain NaN or infinity; choose"
        with pytest.raises(PruningError, match=said):
            ranked(name, subject)
