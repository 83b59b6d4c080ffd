"""The driver of many runs: killed, started again, carried elsewhere, it ends with the same runs."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import sbf_pruner as sbf
from sbf_pruner import Recipe
from sbf_pruner.cli import main as sbf_main
from sbf_pruner.measurement import measure
from sbf_pruner.models import resolve
from sbf_pruner.training import DENSE_STAGE_KEYS, load_checkpoint, save_checkpoint
from sbf_pruner.utils import flatten_keys

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import cifar10  # noqa: E402
from collecting import collect, entry_of, sequential_count  # noqa: E402
from driver import Driver  # noqa: E402
from jobs import Run, read_runs, status_line  # noqa: E402
from locks import end_holders, holder, is_locked, take_lock  # noqa: E402
from packing import pack, unpack  # noqa: E402

RECIPE = """
device = "cpu"
threads = 1
[model]
name = "resnet20"
in_channels = 1
[data]
name = "synthetic"
image_size = 8
channels = 1
samples = 320
validation = 0.2
batch_size = 64
[phases]
warmup = 2
cycles = 1
score = 1
weights = 1
finetune = 3
[scores]
speed = 0.5
penalty = 1e-3
[finetune]
ema = 0.9
[distill]
alpha = 0.5
"""
# The shortest run that ends as any other does.
SHORT = ["phases.warmup=0", "phases.cycles=0", "phases.finetune=1", "distill.alpha=0", "data.samples=64"]
SHORT_JOB = f'[[job]]\nrecipe = "small.toml"\nname = "short"\nset = {json.dumps(SHORT)}\n'


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("driver.POLL_SECONDS", 0.1)
    (tmp_path / "small.toml").write_text(RECIPE)
    (tmp_path / "jobs.toml").write_text('[[job]]\nrecipe = "small.toml"\nseeds = [0, 1]\n')
    return tmp_path


def runs_in(root: Path) -> list[Run]:
    return read_runs(root.parent / "jobs.toml", root)


def wait(until: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < end
        time.sleep(0.05)


def command(*words: str) -> subprocess.CompletedProcess[str]:
    given = [sys.executable, str(BENCHMARKS / "cifar10.py"), *words, "--jobs", "jobs.toml", "--root", "runs"]
    return subprocess.run(given, capture_output=True, text=True, check=False)


def outcome(run: Run) -> tuple[bytes, list[tuple[object, ...]]]:
    records = [(r["done"], r["loss"], r["test_accuracy"], r["filters"]) for r in run.records()]
    return (run.folder / "model.safetensors").read_bytes(), records


def test_killed_carried_and_resumed_it_ends_with_the_same_runs(here: Path) -> None:
    (straight,) = runs_in(here / "straight")[:1]
    assert sbf_main([*straight.words(), "--quiet"]) == 0

    first, second = runs = runs_in(here / "runs")
    started = command("start", "--at-once", "1", "--no-mps")
    assert started.returncode == 0 and "driver: process" in started.stdout
    assert "works on" in command("start").stdout
    wait(lambda: (first.folder / "checkpoints/last.safetensors").is_file())
    driver = holder(here / "runs/driver.lock")
    assert driver is not None and f"process {driver}" in started.stdout
    os.kill(driver, signal.SIGKILL)
    wait(lambda: not is_locked(here / "runs/driver.lock"))
    told = command("status").stdout.splitlines()
    assert told[0] == "driver: not running" and len(told) == 3
    assert holder(here / "runs/driver.lock") is None
    assert told[1].split()[:2] == [first.name, "running"] or first.finished  # it goes on without its driver
    if not first.finished:
        os.kill(int(first.lock.read_text()), signal.SIGKILL)
        wait(lambda: not first.going_on)

    packed = command("pack", "runs.tar")
    assert packed.returncode == 0 and "1 runs" in packed.stdout
    assert unpack(here / "runs.tar", here / "elsewhere") == {first.name: "unpacked"}
    assert unpack(here / "runs.tar", here / "elsewhere") == {first.name: "left alone: this one is as far"}
    (moved,) = runs_in(here / "elsewhere")[:1]
    assert Driver([moved], here / "elsewhere", 1, 0, mps=False).work() == 0

    assert command("start", "--at-once", "2", "--no-mps").returncode == 0
    wait(lambda: all(run.finished for run in runs) and not is_locked(here / "runs/driver.lock"))
    assert outcome(first) == outcome(straight) == outcome(moved)
    assert not second.going_on and "finished" in status_line(second)

    # Finished runs are left alone, and travel with the networks that others may begin from but no other checkpoint.
    before = first.log.read_bytes()
    assert Driver(runs, here / "runs", 2, 0, mps=False).work() == 0
    assert first.log.read_bytes() == before
    long_ago = 1_000_000_000.0
    os.utime(first.folder / "summary.json", (long_ago, long_ago))
    sizes = pack(runs, here / "done.tar")
    assert set(sizes) == {run.name for run in runs}
    assert set(unpack(here / "done.tar", here / "archive").values()) == {"unpacked"}
    carried = sorted((here / "archive" / first.name / "checkpoints").iterdir())
    assert [path.name for path in carried] == ["dense.safetensors", "scored.safetensors"]
    assert all(path.read_bytes() == (moved.folder / "checkpoints" / path.name).read_bytes() for path in carried)
    assert entry_of(runs_in(here / "archive")[0]) == entry_of(first)
    assert entry_of(first)["date"].startswith("2001-09-0")  # the day of the run, not that of its unpacking

    results = here / "results/small.json"
    assert collect(runs[:1], results) == [first.name]
    assert collect(runs, results) == [second.name]
    text = results.read_bytes()
    assert collect(runs, results) == [] and collect([], results) == []
    assert results.read_bytes() == text
    # A run that is held keeps the recipe it was held with, whatever settings there are by now.
    older = json.loads(text)
    del older["runs"][0]["recipe"]["scores"]["recalibrate"]
    results.write_text(json.dumps(older))
    assert collect(runs, results) == [] and json.loads(results.read_text()) == older
    results.write_bytes(text)
    entry = json.loads(text)["runs"][0]
    assert entry["accuracy"] == first.records()[-1]["test_accuracy"]
    assert entry["validation_accuracy"] == first.records()[-1]["validation_accuracy"] is not None
    assert f"{entry['validation_accuracy']:.2f} % (validation)" in status_line(first)
    assert entry["left"]["params"] < entry["dense"]["params"] and entry["left"]["macs_removed"] > 0
    assert entry["recipe"]["distill"]["alpha"] == 0.5 and entry["seed"] == 0 and len(entry["layers"]) == 19
    (second.folder / "summary.json").write_text("{")
    refused = command("collect", "--results", str(results))
    assert refused.returncode == 2 and results.read_bytes() == text
    assert refused.stdout == f"{second.folder}/summary.json is damaged; remove it and --resume to write it anew\n"


def test_stop_ends_the_runs_and_start_would_go_on(here: Path) -> None:
    first, _ = runs_in(here / "runs")
    assert command("start", "--at-once", "1", "--no-mps").returncode == 0
    wait(lambda: first.begun)
    assert command("stop").returncode == 0
    assert not first.going_on and "driver: not running" in command("status").stdout
    assert command("stop").returncode == 0
    # Its driver killed, a run goes on alone; stop ends that one too.
    assert command("start", "--at-once", "1", "--no-mps").returncode == 0
    wait(lambda: holder(first.lock) is not None)
    driver = holder(here / "runs/driver.lock")
    assert driver is not None
    os.kill(driver, signal.SIGKILL)
    wait(lambda: not is_locked(here / "runs/driver.lock"))
    assert first.going_on
    assert command("stop").returncode == 0
    assert not first.going_on and not first.finished


def test_a_run_that_cannot_succeed_is_given_up_and_the_next_one_starts(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "jobs.toml").write_text(
        '[[job]]\nrecipe = "missing.toml"\n'
        '[[job]]\nrecipe = "small.toml"\nname = "crash"\nset = ["model.name=crash:Net"]\n' + SHORT_JOB
    )
    (here / "crash.py").write_text("import os\nos._exit(7)\n")
    monkeypatch.setenv("PYTHONPATH", str(here))
    monkeypatch.setattr("driver.TRIES", 2)
    runs = runs_in(here / "runs")
    assert Driver(runs, here / "runs", 3, 0, mps=False).work() == 1
    failed = json.loads((here / "runs/driver.json").read_text())["failed"]
    assert failed == {"missing-seed0": 2, "crash-seed0": 7}
    assert [run.finished for run in runs] == [False, False, True]
    assert "missing.toml does not exist" in runs[0].log.read_text()
    started = capsys.readouterr().out
    assert [started.count(f"{run.name} starts") for run in runs] == [1, 2, 1]
    said = command("status").stdout
    assert "failed (2)" in said and "failed (7)" in said and "finished" in said


def test_runs_that_wait_for_what_will_not_come_are_told_and_do_not_keep_the_driver(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "jobs.toml").write_text(
        '[[job]]\nrecipe = "missing.toml"\n'
        '[[job]]\nrecipe = "small.toml"\ndense_from = "missing"\n'
        '[[job]]\nrecipe = "small.toml"\nname = "beside"\nbeside = "damaged"\n'
    )
    runs = runs_in(here / "runs")
    (here / "runs/damaged-seed0").mkdir(parents=True)
    (here / "runs/damaged-seed0/summary.json").write_text("{")
    assert Driver(runs, here / "runs", 1, 0, mps=False).work() == 1
    said = capsys.readouterr().out
    assert "small-seed0 cannot start without missing-seed0" in said
    assert "beside-seed0 cannot start: the run it stands beside is damaged (JSONDecodeError" in said
    told = command("status").stdout.splitlines()
    assert told[2].split(maxsplit=1)[1] == "waits for missing-seed0" and "failed (2)" in told[3]
    assert not (here / "runs/small-seed0").exists()


def test_a_damaged_run_is_given_up_and_does_not_stop_the_driver(here: Path) -> None:
    (here / "jobs.toml").write_text(f"{SHORT_JOB}seeds = [0, 1]\n")
    damaged, whole = runs_in(here / "runs")
    damaged.folder.mkdir(parents=True)
    (damaged.folder / "recipe.toml").write_bytes(b"\0" * 8)
    (damaged.folder / "metrics.jsonl").write_bytes(b'{"done": 1}\n7\n\xff\n')
    assert damaged.records() == [{"done": 1}]
    assert Driver([damaged, whole], here / "runs", 1, 0, mps=False).work() == 1
    assert json.loads((here / "runs/driver.json").read_text())["failed"] == {damaged.name: 2}
    assert whole.finished


def test_a_run_in_the_background_is_told_so(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = '[[job]]\nrecipe = "small.toml"\nseeds = [0]\n'
    (here / "jobs.toml").write_text(job + job.replace("[0]", "[1]\nbackground = true"))
    given, real = [], subprocess.Popen

    def started(words: list[str], **options: Any) -> Any:
        given.append(options["env"].get("CUDA_MPS_CLIENT_PRIORITY"))
        return real([sys.executable, "-c", ""], **options)

    monkeypatch.setattr("driver.subprocess.Popen", started)
    driver = Driver(runs_in(here / "runs"), here / "runs", 1, 0, mps=False)
    monkeypatch.setattr("driver.TRIES", 1)
    assert driver.work() == 1
    assert given == [None, "1"]


def test_none_at_once_is_refused(here: Path) -> None:
    done = command("start", "--at-once", "0")
    assert done.returncode == 2 and "--at-once: '0' is no whole number above 0" in done.stderr
    assert not (here / "runs").exists()
    assert command("status").returncode == 0 and not (here / "runs").exists()


def test_jobs_that_make_no_sense(here: Path) -> None:
    for text, message in {
        '[[job]]\nseed = [0]\nrecipe = "digits"': "may have name, seeds, set, beside, dense_from and background",
        '[[job]]\nrecipe = "digits"\nset = ["seed=1"]': "needs a name of its own",
        '[[job]]\nrecipe = "digits"\nseeds = [1, 1]': "asks twice for digits-seed1",
        "[[job]": r"cannot be read \(TOMLDecodeError",
        "[job]": r"asks for nothing; each job is a table \[\[job\]\]",
        "": "asks for nothing",
    }.items():
        (here / "jobs.toml").write_text(text)
        with pytest.raises(SystemExit, match=message):
            runs_in(here / "runs")
    with pytest.raises(SystemExit, match=r"nowhere.toml: cannot be read \(FileNotFoundError"):
        read_runs(here / "nowhere.toml", here)
    with pytest.raises(SystemExit, match=r"cifar10.toml: asks for no run called like best or \*-seed9"):
        read_runs(BENCHMARKS / "cifar10.toml", here, ["best", "*-seed9"])


def test_a_run_beside_another_waits_for_it_and_asks_for_what_it_left(tmp_path: Path) -> None:
    jobs = tmp_path / "jobs.toml"
    jobs.write_text('[[job]]\nrecipe = "digits"\nname = "second"\nbeside = "first"\nseeds = [3]\n', "utf-8")
    (run,) = read_runs(jobs, tmp_path)
    assert run.waits_for == ["first-seed3"]
    (tmp_path / "first-seed3").mkdir()
    told = json.dumps({"pruned": {"macs": 250}, "dense": {"macs": 1000}})
    (tmp_path / "first-seed3" / "summary.json").write_text(told, "utf-8")
    assert not run.waits_for
    assert run.words()[-2:] == ["--set", "budget.macs=0.250000"]


def test_a_run_waits_for_the_dense_stage_it_takes_over(tmp_path: Path) -> None:
    jobs = tmp_path / "jobs.toml"
    jobs.write_text('[[job]]\nrecipe = "digits"\nname = "second"\ndense_from = "first"\n', "utf-8")
    (run,) = read_runs(jobs, tmp_path)
    source = tmp_path / "first-seed0"
    (source / "checkpoints").mkdir(parents=True)
    (source / "checkpoints/dense.safetensors").touch()
    records = [{"done": done, "phase": "warmup", "epoch": done, "epochs": 2} for done in (1, 2)]
    for count in (0, 1, 2):  # the weights are there a moment before the last record, which is needed too
        lines = "".join(json.dumps(record) + "\n" for record in records[:count])
        (source / "metrics.jsonl").write_text(lines)
        assert run.waits_for == ([] if count == 2 else ["first-seed0"])
    assert run.words()[-2:] == ["--dense-from", str(source)]
    # One that came here finished, without its dense stage, cannot give it: the run trains its own.
    (source / "checkpoints/dense.safetensors").rename(source / "summary.json")
    assert not run.waits_for and "--dense-from" not in run.words()
    # A run that has taken it over needs it no more.
    (source / "summary.json").unlink()
    assert run.waits_for == ["first-seed0"]
    (run.folder / "checkpoints").mkdir(parents=True)
    (run.folder / "checkpoints/last.safetensors").touch()
    assert not run.waits_for


def test_a_lock_is_held_as_long_as_one_process_has_it(tmp_path: Path) -> None:
    lock = take_lock(tmp_path / "x")
    assert lock is not None and take_lock(tmp_path / "x") is None
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[lock])
    os.close(lock)
    assert is_locked(tmp_path / "x")
    child.communicate(b"\n")
    assert not is_locked(tmp_path / "x") and not is_locked(tmp_path / "never")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_only_who_holds_a_lock_is_ended(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text(f"{os.getpid()}\n")  # of one that is gone, whose number is another's by now
    assert holder(path) is None and end_holders([path], 1) == []
    lock = take_lock(path)
    assert lock is not None and path.read_text() == "" and holder(path) is None
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[lock])
    assert end_holders([path], 0.3) == [path] and child.poll() is None  # it has not said who it is
    os.write(lock, f"{child.pid}\n".encode())
    os.close(lock)
    assert holder(path) == child.pid
    assert end_holders([path], 30) == [] and child.wait() == -signal.SIGTERM


def test_somebody_who_asks_about_a_lock_does_not_keep_it_from_its_owner(tmp_path: Path) -> None:
    asking = take_lock(tmp_path / "x")
    assert asking is not None
    threading.Timer(0.2, os.close, [asking]).start()
    assert take_lock(tmp_path / "x") is None
    assert take_lock(tmp_path / "x", patience=20.0) is not None


def test_what_a_run_needs_is_carried_and_what_is_damaged_is_not(tmp_path: Path) -> None:
    def run(root: str, group: str, done: int) -> Run:
        made = Run(group, "", 0, (), tmp_path / root)
        save_checkpoint(made.folder / "checkpoints", {"done": done})
        (made.folder / "latency.json").write_text(f"clock of {done}")  # or another machine would take a new one
        return made

    whole, damaged = run("here", "whole", 5), run("here", "damaged", 5)
    (damaged.folder / "checkpoints/last.safetensors").write_bytes(b"\x08" + bytes(20))
    sizes = pack([whole, damaged], tmp_path / "runs.tar")
    assert sizes[damaged.name] == 0 < sizes[whole.name]
    there = run("there", "whole", 7)
    assert unpack(tmp_path / "runs.tar", there.root) == {whole.name: "left alone: this one is as far"}
    (there.folder / "checkpoints/last.safetensors").write_bytes(b"torn")
    lock = take_lock(there.lock)
    assert lock is not None
    assert unpack(tmp_path / "runs.tar", there.root) == {whole.name: "left alone: it is going on here"}
    os.close(lock)
    assert unpack(tmp_path / "runs.tar", there.root) == {whole.name: "unpacked"}
    assert (there.folder / "latency.json").read_text() == "clock of 5"
    assert not there.going_on and load_checkpoint(there.folder / "checkpoints") == {"done": 5}


def test_the_jobs_of_the_table_are_bundled_recipes() -> None:
    runs = read_runs(BENCHMARKS / "cifar10.toml", Path("runs"))
    assert {run.recipe for run in runs} == {n for n in sbf.training.recipe.bundled_recipes() if "cifar10" in n}
    assert all(sum(run.group == other.group for other in runs) == 3 for run in runs)


@pytest.mark.parametrize("path", [*BENCHMARKS.glob("c*.toml"), BENCHMARKS / "ablations.toml"])
def test_every_job_has_a_recipe_and_may_take_over_the_dense_stage_it_asks_for(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(BENCHMARKS.parent)
    runs = {run.name: run for run in read_runs(path, Path("runs"))}
    recipes = {name: flatten_keys(Recipe.load(run.recipe, run.overrides).to_dict()) for name, run in runs.items()}
    for name, run in runs.items():
        for other in filter(None, (run.dense_from, run.beside)):
            assert f"{other}-seed{run.seed}" in runs
        if run.dense_from:
            theirs, ours = recipes[f"{run.dense_from}-seed{run.seed}"], recipes[name]
            assert {key for key in ours if key.startswith(DENSE_STAGE_KEYS) and ours[key] != theirs[key]} == set()


def test_the_sweep_judges_by_images_held_out() -> None:
    runs = read_runs(BENCHMARKS / "choices.toml", Path("runs"))
    assert all(0 < Recipe.load(run.recipe, run.overrides).data.validation < 1 for run in runs)


def test_commands_on_the_pages_are_those_of_the_driver() -> None:
    for page in ("cifar10.md", "ablations.md"):
        text = (BENCHMARKS.parent / "docs" / page).read_text("utf-8").replace("\\\n", " ")
        lines = re.findall(r"^\$ python benchmarks/cifar10.py (.*)$", text, re.MULTILINE)
        assert lines
        for line in lines:
            said = cifar10._parser().parse_args(shlex.split(line))
            assert (BENCHMARKS.parent / said.jobs).is_file()


def test_the_sequential_count_of_the_whole_network_is_the_whole_network() -> None:
    assert sequential_count(sbf.Recipe.load("cifar10-resnet56-dense"), {}) == {
        "params": 853_018,
        "macs": 125_485_696,
    }
    recipe, images = sbf.Recipe.load("cifar10-resnet56-dense", ["model.name=resnet20"]), torch.zeros(1, 3, 32, 32)
    model, whole = resolve("resnet20"), sequential_count(recipe, {})
    assert whole == {"params": measure(model, images).params, "macs": measure(model, images).macs}
    half = {name: layer.filters // 2 for name, layer in sbf.trace(model, images).layers.items()}
    found = sequential_count(recipe, half)
    assert 0.24 < found["macs"] / whole["macs"] < 0.28
    last = {name: range(kept, 2 * kept) for name, kept in half.items() if name.endswith("conv2")}
    plan = sbf.Plan({**{name: range(kept) for name, kept in half.items()}, **last})
    assert found["params"] < measure(sbf.extract(model, images, plan), images).params
