"""What is saved comes back equal, whole, or not at all."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from sbf_pruner.errors import PruningError, RunError
from sbf_pruner.training import LAST_CHECKPOINT, OptimizerConfig, load_checkpoint, load_weights, save_checkpoint
from sbf_pruner.training.data import load_cifar10
from sbf_pruner.training.engine import make_optimizer, restore_optimizer
from sbf_pruner.utils import files


def same(left: Any, right: Any) -> bool:
    """Equal in value and in type, all the way down."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def test_a_nest_comes_back_equal_in_value_and_type(tmp_path: Path) -> None:
    shared = torch.arange(6.0).view(2, 3)
    state = {
        "numbers": [1, -2.5, 1e-300, True, None, "text", float("inf")],
        "empty": {"list": [], "dict": {}, "tuple": (), "tensor": torch.zeros(0, 3)},
        "keys": {0: "int", "0": "text", "a.b": torch.ones(1), "a": {"b": torch.zeros(1)}},
        "tensors": (shared, shared.t(), shared, torch.tensor(3), torch.tensor([True, False])),
        "types": [torch.ones(3, dtype=kind) for kind in (torch.bfloat16, torch.float64, torch.int8)],
        "format": torch.rand(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
    }
    save_checkpoint(tmp_path, state)
    assert same(load_checkpoint(tmp_path), state)


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_an_optimiser_goes_on_bit_for_bit(tmp_path: Path, kind: str) -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 7, 3), nn.Conv2d(7, 2, 3)).to(memory_format=torch.channels_last)
        return net, make_optimizer(net, OptimizerConfig(optimizer=kind, lr=0.01, weight_decay=1e-3))

    def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            torch.manual_seed(step)
            optimizer.zero_grad()
            net(torch.randn(4, 3, 9, 9)).square().mean().backward()
            optimizer.step()

    straight, optimizer = made()
    train(straight, optimizer, range(6))
    first, optimizer = made()
    train(first, optimizer, range(3))
    save_checkpoint(tmp_path, {"net": first.state_dict(), "optimizer": optimizer.state_dict()})
    second, optimizer = made()
    state = load_checkpoint(tmp_path)
    second.load_state_dict(state["net"])
    restore_optimizer(optimizer, state["optimizer"])
    for parameter, held in optimizer.state.items():
        moments = [value for value in held.values() if value.shape == parameter.shape]
        assert moments and all(value.stride() == parameter.stride() for value in moments)
    train(second, optimizer, range(3, 6))
    assert all(map(torch.equal, straight.parameters(), second.parameters()))


def test_a_type_that_cannot_be_stored_is_named_and_leaves_the_old_file(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, {"done": 1})
    with pytest.raises(TypeError, match=r"optimizer\.fn is of type function"):
        save_checkpoint(tmp_path, {"optimizer": {"fn": same}})
    assert load_checkpoint(tmp_path) == {"done": 1}


def test_the_old_checkpoint_stays_until_the_new_one_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, {"done": 1, "x": torch.ones(3)})

    def full(tensors: Any, path: Path, metadata: Any) -> None:
        Path(path).write_bytes(b"half of")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(tmp_path, {"done": 2, "x": torch.zeros(3)})
    assert load_checkpoint(tmp_path)["done"] == 1
    assert os.listdir(tmp_path) == [LAST_CHECKPOINT]


def test_a_killed_write_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, {"done": 1})

    def killed(source: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, {"done": 2})
    monkeypatch.undo()
    assert load_checkpoint(tmp_path) == {"done": 1}
    save_checkpoint(tmp_path, {"done": 3})
    assert load_checkpoint(tmp_path) == {"done": 3}


def weights_from(folder: Path) -> None:
    load_weights(nn.Linear(1, 1), folder / LAST_CHECKPOINT)


def cifar_from(folder: Path) -> None:
    load_cifar10(str(folder / LAST_CHECKPOINT))


def test_a_missing_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"last\.safetensors does not exist; put the file back, or begin a"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("read", [load_checkpoint, weights_from, cifar_from])
def test_a_file_without_permission_is_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], Any]
) -> None:
    """safetensors says "No such file or directory" of it."""
    save_checkpoint(tmp_path, {"x": torch.ones(2)})

    def denied(*given: Any, **named: Any) -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(PruningError, match=r"last\.safetensors cannot be read[:(\s]+Permission denied"):
        read(tmp_path)


@pytest.mark.parametrize("length", [0, 4, 100, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, length: int) -> None:
    path = save_checkpoint(tmp_path, {"x": torch.ones(1000)})
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(RunError, match=r"is damaged or cut short .*; put the file back, or begin a run in another"):
        load_checkpoint(tmp_path)


def test_changed_numbers_are_refused(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, {"x": torch.ones(1000)})
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(RunError, match="was changed after it was written"):
        load_checkpoint(tmp_path)


def test_a_changed_skeleton_is_refused(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, {"done": 5, "x": torch.ones(2)})
    with safe_open(path, framework="pt") as file:
        metadata, tensors = file.metadata(), {"x": file.get_tensor("x")}
    entry = json.loads(metadata["sbf"])
    entry["header"] = entry["header"].replace("5", "6")
    metadata["sbf"] = json.dumps(entry)
    save_file(tensors, path, metadata)
    with pytest.raises(RunError, match="was changed after it was written"):
        load_checkpoint(tmp_path)


def test_a_full_disk_is_told_with_the_file_and_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, {"done": 1})

    def full(*_: Any, **__: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    with (
        monkeypatch.context() as patch,
        pytest.raises(OSError, match=f"{LAST_CHECKPOINT} cannot be written .*No space left"),
    ):
        patch.setattr(files, "save_file", full)
        save_checkpoint(tmp_path, {"done": 2})
    with pytest.raises(OSError, match="File too large") as caught, files.atomic_path(tmp_path / "plan.json"):
        raise OSError(27, "File too large")
    assert caught.value.filename == str(tmp_path / "plan.json")
    assert load_checkpoint(tmp_path) == {"done": 1}
    assert [path.name for path in tmp_path.iterdir()] == [LAST_CHECKPOINT]


def test_a_changed_entry_is_refused(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, {"weights": torch.ones(2)})
    save_file({"weights": torch.ones(2)}, path, metadata={"sbf": '{"sha256": "", "header": 1}'})
    with pytest.raises(RunError, match="was changed after it was written"):
        load_checkpoint(tmp_path)


def test_a_file_of_another_origin_is_refused(tmp_path: Path) -> None:
    save_file({"x": torch.ones(2)}, tmp_path / LAST_CHECKPOINT)
    with pytest.raises(RunError, match="was not written by sbf-pruner"):
        load_checkpoint(tmp_path)
    for entry in ("no JSON", "[]", '{"header": "{}"}'):
        save_file({"x": torch.ones(2)}, tmp_path / LAST_CHECKPOINT, metadata={"sbf": entry})
        with pytest.raises(RunError, match="was not written by sbf-pruner"):
            load_checkpoint(tmp_path)
    files.write_tensors(tmp_path / LAST_CHECKPOINT, {}, {"format": "something else"})
    with pytest.raises(RunError, match="is not a checkpoint of this version"):
        load_checkpoint(tmp_path)


def test_the_file_is_plain_safetensors_with_readable_names(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, {"networks": {"dense": {"conv1.weight": torch.ones(2)}}, "done": 7})
    with safe_open(path, framework="pt") as file:
        assert list(file.keys()) == ["networks.dense.conv1.weight"]
        header = json.loads(json.loads(file.metadata()["sbf"])["header"])
        assert header["format"] == "sbf-pruner checkpoint 1"


# -- several writers of one file -----------------------------------------------------------------------------


def test_writers_of_one_file_do_not_disturb_one_another(tmp_path: Path) -> None:
    path = tmp_path / "answer.txt"
    with files.atomic_path(path) as first, files.atomic_path(path) as second:
        first.write_text("first")
        second.write_text("second")
        assert first != second and first.parent == second.parent == tmp_path
    assert path.read_text() == "first"  # which was moved there last
    with files.atomic_path(path) as first:
        first.write_text("whole")
        with pytest.raises(KeyboardInterrupt), files.atomic_path(path):
            raise KeyboardInterrupt
    assert path.read_text() == "whole" and os.listdir(tmp_path) == ["answer.txt"]


WRITER = """
import sys
from pathlib import Path
from sbf_pruner.utils import write_text
for turn in range(200):
    write_text(Path(sys.argv[1]), sys.argv[2] * 50_000)
"""


def test_processes_that_write_one_file_leave_it_whole(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    started = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), letter]) for letter in "ab"]
    seen = set()
    while any(writer.poll() is None for writer in started):
        if path.is_file():
            seen.add(path.read_text())
    assert [writer.returncode for writer in started] == [0, 0]
    assert seen <= {"a" * 50_000, "b" * 50_000} and os.listdir(tmp_path) == ["table.json"]


def test_what_killed_writers_left_goes_when_it_is_old(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    ours, young = (tmp_path / f".table.json.{digits}.partial" for digits in ("0123456789ab", "456789abcdef"))
    others = [tmp_path / name for name in (".table.json.mine.partial", ".other.json.0123456789ab.partial")]
    for left in (ours, young, *others):
        left.write_text("half of")
    for left in (ours, *others):
        os.utime(left, (0, 0))
    files.write_text(path, "whole")
    assert sorted(tmp_path.iterdir()) == sorted([path, young, *others])


def test_a_new_file_may_be_read_by_those_who_may_read_any(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        files.write_text(tmp_path / "a", "text")
        files.write_tensors(tmp_path / "b", {"x": torch.ones(2)}, {})
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o640}


def test_a_file_that_cannot_be_written_is_told_by_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "held" / "inside").mkdir(parents=True)
    with pytest.raises(OSError, match="directory") as caught:
        files.write_text(tmp_path / "held", "text")
    assert caught.value.filename == str(tmp_path / "held") and "partial" not in str(caught.value)


def test_files_are_flushed_through_handles_that_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows refuses to flush any other."""
    fcntl, flushed = pytest.importorskip("fcntl"), []

    def fsync(handle: int) -> None:
        if stat.S_ISREG(os.fstat(handle).st_mode):
            flushed.append(fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE)

    monkeypatch.setattr(os, "fsync", fsync)
    files.write_text(tmp_path / "a", "text")
    files.write_tensors(tmp_path / "b", {"x": torch.ones(2)}, {})
    assert flushed == [os.O_RDWR, os.O_RDWR]
