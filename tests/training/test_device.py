"""What a run computes with: what is chosen on which machine, and what is said where something is not possible."""

import logging

import pytest
import torch
from torch import Tensor, nn

from sbf_pruner.errors import RunError
from sbf_pruner.training import ComputeConfig, choose_machine, choose_memory_format, device
from sbf_pruner.training.engine import CapturedEngine, Engine, captured, make_engine


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with a GPU, a Hopper with everything, as far as torch is asked about it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Old One")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    monkeypatch.setattr(device, "find_spec", lambda name: object())
    return monkeypatch


def test_a_gpu_captures_in_bfloat16_unless_it_is_told_otherwise(gpu: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    assert choose_machine("auto") == ComputeConfig(cuda, True, torch.bfloat16)
    assert choose_machine("cuda", "plain", "float32") == ComputeConfig(cuda, False, torch.float32)
    assert choose_machine("cpu") == ComputeConfig(torch.device("cpu"))


def test_a_gpu_without_bfloat16_computes_in_float32(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    assert choose_machine("cuda").told() == {"engine": "captured", "precision": "float32"}


@pytest.mark.parametrize("lack", ["Triton", "Old One"])
def test_where_there_is_no_compiler_steps_run_one_by_one(
    lack: str, gpu: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if lack == "Triton":
        gpu.setattr(device, "find_spec", lambda name: None)
    else:
        gpu.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1))
    with caplog.at_level(logging.INFO):
        assert not choose_machine("cuda").captured
    assert lack in caplog.text and "training steps run eagerly" in caplog.text
    assert choose_machine("cuda", "captured").captured  # who asks for it is told by the compiler


def test_what_the_cpu_cannot_do_is_refused() -> None:
    with pytest.raises(RunError, match=r"^engine: CUDA graph capture needs a CUDA device; set engine=auto"):
        choose_machine("cpu", "captured")
    with pytest.raises(RunError, match=r"^precision: networks on the cpu compute in float32; set precision=auto"):
        choose_machine("cpu", "auto", "bfloat16")


def test_a_machine_has_its_engine() -> None:
    cpu, order = torch.device("cpu"), torch.contiguous_format
    for is_captured, kind in ((False, Engine), (True, CapturedEngine)):
        engine = make_engine(nn.Conv2d(3, 4, 3), ComputeConfig(cpu, is_captured, order=order))
        assert type(engine) is kind and engine.order == order and engine.network.weight.is_contiguous()


class Picky(nn.Module):
    """Runs in one mode with any order, in the other with its channels first alone."""

    def __init__(self, picky_in_training: bool) -> None:
        super().__init__()
        self.conv, self.picky = nn.Conv2d(3, 4, 3), picky_in_training

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return x.view(len(x), -1) if self.training == self.picky else x.flatten(1)


@pytest.mark.parametrize("mode", [True, False])
def test_an_order_suits_both_modes(mode: bool) -> None:
    images = torch.rand(2, 3, 8, 8)
    assert choose_memory_format(Picky(mode), images) == torch.contiguous_format
    assert choose_memory_format(nn.Conv2d(3, 4, 3), images) == torch.channels_last
    assert (
        choose_memory_format(nn.Conv2d(5, 4, 3), images) == torch.channels_last
    )  # what runs in no order is told later


def test_choosing_an_order_leaves_model_and_random_numbers_alone() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    choose_memory_format(model, torch.zeros(2, 3, 8, 8))
    assert torch.equal(torch.rand(2), expected) and model.training
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]) and tensor.stride() == before[name].stride()


def test_a_step_that_cannot_be_captured_is_told_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmuch more")

    monkeypatch.setattr(torch.cuda, "get_rng_state", fails)
    said = (
        r"^the network's steps cannot be compiled and captured \(RuntimeError: operation not permitted when stream "
        r"is capturing\); set engine=plain to run them eagerly$"
    )
    with pytest.raises(RunError, match=said):
        captured.capture(lambda: None, lambda: None)


def test_too_little_memory_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "get_rng_state", fails)
    with pytest.raises(torch.OutOfMemoryError):
        captured.capture(lambda: None, lambda: None)
