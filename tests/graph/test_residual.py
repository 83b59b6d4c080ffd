"""Residual blocks from the graph alone, and how much they refine, against a calculation by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from runs import Small
from sbf_pruner import Scores
from sbf_pruner.errors import PruningError
from sbf_pruner.graph import residual_blocks, trace
from sbf_pruner.pruner import Pruner
from sbf_pruner.training import MEASURED_ON, pruned_refinement, scored_refinement
from zoo import ZOO

FOUND = {
    "Residual": ["3.conv2", "4.conv2", "5.conv2", "6.conv2", "7.conv2"],  # with and without a projection
    "OptionA": ["3.conv2", "4.conv2", "5.conv2", "6.conv2"],  # a shortcut that pads channels
    "PreActivation": ["1.conv2", "2.conv2"],
    "InplaceOps": ["left.0", "right.0"],  # x += f(x)
    "Depthwise": ["4.project.0"],
    "SqueezeExcite": ["first.0"],
    "LayerNorm": ["", ""],  # channels last: no filter of a branch can be named
    "Plain": [],
    "Concat": [],
    "Unet": [],
    "SelectiveKernel": [],  # parallel branches are no way around each other
    "TwoInputs": [],
}


@pytest.mark.parametrize("name", FOUND)
def test_residual_blocks_are_found_in_the_graph(name: str) -> None:
    assert [block.layer for block in residual_blocks(trace(*ZOO[name]()))] == FOUND[name]


def test_names_play_no_part() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1)
            self.head = nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            x = x + torch.relu(self.b(x))
            x = self.b(x) + x
            return self.head(x.mean((2, 3)))

    found = residual_blocks(trace(Odd(), torch.rand(1, 3, 8, 8)))
    assert [(block.addition, block.branch, block.layer) for block in found] == [(0, 1, "b"), (1, 0, "b")]
    assert len({block.name for block in found}) == 2


@pytest.fixture(scope="module")
def scored() -> tuple[Pruner, Tensor]:
    torch.manual_seed(0)
    model, images = Small().double(), torch.rand(16, 1, 8, 8, dtype=torch.float64)
    pruner = Pruner(model, images[:2], scores=Scores(penalty=0.02, lr=3e-3))
    with pruner.scoring():
        for _ in range(40):
            (model(images).square().mean() + pruner.penalty()).backward()
            pruner.step()
    return pruner, images


def test_the_ratio_is_that_of_a_calculation_by_hand(scored: tuple[Pruner, Tensor]) -> None:
    pruner, images = scored
    found = scored_refinement(pruner, images)
    assert [record["block"] for record in found] == ["blocks.0", "blocks.1"]
    assert pruner.gates.mode == "hard", "as it was before"
    model, kept = pruner.model.eval(), {}
    block = model.blocks[0]
    handles = [
        block.register_forward_pre_hook(lambda m, args: kept.update(x=args[0])),
        block.bn2.register_forward_hook(lambda m, args, out: kept.update(f=out)),
    ]
    pruner.gates.mode = "soft"
    with torch.no_grad():
        model(images)
    pruner.gates.mode = "hard"
    for handle in handles:
        handle.remove()
    score = pruner.scores()["blocks.0.conv2"]
    scored_ratio = float(kept["f"].square().sum() / kept["x"].square().sum())
    bare = kept["f"] / score.view(1, -1, 1, 1)
    assert found[0]["scored"] == pytest.approx(scored_ratio, rel=1e-9)
    assert found[0]["unscored"] == pytest.approx(float(bare.square().sum() / kept["x"].square().sum()), rel=1e-9)
    assert (found[0]["delta"], found[0]["top"]) == (float(score.min()), float(score.max()))


def test_the_bounds_hold(scored: tuple[Pruner, Tensor]) -> None:
    records = scored_refinement(*scored)
    assert len(records) == 2
    for record in records:
        low, high = (record[key] ** 2 * record["unscored"] for key in ("delta", "top"))
        assert low < record["scored"] < high


def test_of_the_small_network_the_same_blocks_are_measured(scored: tuple[Pruner, Tensor]) -> None:
    pruner, images = scored
    gated = pruned_refinement(pruner, pruner.model.eval(), images)
    small = pruned_refinement(pruner, pruner.extract(), images)
    assert list(small) == ["blocks.0", "blocks.1"]
    assert small == pytest.approx(gated, rel=1e-9), "removal changes nothing"


def test_a_block_that_is_gone_refines_nothing(scored: tuple[Pruner, Tensor]) -> None:
    pruner, images = scored
    held = pruner.plan()
    masks = {name: list(kept) for name, kept in held.keep.items()}
    masks |= {"blocks.0.conv1": [], "blocks.0.conv2": [], "blocks.1.conv2": [0, 1], "blocks.1.conv1": [2]}
    try:
        pruner.gate(type(held)({**masks, "stem": list(range(8))}))
        found = pruned_refinement(pruner, pruner.extract(), images)
        assert found["blocks.0"] == 0 and found["blocks.1"]
    finally:
        pruner.gate(held)


def test_a_network_that_adds_at_other_times_is_not_measured() -> None:
    class Moody(Small):
        calm = True

        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            return out if self.calm else out + (x + x).mean()

    model = Moody()
    pruner = Pruner(model, torch.rand(2, 1, 8, 8))
    images = torch.rand(MEASURED_ON, 1, 8, 8)
    assert len(scored_refinement(pruner, images)) == 2
    model.calm = False
    for measured in (lambda: scored_refinement(pruner, images), lambda: pruned_refinement(pruner, model, images)):
        with pytest.raises(PruningError, match="adds feature maps 3 times, but its graph has 2 additions"):
            measured()


def test_shortcuts_that_carry_nothing_are_told_of() -> None:
    model = Small()
    pruner = Pruner(model, torch.rand(2, 1, 8, 8))
    for held in (model.norm.weight, model.norm.bias, model.blocks[0].bn2.weight, model.blocks[0].bn2.bias):
        nn.init.zeros_(held)
    with pytest.raises(PruningError, match=r"the shortcut of blocks\.1 is all zero"):
        scored_refinement(pruner, torch.rand(4, 1, 8, 8))


def test_every_module_keeps_its_mode(scored: tuple[Pruner, Tensor]) -> None:
    pruner, images = scored
    pruner.model.train()
    pruner.model.norm.eval()
    before = [module.training for module in pruner.model.modules()]
    scored_refinement(pruner, images)
    pruned_refinement(pruner, pruner.model, images)
    assert [module.training for module in pruner.model.modules()] == before
