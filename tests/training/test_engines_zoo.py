"""Both engines train every network of the zoo alike, and several networks of one process do not meet."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from sbf_pruner import Plan, Pruner, Scores
from sbf_pruner.training import OptimizerConfig
from sbf_pruner.training.data import Augment, DeviceBatches, Split
from sbf_pruner.training.engine import (
    CapturedEngine,
    Engine,
    EpochResult,
    TunableConvolutions,
    WeightTrainer,
    captured,
    copy_function,
    make_optimizer,
)
from shares import mostly_slow
from zoo import ZOO

CLASSES = 4
# What only one engine can train, or what they count differently, and the zoo shows on purpose.
COUNTED_OTHERWISE = "num_batches_tracked"  # a norm that runs twice in a step counts it once when captured
ALWAYS = ["NoNorm", "LayerNorm", "Unused", "AuxiliaryHead", "Residual", "GroupedBias", "GroupNormStream"]


class Classifier(nn.Module):
    """Makes a few logits of whatever a network gives."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        given = self.network(x)
        while not isinstance(given, Tensor):
            given = next(iter(given.values() if isinstance(given, dict) else given))
        return given.flatten(1)[:, :CLASSES]


def images_of(name: str) -> Tensor | None:
    """Its example inputs, if it takes one batch of images."""
    inputs = ZOO[name]()[1]
    inputs = inputs[0] if isinstance(inputs, tuple) and len(inputs) == 1 else inputs
    return inputs.float() if isinstance(inputs, Tensor) and inputs.dim() == 4 else None


def train(kind: type[Engine], name: str, *, joint: bool) -> tuple[list[EpochResult], dict[str, Tensor]]:
    torch.manual_seed(0)
    images = images_of(name)
    assert images is not None
    network, channels = Classifier(ZOO[name]()[0].float()), images.shape[1]
    random = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (24, *images.shape[1:]), dtype=torch.uint8, generator=random)
    split = Split(pixels, torch.randint(0, CLASSES, (24,), generator=random))
    scale = (0.5,) * channels, (0.25,) * channels
    data = DeviceBatches(split, 8, *scale, augment=Augment(flip=True), seed=1, num_classes=CLASSES)
    test = DeviceBatches(split, 10, *scale, num_classes=CLASSES)
    pruner = Pruner(network, images[:1], scores=Scores(penalty=1e-3, speed=0.3))
    engine, config, rates = kind(network, "cpu", pruner), OptimizerConfig(lr=0.01), [0.01] * 3
    torch.manual_seed(0)
    with pruner.gated():
        tallies = [engine.train_epoch(data, 0, make_optimizer(network, config), rates), engine.evaluate(test)]
    with pruner.scoring(joint=joint):
        if joint:
            tallies.append(engine.train_epoch(data, 1, make_optimizer(network, config), rates))
        else:
            tallies.append(engine.score_epoch(data, 1))
        tallies.append(engine.evaluate(test))
    with pruner.gated():
        tallies += [engine.train_epoch(data, 2, make_optimizer(network, config), rates), engine.evaluate(test)]
    return tallies, network.state_dict()


IMAGED = [name for name in ZOO if images_of(name) is not None]


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("name", mostly_slow(IMAGED, [name for name in ALWAYS if name in IMAGED]))
def test_both_engines_train_a_network_alike(name: str, joint: bool) -> None:
    try:
        plain = train(Engine, name, joint=joint)
    except Exception as error:
        with pytest.raises(type(error)):
            train(CapturedEngine, name, joint=joint)
        return
    fast = train(CapturedEngine, name, joint=joint)
    for a, b in zip(plain[0], fast[0], strict=True):
        assert (a.loss, a.accuracy, a.penalty) == pytest.approx(
            (b.loss, b.accuracy, b.penalty), rel=1e-5, nan_ok=True
        )
    for key, held in plain[1].items():
        if COUNTED_OTHERWISE not in key:
            torch.testing.assert_close(held, fast[1][key], rtol=1e-5, atol=1e-5, equal_nan=True)


class Compiled(CapturedEngine):
    """The captured engine with its functions compiled, as far as that can be done without a GPU."""

    def __init__(self, network: nn.Module, device: str, pruner: Pruner | None = None) -> None:
        super().__init__(network, device, pruner)
        self._tunable = TunableConvolutions(network, torch.float32)
        self._loss = captured.compile_copy(self._plain_loss, backend="eager")


def small_network(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, CLASSES),
    )


def trained_in_turn(kind: type[Engine], width: int) -> list[Tensor]:
    """The weights of a gated network, its scores, and the weights of a control without gates after it."""
    torch.manual_seed(width)
    split = Split(torch.randint(0, 256, (16, 3, 8, 8), dtype=torch.uint8), torch.arange(16) % CLASSES)
    data = DeviceBatches(split, 8, (0.5,) * 3, (0.25,) * 3, augment=Augment(flip=True))
    network = small_network(width)
    pruner = Pruner(network, torch.zeros(1, 3, 8, 8), scores=Scores(speed=0.3))
    engine = kind(network, "cpu", pruner)
    pruner.gate(Plan({"0": [0, 2]}))
    with pruner.gated():
        optimizer = make_optimizer(network, OptimizerConfig(lr=0.1))
        engine.train_epoch(data, 0, optimizer, [0.1] * 2, 0.1)
    with pruner.scoring():
        engine.score_epoch(data, 1)
        scores = pruner.gates.soft.detach().clone()
    found = [p.detach().clone() for p in network.parameters()]
    control = pruner.detach()
    optimizer = make_optimizer(control, OptimizerConfig(lr=0.1))
    kind(control, "cpu").train_epoch(data, 2, optimizer, [0.1] * 2, 0.1)
    return [*found, scores, *control.parameters()]


def test_runs_of_one_process_share_nothing_that_was_compiled() -> None:
    """torch would give a gated network what it compiled for a bare one, and stop compiling after eight."""
    for width in (4, 4, 5, 6, 7):
        for a, b in zip(trained_in_turn(Compiled, width), trained_in_turn(Engine, width), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_copy_of_a_function_is_the_same_function() -> None:
    offset = 3

    def shifted(x: int, *, by: int = 2) -> int:
        return x + by + offset

    again = copy_function(shifted)
    assert again(1) == shifted(1) and again(1, by=5) == 9
    assert again.__code__ is not shifted.__code__  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm"])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_convolution_whose_weight_is_made_by_a_hook_is_trained(kind: str) -> None:
    torch.manual_seed(0)
    conv = getattr(torch.nn.utils, kind)(nn.Conv2d(3, 8, 3, bias=False))
    assert not TunableConvolutions(nn.Sequential(conv), torch.float32).modules


def test_the_state_of_an_optimiser_goes_on_where_other_steps_are_possible() -> None:
    """As a GPU saves it: its flags would stop a CPU's optimiser at the next step."""
    network, config = nn.Conv2d(3, 4, 3), OptimizerConfig("adam", lr=0.1)
    descent = WeightTrainer.of(network, config)
    network(torch.rand(1, 3, 8, 8)).sum().backward()
    descent.optimizer.step()
    state = descent.state()["optimizer"]
    for group in state["param_groups"]:
        group["capturable"] = group["fused"] = True
    goes_on = WeightTrainer.of(network, config, state)
    goes_on.optimizer.step()
    assert not goes_on.optimizer.param_groups[0]["capturable"]

    model = small_network(4)
    pruner = Pruner(model, torch.zeros(1, 3, 8, 8))
    with pruner.scoring():
        (model(torch.rand(2, 3, 8, 8)).sum() + pruner.penalty()).backward()
        pruner.step()
        saved = pruner.state_dict()
    for group in saved["optimizer"]["param_groups"]:
        group["capturable"] = True
    pruner.load_state_dict(saved)
    with pruner.scoring():
        (model(torch.rand(2, 3, 8, 8)).sum() + pruner.penalty()).backward()
        pruner.step()


def test_a_group_norm_before_everything_that_is_scored_does_not_end_the_process() -> None:
    """torch's gradient of its scale crashes on a map with its channels last that needs no gradient."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    images = torch.rand(4, 3, 8, 8)
    gradients = []
    for order in (torch.contiguous_format, torch.channels_last):
        pruner = Pruner(model, images[:1])
        with pruner.scoring():
            model(images.contiguous(memory_format=order)).square().sum().backward()
            assert pruner.gates.soft.grad is not None
            gradients.append(pruner.gates.soft.grad.clone())
        pruner.detach()
    torch.testing.assert_close(*gradients)
    assert gradients[0].any()


def test_norms_that_look_at_the_batch_are_judged_as_by_the_plain_engine() -> None:
    torch.manual_seed(0)
    network = small_network(4)
    network[1] = nn.BatchNorm2d(4, track_running_stats=False)
    split = Split(torch.randint(0, 256, (10, 3, 8, 8), dtype=torch.uint8), torch.arange(10) % CLASSES)
    test = DeviceBatches(split, 8, (0.5,) * 3, (0.25,) * 3)
    assert CapturedEngine(network, "cpu").evaluate(test) == Engine(network, "cpu").evaluate(test)


def test_score_steps_count_batches_where_norms_move() -> None:
    counted = []
    for kind in (Engine, CapturedEngine):
        network = small_network(4)
        pruner = Pruner(network, torch.zeros(1, 3, 8, 8), scores=Scores(freeze_norms=False))
        split = Split(torch.randint(0, 256, (16, 3, 8, 8), dtype=torch.uint8), torch.arange(16) % CLASSES)
        with pruner.scoring():
            kind(network, "cpu", pruner).score_epoch(
                DeviceBatches(split, 8, (0.5,) * 3, (0.25,) * 3, augment=Augment()), 0
            )
        counted.append(int(network[1].num_batches_tracked))
    assert counted == [2, 2]
