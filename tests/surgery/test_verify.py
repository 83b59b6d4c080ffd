"""The proof by numbers: it finds what nothing else sees, and accuses no network that is only unsure of itself."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sbf_pruner as sbf
from sbf_pruner import Plan, Pruner, PruningError
from sbf_pruner.surgery import max_relative_difference, prove
from zoo import ZOO, randomise

IMAGE = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
HALF = Plan({"a": [0, 2, 5, 6]})


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.bn = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.b, self.o = nn.Conv2d(8, 6, 3, padding=1), nn.Conv2d(6, 4, 1)

    def forward(self, x: Tensor) -> Any:
        return self.o(self.b(self.changed(self.bn(self.a(x)).relu())).relu())

    def changed(self, x: Tensor) -> Tensor:
        return x


class AsksANorm(Two):
    """The mode of a norm, which no recording sets."""

    def changed(self, x: Tensor) -> Tensor:
        return x * (x.shape[1] / 8) if self.bn.training else x


def made(kind: type[Two]) -> nn.Module:
    torch.manual_seed(0)
    return randomise(kind())


def test_what_no_recording_shows_is_refused() -> None:
    model = made(AsksANorm)
    sbf.extract(model, IMAGE, HALF)
    pruner = Pruner(model, IMAGE)
    pruner.gate(HALF)
    for cut in (lambda: pruner.extract(prove=True), lambda: sbf.extract(model, IMAGE, HALF, prove=True)):
        with pytest.raises(
            PruningError,
            match=r"^in training mode the extracted network differs from the gated one by [\d.e-]+ of its largest "
            r"output: some code depends on widths or training mode in a way that the trace does not show; exclude "
            r"the layers that feed it \(ignore\), and please report the model$",
        ):
            cut()


@pytest.mark.parametrize("name", [*ZOO][::6])
def test_right_cuts_are_proved(name: str) -> None:
    model, inputs = ZOO[name]()
    graph = sbf.trace(model, inputs)
    half = Plan({n: range(0, layer.filters, 2) for n, layer in graph.layers.items()})
    if graph.connected(graph.settle(half.masks(graph))):
        sbf.extract(model, inputs, half, graph, prove=True)


class Noisy(Two):
    def changed(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x) * (x != 0)


class DropsOut(Two):
    def changed(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, self.training)


class Rounds(Two):
    """Goes on with fewer digits."""

    def changed(self, x: Tensor) -> Tensor:
        return (x * 100).half().to(x.dtype)


class Infinite(Two):
    """A removed channel is zero times infinity in the gated network, and gone in the other."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y, self.o(self.b((self.bn(self.a(x)) * 1e38).relu() * 1e300) * 1e300)


@pytest.mark.parametrize("kind", [Noisy, DropsOut, Rounds, Infinite])
def test_a_network_that_is_unsure_of_itself_is_not_accused(kind: type[Two]) -> None:
    sbf.extract(made(kind), IMAGE, HALF, prove=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_proved_in_double(dtype: torch.dtype) -> None:
    model = made(Two).to(dtype)
    sbf.extract(model, IMAGE.to(dtype), HALF, prove=True)
    pruner = Pruner(model, IMAGE.to(dtype))
    pruner.gate(HALF)
    error = max_relative_difference(model, pruner.extract(), IMAGE)
    assert error is not None and error < 1e-12


class Typed(Two):
    """A type that is written down: no float64 goes through it."""

    def changed(self, x: Tensor) -> Tensor:
        return x.float()


class NotANumber(Two):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * float("nan")


UNPROVED = {
    "no numbers": (Two, IMAGE.to("meta"), "evaluation training", "it is on the meta device"),
    "another type": (Typed, IMAGE, "evaluation training", "should be the same"),
    "not a number": (NotANumber, IMAGE, "evaluation training", "none of its outputs is finite"),
    "a norm of one value": (Two, IMAGE[:1, :, :1, :1], "training", "Expected more than 1 value per channel"),
}


@pytest.mark.parametrize("name", UNPROVED)
def test_what_cannot_be_proved_is_said(name: str, caplog: pytest.LogCaptureFixture) -> None:
    kind, inputs, modes, why = UNPROVED[name]
    with caplog.at_level(logging.WARNING, "sbf_pruner"):
        sbf.extract(made(kind), inputs, HALF, prove=True)
    for record, mode in zip(caplog.records, modes.split(), strict=True):
        said = record.getMessage()
        assert said.startswith(
            f"in {mode} mode the extraction was not verified: the gated network has no finite float64 output ("
        )
        assert why in said


class Turns(Two):
    """Which channels stand where depends on the size of the map, or on the number of samples."""

    def __init__(self, axis: int, side: int | None = None) -> None:
        super().__init__()
        self.axis, self.side = axis, side

    def changed(self, x: Tensor) -> Tensor:
        if self.side and x.shape[2] != self.side:
            raise ValueError(f"{self.side} pixels a side")
        return x.roll(x.shape[self.axis] * 3 // 2, 1)


SEEN = {"height": (2, None, "3, 3, 12, 16"), "width": (3, None, "3, 3, 12, 16"), "samples": (0, 8, "3, 3, 8, 8")}


@pytest.mark.parametrize("name", SEEN)
def test_a_cut_that_holds_for_one_size_alone_is_refused(name: str) -> None:
    axis, side, sizes = SEEN[name]
    model = randomise(Turns(axis, side))
    sbf.extract(model, IMAGE, HALF)
    with pytest.raises(PruningError, match=rf"for inputs of \({sizes}\): some code depends on their sizes in"):
        sbf.extract(model, IMAGE, HALF, prove=True)


@pytest.mark.parametrize(
    ("side", "told"), [(None, []), (8, ["the extraction was verified for inputs of one size only"])]
)
def test_a_network_that_takes_one_size_is_compared_at_that(
    side: int | None, told: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    model = randomise(Turns(1, side))
    with caplog.at_level(logging.INFO, "sbf_pruner"):
        sbf.extract(model, IMAGE, HALF, prove=True)
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("the extraction")]
    assert [line.partition(":")[0] for line in said] == told


def test_a_small_network_that_fails_or_gives_no_number_is_no_proof() -> None:
    model = made(Two)
    with pytest.raises(PruningError, match="the extracted network does not run where the gated one does"):
        prove(model, nn.Conv2d(1, 1, 1), IMAGE)
    with pytest.raises(PruningError, match="differs from the gated one by inf"):
        prove(model, made(NotANumber), IMAGE)


def test_the_proof_leaves_the_random_numbers_and_the_model_alone() -> None:
    model = made(Noisy)
    before, drawn = {n: t.clone() for n, t in model.state_dict().items()}, torch.get_rng_state()
    small = sbf.extract(model, IMAGE, HALF, prove=True)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert int(small.bn.num_batches_tracked) == 0 and small.training == model.training
