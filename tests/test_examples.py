"""The scripts in examples/ run as they stand, and come to what they say."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NEEDS = {"handover": ["onnx", "onnxscript", "onnxruntime"], "pretrained": ["torchvision"]}
Scope = dict[str, Any]

# What each must come to, beside the checks it makes itself.
COMES_TO: dict[str, Callable[[Scope], bool]] = {
    "handover": lambda got: got["compact"].macs <= 0.3 * got["dense"].macs and got["size"] <= 20_000,
    "own_loop": lambda got: 0.2 < got["left"] < 0.7 and got["pruned"] > got["dense"] - 5 > 80,
    "own_plan": lambda got: (
        got["pruner"].plan().widths()["branches.1.0"] == 0 and got["compact"] < got["dense"] / 4
    ),
    "own_ranking": lambda got: 0.49 < got["left"] <= 0.5,
    "pretrained": lambda got: got["compact"].macs <= got["dense"].macs / 2 and got["last"] < got["first"],
    "segmentation": lambda got: 0.39 < got["left"] <= 0.4 and got["overlap"] > 0.9,
}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_comes_to_what_it_says(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing := [name for name in NEEDS.get(path.stem, ()) if find_spec(name) is None]:
        pytest.skip(f"needs {', '.join(missing)}")
    if path.stem == "pretrained":
        monkeypatch.syspath_prepend(ROOT / "benchmarks")
        import zoos

        zoos.torchvision()  # also where only a build for another torch is to be had
    got = runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr().out.strip().splitlines()
    assert COMES_TO[path.stem](got), printed
    weights = {name: list(got[name].parameters()) for name in ("model", "small")}
    assert sum(w.numel() for w in weights["small"]) < sum(w.numel() for w in weights["model"])
    assert all(w.requires_grad for w in weights["small"]), "it can be trained on"
    assert 2 <= len(printed) <= 4 and re.search(r"\d", printed[-1])


@pytest.mark.parametrize("name", NEEDS)
def test_what_an_example_needs_is_one_sentence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (NEEDS[name][-1], f"{NEEDS[name][-1]}.models"):
        monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=f"^this example needs .*{NEEDS[name][-1]}"):
        runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_uses_what_the_documents_show(path: Path) -> None:
    text = path.read_text("utf-8")
    shown = "".join(page.read_text("utf-8") for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    assert "import sbf_pruner as sbf" in text and len(text.splitlines()) <= 70
    assert [line for line in re.findall(r"^from sbf_pruner.*", text, re.M) if line not in shown] == []
    assert f"examples/{path.name}" in shown, "a page leads to it"
