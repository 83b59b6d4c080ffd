"""The fast engine takes the same way as the plain one, number for number."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from sbf_pruner import Plan, Pruner
from sbf_pruner.models import resolve
from sbf_pruner.training.average import Average
from sbf_pruner.training.captured import CapturedEngine
from sbf_pruner.training.convolutions import tunable_convolutions
from sbf_pruner.training.data import Augment, Batches, Split
from sbf_pruner.training.engine import Engine, Tally, make_optimizer
from sbf_pruner.training.recipe import OptimizerConfig
from sbf_pruner.training.teacher import Teacher

Way = Callable[..., tuple[list[Tally], list[Tensor], Plan]]


def batches(device: str = "cpu") -> Batches:
    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (96, 3, 16, 16), dtype=torch.uint8, generator=random)
    split = Split(images, torch.randint(0, 10, (96,), generator=random))
    return Batches(split, 32, (0.5,) * 3, (0.25,) * 3, device=device, augment=Augment(2, True), seed=3)


def train_with_everything(kind: type[Engine], device: str = "cpu") -> tuple[list[Tally], list[Tensor], Plan]:
    """A teacher, an average, norms without decay, scores of one speed, statistics taken anew."""
    torch.manual_seed(1)
    teacher = Teacher(resolve("resnet20").to(device).eval().requires_grad_(False), 0.7, 4.0)
    torch.manual_seed(0)
    model = resolve("resnet20").to(device)
    pruner = Pruner(model, torch.zeros(1, 3, 16, 16, device=device), speed=0.2, penalty=1e-3)
    data, engine = batches(device), kind(model, device, pruner)
    config = OptimizerConfig(lr=0.05, nesterov=True, decay_all=False, ema=0.9)
    tallies = []
    for first in (0, 4):
        optimizer, average = make_optimizer(model, config), Average(model, config.ema)
        for epoch in (first, first + 1):
            rates = [0.05, 0.04, 0.03]
            tallies.append(engine.train_epoch(data, epoch, optimizer, rates, 0.1, teacher, average))
            with average.applied():
                tallies.append(engine.evaluate(data))
        average.take_over()
        engine.recalibrate(data, first, 2)
        tallies.append(engine.evaluate(data))
        with pruner.scoring():
            tallies += [engine.score_epoch(data, epoch, teacher) for epoch in (first + 2, first + 3)]
    return tallies, [t.detach().cpu() for t in model.state_dict().values()], pruner.plan()


def train(kind: type[Engine], device: str = "cpu") -> tuple[list[Tally], list[Tensor], Plan]:
    torch.manual_seed(0)
    model = resolve("resnet20").to(device)
    pruner = Pruner(model, torch.zeros(1, 3, 16, 16, device=device), lr=1e-4, penalty=1e-3)
    data, engine = batches(device), kind(model, device, pruner)
    optimizer = make_optimizer(model, OptimizerConfig(lr=0.05))
    tallies = [engine.train_epoch(data, epoch, optimizer, [0.05, 0.04, 0.03], 0.1) for epoch in range(2)]
    with pruner.scoring():
        tallies += [engine.score_epoch(data, epoch) for epoch in (2, 3)]
    with pruner.gated():
        optimizer = make_optimizer(model, OptimizerConfig("adam", lr=1e-3))
        tallies.append(engine.train_epoch(data, 4, optimizer, [1e-3] * 3))
    tallies.append(engine.evaluate(data))
    return tallies, [p.detach().cpu() for p in model.parameters()], pruner.plan()


@pytest.mark.parametrize("way", [train, train_with_everything])
def test_the_fast_engine_equals_the_plain_one(way: Way) -> None:
    plain, fast = way(Engine), way(CapturedEngine)
    assert plain[0] == fast[0]
    assert plain[2] == fast[2]
    for a, b in zip(plain[1], fast[1], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("way", [train, train_with_everything])
def test_the_captured_engine_follows_the_plain_one_on_cuda(way: Way) -> None:
    plain, fast = way(Engine, "cuda"), way(CapturedEngine, "cuda")
    for a, b in zip(plain[0], fast[0], strict=True):
        assert a.loss == pytest.approx(b.loss, rel=0.05)


def test_tunable_convolutions_have_the_same_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(8, 9, 3, padding=1, bias=False), nn.ReLU(), nn.Conv2d(9, 8, 5, bias=False)
    ).double()
    x = torch.rand(2, 8, 9, 9, dtype=torch.float64, requires_grad=True)

    def gradients() -> list[Tensor]:
        return list(torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()]))

    expected = gradients()
    with tunable_convolutions(model):
        assert "forward" in vars(model[0])
        found = gradients()
    assert "forward" not in vars(model[0])
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
