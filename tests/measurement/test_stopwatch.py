"""Measuring: what is done with the times that are taken.  How long something takes is not tested."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from clocks import work
from sbf_pruner.errors import PruningError
from sbf_pruner.graph import lay_out, trace
from sbf_pruner.measurement import (
    LAYER_TIMERS,
    Conditions,
    LayerSpec,
    PlanTimer,
    Predictor,
    cache_folder,
    calibration,
    comparable_conditions,
    conditions_here,
    layer_seconds,
    load_or_calibrate,
    passes,
    rehearse,
    time_layers,
)
from sbf_pruner.models import resnet20
from sbf_pruner.plan import Plan
from sbf_pruner.runtimes import LATENCY_RUNTIMES, RUNTIMES, CapturedNetwork, make_runner
from sbf_pruner.surgery import extract
from sbf_pruner.training import settings
from sbf_pruner.utils import random_inputs, synchronizer
from shares import mostly_slow

IMAGE = torch.zeros(1, 3, 16, 16)
TORCH = Conditions("eager", 2, 1, {"cpu": "an abacus"})


# -- layers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runtime", ["onnxruntime", "eager", "compile"])
@pytest.mark.parametrize(
    "site",
    [
        LayerSpec("conv", (3, 3), (2, 2), (1, 1), (1, 1), 1, (8, 8)),
        LayerSpec("conv", (3, 3), (1, 1), (1, 1), (1, 1), 0, (8, 8)),
        LayerSpec("conv", (3, 3), (1, 1), (1, 1), (1, 1), 2, (8, 8)),
        LayerSpec("conv", (3,), (1,), (1,), (1,), 1, (8,)),
        LayerSpec("transposed", (2, 2), (2, 2), (0, 0), (1, 1), 1, (8, 8)),
        LayerSpec("linear", size=(3,)),
    ],
    ids=str,
)
def test_every_kind_of_layer_can_be_timed(runtime, site):
    found = time_layers(runtime, site, [(4, 4), (8, 8)], 2, 1)
    assert sorted(found) == [(4, 4), (8, 8)] and all(0 <= seconds < 1 for seconds in found.values())


def profile(*passes):
    events, at = [], 0
    for ops in passes:
        events.append({"cat": "Session", "name": "model_run", "ts": at, "dur": 1})
        for op, took in ops:
            at += 1
            args = {"op_name": op}
            events.append({"cat": "Node", "name": f"{op}_fence_before", "ts": at, "dur": 5, "args": args})
            events.append({"cat": "Node", "name": f"{op}_kernel_time", "ts": at, "dur": took, "args": args})
        at += 1
    return events


def test_of_a_profile_the_middle_layer_counts_with_what_lays_its_input_out():
    plain = [("ReorderInput", 9), ("Conv", 2), ("Conv", 30), ("Conv", 2), ("ReorderOutput", 9)]
    laid = [("ReorderInput", 9), ("Conv", 2), ("ReorderOutput", 4), ("Conv", 30), ("ReorderInput", 7), ("Conv", 2)]
    alone = [("ReorderInput", 9), ("Conv", 30), ("ReorderOutput", 9)]
    assert layer_seconds(profile(plain, laid, alone)) == pytest.approx([30e-6, 34e-6, 30e-6])
    assert layer_seconds(profile([("Gemm", 3)])) == pytest.approx([3e-6])


# -- calibration ---------------------------------------------------------------------------------------------


def test_networks_are_cut_in_all_three_ways_and_several_sizes():
    graph = trace(resnet20(), IMAGE)
    found = calibration.samples(graph)
    assert [(way, share) for way, share, _ in found] == [
        (way, share) for way in ("filters", "streams", "blocks") for share in (0.75, 0.5, 0.25)
    ]
    for _, _, keep in found:
        graph.check_connected(keep)
    streams = {name: mask for name, mask in found[4][2].items() if name.endswith("conv2")}
    assert (streams["layer1.0.conv2"] == streams["layer1.2.conv2"]).all() and streams["layer1.0.conv2"].sum() in (
        7,
        8,
    )
    blocks = found[7][2]
    gone = [name for name, mask in blocks.items() if not graph.settle(blocks)[name].any()]
    assert len(gone) in (8, 10)  # half of nine branches, two layers each


@pytest.fixture
def fake(monkeypatch):
    """Layers take their multiply-accumulates, networks twice that and a little for every number added up."""
    counted = {"layers": 0, "networks": 0}

    def layers(runtime, site, widths, batch, threads):
        counted["layers"] += len(widths)
        return {pair: 1e-9 * batch * work(site, *pair, 1) for pair in widths}

    class Timer:
        def __init__(self, model, example, graph, conditions):
            self.graph, self.batch = graph, conditions.batch
            self.predictor = calibration.Predictor(graph, TABLES[-1], conditions.batch)

        def joins(self, keep):
            counted["networks"] += 1
            reckoned = self.predictor.terms_of(lay_out(self.graph, self.graph.settle(keep)))
            dense = self.truth(self.predictor.terms_of(lay_out(self.graph, {})).terms["zeros"])
            return {form: self.truth(terms) / dense for form, terms in reckoned.terms.items()}, dense

        @staticmethod
        def truth(terms):
            return 2 * terms["layers"] + 1e-8 * terms["added"] + 2e-8 * terms["moved"]

    TABLES = []
    real = calibration.calibrate

    def calibrated(model, example, graph, table, conditions, report):
        TABLES.append(table)
        return real(model, example, graph, table, conditions, report)

    monkeypatch.setattr(calibration, "time_layers", layers)
    monkeypatch.setattr(calibration, "Timer", Timer)
    monkeypatch.setattr(calibration, "calibrate", calibrated)
    monkeypatch.setattr(calibration, "busy_cores", lambda: 0.0)
    monkeypatch.setattr(calibration, "rehearse", lambda network, example, conditions: None)
    return counted


def test_a_calibration_finds_what_networks_really_take_and_states_its_error(fake, tmp_path, monkeypatch):
    monkeypatch.setenv("SBF_CACHE", str(tmp_path))
    said = []
    model = load_or_calibrate(resnet20(), IMAGE, TORCH, report=said.append)
    assert model.calibration["worst_error"] < 0.03 and len(model.calibration["networks"]) == 9
    assert model.predictor.coefficients["layers"] == pytest.approx(2, rel=0.1)
    assert any(line.startswith("measuring") for line in said)
    keep = calibration.samples(model.graph)[3][2]
    terms = model.predictor.terms_of(lay_out(model.graph, model.graph.settle(keep))).terms
    dense = model.predictor.terms_of(lay_out(model.graph, {})).terms["zeros"]
    truth = [2 * t["layers"] + 1e-8 * t["added"] + 2e-8 * t["moved"] for t in (*terms.values(), dense)]
    assert model.ratio(model.graph.settle(keep)) == pytest.approx(min(truth[:2]) / truth[2], rel=0.03)


def test_nothing_is_measured_twice(fake, tmp_path, monkeypatch):
    monkeypatch.setenv("SBF_CACHE", str(tmp_path))
    net = resnet20()
    first = load_or_calibrate(net, IMAGE, TORCH)
    before = dict(fake)
    again = load_or_calibrate(net, IMAGE, TORCH)
    assert again.to_dict() == first.to_dict() and fake == before
    load_or_calibrate(resnet20(num_classes=7), IMAGE, TORCH)  # another network, but the layers are known
    assert fake["layers"] - before["layers"] <= 3 * 10 and fake["networks"] == 2 * before["networks"]
    (kept,) = tmp_path.glob(f"latency-*-{first.to_dict()['network']}.json")
    kept.write_text("{")
    assert load_or_calibrate(net, IMAGE, TORCH).to_dict() == first.to_dict()  # a damaged cache is only a cache
    load_or_calibrate(net, IMAGE, TORCH, fresh=True)
    assert fake["layers"] > 2 * before["layers"]


def test_processes_that_measure_at_once_keep_each_others_layers(fake, tmp_path, monkeypatch):
    monkeypatch.setenv("SBF_CACHE", str(tmp_path))
    real, other = calibration.measure_layers, resnet20(in_channels=1)

    def meanwhile(table, wanted, conditions, report):
        monkeypatch.setattr(calibration, "measure_layers", real)
        load_or_calibrate(other, torch.zeros(1, 1, 16, 16), TORCH)  # as another process would
        return real(table, wanted, conditions, report)

    monkeypatch.setattr(calibration, "measure_layers", meanwhile)
    load_or_calibrate(resnet20(), IMAGE, TORCH)
    before = fake["layers"]
    for again in tmp_path.glob("latency-*"):
        again.unlink()
    load_or_calibrate(other, torch.zeros(1, 1, 16, 16), TORCH)
    load_or_calibrate(resnet20(), IMAGE, TORCH)
    assert fake["layers"] == before, "all layers are known"


def test_layers_measured_anew_stand_beside_those_of_other_networks(fake, tmp_path, monkeypatch):
    monkeypatch.setenv("SBF_CACHE", str(tmp_path))
    load_or_calibrate(resnet20(), IMAGE, TORCH)
    (kept,) = tmp_path.glob("layers-*")
    measured = json.loads(kept.read_text())
    known, other = next(iter(measured)), str(LayerSpec("linear", size=(77,)))
    before = {**measured, known: [[1, 1, 9.0], *measured[known]], other: [[1, 1, 5.0]]}
    kept.write_text(json.dumps(before))
    load_or_calibrate(resnet20(), IMAGE, TORCH, fresh=True)
    assert json.loads(kept.read_text()) == {**measured, other: [[1, 1, 5.0]]}


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("SBF_CACHE", str(tmp_path / "here"))
    assert cache_folder() == tmp_path / "here"
    monkeypatch.delenv("SBF_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "sbf-pruner"


def test_only_the_same_machine_with_the_same_versions_measures_the_same():
    mine = conditions_here("eager", 4, 1)
    assert comparable_conditions(mine, conditions_here("eager", 4, 1)) and json.dumps(dict(mine.machine))
    assert not comparable_conditions(mine, conditions_here("eager", 8, 1)) and not comparable_conditions(
        mine, TORCH
    )
    lacking = Conditions("onnxruntime", 4, 1, {**mine.machine, "onnxruntime": None})
    assert not comparable_conditions(lacking, lacking)


def test_without_onnx_runtime_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "onnxruntime" else object())
    with pytest.raises(PruningError, match=r'needs onnxruntime; run: pip install "sbf-pruner\[export\]"'):
        load_or_calibrate(resnet20(), IMAGE, Conditions("onnxruntime", 1, 1))


# -- runtimes ------------------------------------------------------------------------------------------------


def test_a_recipe_knows_the_runtimes_there_are():
    assert settings()["latency.runtime"].choices == LATENCY_RUNTIMES
    predicted = {name: row.joins for name, row in RUNTIMES.items() if row.joins is not None}
    assert predicted.keys() == LAYER_TIMERS.keys() == {name.partition(":")[0] for name in LATENCY_RUNTIMES}
    assert all(set(joins) == {"zeros", "moves"} for joins in predicted.values())


NO_GPU = (
    "this machine has no cuda device that torch can use; measure on one that has \\(sbf latency "
    "--runtime eager:cuda --out FILE\\) and give the file \\(latency.table\\)"
)


def test_without_a_gpu_there_is_no_time_on_one_and_one_sentence_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("SBF_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    place = conditions_here("eager:cuda", 4, 1)
    assert (
        place.machine["gpu"] is None and place.machine["cuda"] is None and not comparable_conditions(place, place)
    )
    with pytest.raises(PruningError, match=rf"\(eager:cuda, batch 4, 1 thread\): {NO_GPU}$"):
        load_or_calibrate(resnet20(), IMAGE, place)
    assert list(tmp_path.iterdir()) == []


def test_a_gpu_is_told_by_its_name_its_driver_and_its_arithmetic(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    mine = conditions_here("eager:cuda", 4, 1)
    assert mine.machine["gpu"] == "a GPU" and mine.machine["cuda"] == "13.0" and mine.machine["dtype"] == "float32"
    assert comparable_conditions(mine, conditions_here("eager:cuda", 4, 1))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    assert conditions_here("eager:cuda", 4, 1).machine["dtype"] == "float32, convolutions in tf32"
    assert not comparable_conditions(mine, conditions_here("eager:cuda", 4, 1))


@pytest.fixture(scope="module")
def deployable():
    """A network of whose filters half are gone, so that branches have to be brought into their streams."""
    graph = trace(resnet20(), IMAGE)
    keep = calibration.samples(graph)[1][2]
    return CapturedNetwork(extract(resnet20(), IMAGE, Plan.from_masks(graph.settle(keep)), graph), IMAGE)


@pytest.mark.parametrize("form", RUNTIMES["eager"].forms, ids=str)
def test_a_pass_on_another_device_runs_there_and_waits(form, deployable, monkeypatch):
    made = deployable.form(form)
    waited = []
    monkeypatch.setattr("sbf_pruner.runtimes.table.synchronizer", lambda device: lambda: waited.append(device))
    run = make_runner(made, torch.rand(4, 3, 16, 16), "eager", 1, "meta")
    given = [part for node in made.graph.nodes for part in (*node.args, *node.kwargs.values())]
    assert not any(isinstance(part, torch.device) for part in given)
    found = run()
    assert found.device.type == "meta" and found.shape == (4, 10) and waited == ["meta"]


def test_on_a_gpu_the_clock_is_read_when_all_is_done(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "synchronize", asked.append)
    synchronizer("cuda")()
    synchronizer("cpu")()
    assert asked == [torch.device("cuda")]


def test_a_compiled_network_computes_the_same_and_is_compiled_before_it_is_timed(monkeypatch):
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    (form,) = RUNTIMES["compile"].joins["zeros"]
    (run,) = passes(net, IMAGE, {"zeros": form}, conditions_here("compile", 2, 1)).values()
    before = counters["frames"]["total"]
    with torch.no_grad():
        torch.testing.assert_close(run(), net(random_inputs(IMAGE, 2)), rtol=1e-4, atol=1e-5)
    assert before and counters["frames"]["total"] == before

    def broken(*given, **named):
        raise RuntimeError("No working C++ compiler found.\nand a page of what was tried")

    monkeypatch.setattr(torch, "compile", lambda network, **named: broken)
    with pytest.raises(PruningError, match=r"torch.compile failed here \(RuntimeError: No working C\+\+ compiler"):
        rehearse(net, IMAGE, conditions_here("compile", 2, 1))


# -- whole networks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runtime", mostly_slow(["onnxruntime", "eager"], ["onnxruntime"]))
def test_a_plan_is_really_cut_and_timed_beside_the_dense_network(runtime):
    net = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 8, 3)).eval()
    found = PlanTimer(net, torch.zeros(1, 3, 24, 24), conditions_here(runtime, 16, 1)).interval(
        Plan({"0": [0]}), pairs=6
    )
    assert found.n == 6 and 0 < found.low <= found.median <= found.high
    assert found.median < 0.9  # one filter of 32 is left


@pytest.mark.slow
def test_calibrating_for_real_gives_a_clock_that_knows_its_error(tmp_path, monkeypatch):
    monkeypatch.setenv("SBF_CACHE", str(tmp_path))
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 3)).eval()
    model = load_or_calibrate(net, IMAGE, conditions_here("eager", 8, 1))
    assert model.dense_seconds > 0 and model.calibration["mean_error"] >= 0
    assert [one["way"] for one in model.calibration["networks"]] == ["filters"] * 3
    assert Predictor(model.graph, model.table, 8).seconds(lay_out(model.graph, {})) > 0
