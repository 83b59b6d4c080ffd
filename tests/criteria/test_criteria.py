"""Other methods: each score against its definition written out, and all of them on networks of every kind."""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sbf_pruner as sbf
from sbf_pruner.criteria import (
    METHODS,
    NO_FILTER,
    Subject,
    check_method,
    first_order,
    fpgm_distance,
    infinite_selection,
    l1_norm,
    l2_norm,
    largest_part,
    lost_without,
    norm_scale,
    pairs,
    propagated,
    rank,
    rank_by,
    ranked,
    read_filters,
)
from sbf_pruner.criteria.nisp import _absolute as absolute_copy
from sbf_pruner.errors import PruningError
from sbf_pruner.models import resolve
from sbf_pruner.utils import call
from shares import mostly_slow
from zoo import ZOO, fresh_inputs


def subject_of(net: nn.Module, images: Tensor, labels: Tensor | None = None, parts: int = 1) -> Subject:
    labels = torch.zeros(len(images), dtype=torch.int64) if labels is None else labels
    batches = list(zip(images.chunk(parts), labels.chunk(parts), strict=True))
    return Subject(net.eval(), sbf.trace(net, images[:2]), batches)


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Conv2d(2, 5, 3, padding=1, bias=False), nn.BatchNorm2d(5), nn.ReLU(inplace=True)),
        *(nn.Conv2d(5, 4, 3, padding=1), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        nn.Linear(4, 3),
    ).double()
    nn.init.uniform_(net[1].weight, -1, 1)
    nn.init.uniform_(net[1].bias)
    return net


IMAGES = torch.rand(6, 2, 7, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
LABELS = torch.tensor([0, 1, 2, 0, 1, 2])


# -- weights -------------------------------------------------------------------------------------------------------


def test_norms_and_distances_of_filters() -> None:
    net = chain()
    weight = net[0].weight.detach()
    subject = subject_of(net, IMAGES)
    assert l1_norm(subject)["0"] == pytest.approx([float(w.abs().sum()) for w in weight])
    assert l2_norm(subject)["0"] == pytest.approx([float(w.square().sum()) ** 0.5 for w in weight])
    expected = [sum(float((w - other).square().sum()) ** 0.5 for other in weight) for w in weight]
    assert fpgm_distance(subject)["0"] == pytest.approx(expected)


@pytest.mark.parametrize("groups", [1, 2])
def test_the_filters_of_a_transposed_convolution_are_not_its_rows(groups: int) -> None:
    net = nn.Sequential(
        nn.ConvTranspose2d(4, 6, 2, groups=groups, bias=False), nn.BatchNorm2d(6), nn.Conv2d(6, 2, 1)
    )
    graph = sbf.trace(net.eval(), torch.zeros(1, 4, 3, 3))
    rows = Subject(net, graph, []).rows("0")
    inputs = torch.rand(1, 4, 3, 3)
    for number in range(6):
        alone = net[0](inputs)[0, number].detach()
        with torch.no_grad():
            changed = nn.ConvTranspose2d(4, 6, 2, groups=groups, bias=False)
            changed.weight.zero_()
            per_group = 6 // groups
            taken = slice(number // per_group * (4 // groups), (number // per_group + 1) * (4 // groups))
            changed.weight[taken, number % per_group] = rows[number].view(4 // groups, 2, 2).float()
        torch.testing.assert_close(changed(inputs)[0, number].detach(), alone)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_emptied_filters_give_nothing_and_the_others_what_they_did(kind: type[nn.Conv2d], groups: int) -> None:
    net = nn.Sequential(kind(4, 6, 2, groups=groups, bias=False), nn.BatchNorm2d(6), nn.Conv2d(6, 2, 1)).eval()
    inputs, keep = torch.rand(1, 4, 5, 5), np.array([True, False, True, False, True, True])
    before = net[0](inputs).detach()
    subject = Subject(net, sbf.trace(net, inputs), [])
    subject.empty({"0": keep})
    expected = before * torch.from_numpy(keep)[None, :, None, None]
    torch.testing.assert_close(net[0](inputs).detach(), expected, rtol=0, atol=0)
    assert l2_norm(subject)["0"][~keep].tolist() == [0.0, 0.0] and l2_norm(subject)["0"][keep].min() > 0


def test_layers_without_a_norm_are_the_last_to_be_slimmed() -> None:
    net = chain()
    scores = norm_scale(subject_of(net, IMAGES))
    assert scores["0"] == pytest.approx(net[1].weight.detach().abs().numpy())
    assert scores["3"].min() > scores["0"].max()


# -- maps ----------------------------------------------------------------------------------------------------------


def test_the_rank_of_maps() -> None:
    net = nn.Sequential(nn.Conv2d(2, 4, 1, bias=False), nn.ReLU(), nn.Conv2d(4, 1, 1))
    net[0].weight.data[:] = torch.tensor([[1.0, 0], [0, 1.0], [0, 0], [-1.0, -1.0]])[..., None, None]
    images = torch.stack([torch.ones(5, 5), torch.eye(5)]).expand(3, 2, 5, 5).clone()
    assert rank(subject_of(net, images))["0"].tolist() == [1.0, 5.0, 0.0, 0.0]


def nuclear(matrix: Tensor) -> Tensor:
    return torch.linalg.svdvals(matrix).sum(-1)


def check_lost(rows: Tensor) -> None:
    found = lost_without(rows)
    for number in range(rows.shape[1]):
        without = rows.clone()
        without[:, number] = 0
        expected = nuclear(rows) - nuclear(without)
        torch.testing.assert_close(found[:, number], expected, rtol=1e-6, atol=1e-7 * float(nuclear(rows).max()))


@pytest.mark.parametrize("shape", [(16, 64), (64, 16), (8, 8), (5, 1), (1, 5), (48, 49)])
def test_what_goes_with_a_row_of_a_matrix(shape: tuple[int, int]) -> None:
    rows = torch.randn(3, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).relu()
    rows[1, 0] = rows[1, -1]  # two alike
    rows[2, 0] = 0
    check_lost(rows)
    assert torch.equal(lost_without(torch.zeros(1, 3, 4)), torch.zeros(1, 3))


@pytest.mark.parametrize("size", [1e-200, 1.0, 1e160])
def test_what_goes_with_a_row_of_a_hard_matrix(size: float) -> None:
    torch.manual_seed(0)
    wide, tall = torch.randn(20, 50, dtype=torch.float64), torch.randn(50, 20, dtype=torch.float64)
    spread = 10 ** torch.linspace(-6, 6, 20, dtype=torch.float64)
    some = torch.rand(20, 1, dtype=torch.float64) @ torch.rand(1, 50, dtype=torch.float64)  # of rank 1
    for hard in (wide * spread[:, None], tall * spread, wide[:4].repeat(5, 1), some, torch.ones_like(some)):
        check_lost(size * hard[None])
    assert lost_without((wide * 0).index_fill(0, torch.tensor([3]), size)[None])[0].count_nonzero() == 1


# -- the loss ------------------------------------------------------------------------------------------------------


def test_sensitivities_are_the_gradient_of_gates() -> None:
    net = chain()
    subject = subject_of(net, IMAGES, LABELS, parts=2)
    found = subject.sensitivities()
    assert {name: values.shape for name, values in found.items()} == {"0": (6, 5), "3": (6, 4)}
    pruner = sbf.Pruner(net, IMAGES[:2])
    with pruner.scoring():
        nn.functional.cross_entropy(net.eval()(IMAGES), LABELS, reduction="sum").backward()
        assert pruner.gates.soft.grad is not None
        torch.testing.assert_close(torch.cat([found["0"].sum(0), found["3"].sum(0)]), pruner.gates.soft.grad)
    values = found["0"].abs().mean(0)
    assert first_order(subject)["0"] == pytest.approx((values / values.norm()).numpy())


def test_pairs_of_filters_cost_what_the_second_order_says() -> None:
    subject = subject_of(chain(), IMAGES, LABELS)
    slopes, scores = subject.sensitivities()["0"], pairs(subject)["0"]
    curvature, mean = slopes.T @ slopes / len(slopes), slopes.mean(0)

    def cost(gone: list[int]) -> float:
        return float(curvature[gone][:, gone].sum() / 2 - mean[gone].sum())

    gone: list[int] = []
    highest = -np.inf
    while len(gone) < 5:
        more = {f: cost([*gone, f]) - cost(gone) for f in range(5) if f not in gone}
        cheapest = min(more, key=more.__getitem__)
        highest = max(highest, more[cheapest])
        assert scores[cheapest] == pytest.approx(highest)
        gone.append(cheapest)


# -- what comes after ----------------------------------------------------------------------------------------------


def test_importance_goes_back_through_absolute_weights() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Conv2d(2, 5, 1), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 4, 1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)),
    ).double()
    subject = subject_of(net, IMAGES)
    with torch.no_grad():
        last = infinite_selection(net[:-1](IMAGES))
    second = net[3].weight.detach().abs()[:, :, 0, 0]
    expected = {"0": second.T @ last, "3": last}
    found = propagated(subject)
    assert set(found) == set(expected)
    for name, values in found.items():
        assert values == pytest.approx((expected[name] / expected[name].mean()).numpy())


def test_the_part_of_a_channel_in_the_next_layer() -> None:
    net = nn.Sequential(nn.Conv2d(1, 3, 1, bias=False), nn.ReLU(), nn.Conv2d(3, 2, 1))
    net[0].weight.data[:] = torch.tensor([1.0, 2.0, -1.0])[:, None, None, None]
    net[2].weight.data[:] = torch.tensor([[3.0, -0.5, 1.0], [1.0, 1.0, 1.0]])[..., None, None]
    found = largest_part(subject_of(net, torch.ones(4, 1, 5, 5)))
    # The first output is made of 3 and -1, the second of 1 and 2; the third filter gives nothing.
    assert found["0"] == pytest.approx([3 / 4, 2 / 3, 0.0])


class Meeting(nn.Module):
    """Two layers are added, one is joined beside them, halves of another are added to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Conv2d(3, filters, 1) for filters in (4, 4, 2, 6))
        self.joined, self.folded = nn.Conv2d(6, 2, 1), nn.Conv2d(3, 2, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, second = self.d(x).relu().chunk(2, 1)
        return self.joined(torch.cat([self.c(x), self.a(x) + self.b(x)], 1)), self.folded(first + second)


def test_whose_filters_a_layer_reads() -> None:
    graph = sbf.trace(Meeting().eval(), torch.zeros(1, 3, 4, 4))
    read = {name: {n.layer: numbers.tolist() for n, numbers in read_filters(graph, name)} for name in graph.layers}
    for name in ("a", "b"):
        assert read[name] == {"joined": [NO_FILTER, NO_FILTER, 0, 1, 2, 3]}
    assert read["c"] == {"joined": [0, 1, *[NO_FILTER] * 4]}
    assert read["d"] == {}  # every channel that arrives is made of two filters


# -- all of them ---------------------------------------------------------------------------------------------------

JUDGED = {name: method for name, method in METHODS.items() if not method.learned}
KINDS = [
    "Residual",
    "OptionA",
    "Concat",
    "Shuffle",
    "Depthwise",
    "Grouped",
    "Transposed",
    "FlattenLinear",
    "Conv1d",
]


def test_every_method_is_where_the_list_says() -> None:
    for method in JUDGED.values():
        file, _, name = method.judge.partition(".")
        assert importlib.import_module(f"sbf_pruner.criteria.{file}").__dict__[name].__doc__


@pytest.mark.parametrize("kind", mostly_slow(KINDS, ("Concat", "FlattenLinear")))
def test_every_method_lands_on_the_size_asked_for_and_leaves_the_network_alone(kind: str) -> None:
    model, inputs = ZOO[kind]()
    model = model.eval().requires_grad_(False)
    images = fresh_inputs(inputs, batch=4)
    images = images[0] if isinstance(images, tuple | list) else images
    outputs = model(images)
    labels = torch.zeros(outputs.shape[:1] + outputs.shape[2:], dtype=torch.int64)
    graph = sbf.trace(model, images)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    subject = Subject(model, graph, [(images, labels)])
    whole = sbf.measure(model, images).macs
    plans = {}
    for name in JUDGED:
        scores = ranked(name, subject)
        assert {layer: values.shape for layer, values in scores.items()} == {
            layer: (held.filters,) for layer, held in graph.layers.items()
        }
        assert all(np.isfinite(values).all() for values in scores.values()), name
        assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
        assert not any(_hooks(module) for module in model.modules()) and not model.training
        pruner = sbf.Pruner(model, images, budget=sbf.Budget(macs=0.6), graph=graph)
        pruner.rank(scores)
        small = pruner.extract()
        assert sbf.measure(small, images).macs <= 0.6 * whole
        plans[name] = pruner.plan()
        pruner.detach()
    assert any(a != b for a, b in itertools.pairwise(plans.values()))


HARD = ["TwoInputs", "DictInput", "NestedInput", "MultiOutput", "AuxiliaryHead", "KeywordCalls", "DynamicWeight"]
HARD += [
    "NoNorm",
    "LayerNorm",
    "Linear3d",
    "WeightNorm",
    "WeightNormHook",
    "SharedModule",
    "BareParameter",
    "Unused",
]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("kind", mostly_slow(HARD, HARD[1::2]))
def test_a_method_judges_every_filter_or_says_in_a_sentence_why_not(kind: str) -> None:
    model, inputs = ZOO[kind]()
    inputs = inputs[0] if isinstance(inputs, tuple) and len(inputs) == 1 else inputs
    graph = sbf.trace(model.eval(), inputs)
    outputs, refused = call(model, inputs), set()
    outputs = outputs if isinstance(outputs, Tensor) else outputs[0]
    labels = torch.zeros(outputs.shape[:1] + outputs.shape[2:], dtype=torch.int64)
    for name, method in JUDGED.items():
        try:
            scores = ranked(name, Subject(model, graph, [(inputs, labels)]))
        except PruningError as error:
            assert str(error).startswith(f"method {name}") and str(error).endswith("; choose another method")
            refused.add(name)
            continue
        assert {layer: len(values) for layer, values in scores.items()} == {
            layer: held.filters for layer, held in graph.layers.items()
        }
        assert not method.across or any(values.any() for values in scores.values())
        assert all(parameter.grad is None for parameter in model.parameters())
    assert refused <= ({"taylor", "ccp", "amc", "nppm"} if kind == "MultiOutput" else {"bnscale"})


def test_no_activation_bends_what_is_propagated() -> None:
    net, other = chain(), chain()
    net[2], net[4] = nn.ReLU6(), nn.Tanh()
    expected, found = propagated(subject_of(other, IMAGES)), None
    for scale in (1.0, 1e9):
        with torch.no_grad():
            net[0].weight *= scale  # which a norm undoes but for a factor that all filters share
        found = propagated(subject_of(net, IMAGES))
        assert all(values.all() for values in found.values())
    assert {name: values.shape for name, values in (found or {}).items()} == {
        n: v.shape for n, v in expected.items()
    }


class LayerNorm2d(nn.LayerNorm):
    """As torchvision and timm have it: for maps, whose channels come second."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


@pytest.mark.parametrize("norm", [LayerNorm2d(5), nn.GroupNorm(1, 5), nn.InstanceNorm2d(5, affine=True)])
def test_norms_only_scale_what_is_propagated(norm: nn.Module) -> None:
    net = chain()
    net[1] = norm.double()
    with torch.no_grad():
        norm.weight[:] = scales = torch.tensor([0.0, 1.0, -2.0, 3.0, 4.0])
        norm.bias.fill_(5.0)
    maps = torch.rand(2, 5, 7, 7, dtype=torch.float64)
    torch.testing.assert_close(absolute_copy(net)[1](maps), maps * scales.abs()[:, None, None])
    assert propagated(subject_of(net, IMAGES))["3"].all()
    assert torch.equal(norm.weight, scales)


def test_equal_features_share_their_rank() -> None:
    torch.manual_seed(0)
    dead = torch.zeros(40, 2, dtype=torch.float64)
    live = torch.rand(40, 3, dtype=torch.float64)
    importance = infinite_selection(torch.cat([dead, live], 1))
    assert importance[0] == pytest.approx(float(importance[1])) and importance[:2].max() < importance[2:].min()
    shuffled = torch.cat([dead, live], 1)[torch.randperm(40)]
    torch.testing.assert_close(infinite_selection(shuffled), importance)  # the order of images says nothing


def test_a_weight_that_is_made_of_others_is_judged_as_it_is_used() -> None:
    conv = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 6, 3))
    net = nn.Sequential(conv, nn.ReLU(), nn.Conv2d(6, 2, 1)).eval()
    with torch.no_grad():
        conv.parametrizations.weight.original0 *= torch.arange(1.0, 7)[:, None, None, None]
    subject = Subject(net, sbf.trace(net, torch.zeros(1, 3, 8, 8)), [])
    assert l2_norm(subject)["0"] == pytest.approx(conv.weight.detach().double().flatten(1).norm(dim=1).numpy())
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with pytest.raises(
        PruningError, match=r"^method sfp: the weight of 0 is not a parameter itself .*; choose another"
    ):
        check_method("sfp", subject)
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


def test_weights_that_are_not_finite_are_said_to_be_so() -> None:
    net = chain()
    subject = subject_of(net, IMAGES, LABELS)
    with torch.no_grad():
        net[0].weight[2] = torch.nan
    for name in JUDGED.keys() - {"random", "bnscale"}:
        with pytest.raises(PruningError, match=f"^method {name}[: ].*; (choose|check|give)"):
            ranked(name, subject)


def test_large_layers_are_judged_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = subject_of(chain(), IMAGES, LABELS)
    whole = {name: ranked(name, subject) for name in ("pfp", "chip", "hrank")}
    monkeypatch.setattr("sbf_pruner.criteria.subject.MAX_ELEMENTS", 300)
    for name, expected in whole.items():
        found = ranked(name, subject)
        assert all(found[layer] == pytest.approx(values) for layer, values in expected.items())


def _hooks(module: nn.Module) -> list[Any]:
    return [*module._forward_hooks, *module._forward_pre_hooks]


def test_where_filters_are_compared_within_layers_all_layers_lose_the_same_part() -> None:
    net = nn.Sequential(nn.Conv2d(3, 40, 1), nn.ReLU(), nn.Conv2d(40, 20, 1), nn.ReLU(), nn.Conv2d(20, 2, 1))
    images = torch.rand(2, 3, 4, 4)
    pruner = sbf.Pruner(net, images, budget=sbf.Budget(macs=0.3))
    pruner.rank(ranked("l1", Subject(net, pruner.graph, [])))
    kept = {name: len(filters) for name, filters in pruner.plan().keep.items()}
    assert kept["0"] / 40 == pytest.approx(kept["2"] / 20, abs=0.06) and kept["0"] < 24
    largest = l1_norm(Subject(net, pruner.graph, []))["0"].argsort()[-kept["0"] :]
    assert pruner.plan().keep["0"] == tuple(sorted(largest.tolist()))


def test_scores_below_zero_and_of_any_size_keep_their_order() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 2, 1))
    pruner = sbf.Pruner(net, torch.rand(2, 3, 4, 4), budget=sbf.Budget(macs=0.5, params=0.6))
    for factor in (1e-30, 1.0, 1e30):
        pruner.rank({"0": factor * np.array([-5.0, 3, -4, 2, -3, 1, -2, -1])})
        assert pruner.plan().keep["0"] == (1, 3, 5, 7)
    pruner.rank({"0": torch.tensor([9.0, 1, 8, 2, 7, 3, 6, 4], requires_grad=True)})
    assert pruner.plan().keep["0"] == (0, 2, 4, 6)
    close = -1e6 + 1e-6 * np.array([5.0, 1, 6, 2, 7, 3, 8, 4])  # single precision would not tell them apart
    pruner.rank({"0": np.append(close[:-1], 1e6)})
    assert pruner.plan().keep["0"] == (2, 4, 6, 7)
    pruner.rank({"0": 1e307 * np.array([-10.0, 3, 2, 1, 10, 0, 0, 4])[::-1]})
    assert pruner.plan().keep["0"] == (0, 3, 5, 6)


REFUSED = {
    "no budget": (None, {"0": np.ones(8)}, "to know how many filters to keep; give the pruner a budget"),
    "a layer is missing": (0.5, {}, "exactly the layers that can be pruned; 0 is missing"),
    "a layer too many": (0.5, {"0": np.ones(8), "2": np.ones(2)}, "; 2 is missing or is not one of them"),
    "a filter is missing": (0.5, {"0": np.ones(7)}, "0: expected 8 finite scores, one per filter"),
    "not finite": (0.5, {"0": np.full(8, np.nan)}, "0: expected 8 finite scores"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_scores_that_do_not_fit_are_refused_and_change_nothing(case: str) -> None:
    macs, scores, message = REFUSED[case]
    net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 2, 1))
    pruner = sbf.Pruner(net, torch.rand(2, 3, 4, 4), budget=sbf.Budget(macs=macs) if macs else None)
    with pytest.raises(PruningError, match=message):
        pruner.rank(scores)
    assert pruner.alive() == (8, 8) and pruner.scores()["0"].tolist() == [1.0] * 8


def test_a_layer_that_is_never_called_is_worth_nothing() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 2, 1))
    subject = Subject(net.eval(), sbf.trace(net, torch.zeros(1, 3, 4, 4)), [])
    assert ranked("taylor", subject)["0"].tolist() == [0.0] * 8


@pytest.mark.parametrize("name", ["l1", "chip", "taylor", "bnscale"])
def test_a_method_ranks_filters_in_a_loop_of_ones_own(name: str) -> None:
    torch.manual_seed(0)
    net = resolve("resnet20").eval()
    before = {key: tensor.clone() for key, tensor in net.state_dict().items()}
    batches = [(torch.rand(8, 3, 16, 16), torch.arange(8))]
    pruner = sbf.Pruner(net, batches[0][0][:1], budget=sbf.Budget(macs=0.4))
    rank_by(pruner, name, batches)
    small, image = pruner.extract(), batches[0][0][:1]
    assert sbf.measure(small, image).macs <= 0.4 * sbf.measure(pruner.detach(), image).macs
    assert all(torch.equal(tensor, before[key]) for key, tensor in net.state_dict().items())


def test_what_cannot_rank_is_said() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    pruner = sbf.Pruner(net, torch.rand(1, 3, 8, 8), budget=sbf.Budget(macs=0.5))
    with pytest.raises(sbf.PruningError, match=r"no method that ranks filters is called 'tailor'; did you mean"):
        rank_by(pruner, "tailor")
    with pytest.raises(sbf.PruningError, match="no method that ranks filters is called 'dmc'"):
        rank_by(pruner, "dmc")
    with pytest.raises(sbf.PruningError, match="method chip needs images; give batches of inputs and labels"):
        rank_by(pruner, "chip")
