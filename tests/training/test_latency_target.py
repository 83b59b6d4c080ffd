"""A run that is asked for a time: it lands, corrects, remembers, and says what it knows."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
import torch

from clocks import clock_of
from runs import Small, resnet8, small_recipe
from sbf_pruner.budget import Budget, Constraints, Selector
from sbf_pruner.cli import summary_lines
from sbf_pruner.errors import PruningError, RunError
from sbf_pruner.graph import trace
from sbf_pruner.measurement import CouplingChoice, conditions_here, synthetic_scores
from sbf_pruner.pruner import Pruner
from sbf_pruner.training import (
    MAX_LANDINGS,
    TOLERANCE,
    LatencyTarget,
    fit,
    load_recipe,
    make_plan_timer,
    networks,
)
from shares import mostly_slow

IMAGE = torch.zeros(1, 3, 16, 16)


NETWORK = {"accuracy": 50.0, "warmup_accuracy": 50.0, "params": 2, "macs": 2, "latency_ms": 1.0}
SUMMARY = {"dense": NETWORK, "pruned": NETWORK, "latency_batch": 1, "layers": {}, "cut_error": 0.0, "skipped": {}}


def scored(budget, constraints=None):
    net = resnet8()
    graph = trace(net, IMAGE)
    clock = clock_of(graph)
    pruner = Pruner(net, IMAGE, budget=budget, clock=clock, graph=graph, constraints=constraints)
    values = synthetic_scores(graph, pruner.selector.constraints)
    with torch.no_grad():
        for name, span in pruner.gates.spans.items():
            pruner.gates.soft[span] = torch.from_numpy(values[name]).float()
    pruner.land()
    return pruner, clock


def slower(clock, factor=1.2):
    """What a machine would find on which pruned networks take longer than foretold."""
    truth = clock_of(clock.graph)
    asked = []

    def timer(plan):
        asked.append(plan)
        return factor * truth.ratio(plan.masks(clock.graph))

    timer.asked = asked
    return timer


def test_it_lands_again_until_the_real_time_is_the_one_asked_for():
    pruner, clock = scored(Budget(latency=0.5))
    timer, timed = slower(clock), LatencyTarget(clock, CouplingChoice("filters", {}))
    assert timer(pruner.plan()) > 0.59
    timed.correct_by_measurement(pruner, timer)
    assert timer(pruner.plan()) == pytest.approx(0.5, rel=TOLERANCE)
    assert 2 <= len(timed.rounds) <= MAX_LANDINGS
    found = timed.summary(pruner, pruner.plan())
    assert found["measured"] == pytest.approx(0.5, rel=TOLERANCE) and found["asked"] == 0.5
    assert found["foretold"] == pytest.approx(0.5 / 1.2, rel=0.03)  # without the correction


def test_time_that_is_left_over_is_used_too():
    pruner, clock = scored(Budget(latency=0.5))
    timer = slower(clock, 0.8)
    LatencyTarget(clock, CouplingChoice("filters", {})).correct_by_measurement(pruner, timer)
    assert timer(pruner.plan()) == pytest.approx(0.5, rel=TOLERANCE)


def test_one_disturbed_measurement_does_not_lead_astray():
    pruner, clock = scored(Budget(latency=0.5))
    true, calls = slower(clock, 1.1), []

    def disturbed(plan):
        calls.append(plan)
        return true(plan) * (9 if len(calls) == 1 else 1)

    timed = LatencyTarget(clock, CouplingChoice("filters", {}))
    timed.correct_by_measurement(pruner, disturbed)
    assert true(pruner.plan()) == pytest.approx(0.5, rel=TOLERANCE)
    assert all(one["measured"] < 0.6 for one in timed.rounds)


def test_a_time_that_was_missed_is_told(caplog):
    pruner, clock = scored(Budget(latency=0.5))
    timed = LatencyTarget(clock, CouplingChoice("filters", {}))
    with caplog.at_level("WARNING"):
        timed.correct_by_measurement(pruner, lambda plan: 0.7)  # whatever goes
    assert "the pruned network misses the latency target by 40%" in caplog.text
    assert len(timed.rounds) <= MAX_LANDINGS
    told = " ".join(summary_lines(SUMMARY | {"latency": timed.summary(pruner, pruner.plan())}, "runs/x"))
    assert "70.0% measured against the dense network (missed by 40%" in told


def test_time_that_no_landing_can_use_is_not_called_missed(caplog):
    pruner, clock = scored(Budget(latency=0.5))
    timed = LatencyTarget(clock, CouplingChoice("filters", {}))
    with caplog.at_level("WARNING"):
        timed.correct_by_measurement(pruner, lambda plan: 0.4)
    assert "20% faster than the latency target" in caplog.text and "misses" not in caplog.text


def test_the_closing_table_tells_the_size_of_the_file():
    sized = {"dense": NETWORK | {"file_bytes": 2000}, "pruned": NETWORK | {"file_bytes": 1500}}
    (line,) = [line for line in summary_lines(SUMMARY | sized, "runs/x") if line.startswith("file")]
    assert line.split() == ["file,", "bytes", "2,000", "1,500", "-25.0", "%"]


def test_the_closing_table_takes_a_little_for_no_nothing():
    sized = {"dense": NETWORK | {"params": 1_000_000}, "pruned": NETWORK | {"params": 300}}
    (line,) = [line for line in summary_lines(SUMMARY | sized, "runs/x") if line.startswith("parameters")]
    assert line.split() == ["parameters", "1,000,000", "300", "-99.97", "%"]


def test_a_run_whose_scores_removed_nothing_says_what_to_do():
    whole = SUMMARY | {"layers": {"conv": {"before": 4, "after": 4}}}
    cut = SUMMARY | {"layers": {"conv": {"before": 4, "after": 3}}}
    assert any("ask for a size" in line for line in summary_lines(whole, "runs/x", scored=True))
    told = summary_lines(whole, "runs/x", scored=True, rate="scores.speed")
    assert any(line.endswith("raise scores.speed or scores.penalty") for line in told)
    assert not any("ask for a size" in line for line in summary_lines(whole, "runs/x"))  # it was to stay dense
    assert not any("ask for a size" in line for line in summary_lines(cut, "runs/x", scored=True))


def test_a_machine_on_which_no_network_is_quick_enough_gets_the_smallest(caplog):
    graph = scored(Budget(latency=0.5))[0].graph
    clock = clock_of(graph)
    share = clock.ratio(Selector(graph, Budget(latency=0.5), latency_model=clock).smallest)
    pruner, clock = scored(Budget(latency=1.1 * share))
    timed = LatencyTarget(clock, CouplingChoice("filters", {}))
    with caplog.at_level("WARNING"):
        timed.correct_by_measurement(pruner, slower(clock, 1.4))
    assert "the pruned network misses the latency target by" in caplog.text
    assert clock.ratio(pruner.plan().masks(graph)) == clock.ratio(pruner.selector.smallest)


def test_where_something_else_is_scarce_the_time_may_stay_below():
    pruner, clock = scored(Budget(latency=0.6, params=0.2))
    timer, timed = slower(clock, 0.5), LatencyTarget(clock, CouplingChoice("filters", {}))
    before = pruner.plan()
    timed.correct_by_measurement(pruner, timer)
    assert pruner.plan() == before and len(timed.rounds) == 1


def test_what_was_measured_is_written_before_it_is_used_and_not_measured_again(tmp_path):
    pruner, clock = scored(Budget(latency=0.5))
    timed = LatencyTarget(clock, CouplingChoice("filters", {"filters": 0.5}))
    timed.keep_in(tmp_path / "latency.json")
    truth = slower(clock)

    def cut_short(plan):
        if truth.asked:
            raise KeyboardInterrupt
        assert len(json.loads((tmp_path / "latency.json").read_text())["rounds"]) == len(truth.asked)
        return truth(plan)

    with pytest.raises(KeyboardInterrupt):
        timed.correct_by_measurement(pruner, cut_short)
    again, other = scored(Budget(latency=0.5))
    rounds = json.loads((tmp_path / "latency.json").read_text())["rounds"]
    assert len(rounds) == 1
    later = slower(other)
    LatencyTarget(other, CouplingChoice("filters", {}), rounds).correct_by_measurement(again, later)
    whole, third = scored(Budget(latency=0.5))
    LatencyTarget(third, CouplingChoice("filters", {})).correct_by_measurement(whole, slower(third))
    assert again.plan() == whole.plan()
    assert not set(map(str, truth.asked)) & set(map(str, later.asked))


def test_what_was_written_is_read_again_and_what_is_damaged_is_one_sentence(tmp_path):
    pruner, clock = scored(Budget(latency=0.5))
    path, recipe = tmp_path / "latency.json", load_recipe("digits", ["budget.latency=0.5"])
    timed = LatencyTarget(
        clock, CouplingChoice("blocks", {"blocks": 0.5}), [{"plan": "a", "foretold": 0.5, "measured": 0.6}]
    )
    timed.keep_in(path)

    def again():
        return LatencyTarget.of(pruner.model, IMAGE, pruner.graph, recipe, path, Constraints())

    assert (again().chosen, again().rounds) == (timed.chosen, timed.rounds)
    written = json.loads(path.read_text())
    for damaged in ("{", "[]", "\xff", {**written, "rounds": [1]}, {**written, "chosen": {"way": "blocks"}}):
        text = damaged if isinstance(damaged, str) else json.dumps(damaged)
        path.write_bytes(text.encode("latin-1"))
        with pytest.raises(
            RunError, match=r"latency.json is damaged; put the file back, or begin a run in another folder"
        ):
            again()


def test_on_another_machine_nothing_is_timed():
    clock = clock_of(trace(resnet8(), IMAGE))
    for runtime in ("eager", "eager:cuda", "one that is not known here"):
        clock.conditions = replace(clock.conditions, runtime=runtime)
        assert make_plan_timer(clock, resnet8(), IMAGE) is None


# -- whole runs ----------------------------------------------------------------------------------------------

SHORT = [
    *("data.name=synthetic", "data.samples=320", "data.image_size=8", "data.channels=1"),
    *("phases.warmup=1", "phases.cycles=2", "phases.score=1", "phases.weights=1", "phases.finetune=1"),
    *("dense_control=false", "budget.settled=1", "threads=1", "budget.latency=0.5", "scores.steer=true"),
    *("scores.balance=cost", "scores.speed=0.05"),
]


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "table.json"
    clock_of(trace(resnet8(10, 1), torch.zeros(1, 1, 8, 8))).write(path)
    return path


def test_a_run_with_a_table_from_elsewhere_lands_by_prediction_and_says_so(table, tmp_path, monkeypatch):
    for name in ("HOME", "USERPROFILE"):  # the second is what Windows calls it
        monkeypatch.setenv(name, str(table.parent))
    recipe = load_recipe("digits", [*SHORT, f"latency.table=~/{table.name}"])
    result = fit(resnet8(10, 1), recipe, run=tmp_path / "run")
    found = result.summary["latency"]
    assert found["measured"] is None and found["landings"] == []
    assert 0.485 <= found["foretold"] <= 0.5
    assert found["way"] in ("filters", "streams", "blocks") and set(found["macs_left"]) == {
        *("filters", "streams", "blocks")
    }
    assert json.loads((tmp_path / "run" / "latency.json").read_text())["chosen"]["way"] == found["way"]


@pytest.mark.slow
def test_a_run_that_is_killed_while_it_corrects_ends_on_the_same_filters(table, tmp_path, monkeypatch):
    recipe = load_recipe("digits", [*SHORT, f"latency.table={table}", "latency.way=filters"])

    def run(name, timer, **named):
        monkeypatch.setattr(networks, "make_plan_timer", lambda clock, net, images: timer(clock))
        return fit(resnet8(10, 1), recipe, run=tmp_path / name, **named)

    def stops(clock):
        truth = slower(clock)

        def timer(plan):
            if len(truth.asked) == 1:
                raise KeyboardInterrupt
            return truth(plan)

        return timer

    whole = run("whole", slower)
    with pytest.raises(KeyboardInterrupt):
        run("killed", stops)
    again = run("killed", slower, resume=True)
    assert again.plan == whole.plan
    assert whole.summary["latency"]["measured"] == pytest.approx(0.5, rel=0.05)
    assert len(again.summary["latency"]["landings"]) == len(whole.summary["latency"]["landings"])
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, again.model.state_dict()[name])


def test_a_way_is_said_once(table):
    recipe = load_recipe("digits", [*SHORT, f"latency.table={table}", "latency.way=blocks", "scores.blocks=true"])
    with pytest.raises(
        PruningError, match=r"^latency\.way: .* constraints\.couple or scores\.blocks; set only one of them"
    ):
        fit(resnet8(10, 1), recipe, run=table.parent / "run")
    assert not (table.parent / "run").exists()


def test_a_time_that_cannot_be_is_refused_before_anything_is_trained(table):
    recipe = load_recipe("digits", [*SHORT, f"latency.table={table}", "budget.latency=0.0001"])
    with pytest.raises(PruningError, match=r"the target of .* ms \(0.01\d*%\) cannot be met"):
        fit(resnet8(10, 1), recipe, run=table.parent / "run")
    assert not (table.parent / "run").exists()


# -- what the landing will need ------------------------------------------------------------------------------


@pytest.fixture
def measured_here(tmp_path):
    """A recipe whose table is one that was measured on this very machine, in ONNX Runtime."""
    place = conditions_here("onnxruntime", 1, 1)
    held = clock_of(trace(Small(), torch.zeros(1, 1, 8, 8))).to_dict()
    held |= {"runtime": place.runtime, "machine": dict(place.machine)}
    (tmp_path / "table.json").write_text(json.dumps(held))
    return small_recipe(
        budget={"latency": 0.5},
        latency={"table": str(tmp_path / "table.json"), "way": "filters"},
        phases={"warmup": 1, "cycles": 1, "score": 1, "weights": 1, "finetune": 1},
        dense_control=False,
    )


@pytest.mark.parametrize("package", mostly_slow(["onnx", "onnxscript", "onnxruntime"], ["onnxruntime"]))
def test_what_the_landing_is_timed_with_is_missed_before_anything_is_trained(
    package, measured_here, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        PruningError,
        match=rf"^latency cannot be measured on this machine \(onnxruntime, batch 1, 1 thread\): "
        rf'exporting to ONNX needs {package}; run: pip install "sbf-pruner\[export\]"$',
    ):
        fit(Small(), measured_here, run=tmp_path / "run", report=lambda record: 1 / 0)
    assert not (tmp_path / "run").exists()


def test_a_network_that_the_runtime_cannot_run_is_found_before_anything_is_trained(
    measured_here, tmp_path, monkeypatch
):
    def fails(*given):
        raise OSError("no space\nleft")

    monkeypatch.setattr("sbf_pruner.measurement.stopwatch.make_runner", fails)
    with pytest.raises(PruningError, match=r"\(onnxruntime, batch 1, 1 thread\): OSError: no space$"):
        fit(Small(), measured_here, run=tmp_path / "run", report=lambda record: 1 / 0)
    assert not (tmp_path / "run").exists()


def test_a_run_that_goes_on_asks_for_what_it_still_needs(measured_here, tmp_path, monkeypatch):
    monkeypatch.setattr(networks, "make_plan_timer", lambda clock, net, images: None)
    run = tmp_path / "run"

    def stop_at(epoch, **named):
        def report(record):
            if record["done"] == epoch:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            fit(Small(), measured_here, run=run, report=report, **named)

    stop_at(1)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "onnx", None)
        with pytest.raises(PruningError, match="needs onnx"):
            fit(Small(), measured_here, run=run, resume=True)
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for damage in ("{", "[]", "{}"):
        (run / "latency.json").write_text(damage)
        with pytest.raises(PruningError, match=r"latency\.json is damaged; put the file back, or begin a run in"):
            fit(Small(), measured_here, run=run, resume=True)
    (run / "latency.json").write_bytes(before[run / "latency.json"])
    stop_at(2, resume=True)  # the last scores have landed, and nothing is timed any more
    monkeypatch.setitem(sys.modules, "onnx", None)
    assert fit(Small(), measured_here, run=run, resume=True).summary["latency"]["asked"] == 0.5
