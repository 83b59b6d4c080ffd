"""The tables and pictures are what the results say; with no results they say so."""

from __future__ import annotations

import doctest
import importlib
import json
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from sbf_pruner import Recipe
from sbf_pruner.criteria import METHODS, OWN

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import tables  # noqa: E402
from ablation_tables import bottleneck  # noqa: E402
from anatomy import dissect  # noqa: E402
from choice_tables import choices  # noqa: E402
from cifar10_tables import NONE, PUBLISHED, Rebuilt, budgets, cifar10, counting, pictures  # noqa: E402
from coverage_tables import torch_versions  # noqa: E402
from engine_tables import engine  # noqa: E402
from jobs import read_runs  # noqa: E402
from method_tables import cifar10_methods, methods  # noqa: E402
from torch_versions import counts  # noqa: E402


def entry(
    name: str, seed: int, accuracy: float, removed: float, validation: float | None = None, **recipe: Any
) -> dict[str, Any]:
    """A made-up run; no such network was trained."""
    shares = {"params_removed": removed, "macs_removed": removed - 2}
    return {
        "name": f"{name}-seed{seed}",
        "date": "2000-01-01",
        "seed": seed,
        "epochs": 7,
        "accuracy": accuracy,
        "validation_accuracy": validation,
        "warmup_accuracy": accuracy + 1,
        "left": shares,
        "sequential": {key: value + 5 for key, value in shares.items()},
        "layers": {"conv1": [16, 16], "layer1.0.conv1": [16, 6 + seed], "layer2.0.conv1": [32, 0]},
        "environment": {"gpu": None, "cpu": "none", "torch": "0"},
        "recipe": {
            "name": name,
            "seed": seed,
            "model": {"name": "resnet56"},
            "data": {"name": "cifar10"},
            "phases": {"warmup": 5, "finetune": 2},
            **recipe,
        },
    }


BUNDLED = {
    key: value
    for key, value in Recipe.load("cifar10-resnet56-best-medium").to_dict().items()
    if key not in ("name", "seed")
}
RESULT = {
    "benchmark": "cifar10",
    "runs": [
        entry("cifar10-resnet56-dense", 0, 93.0, 0.0),
        *(entry("cifar10-resnet56-best-medium", seed, 94.0 + seed / 10, 50.0, **BUNDLED) for seed in range(3)),
        entry("cifar10-resnet56-paper-high", 0, 91.0, 80.0),
        entry("something-else", 0, 99.0, 99.0),
    ],
}


def test_the_table_has_the_papers_figures_beside_ours() -> None:
    lines = cifar10(RESULT).splitlines()
    assert "7 epochs each" in lines[0]
    assert lines[4:13] == [
        "| ResNet-56, dense control | `cifar10-resnet56-dense` | 93.00 (1) | - | - | - | |",
        "| ResNet-56, medium | the paper | 94.28 |  |  |  | 52.3 / 49.3 |",
        "| ResNet-56, medium | CHIP | 94.01; repository 94.16 |  | 43.1 / 48.1 |  | 42.8 / 47.4 |",
        "| ResNet-56, medium | `cifar10-resnet56-best-medium` | 94.10 ± 0.10 (3) | 95.10 ± 0.10 (220 epochs) "
        "| 50.0 / 48.0 | 55.0 / 53.0 | |",
        "| ResNet-56, high | the paper | 92.42 |  |  |  | 83.0 / 70.5 |",
        "| ResNet-56, high | `cifar10-resnet56-paper-high` (*) | 91.00 (1) | 92.00 (5 epochs) "
        "| 80.0 / 78.0 | 85.0 / 83.0 | |",
        "",
        "(*) Run with the recipe as it was before its last change.",
        "",
    ]
    assert "points from the paper's, is -1.4 (ResNet-56, high)." in lines[13]
    assert "best epoch" in lines[15] and "CHIP_NeurIPS2021/issues/8" in lines[15]
    assert lines[-1] == "`benchmarks/results/cifar10.json`: none, torch 0, 2000-01-01."


def test_without_runs_they_say_so() -> None:
    for nothing in (None, {"benchmark": "cifar10", "runs": []}):
        assert cifar10(nothing) == budgets(nothing) == NONE
        assert pictures(nothing) == {}


def test_networks_rebuilt_from_published_settings_have_the_published_sizes() -> None:
    """CHIP adds 2 operations per output of a norm to the MACs, NORTON 3, and both truncate the parameters."""

    def size(rebuilt: Rebuilt, extra: int) -> tuple[int, int]:
        count = rebuilt.count()
        return count["params"] // 10_000, round((count["macs"] + extra * count["normed"]) / 1e4)

    assert Rebuilt().count() == {"params": 853_018, "macs": 125_485_696, "normed": 532_480}
    (_, medium), (chip, norton) = PUBLISHED["resnet56", "medium"], PUBLISHED["resnet56", "rivals"]
    assert medium.rebuilt is not None and chip.rebuilt is not None and norton.rebuilt is not None
    assert size(medium.rebuilt, 2) == (48, 65_94) and size(chip.rebuilt, 2) == (24, 34_78)
    assert size(norton.rebuilt, 3) == (21, 37_52)
    assert (chip.rebuilt.removed(), norton.rebuilt.removed()) == ("71.8 / 72.7", "74.5 / 71.4")


def test_sizes_are_shown_for_both_balances() -> None:
    name = "cifar10-resnet56-paper-high"
    unbalanced = [entry(f"{name}-none", seed, 50.0, 70.0, scores={"balance": "none"}) for seed in (0, 1)]
    lines = counting({**RESULT, "runs": [*RESULT["runs"], *unbalanced]}).splitlines()
    assert lines[2:5] == [
        "| ResNet-56, high | the paper | | | 83.0 / 70.5 |",
        "| ResNet-56, high | `area` (1) | 80.0 / 78.0 | 85.0 / 83.0 | |",
        "| ResNet-56, high | `none` (2) | 70.0 / 68.0 | 75.0 / 73.0 | |",
    ]
    assert counting(RESULT).splitlines()[4] == "| ResNet-56, high | `none` | not run | not run | |"
    assert counting(None) == NONE
    shown = cifar10({**RESULT, "runs": [*RESULT["runs"], *({**run, "epochs": 5} for run in unbalanced)]})
    assert shown == cifar10(RESULT)


def test_what_blocks_keep_is_told_over_layers_and_over_filters() -> None:
    layers = {"a.conv1": [16, 4], "a.conv2": [16, 8], "b.conv1": [64, 48], "b.conv2": [64, 32], "conv1": [16, 1]}
    lines = bottleneck({"benchmark": "b", "runs": [{**entry("pruned", 0, 90.0, 50.0), "layers": layers}]})
    assert lines.splitlines()[2] == "| `pruned` | 1 | 0 | 1 | 50 / 50 % | 65 / 50 % |"


def test_two_recipes_of_one_name_are_not_mixed() -> None:
    other = entry("cifar10-resnet56-dense", 1, 93.0, 0.0, threads=1)
    with pytest.raises(SystemExit, match="cifar10-resnet56-dense differ in more than the seed"):
        cifar10({**RESULT, "runs": [*RESULT["runs"], other]})


MEDIUM, HIGH = "cifar10-resnet56-best-medium", "cifar10-resnet56-best-high"
HELD_OUT = "data.validation=0.2"
JOBS = f"""
[[job]]
recipe = "{MEDIUM}"
name = "base"
set = ["{HELD_OUT}"]
[[job]]
recipe = "{MEDIUM}"
name = "not-run"
set = ["{HELD_OUT}", "warmup.ema=0.9"]
[[job]]
recipe = "{HIGH}"
name = "holes"
set = ["{HELD_OUT}", "warmup.cutout=8", "finetune.cutout=8", "distill.alpha=0"]
seeds = [0, 1]
"""


def choice(name: str, seed: int, validation: float | None, recipe: str, *changes: str) -> dict[str, Any]:
    """A made-up run of a sweep, far better on the test images, which do not count."""
    held = Recipe.load(recipe, list(changes)).to_dict()
    return entry(name, seed, 99.0, 60.0, validation, **{k: v for k, v in held.items() if k not in ("name", "seed")})


def chosen(*runs: dict[str, Any]) -> dict[str, Any]:
    return {"benchmark": "choices", "runs": list(runs)}


def test_a_sweep_is_told_by_what_its_jobs_change_and_judged_on_validation_images(tmp_path: Path) -> None:
    (tmp_path / "jobs.toml").write_text(JOBS)
    holes = [HELD_OUT, "warmup.cutout=8", "finetune.cutout=8", "distill.alpha=0"]
    runs = [
        choice("gone", 0, 90.5, MEDIUM, HELD_OUT),
        *(choice("holes", seed, 92.0 + seed, HIGH, *holes) for seed in (0, 1)),
        choice("base", 0, 91.0, MEDIUM, HELD_OUT),
    ]
    lines = choices(chosen(*runs), tmp_path / "jobs.toml").splitlines()
    assert lines[0] == "### What they were chosen by" and "on 20 % of the training images" in lines[1]
    said = "cutout 8 in the dense stage and fine-tuning, no teacher"
    assert lines[5:] == [
        "| the recipe as it is | ResNet-56, medium | 91.00 (1) | 60.0 / 58.0 |",
        "| ema 0.9 in the dense stage | ResNet-56, medium | not run | |",
        f"| {said} | ResNet-56, high | 92.50 ± 0.71 (2) | 60.0 / 58.0 |",
        "| `gone`, which is no longer asked for | | 90.50 (1) | 60.0 / 58.0 |",
        "",
        "`benchmarks/results/choices.json`: none, torch 0, 2000-01-01.",
    ]
    assert not any("99" in line for line in lines)
    # The recipe, or what the job sets, may have changed since.
    changed = choice("base", 0, 91.0, MEDIUM, HELD_OUT, "finetune.lr=0.2")
    lines = choices(chosen(changed), tmp_path / "jobs.toml").splitlines()
    assert lines[5].startswith("| the recipe as it is (*) |")
    assert "(*) Run with the recipe as it was before its last change." in lines


def test_a_sweep_that_held_nothing_out_or_was_not_run_shows_nothing(tmp_path: Path) -> None:
    assert choices(None) == choices(chosen()) == ""
    (tmp_path / "jobs.toml").write_text(JOBS)
    with pytest.raises(SystemExit, match=r"the runs of base held no images out \(data.validation = 0\)"):
        choices(chosen(choice("base", 0, None, MEDIUM)), tmp_path / "jobs.toml")


def test_outcomes_of_a_run_of_the_tests_are_read_from_its_report(tmp_path: Path) -> None:
    cases = tmp_path / "test_cases.py"
    cases.write_text(
        "import pytest\n@pytest.fixture\ndef broken(): 1 / 0\ndef test_a(): pass\ndef test_b(): pass\n"
        "def test_c(): assert False\ndef test_d(broken): pass\n"
        "@pytest.mark.skip\ndef test_e(): pass\n@pytest.mark.xfail\ndef test_f(): assert False\n",
        "utf-8",
    )
    report = tmp_path / "report.xml"
    words = ["-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", f"--junitxml={report}", str(cases)]
    subprocess.run([sys.executable, "-m", "pytest", *words], cwd=tmp_path, capture_output=True, check=False)
    found = counts(report)
    assert found.pop("seconds") < 60
    assert found == {"passed": 2, "failed": 2, "skipped": 2}


def test_the_table_of_torch_versions_has_a_line_for_each() -> None:
    row = {"torch": "2.99.0", "torchvision": "0.99.0", "python": "3.11.0", "date": "2000-01-01"}
    runs = [row | {"passed": 7, "failed": 0, "skipped": 2, "seconds": 610}]
    told = torch_versions({"runs": runs, "environment": {"cpu": "an abacus"}}).splitlines()
    assert told[2] == "| 2.99.0 | 0.99.0 | 3.11.0 | 7 | 0 | 2 | 10 | 2000-01-01 |"
    assert told[-1].endswith("an abacus, no GPU.") and torch_versions(None) == "No run yet."


@pytest.mark.parametrize("name", ["anatomy", "choice_tables", "pictures"])
def test_examples_in_the_benchmarks_hold(name: str) -> None:
    tried = doctest.testmod(importlib.import_module(name))
    assert tried.attempted and not tried.failed


def test_where_the_time_of_a_step_goes() -> None:
    images, weight = torch.rand(4, 3, 8, 8), torch.rand(6, 3, 3, 3)
    found = dissect(lambda: [F.conv2d(images, weight) for _ in range(4)], 2, torch.device("cpu"))
    assert next(iter(found["kinds"])) == "convolutions"
    assert found["kinds"]["convolutions"]["kernels"] % 2 == 0  # two convolutions a step, each of several calls
    by_kind = sum(kind["ms"] for kind in found["kinds"].values())
    assert by_kind == pytest.approx(sum(found["costliest"].values()))
    result = json.loads((ROOT / "benchmarks" / "results" / "engine.json").read_text())
    result["captured"] |= {
        "weight_kernels": {"kinds": {"reductions": {"ms": 1.26, "kernels": 110.0}}},
        "score_kernels": {"kinds": {"other": {"ms": 0.5, "kernels": 9.0}}},
    }
    lines = engine(result).splitlines()
    assert "| reductions | 1.26 (110) | - |" in lines and "| other | - | 0.50 (9) |" in lines


def test_the_picture_shows_every_layer() -> None:
    drawn = pictures(RESULT)
    assert sorted(drawn) == ["cifar10-resnet56-best.svg", "cifar10-resnet56-paper.svg"]
    space = {"svg": "http://www.w3.org/2000/svg"}
    bars = ET.fromstring(drawn["cifar10-resnet56-best.svg"]).findall("svg:rect", space)
    said = [bar.findtext("svg:title", namespaces=space) for bar in bars]
    assert said[::2] == said[1::2] == ["conv1: 16 of 16", "layer1.0.conv1: 7 of 16", "layer2.0.conv1: 0 of 32"]
    heights = [float(bar.attrib["height"]) for bar in bars]
    assert heights == [32.0, 32.0, 32.0, 14.0, 64.0, 0.0]


def test_pages_and_pictures_are_written_and_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(ROOT / "benchmarks" / "results", tmp_path / "results")
    shutil.copytree(ROOT / "docs", tmp_path / "root" / "docs")
    shutil.copy(ROOT / "README.md", tmp_path / "root")
    where = tmp_path / "results", tmp_path / "root"
    (tmp_path / "results/cifar10.json").write_text(json.dumps(RESULT))
    (tmp_path / "results/choices.json").unlink(missing_ok=True)
    assert tables.main(True, *where) == 1
    assert "cifar10-resnet56-best.svg" in capsys.readouterr().out
    assert tables.main(False, *where) == 0
    assert tables.main(True, *where) == 0
    page = (tmp_path / "root/docs/cifar10.md").read_text()
    assert "94.10 ± 0.10 (3)" in page and "(cifar10-resnet56-best.svg)" in page
    assert (tmp_path / "root/docs/cifar10-resnet56-best.svg").is_file()
    assert "94.10 ± 0.10 (3)" in (tmp_path / "root/README.md").read_text()
    assert "<!-- choices -->\n\n<!-- /choices -->" in page
    first = read_runs(ROOT / "benchmarks/choices.toml", tmp_path)[0]
    made = choice(first.group, 0, 91.25, first.recipe, *first.overrides)
    (tmp_path / "results/choices.json").write_text(json.dumps(chosen(made)))
    assert tables.main(False, *where) == 0
    assert "| ResNet-56, medium | 91.25 (1) | 60.0 / 58.0 |" in (tmp_path / "root/docs/cifar10.md").read_text()


def test_methods_stand_in_the_order_of_their_means() -> None:
    machine = {"gpu": None, "cpu": "none", "threads": 1, "torch": "0"}
    origin = {"benchmark": "methods", "date": "2000-01-01", "environment": machine}

    def run(
        method: str, share: float, accuracy: float, seed: int = 0, dense: float | None = None
    ) -> dict[str, Any]:
        return {
            "method": method,
            "seed": seed,
            "share": share,
            "accuracy": accuracy,
            "dense_accuracy": dense,
            "params_left": 0.25,
            "epochs": 7,
        }

    runs = [run("l1", 0.5, 90.0, 0, 95.0), run("l1", 0.5, 92.0, 1, 97.0), run("chip", 0.5, 93.0)]
    runs.append(run("chip", 0.2, 92.0, 1, 97.0))
    lines = methods({**origin, "runs": runs}).splitlines()
    assert "7 epochs" in lines[0] and "the dense control has 96.00 ± 1.41 (2)" in lines[0]
    assert lines[2] == "| method | 50 % of the MACs | parameters left | 20 % of the MACs | parameters left |"
    assert lines[4] == "| `chip` | 93.00 (1) | 25 % | 92.00 (1) | 25 % |"
    assert lines[5] == "| `l1` | 91.00 ± 1.41 (2) | 25 % |  |  |"
    assert methods(None) == "Not measured yet."
    assert "†" not in "".join(lines)
    marked = [run("gal", 0.5, 90.0, dense=95.0), run("pfp", 0.5, 80.0)]
    told = methods({**origin, "runs": marked}).splitlines()
    assert told[4] == "| `gal` (after GAL) | 90.00 (1) | 25 % |" and told[5] == "| `pfp` † | 80.00 (1) | 25 % |"
    assert told[7] == f"† Not as published yet: `pfp` ({METHODS['pfp'].unlike})."


@pytest.mark.parametrize("name", ["methods", "few_methods"])
def test_methods_in_the_results_are_those_there_are(name: str) -> None:
    runs = json.loads((ROOT / "benchmarks/results" / f"{name}.json").read_text())["runs"]
    assert {run["method"] for run in runs} <= {OWN, *METHODS}


def test_methods_on_cifar10_are_told_by_their_recipes() -> None:
    runs = [
        entry(f"method-{method}", seed, accuracy + seed, 60.0, method=method, budget={"macs": 0.3})
        for method, accuracy in (("random", 80.0), ("sbf", 90.0))
        for seed in (0, 1)
    ]
    lines = cifar10_methods({"benchmark": "cifar10_methods", "runs": runs}).splitlines()
    assert lines[0] == "ResNet-20 on CIFAR-10, 7 epochs, 30 % of the MACs asked for:"
    assert lines[4:6] == [
        "| `sbf` | 90.50 ± 0.71 (2) | 60.0 / 58.0 |",
        "| `random` | 80.50 ± 0.71 (2) | 60.0 / 58.0 |",
    ]
    assert cifar10_methods(None) == "No run on CIFAR-10 yet."
