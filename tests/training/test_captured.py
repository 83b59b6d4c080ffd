"""The fast engine takes the same way as the plain one, number for number."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runs import made_by, resnet8, small_run
from sbf_pruner import Plan, Pruner, Scores
from sbf_pruner.budget import Budget
from sbf_pruner.scores import PROJECTIONS
from sbf_pruner.training import OptimizerConfig
from sbf_pruner.training.data import Augment, DeviceBatches, Split
from sbf_pruner.training.engine import (
    Average,
    BatchCounters,
    CapturedEngine,
    Engine,
    EpochResult,
    Teacher,
    TunableConvolutions,
    make_optimizer,
)
from sbf_pruner.utils import real_copy, remove_pruner_hooks
from shares import mostly_slow

Way = Callable[..., tuple[list[EpochResult], list[Tensor], Plan]]


def batches(device: str = "cpu", *, training: bool = True, cutout: int = 0, mixup: float = 0.0) -> DeviceBatches:
    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (96, 3, 16, 16), dtype=torch.uint8, generator=random)
    split = Split(images, torch.randint(0, 10, (96,), generator=random))
    augment = Augment(2, True, cutout, mixup) if training else None
    size, mean, std = 32 if training else 40, (0.5,) * 3, (0.25,) * 3
    return DeviceBatches(split, size, mean, std, device=device, augment=augment, seed=3, num_classes=10)


def train_with_everything(kind: type[Engine], device: str = "cpu") -> tuple[list[EpochResult], list[Tensor], Plan]:
    """A teacher, an average, norms without decay and new statistics, holes, blends; scores of blocks, steered."""
    torch.manual_seed(1)
    teacher = Teacher(resnet8().to(device).eval().requires_grad_(False), 0.7, 4.0, mirrored=True)
    torch.manual_seed(0)
    model = resnet8().to(device)
    images, asked = torch.zeros(1, 3, 16, 16, device=device), Budget(macs=0.6)
    pruner = Pruner(
        model, images, scores=Scores(speed=0.2, penalty=1e-3, blocks=True, balance="cost"), budget=asked
    )
    data, engine = batches(device), kind(model, device, pruner)
    blends, config = (
        batches(device, cutout=5, mixup=0.5),
        OptimizerConfig(lr=0.05, nesterov=True, decay_all=False, ema=0.9),
    )
    tallies = []
    for first in (0, 4):
        optimizer, average = make_optimizer(model, config), Average(model, config.ema)
        for epoch in (first, first + 1):
            rates = [0.05, 0.04, 0.03]
            teacher.alpha.fill_(0.7 / (1 + epoch))  # it fades
            tallies.append(engine.train_epoch(blends, epoch, optimizer, rates, 0.1, teacher, average))
            with average.applied():
                tallies.append(engine.evaluate(data))
        average.take_over()
        engine.recalibrate(data, first, 2)
        tallies.append(engine.evaluate(data))
        with pruner.scoring():
            for epoch in (first + 2, first + 3):
                tallies.append(engine.score_epoch(data, epoch, teacher))
                pruner.steer()
    return tallies, [t.detach().cpu() for t in model.state_dict().values()], pruner.plan()


def train(kind: type[Engine], device: str = "cpu", **more: Any) -> tuple[list[EpochResult], list[Tensor], Plan]:
    torch.manual_seed(0)
    model = resnet8().to(device)
    pruner = Pruner(model, torch.zeros(1, 3, 16, 16, device=device), scores=Scores(lr=1e-4, penalty=1e-3, **more))
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


def train_binary(kind: type[Engine], device: str = "cpu") -> tuple[list[EpochResult], list[Tensor], Plan]:
    """Gates that are open or closed in score phases, too."""
    return train(kind, device, binary=True, projection="free", speed=0.2)


def train_jointly(kind: type[Engine], device: str = "cpu") -> tuple[list[EpochResult], list[Tensor], Plan]:
    """Scores and weights in the same steps, with all that a phase of weights may have, twice."""
    torch.manual_seed(1)
    teacher = Teacher(resnet8().to(device).eval().requires_grad_(False), 0.7, 4.0)
    torch.manual_seed(0)
    model = resnet8().to(device)
    pruner = Pruner(model, torch.zeros(1, 3, 16, 16, device=device), scores=Scores(lr=1e-4, penalty=1e-3))
    data, engine = batches(device), kind(model, device, pruner)
    config = OptimizerConfig("adam", lr=1e-3, ema=0.9)
    tallies = []
    for first in (0, 2):
        optimizer, average = make_optimizer(model, config), Average(model, config.ema)
        with pruner.scoring(joint=True):
            for epoch in (first, first + 1):
                tallies.append(engine.train_epoch(data, epoch, optimizer, [1e-3] * 3, 0.1, teacher, average))
                tallies.append(engine.evaluate(data))
            average.take_over()
        tallies.append(engine.evaluate(data))
    assert all(tally.penalty > 0 for tally in tallies[:3:2])
    held = [*model.state_dict().values(), pruner.gates.soft]
    return tallies, [t.detach().cpu() for t in held], pruner.plan()


WAYS = [train, train_binary, train_with_everything, train_jointly]


@pytest.mark.parametrize("way", WAYS)
def test_the_fast_engine_equals_the_plain_one(way: Way) -> None:
    plain, fast = way(Engine), way(CapturedEngine)
    assert plain[0] == fast[0]
    assert plain[2] == fast[2]
    for a, b in zip(plain[1], fast[1], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


MADE_OF: dict[str, dict[str, Any]] = {
    "cutout": {"cutout": 3},
    "mixup": {"mixup": 0.5, "label_smoothing": 0.1},
    "ema": {"ema": 0.9, "recalibrate": 1},
}
TOGETHER = [
    "cutout",
    "mixup teacher fade",
    "cutout ema teacher joint",
    "cutout mixup ema teacher fade mirrored",
]


@pytest.mark.parametrize("names", mostly_slow(TOGETHER, TOGETHER[2:]))
def test_a_whole_run_comes_to_the_same_bits_through_either_engine(
    names: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = names.split()
    phase = {key: value for part in parts for key, value in MADE_OF.get(part, {}).items()}
    data = {"name": "synthetic", "image_size": 8, "channels": 1, "samples": 80, "batch_size": 24, "validation": 0.2}
    changes = {
        "data": {**data, "crop": 1, "flip": True},
        "scores": {"joint": "joint" in parts, "speed": 0.3, "penalty": 0.02},
        "distill": {
            "alpha": 0.6 * ("teacher" in parts),
            "during": "cycles",
            **{name: name in parts for name in ("fade", "mirrored")},
        },
        **dict.fromkeys(("warmup", "finetune"), phase),
        "weights": {"optimizer": "adam", "lr": 1e-3, **phase},
    }
    found = []
    for kind in (Engine, CapturedEngine):
        monkeypatch.setattr("sbf_pruner.training.run.make_engine", made_by(kind))
        made = small_run(tmp_path / kind.__name__, **changes)
        lines = (made.folder / "metrics.jsonl").read_text().splitlines()
        records = [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]
        found.append(
            (records, (made.folder / "model.safetensors").read_bytes(), made.summary["pruned"]["accuracy"])
        )
    assert found[0] == found[1]


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_the_captured_engine_follows_the_plain_one_on_cuda(way: Way) -> None:
    plain, fast = way(Engine, "cuda"), way(CapturedEngine, "cuda")
    for a, b in zip(plain[0], fast[0], strict=True):
        assert a.loss == pytest.approx(b.loss, rel=0.05)


@pytest.mark.parametrize("form", PROJECTIONS)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_captured_step_moves_every_score(form: str, device: str) -> None:
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.BatchNorm2d(6), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 10)),
    ).to(device)
    pruner = Pruner(model, torch.zeros(1, 3, 16, 16, device=device), scores=Scores(projection=form, speed=0.1))
    engine = CapturedEngine(model, device, pruner)
    with pruner.scoring():
        engine.score_epoch(batches(device), 0)
        assert all((scores != 1).all() for scores in pruner.scores().values())


@pytest.mark.parametrize("mode", ["off", "soft", "hard"])
def test_the_fast_evaluation_counts_every_image_once(mode: str) -> None:
    model = resnet8()
    pruner = Pruner(model, torch.zeros(1, 3, 16, 16), scores=Scores(lr=1e-2))
    data = batches(training=False)
    assert data.count % data.batch_size  # its last batch is not full
    plain, fast = Engine(model, "cpu", pruner), CapturedEngine(model, "cpu", pruner)

    def compare() -> None:
        expected, found = plain.evaluate(data), fast.evaluate(data)
        assert found.accuracy == expected.accuracy
        assert found.loss == pytest.approx(expected.loss, rel=1e-6)

    compare()
    if mode == "hard":
        pruner.gate(Plan({"layer1.0.conv1": (0, 1), "layer2.0.conv2": (3,)}))
        compare()
        pruner.gate(Plan({"layer1.0.conv1": (2, 5, 7)}))
        compare()
    elif mode == "soft":
        with pruner.scoring():
            for epoch in range(2):
                plain.score_epoch(batches(), epoch)
                compare()


@pytest.mark.parametrize("backend", ["none", "eager", "aot_eager"])
def test_tunable_convolutions_have_the_same_gradients(backend: str) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.ReLU(),
        nn.Conv2d(8, 9, 1, bias=False),
        nn.Conv2d(9, 8, 5, bias=False),
    ).to(torch.float64, memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.rand(2, 3, 9, 9, dtype=torch.float64, requires_grad=True)
    tunable = TunableConvolutions(model, torch.float64)

    def loss() -> Tensor:
        return model(x).square().sum()

    def gradients(work: Callable[[], Tensor] = loss) -> list[Tensor]:
        return list(torch.autograd.grad(work(), [x, *model.parameters()]))

    compiled = loss if backend == "none" else torch.compile(loss, backend=backend, fullgraph=True)
    for _ in range(2):
        expected = gradients()
        with tunable:
            assert "forward" in vars(model[0])
            found = gradients(compiled)
        assert "forward" not in vars(model[0])
        for a, b in zip(expected, found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)


def test_a_copy_of_a_tuned_network_can_be_cleaned() -> None:
    """A copy that kept the forward would go on with weights cast before, whatever it learns."""
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False)), torch.rand(2, 3, 9, 9)
    with TunableConvolutions(model, torch.float32):
        bare = remove_pruner_hooks(real_copy(model))
    nn.init.zeros_(bare[0].weight)
    assert "forward" not in vars(bare[0]) and not bare(x).any() and model(x).any()


def test_a_network_that_cannot_be_dressed_is_left_bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is put on before the part that fails comes off again."""
    model = resnet8()
    pruner = Pruner(model, torch.zeros(1, 3, 16, 16))
    engine = CapturedEngine(model, "cpu", pruner)
    hooks = [len(module._forward_hooks) for module in model.modules()]

    def broken(counters: BatchCounters) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(BatchCounters, "__enter__", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.train_epoch(batches(), 0, make_optimizer(model, OptimizerConfig()), [0.1] * 3)
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
    assert not any(isinstance(held, Tensor) for module in model.modules() for held in vars(module).values())


def test_tunable_convolutions_leave_those_of_another_kind_alone() -> None:
    model = nn.Sequential(
        nn.Conv2d(8, 8, 3, stride=2, bias=False),
        nn.Conv2d(8, 8, 3, groups=2, bias=False),
        nn.Conv2d(8, 8, 3),
        nn.ReLU(),
    )
    with TunableConvolutions(model, torch.float32):
        assert not any("forward" in vars(module) for module in model)
