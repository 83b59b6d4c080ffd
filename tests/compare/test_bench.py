"""Dense against compact: what is timed is right, what is missing is said, and the figures are all there."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sbf_pruner.cli import bench_lines
from sbf_pruner.compare import (
    LAYERS,
    REST,
    BenchOptions,
    Subject,
    bench,
    dissect,
    page_faults,
    read_settings,
    resolve_subject,
    run_bench,
)
from sbf_pruner.errors import PruningError
from sbf_pruner.measurement import measure
from sbf_pruner.models import resolve
from sbf_pruner.plan import Plan
from sbf_pruner.runtimes import RUNTIMES, CapturedNetwork, Form, Placement, Unavailable, outputs
from sbf_pruner.surgery import extract
from sbf_pruner.utils import call, timing
from zoo import ZOO

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def less_work() -> Iterator[None]:
    """Two forms, tried less long, of networks captured once: that all are right is tested where they are made."""
    some = {name: replace(row, forms=(row.forms[0], row.forms[-1])) for name, row in RUNTIMES.items()}
    captured: dict[int, CapturedNetwork] = {}

    def capture(model: nn.Module, example: Any) -> CapturedNetwork:
        if id(model) not in captured:
            captured[id(model)] = CapturedNetwork(model, example)
            captured[id(model)].model = model  # alive, so that no other takes its place
        return captured[id(model)]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(bench, "RUNTIMES", some)
        patched.setattr(bench, "TRIAL", 0.05)
        patched.setattr(bench, "CapturedNetwork", capture)
        yield


@pytest.fixture(scope="module")
def subject() -> Subject:
    torch.manual_seed(0)
    model, inputs = ZOO["Residual"]()
    model, image = model.float().eval(), inputs.float()
    return Subject.of(
        "residual", model, extract(model, image, Plan({"0": [1, 2, 5], "3.conv1": [0], "3.conv2": [1]}))
    )


@pytest.fixture(scope="module")
def result(subject: Subject) -> dict[str, Any]:
    """One real bench of a tiny network, without the compiler, which takes long."""
    before = {key: value.clone() for key, value in subject.dense.state_dict().items()}
    found = run_bench(subject, BenchOptions((1, 3), ("eager", "onnxruntime"), ("cpu",), pairs=6, threads=1))
    torch.testing.assert_close(dict(subject.dense.state_dict()), before, rtol=0, atol=0)
    return found


def test_every_combination_is_timed_and_computes_what_the_saved_network_does(result: dict[str, Any]) -> None:
    keys = [(record["runtime"], record["batch"]) for record in result["measured"]]
    assert keys == [("eager", 1), ("eager", 3), ("onnxruntime", 1), ("onnxruntime", 3)]
    for record in result["measured"]:
        assert record["difference"] < 1e-5
        assert record["speedup"]["n"] == record["dense_ms"]["n"] == 6
        assert record["speedup"]["low"] <= record["speedup"]["median"] <= record["speedup"]["high"]
        tried, known = record["tried_ms"], {str(form) for form in RUNTIMES[record["runtime"]].forms}
        assert (
            1 <= len(tried["dense"]) <= len(tried["compact"]) == 2 and {*tried["dense"], *tried["compact"]} <= known
        )
        assert all(tried[side][record["form"][side]] == min(tried[side].values()) for side in tried)
    assert result["missing"] == []


def test_the_figures_are_plain_data_with_all_that_made_them(result: dict[str, Any], subject: Subject) -> None:
    assert json.loads(json.dumps(result))["settings"] == {
        "batches": [1, 3],
        "runtimes": ["eager", "onnxruntime"],
        "devices": ["cpu"],
        "pairs": 6,
        "threads": 1,
        "trial_seconds": bench.TRIAL,
    }
    assert result["environment"]["onnxruntime"] and result["environment"]["load"] >= 0
    dense, compact = (measure(network, subject.example).macs for network in (subject.dense, subject.compact))
    assert result["subject"]["dense"]["macs"] == dense and result["subject"]["compact"]["macs"] == compact
    assert result["subject"]["fewer_macs"] == dense / compact > 1
    assert all(record["form_macs"] >= compact for record in result["measured"])  # zeros cost something too


def test_the_anatomy_finds_every_layer_with_its_macs(result: dict[str, Any], subject: Subject) -> None:
    for held, batch in zip(result["anatomy"], (1, 3), strict=True):
        found = {part["name"]: part for part in held["dense"] if part["kind"] == LAYERS}
        counted = {name: batch * n for name, n in measure(subject.dense, subject.example).by_module.items()}
        assert {name: part["macs"] for name, part in found.items()} == {name: counted[name] for name in found}
        layers = [n for n, m in subject.dense.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)]
        assert sorted(found) == sorted(layers)
        names = {part["name"] for part in held["compact"] if part["kind"] == LAYERS}
        assert names <= set(layers) and held["compact"]


def test_the_table_says_what_was_measured(result: dict[str, Any]) -> None:
    lines = bench_lines(result)
    assert lines[0].split()[:4] == ["runtime", "batch", "dense", "compact"]
    assert [line.split()[0] for line in lines[1:5]] == ["eager", "eager", "onnxruntime", "onnxruntime"]
    assert any(line.startswith("MACs of one sample: ") and line.endswith(" times fewer") for line in lines)
    pytest.importorskip("rich")
    pretty = bench_lines(result, pretty=True)
    assert "onnxruntime" in "".join(pretty) and pretty[0][0] != "r" and pretty[-1] == lines[-1]


def test_a_table_without_rich_is_plain(result: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.table", None)
    assert bench_lines(result, pretty=True) == bench_lines(result)


def test_without_onnx_runtime_and_openvino_the_others_run(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name == "onnxruntime" else ...)
    said: list[str] = []
    asked = BenchOptions((1,), ("onnxruntime", "openvino", "eager"), ("cpu",), pairs=1, threads=1)
    result = run_bench(subject, asked, said.append)
    assert [(entry["runtime"], entry["reason"]) for entry in result["missing"]] == [
        ("onnxruntime", 'exporting to ONNX needs onnxruntime; run: pip install "sbf-pruner[export]"'),
        ("openvino", 'OpenVINO is not installed; run: pip install "sbf-pruner[openvino]"'),
    ]
    assert [record["runtime"] for record in result["measured"]] == ["eager"]
    assert "eager, cpu: batch 1" in said
    assert any(line.startswith("openvino on cpu: left out, OpenVINO is not") for line in bench_lines(result))


def test_that_nothing_could_be_timed_is_an_error(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    asked = BenchOptions((1,), ("openvino",), ("cpu",), pairs=1, threads=1)
    with pytest.raises(
        PruningError, match=r"^nothing could be timed \(openvino, cpu: OpenVINO is not installed; .*\); n"
    ):
        run_bench(subject, asked)


def test_a_compiler_that_fails_is_one_line(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any, **named: Any) -> Any:
        def run(*inputs: Any) -> None:
            raise RuntimeError("No working C++ compiler found.\nand a page of what was tried")

        return run

    monkeypatch.setattr(torch, "compile", broken)
    with pytest.raises(PruningError) as caught:
        RUNTIMES["compile"].prepare(subject.compact, Placement(CPU, 1, subject.example))(subject.example)
    assert str(caught.value) == "torch.compile failed here (RuntimeError: No working C++ compiler found)"


@pytest.mark.slow
def test_the_compiled_network_computes_the_same(subject: Subject) -> None:
    form = CapturedNetwork(subject.compact, subject.example).form(RUNTIMES["compile"].forms[0])
    bind = RUNTIMES["compile"].prepare(form, Placement(CPU, 1, subject.example))
    for batch in (1, 3):
        inputs = subject.inputs(batch)
        with torch.inference_mode():
            torch.testing.assert_close(outputs(bind(inputs)), [subject.compact(inputs)], rtol=1e-4, atol=1e-5)


def test_a_network_that_cannot_be_rewritten_is_timed_as_it_is() -> None:
    class Wordy(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            return x if len(x) == int(x.shape[0]) and x.sum().isfinite().item() else -x

    net, image = Wordy(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 3)).eval(), torch.rand(1, 3, 8, 8)
    odd = Subject.of("wordy", net, extract(net, image, Plan({"0": [1]})))
    result = run_bench(odd, BenchOptions((2,), ("eager", "onnxruntime"), ("cpu",), pairs=1, threads=1))
    (record,), (left_out,) = result["measured"], result["missing"]
    assert record["form"] == {"dense": "as it is", "compact": "as it is"} and record["difference"] == 0
    assert left_out["reason"].startswith("Wordy cannot be written as ONNX") and result["anatomy"] == []
    assert "Wordy cannot be exported" in result["not_rewritten"]
    assert any(line.startswith("both networks were timed as they are") for line in bench_lines(result))


def test_on_a_gpu_only_torch_is_timed(subject: Subject) -> None:
    tool = bench._Bench(subject, BenchOptions((1,), ("onnxruntime",), ("cpu",)), lambda line: None)
    with pytest.raises(Unavailable, match="timed only on the CPU"):
        tool._measure("onnxruntime", torch.device("cuda"))


def test_pairs_follow_from_the_time_a_pass_takes(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SECONDS", 0.5)  # 25 pairs of samples that take 10 ms each
    found = run_bench(subject, BenchOptions((1,), ("eager",), ("cpu",), threads=1))
    assert found["measured"][0]["speedup"]["n"] == 25
    monkeypatch.setattr(bench, "SECONDS", 0.0)
    assert (
        run_bench(subject, BenchOptions((1,), ("eager",), ("cpu",), threads=1))["measured"][0]["speedup"]["n"] == 10
    )


# -- settings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("1,x", None, "cpu"), "--batch '1,x': write numbers with commas between them, such as 1,64"),
        (("0", None, "cpu"), "--batch must be at least 1"),
        (("1", None, "cpu", 0), "--pairs must be at least 1"),
        (("1", None, "cpu", None, -1), "--threads must be at least 1"),
        (("1", "egar", "cpu"), "--runtimes: none is called 'egar'; did you mean 'eager'?"),
        (("1", None, "cuda"), "--device cuda: torch sees no GPU here; use --device cpu"),
    ],
)
def test_wrong_settings_are_one_sentence(
    words: tuple[Any, ...], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(PruningError) as caught:
        read_settings(*words)
    assert str(caught.value) == expected


def test_auto_is_every_device_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for there, devices in ((False, ("cpu",)), (True, ("cpu", "cuda"))):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert read_settings("1,1,8", " eager ", "auto") == BenchOptions((1, 8), ("eager",), devices)


# -- small parts -------------------------------------------------------------------------------------------


def test_page_faults_are_counted() -> None:
    pytest.importorskip("resource")
    pages = 4096
    assert page_faults(lambda: None) < 10
    assert page_faults(lambda: torch.zeros(pages * 1024).add_(1)) >= 0  # 16 MiB: 4,096 pages, unless they are kept


def test_the_load_is_what_others_do_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    told = iter([(100, 1000), (130, 1060), None, (1, 2), (5, 9), (5, 9)])
    monkeypatch.setattr(timing, "_ticks", lambda: next(told))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert timing.busy_cores(0) == 1.0  # half of the time of two cores
    assert timing.busy_cores(0) is None and timing.busy_cores(0) is None  # unknown; no tick has passed
    monkeypatch.undo()
    if Path("/proc/stat").is_file():
        busy, whole = timing._ticks()
        assert 0 < busy < whole
    monkeypatch.setattr(Path, "read_text", lambda *given: "nothing of the kind")
    assert timing._ticks() is None


def test_inputs_of_any_kind_get_the_batch_asked_for() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.table = nn.Conv2d(3, 4, 3, padding=1), nn.Embedding(5, 4)

        def forward(self, image: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            return self.conv(image).mean((2, 3)) * self.table(index)

    net, inputs = Two().eval(), {"image": torch.rand(2, 3, 8, 8), "index": torch.ones(2, dtype=torch.int64)}
    subject = Subject.of("two", net, extract(net, inputs, Plan({})))
    assert subject.shapes() == [[3, 8, 8], []]
    made = subject.inputs(7)
    assert made["image"].shape == (7, 3, 8, 8) and made["index"].tolist() == [0] * 7
    assert torch.equal(made["image"], subject.inputs(7)["image"])


def test_operators_are_sorted_into_kinds() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)).eval()
    graph = CapturedNetwork(net, torch.rand(1, 3, 8, 8)).form(Form())
    found = dissect(graph, torch.rand(2, 3, 8, 8), ["0", "4"], passes=2)
    assert [(p.name, p.kind, p.widths) for p in found if p.kind == LAYERS] == [
        ("0", LAYERS, (3, 4)),
        ("4", LAYERS, (144, 2)),
    ]
    assert {p.kind for p in found} == {LAYERS, REST} and all(p.ms > 0 for p in found)
    assert [p.macs for p in found if p.kind == LAYERS] == [2 * 4 * 36 * 27, 2 * 2 * 144]


def test_a_plan_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PruningError, match=r"cannot be read \(No such file or directory\); name a file$"):
        Subject.of_plan("resnet20", [(3, 32, 32)], {}, tmp_path / "none.json")


def test_a_network_by_name_with_a_plan(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(Plan({"layer1.0.conv1": [0, 3]}).to_json())
    subject = Subject.of_plan("resnet20", [(1, 8, 8)], {"num_classes": 3}, tmp_path / "plan.json")
    assert subject.compact.layer1[0].conv1.out_channels == 2
    assert outputs(lambda: call(subject.compact, subject.inputs(4)))[0].shape == (4, 3)
    assert not subject.dense.training and not subject.compact.training
    assert RUNTIMES.keys() == {"eager", "compile", "onnxruntime", "openvino"}
    assert resolve("resnet20").training


def test_a_network_of_several_inputs_is_given_them_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["from torch import nn", "class Sum(nn.Bilinear):", "    def __init__(self):"]
    (tmp_path / "of_two.py").write_text("\n".join([*lines, "        super().__init__(4, 6, 2)"]))
    monkeypatch.chdir(tmp_path)
    network, example, ignore = resolve_subject("of_two:Sum", [(4,), (6,)], {}, (3, 32, 32))
    assert call(network, example).shape == (1, 2) and ignore == ()
    _, (image,), _ = resolve_subject("resnet20", [], {}, (3, 32, 32))
    assert image.shape == (1, 3, 32, 32)
