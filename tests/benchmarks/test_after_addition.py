"""Scores behind the addition: the same network, gates on the sums, and an exact cut."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from cases import assert_equal_networks, random_plans
from sbf_pruner import Plan, Pruner, Scores, trace
from sbf_pruner.graph import network_cost
from sbf_pruner.measurement import measure
from sbf_pruner.models import resolve
from sbf_pruner.modules import GatePoint
from sbf_pruner.saving import load, save
from sbf_pruner.scores import LeafGates
from sbf_pruner.training import OptimizerConfig
from sbf_pruner.training.data import Augment, DeviceBatches, Split
from sbf_pruner.training.engine import CapturedEngine, Engine, make_optimizer
from shares import mostly_slow
from zoo import randomise

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from after_addition import Block, resnet20

IMAGES = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def network() -> nn.Module:
    torch.manual_seed(0)
    return randomise(resnet20().double())


def test_it_is_the_bundled_network_bit_for_bit() -> None:
    torch.manual_seed(0)
    plain = resolve("resnet20")
    torch.manual_seed(0)
    ours = resnet20()
    assert list(ours.state_dict()) == list(plain.state_dict())
    images = IMAGES.float()
    assert torch.equal(ours(images), plain(images))


def test_the_last_layer_of_every_block_is_gated_behind_the_sum_and_the_others_where_they_always_are() -> None:
    graph, plain = trace(resnet20(), IMAGES.float()), trace(resolve("resnet20"), IMAGES.float())
    assert list(graph.layers) == list(plain.layers)
    for name, layer in graph.layers.items():
        if name.endswith(".conv2"):
            assert (layer.site.kind, layer.site.module) == ("sum", name.replace("conv2", "place"))
        else:
            assert layer.site == plain.layers[name].site
    # The norms before the sums have switches, so that a branch without input stays away.
    followed = {site.module for site in graph.sites if not site.layer}
    assert followed == {name.replace("conv", "bn") for name in graph.layers if name.endswith(".conv2")}


def by_hand(model: nn.Module, masks: dict[str, Tensor], images: Tensor) -> Tensor:
    """The forward pass written out, with the masks where they are meant to be."""
    x = torch.relu(model.bn1(model.conv1(images)) * masks["conv1"])
    for stage in ("layer1", "layer2", "layer3"):
        for number, block in enumerate(getattr(model, stage)):
            assert isinstance(block, Block)
            first, second = (masks[f"{stage}.{number}.conv{i}"] for i in (1, 2))
            inner = torch.relu(block.bn1(block.conv1(x)) * first)
            branch = block.bn2(block.conv2(inner)) if first.any() else 0
            x = torch.relu((branch + block.shortcut(x)) * second)
    return model.fc(x.mean((2, 3)))


@pytest.mark.parametrize("empty", ["", "layer1.1.conv1", "layer3.0.conv1"])
def test_a_closed_gate_takes_what_the_shortcut_carries_too(empty: str) -> None:
    model = network().eval()
    pruner = Pruner(model, IMAGES)
    keep = {n: [i for i in range(layer.filters) if i % 3] for n, layer in pruner.graph.layers.items()}
    if empty:
        keep[empty] = []
    pruner.gate(Plan(keep))
    masks = {n: torch.zeros(layer.filters, 1, 1).double() for n, layer in pruner.graph.layers.items()}
    for name, kept in keep.items():
        masks[name][kept] = 1
    found, small = model(IMAGES), pruner.extract().eval()
    pruner.gates.mode = "off"
    expected = by_hand(model, masks, IMAGES)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(small(IMAGES), expected, rtol=1e-12, atol=1e-12)
    if empty:  # the branch is gone, and the stream goes on
        second = empty.replace("conv1", "conv2")
        assert pruner.plan().keep[second] and not any(n.startswith(second) for n in small.state_dict())


def test_gated_and_cut_networks_are_equal_and_cost_what_was_counted(tmp_path: Path) -> None:
    pruner = Pruner(network(), IMAGES)
    for number, plan in enumerate(random_plans(pruner.graph, 4)):
        pruner.gate(plan)
        small = pruner.extract()
        for training in (False, True):
            assert_equal_networks(pruner, small, training, seed=number)
        counted, found = network_cost(pruner.graph, plan.masks(pruner.graph)), measure(small, IMAGES)
        assert (counted.params, counted.macs) == (found.params, found.macs)
        assert not any(isinstance(module, GatePoint) for module in small.modules())
    save(small, tmp_path)
    again = load(tmp_path, lambda: resnet20().double()).eval()
    assert torch.equal(again(IMAGES), small.eval()(IMAGES))


def test_a_score_multiplies_the_sum() -> None:
    model = network().eval()
    pruner = Pruner(model, IMAGES)
    scores = {n: torch.rand(layer.filters, dtype=torch.float64) + 0.5 for n, layer in pruner.graph.layers.items()}
    with pruner.scoring():
        with torch.no_grad():
            pruner.gates.soft.copy_(torch.cat(list(scores.values())))
        found = model(IMAGES)
    pruner.gates.mode = "off"
    expected = by_hand(model, {name: score[:, None, None] for name, score in scores.items()}, IMAGES)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("joint", [False, True])
def test_both_engines_train_it_alike(joint: bool) -> None:
    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (48, 3, 8, 8), dtype=torch.uint8, generator=random)
    split = Split(images, torch.randint(0, 10, (48,), generator=random))
    results = []
    for kind in (Engine, CapturedEngine):
        torch.manual_seed(0)
        model = resnet20()
        data = DeviceBatches(split, 16, (0.5,) * 3, (0.25,) * 3, augment=Augment(1, True), seed=3)
        pruner = Pruner(model, IMAGES.float(), scores=Scores(lr=1e-4, penalty=1e-3))
        engine = kind(model, "cpu", pruner)
        optimizer = make_optimizer(model, OptimizerConfig("adam", lr=1e-3))
        with pruner.scoring(joint=joint):
            first = engine.train_epoch(data, 0, optimizer, [1e-3] * 3) if joint else engine.score_epoch(data, 0)
        optimizer = make_optimizer(model, OptimizerConfig("adam", lr=1e-3))
        second = engine.train_epoch(data, 1, optimizer, [1e-3] * 3)
        results.append((first, second, pruner.plan(), [*model.state_dict().values(), pruner.gates.soft.detach()]))
    plain, fast = results
    assert plain[:3] == fast[:3]
    for a, b in zip(plain[3], fast[3], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("mode", mostly_slow(["soft", "hard"], ["soft"]))
def test_a_compiler_follows_the_gates_on_the_sums(mode: str) -> None:
    """As the captured engine compiles it: whole, and with the gates' gradients."""
    model = network().train()
    pruner = Pruner(model, IMAGES)
    pruner.gate(Plan({n: [i for i in range(layer.filters) if i % 3] for n, layer in pruner.graph.layers.items()}))
    soft = pruner.gates.soft
    with pruner.scoring(joint=True):
        pruner.gates.mode = mode  # type: ignore[assignment]
        with torch.no_grad():
            soft.uniform_(0.5, 1)
        with LeafGates(model, pruner.gates) as folded:
            leaves = [*folded.leaves, *(p for p in model.parameters() if p.dim() > 1), *[soft] * (mode == "soft")]

            def gradients(forward: nn.Module) -> tuple[Tensor, ...]:
                return torch.autograd.grad(forward(IMAGES).square().sum(), leaves)

            expected = gradients(model)
            found = gradients(torch.compile(model, backend="aot_eager", fullgraph=True))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_what_was_compiled_notices_that_the_gates_work_in_another_way() -> None:
    model = network().eval()
    pruner = Pruner(model, IMAGES)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)

    def compare() -> Tensor:
        with torch.no_grad(), LeafGates(model, pruner.gates):
            expected = model(IMAGES)
            torch.testing.assert_close(compiled(IMAGES), expected, rtol=1e-12, atol=1e-12)
        return expected

    seen = [compare()]
    with pruner.scoring():
        with torch.no_grad():
            pruner.gates.soft.uniform_(0.5, 1)
        seen.append(compare())
    pruner.gate(Plan({n: [i for i in range(layer.filters) if i % 3] for n, layer in pruner.graph.layers.items()}))
    seen.append(compare())
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(seen, 2))


class Two(nn.Module):
    """A convolution on either side of the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Conv2d(3, 6, 3, padding=1) for _ in range(2))
        self.place = GatePoint(6)
        self.fc = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.relu(self.place(self.left(x) + self.right(x))).mean((2, 3)))


def test_a_place_belongs_to_one_layer_and_the_other_has_its_own_gate() -> None:
    torch.manual_seed(0)
    pruner = Pruner(Two().double(), IMAGES)
    assert {n: layer.site.module for n, layer in pruner.graph.layers.items()} == {"left": "place", "right": "right"}
    pruner.gate(Plan({"left": [0, 2, 3], "right": [2, 3, 5]}))
    assert pruner.plan().keep["right"] == (2, 3)  # what is added to a closed channel is not needed
    for training in (False, True):
        assert_equal_networks(pruner, pruner.extract(), training)
