"""The benchmarks that need a GPU run on the CPU too, tiny; and ResNet-50 written out is torchvision's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sbf_pruner
from sbf_pruner.measurement import measure

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("script", ["engine.py", "imagenet_scale.py", "speed.py"])
def test_a_benchmark_runs_on_the_cpu(script: str) -> None:
    source = str(Path(sbf_pruner.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / script), "--quick"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": source},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "speedup" in done.stdout or "speed-up" in done.stdout


def test_every_benchmark_finds_what_it_imports() -> None:
    names = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py"))
    names.remove("kernels")  # it needs Triton
    lines = "import importlib\n" + "".join(f"importlib.import_module({name!r})\n" for name in names)
    paths = [str(ROOT / "benchmarks"), str(Path(sbf_pruner.__file__).parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-c", lines], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_written_out_resnet50_has_torchvisions_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from resnet50 import ResNet50

    with torch.device("meta"):
        size = measure(ResNet50(), torch.zeros(1, 3, 224, 224))
    assert (size.params, size.macs) == (25_557_032, 4_089_184_256)
