"""A saved network comes back as it was, from files that anyone can read, or is refused in one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from cases import random_plans
from sbf_pruner.errors import PruningError, RunError
from sbf_pruner.graph import trace
from sbf_pruner.plan import Plan
from sbf_pruner.saving import load, save
from sbf_pruner.surgery import extract
from sbf_pruner.utils import call
from zoo import ZOO, fresh_inputs

HARD = "Residual Concat Depthwise Grouped SqueezeExcite SharedModule Unet TwoInputs DictInput NestedInput"


def net(width: int = 8) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 6, 3), nn.Conv2d(6, 4, 1)
    )


def small() -> nn.Module:
    return extract(net(), torch.rand(2, 3, 9, 9), Plan({"0": [0, 5], "3": [1, 2, 3]}))


@pytest.mark.parametrize("name", HARD.split())
def test_what_comes_back_is_what_was_saved(name: str, tmp_path: Path) -> None:
    model, inputs = ZOO[name]()
    plans = random_plans(trace(model, inputs), 4, seed=3)
    for plan in plans:
        pruned = extract(model, inputs, plan)
        save(pruned, tmp_path)
        again = load(tmp_path, lambda: ZOO[name]()[0].float())
        assert str(again) == str(pruned)
        state = again.state_dict()
        for key, tensor in pruned.state_dict().items():
            torch.testing.assert_close(state[key], tensor, rtol=0, atol=0)
        other = fresh_inputs(inputs)
        with torch.no_grad():
            found, expected = call(again.eval(), other), call(pruned.eval(), other)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_the_weights_can_be_read_by_whoever_can_read_the_plan(tmp_path: Path) -> None:
    save(small(), tmp_path)
    modes = {path.name: path.stat().st_mode for path in tmp_path.iterdir()}
    assert modes["model.safetensors"] == modes["plan.json"]


def test_a_network_in_place_of_its_builder_is_refused(tmp_path: Path) -> None:
    save(small(), tmp_path)
    with pytest.raises(RunError, match=r"^build is a network already; give the function that builds the dense one"):
        load(tmp_path, net())  # type: ignore[arg-type]


def test_a_network_pruned_twice_comes_back(tmp_path: Path) -> None:
    images = torch.rand(2, 3, 9, 9)
    twice = extract(small(), images, Plan({"0": [1], "3": [0, 2]}))
    save(twice, tmp_path)
    assert Plan.load(tmp_path / "plan.json") == Plan({"0": [5], "3": [1, 3]})
    again = load(tmp_path, net)
    torch.testing.assert_close(again.eval()(images), twice.eval()(images), rtol=0, atol=0)
    save(again, tmp_path / "again")
    assert (tmp_path / "again/model.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()


class GoesByValues(nn.Module):
    """On every real image, but not on zeros, one branch is turned round, or the other way is taken."""

    def __init__(self, turns: bool) -> None:
        super().__init__()
        self.turns = turns
        self.a, self.b = (nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU()) for _ in range(2))
        self.out, self.other = nn.Conv2d(8, 4, 1), nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> Any:
        seen = bool(x.abs().max() > 0)
        if not seen and not self.turns:
            return self.other(x)
        a = self.a(x)
        return self.out((a.flip(1) if seen else a) + self.b(x))


@pytest.mark.parametrize(
    ("turns", "said"),
    [(True, "tracing with zeros gives another"), (False, "cannot be pruned when traced with zeros")],
)
def test_what_goes_by_values_comes_back_with_the_inputs_it_was_pruned_with_alone(
    turns: bool, said: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, images = GoesByValues(turns).double(), torch.rand(2, 3, 4, 4, dtype=torch.float64)
    small = extract(model, images, Plan({"a.0": [0, 1, 2, 3], "b.0": [2, 3, 4, 5]}))
    save(small, tmp_path)
    with pytest.raises(RunError, match=f"{said}.*example_inputs"):
        load(tmp_path, lambda: GoesByValues(turns))
    again = load(tmp_path, lambda: GoesByValues(turns), images.float())
    torch.testing.assert_close(again(images), small(images), rtol=0, atol=0)


def test_an_ordinary_network_can_be_saved_too(tmp_path: Path) -> None:
    model = net()
    save(model, tmp_path)
    again = load(tmp_path, net)
    assert all(map(torch.equal, model.state_dict().values(), again.state_dict().values()))
    assert Plan.load(tmp_path / "plan.json") == Plan({})


def test_it_can_be_trained_on(tmp_path: Path) -> None:
    save(small(), tmp_path)
    again = load(tmp_path, net).train()
    again(torch.rand(2, 3, 9, 9)).sum().backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in again.parameters())


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_precision_is_kept(kind: torch.dtype, tmp_path: Path) -> None:
    save(small().to(kind), tmp_path)
    again = load(tmp_path, net)
    assert {p.dtype for p in again.parameters()} == {kind}


def test_weights_that_are_tied_stay_tied(tmp_path: Path) -> None:
    def build() -> nn.Module:
        made = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1))
        made[2].weight = made[1].weight
        return made

    model = build()
    save(model, tmp_path)
    again = load(tmp_path, build)
    assert again[2].weight is again[1].weight
    assert torch.equal(again[1].weight, model[1].weight)


def test_the_files_are_plain(tmp_path: Path) -> None:
    saved = small()
    save(saved, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert sorted(tensors) == sorted(saved.state_dict())
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan == {"format": "sbf-pruner plan 1", "keep": {"0": [0, 5], "3": [1, 2, 3]}}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.safetensors", "plan.json"]


# -- refused -------------------------------------------------------------------------------------------------


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-9])


def flip(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")


def strip(folder: Path) -> None:
    save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors")


def edit_plan(folder: Path) -> None:
    Plan({"0": [0, 6], "3": [1, 2, 3]}).save(folder / "plan.json")


def cut_plan(folder: Path) -> None:
    (folder / "plan.json").write_text('{"format": "sbf-pruner plan 1", "keep"')


def lose_plan(folder: Path) -> None:
    (folder / "plan.json").unlink()


def lose_model(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (cut, "model.safetensors is damaged or cut short"),
        (flip, "model.safetensors was changed after it was written"),
        (strip, "model.safetensors was not written by sbf-pruner"),
        (lose_model, "model.safetensors does not exist"),
        (edit_plan, "plan.json and model.safetensors do not belong together"),
        (cut_plan, "plan.json is damaged"),
        (lose_plan, "plan.json cannot be read"),
    ],
)
def test_damage_is_named(harm: Callable[[Path], None], said: str, tmp_path: Path) -> None:
    save(small(), tmp_path)
    harm(tmp_path)
    with pytest.raises(RunError) as caught:
        load(tmp_path, net)
    assert said in str(caught.value)


def test_another_network_is_refused(tmp_path: Path) -> None:
    save(small(), tmp_path)
    with pytest.raises(RunError, match="does not fit the network that build"):
        load(tmp_path, lambda: nn.Sequential(*net()[:4], nn.Conv2d(6, 5, 1)))
    with pytest.raises(PruningError, match="keeps filter 5 of 0, which has 4"):
        load(tmp_path, lambda: net(4))
    with pytest.raises(RunError, match=r"build\(\) returned NoneType"):
        load(tmp_path, lambda: None)  # type: ignore[arg-type, return-value]


class Scaled(nn.Conv2d):
    """A layer that has more to say of itself than tensors."""

    extra: object = {"scale": 2.0}

    def get_extra_state(self) -> object:
        return self.extra

    def set_extra_state(self, state: object) -> None:
        self.extra = state


@pytest.mark.parametrize("where", ["1", "Scaled"])
def test_state_that_is_no_tensor_is_refused_by_name(where: str, tmp_path: Path) -> None:
    layer = Scaled(8, 4, 3)
    model = layer if where == "Scaled" else nn.Sequential(nn.Conv2d(3, 8, 3), layer)
    with pytest.raises(
        PruningError, match=rf"^{where} puts a 'dict' into its state dict, .*; store it in a buffer, or"
    ):
        save(model, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_a_tensor_among_the_extra_state_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scaled, "extra", torch.zeros(1))
    model = nn.Sequential(nn.Conv2d(3, 8, 3), layer := Scaled(8, 4, 3))
    layer.extra = torch.tensor([3.0])
    save(model, tmp_path)
    again = load(tmp_path, lambda: nn.Sequential(nn.Conv2d(3, 8, 3), Scaled(8, 4, 3)))
    assert torch.equal(again[1].extra, layer.extra)
