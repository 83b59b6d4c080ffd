"""What is followed beyond one call in evaluation mode: training mode, chance, and what a first call leaves."""

import functools
import random
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sbf_pruner as sbf
from sbf_pruner.graph import may_read_training

IMAGE = torch.rand(2, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.o = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)


class ByProperty(Two):
    @property
    def hard(self) -> bool:
        return self.training

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.o(torch.sigmoid(x) if self.hard else F.relu(x))


class ByName(Two):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.o(torch.sigmoid(x) if getattr(self, "training") else F.relu(x))  # noqa: B009


def decorated(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(forward)
    def around(*given: object) -> Tensor:
        return forward(*given)

    return around


class Decorated(Two):
    @decorated
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.o(torch.sigmoid(x) if self.training else F.relu(x))


@pytest.mark.parametrize("kind", [ByProperty, ByName, Decorated])
def test_a_mode_is_noticed_however_it_is_asked_for(kind: type[nn.Module]) -> None:
    assert re.match(r"it feeds .* in training mode only", sbf.trace(kind().double(), IMAGE).skipped["a"])


def test_a_hook_may_ask_for_the_mode_of_any_module() -> None:
    act = nn.ReLU()
    assert not may_read_training(act)
    act.register_forward_hook(lambda module, given, found: torch.sigmoid(found) if module.training else found)
    assert may_read_training(act)


class Skipped(nn.Module):
    """A block that chance leaves out in training mode."""

    def __init__(self, chance: Callable[[], bool]) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.chance = chance

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.chance():
            return x
        return F.relu(x + self.conv2(F.relu(self.conv1(x))))


CHANCES: dict[str, Callable[[], bool]] = {
    "python": lambda: random.random() < 0.9,
    "numpy": lambda: bool(np.random.rand() < 0.9),
    "torch": lambda: torch.rand(1).item() < 0.9,
}


@pytest.mark.parametrize("whose", CHANCES)
def test_blocks_that_chance_leaves_out_can_be_pruned(whose: str) -> None:
    blocks = [Skipped(CHANCES[whose]) for _ in range(2)]
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), *blocks, nn.Conv2d(8, 4, 1)).double().eval()
    before = random.getstate(), repr(np.random.get_state(legacy=False)), torch.get_rng_state()
    pruner = sbf.Pruner(model, IMAGE)
    assert (random.getstate(), repr(np.random.get_state(legacy=False))) == before[:2]
    assert torch.equal(torch.get_rng_state(), before[2])
    assert set(pruner.graph.layers) == {"0", "2.conv1", "2.conv2", "3.conv1", "3.conv2"}
    pruner.gate(sbf.Plan({"0": [0, 5], "2.conv1": [1], "3.conv2": [4]}))
    torch.testing.assert_close(pruner.extract()(IMAGE), model(IMAGE), rtol=0, atol=1e-12)


class FeaturesByChance(Two):
    """Gives its features too in training mode, where chance may leave something out."""

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = F.relu(self.a(x))
        if self.training and torch.rand(1).item() < 0.5:
            x = F.relu(x)
        return (self.o(x), x.mean((2, 3))) if self.training else self.o(x)


def test_further_outputs_keep_their_channels_whatever_chance_does() -> None:
    assert "a" in sbf.trace(FeaturesByChance().double(), IMAGE).skipped


class Kept(Two):
    """Keeps something that it makes of a width in its first call."""

    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.make, self.held = make, None

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.a(x))
        if self.held is None:
            self.held = self.make(x)
        return self.o(x * self.held)


MADE: dict[str, Callable[[Tensor], Tensor]] = {
    "full": lambda x: torch.full((1,), float(x.shape[1]), dtype=x.dtype, device=x.device),
    "ones": lambda x: torch.ones(x.shape[1], dtype=x.dtype, device=x.device).sum(),
    "tensor": lambda x: torch.tensor(float(x.shape[1]), dtype=x.dtype, device=x.device),
}


@pytest.mark.parametrize("how", MADE)
@pytest.mark.parametrize("ran_before", [False, True])
def test_a_width_that_is_kept_from_the_first_call_is_not_taken_for_a_constant(how: str, ran_before: bool) -> None:
    model = Kept(MADE[how]).double().eval()
    pruner = sbf.Pruner(model, IMAGE)
    pruner.gate(sbf.Plan({"a": [0, 1]}))
    if ran_before:  # then the small network has it from the large one
        expected = model(IMAGE)
        torch.testing.assert_close(pruner.extract()(IMAGE), expected, rtol=0, atol=1e-12)
        return
    with pytest.raises(
        sbf.PruningError, match="stores a value in its first call that depends on the number of channels"
    ):
        pruner.extract()
