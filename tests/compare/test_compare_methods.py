"""Methods against each other: what is shared, what is equal, what is told, and going on after a stop."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from sbf_pruner.cli import main
from sbf_pruner.compare import check_methods, method_runs, plan_runs, rank_methods
from sbf_pruner.errors import RecipeError, RunError
from sbf_pruner.training import load_recipe, run

SETTINGS = [
    *("data.name=synthetic", "data.samples=64", "data.image_size=8", "data.channels=1", "data.batch_size=16"),
    *(
        "model.name=runs:Small",
        "model.num_classes=4",
        "phases.warmup=1",
        "phases.cycles=1",
        "phases.finetune=1",
        "scores.lr=1e-3",
    ),
]
AIMED = ["budget.macs=0.5"]  # what --target macs=0.5 is short for
WORDS = [word for setting in SETTINGS for word in ("--set", setting)]


def compare(root: Path, *more: str) -> list[str]:
    methods = ["--methods", "sbf,taylor"]
    return ["compare", "digits", *WORDS, *methods, "--target", "macs=0.5", "--run", str(root), "--quiet", *more]


@pytest.fixture(scope="module", autouse=True)
def hurried() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sbf_pruner.training.recording.TIMED_SECONDS", 0.0)  # nobody looks at the latency here
        yield


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods and two seeds, compared."""
    root = tmp_path_factory.mktemp("runs") / "compared"
    assert main(compare(root, "--seeds", "0,3")) == 0
    return root


def test_all_that_may_be_equal_is_equal(root: Path) -> None:
    result = json.loads((root / "comparison.json").read_text())
    runs = {(run["method"], run["seed"]): run for run in result["runs"]}
    assert sorted(runs) == sorted((method, seed) for method in ("sbf", "taylor") for seed in (0, 3))
    assert {run["epochs"] for run in runs.values()} == {5} == {result["epochs"]}
    for (method, seed), found in runs.items():
        folder = root / f"{method}-seed{seed}"
        assert found["pruned"]["macs"] <= 0.5 * found["dense"]["macs"] and found["cut_error"] < 1e-12
        first = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
        shared = json.loads((root / f"sbf-seed{seed}/metrics.jsonl").read_text().splitlines()[0])
        assert {**first, "total": 0} == {**shared, "total": 0}  # the dense stage, to the second that it took
        assert found.get("dense_from") == (None if method == "sbf" else str(root / f"sbf-seed{seed}"))
        assert (found["dense"]["accuracy"] is not None) == (method == "sbf")  # one control for each seed
    assert len(result["dense_accuracy"]) == 2
    means = [one["mean"] for one in result["methods"]]
    assert means == sorted(means, reverse=True)
    page = (root / "comparison.html").read_text()
    for one in result["methods"]:
        cells = (f"digits-{one['method']}", "2", f"{one['mean']:.2f} %", f"{one['deviation']:.2f}")
        first, *rest = (f">{cell}</t" for cell in cells)
        assert first in page and "<td" + "d><td".join(rest) in page
    assert "4 runs compared" in page and "digits-taylor, seed 3" in page


def test_what_is_there_is_not_trained_again(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run.Run, "go", None)
    assert main(compare(root, "--seeds", "0,3")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:6] == ["method", "accuracy", "parameters", "left", "MACs", "left"]
    assert lines[1].startswith("dense ") and {line.split()[0] for line in lines[2:4]} == {"sbf", "taylor"}
    assert lines[5] == "accuracy on the test images after the last of 5 epochs, mean ± deviation (seeds)"
    assert main(compare(root, "--seeds", "0,3", "--json")) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((root / "comparison.json").read_text())


def test_stopped_it_goes_on_where_it_was(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Any] = []

    def stopped(run: Any) -> Any:
        begun.append(run)
        if len(begun) == 2:
            raise KeyboardInterrupt
        return go(run)

    go = run.Run.go
    monkeypatch.setattr(run.Run, "go", stopped)
    assert main(compare(tmp_path / "run")) == 130
    assert capsys.readouterr().err.startswith("sbf: stopped; continue with: sbf compare digits --set")
    assert not (tmp_path / "run/comparison.json").exists()
    assert main(compare(tmp_path / "run")) == 0
    assert len(begun) == 3  # the first was finished
    for method in ("sbf", "taylor"):
        one, other = (folder / f"{method}-seed0/model.safetensors" for folder in (root, tmp_path / "run"))
        assert one.read_bytes() == other.read_bytes()


def test_methods_may_be_added_and_named_in_another_order(root: Path) -> None:
    recipe = load_recipe("digits", [*SETTINGS, *AIMED])
    found = plan_runs(recipe, ["chip", "taylor", "sbf"], [0, 7], root)
    assert [(one.folder.path.name, one.dense_from and one.dense_from.name) for one in found] == [
        *(("sbf-seed0", None), ("chip-seed0", "sbf-seed0"), ("taylor-seed0", "sbf-seed0")),
        *(("chip-seed7", None), ("taylor-seed7", "chip-seed7"), ("sbf-seed7", "chip-seed7")),
    ]
    assert [one.recipe.dense_control for one in found] == [True, False, False] * 2


def test_a_comparison_is_extended(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = Path(shutil.copytree(root, tmp_path / "compared"))
    words = compare(here, "--seeds", "3", "--json")
    words[words.index("sbf,taylor")] = "l1"
    assert main(words) == 0
    result = json.loads(capsys.readouterr().out)
    found = sorted((run["method"], run["seed"]) for run in result["runs"])
    assert found == [("l1", 3), *((method, seed) for method in ("sbf", "taylor") for seed in (0, 3))]
    (added,) = (run for run in result["runs"] if run["method"] == "l1")
    assert added["dense_from"] == str(here / "sbf-seed3") and len(result["dense_accuracy"]) == 2
    assert "5 runs compared" in (here / "comparison.html").read_text()
    words[words.index("macs=0.5")] = "macs=0.6"  # is another comparison
    words[words.index("l1")] = "l2"
    assert main(words) == 0
    assert [run["method"] for run in json.loads(capsys.readouterr().out)["runs"]] == ["l2"]


def test_a_method_that_cannot_judge_the_network_is_refused_before_the_first_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lame(subject: Any) -> Any:
        raise ZeroDivisionError("no such thing")

    monkeypatch.setattr("sbf_pruner.criteria.taylor.first_order", lame)
    assert main(compare(tmp_path / "run")) == 2
    assert capsys.readouterr().err == (
        "sbf: method taylor cannot rank the filters of this network (ZeroDivisionError: no such thing); "
        "give it pairs of inputs and labels as in training, or choose a method that needs weights alone, such "
        "as l1\n"
    )
    assert not (tmp_path / "run").exists()


def test_methods_are_tried_with_the_threads_of_the_recipe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[int] = []
    monkeypatch.setattr(method_runs, "check_method", lambda name, subject: seen.append(torch.get_num_threads()))
    before = torch.get_num_threads()
    recipe = load_recipe("digits", [*AIMED, f"threads={before + 1}"])
    check_methods(plan_runs(recipe, ["l1"], [0], tmp_path / "none"))
    assert seen == [before + 1] and torch.get_num_threads() == before


def test_what_cannot_run_is_refused_before_the_first_run(root: Path, tmp_path: Path) -> None:
    recipe = load_recipe("digits", SETTINGS)
    with pytest.raises(RecipeError, match=r"^method: l1 .*; set a budget, such as budget\.macs=0\.5$"):
        plan_runs(recipe, ["sbf", "l1"], [0], tmp_path)
    other = load_recipe("digits", [*SETTINGS, "budget.macs=0.3"])
    with pytest.raises(RunError, match=r"sbf-seed0 was run with .* resume it .*, or begin a run in another folder"):
        plan_runs(other, ["chip", "sbf"], [0], root)
    assert not list(tmp_path.iterdir()) and not (root / "chip-seed0").exists()
    with pytest.raises(RunError, match=r"comparison.json is a file; name a folder for the runs"):
        plan_runs(other, ["chip", "sbf"], [0], root / "comparison.json")


WRONG = {
    "unknown": (["--methods", "chop"], "sbf: --methods 'chop' is not known; did you mean 'chip'?"),
    "twice": (["--methods", "l1,l1"], "sbf: --methods 'l1,l1' names one of them twice; name each once"),
    "no number": (["--seeds", "1,two"], "sbf: --seeds '1,two': write different whole numbers, such as 0,1,2"),
    "a seed twice": (["--seeds", "1,1"], "sbf: --seeds '1,1': write different whole numbers, such as 0,1,2"),
    "below zero": (["--seeds=-1"], "sbf: seed: must be at least 0, got -1"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_words_are_one_sentence(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, message = WRONG[case]
    assert main([*compare(tmp_path / "run"), *words]) == 2
    assert capsys.readouterr().err.startswith(message)
    assert not (tmp_path / "run").exists()


def test_a_single_seed_has_no_deviation() -> None:
    half = {"dense": {"params": 4, "macs": 4}, "pruned": {"params": 2, "macs": 1, "accuracy": 9.0}}
    half["pruned"]["validation_accuracy"] = 8.0
    (one,) = rank_methods([{"method": "l1", **half}])
    assert (one.mean, one.deviation, one.validation, one.params, one.macs) == (9.0, None, (8.0,), 0.5, 0.25)
