"""The report's data and figures: what is read from a folder, what is drawn, and what is said where it is not."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re
import shutil
import tomllib
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from importlib import resources
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from runs import EPOCHS, FOLDER, HOSTILE, foreign_copy, small_run
from sbf_pruner.compare import draw_frontier
from sbf_pruner.errors import RunError
from sbf_pruner.report import (
    FIGURES,
    FOLLOWER,
    LAYER,
    SECTIONS,
    WIDE_SECTIONS,
    Box,
    LayerKept,
    Point,
    Run,
    Scale,
    Table,
    accuracy_plot,
    checkpointed_plan,
    comparison_page,
    concat,
    draw,
    element,
    headline,
    inspect_model,
    kept_figure,
    latency_section,
    network,
    read_run,
    recipe,
    refinement,
    run_page,
    run_parts,
    scores_figure,
    sentence,
    skipped,
    training_curves,
    with_kept,
    write_own_report,
    write_report,
)
from sbf_pruner.report.live import _View
from sbf_pruner.schedule import phases_of
from sbf_pruner.training import bundled_recipes, load_recipe, phases, save_checkpoint
from sbf_pruner.utils import DASH, MINUS, files


class Killed(BaseException):
    """What ends a run in the middle."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "small"
    small_run(path)
    return path


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run killed in its second phase of scores."""

    def kill(record: dict[str, Any]) -> None:
        if record["done"] == 6:
            raise Killed

    path = tmp_path_factory.mktemp("runs") / "cut-short"
    with pytest.raises(Killed):
        small_run(path, report=kill)
    return path


@pytest.fixture
def run(folder: Path) -> Run:
    return read_run(folder)


def copy_of(folder: Path, to: Path, *without: str) -> Path:
    """A copy of a folder that lacks some of its files."""
    shutil.copytree(folder, to)
    for name in without:
        (to / name).unlink()
    return to


class Parsed(HTMLParser):
    """Elements with their attributes, and whether they are closed in order."""

    VOID = frozenset(["meta", "link", "br", "input"])

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def of_class(self, kind: str) -> list[dict[str, str | None]]:
        return [attrs for _, attrs in self.found if kind in (attrs.get("class") or "").split()]


# -- data ----------------------------------------------------------------------------------------------------


def test_a_finished_run_is_read_whole(run: Run) -> None:
    assert run.finished and run.name == "small" and run.epochs == EPOCHS == len(run.records) == len(run.control)
    assert [line["done"] for line in run.scores] == [3, 4, 6, 7]
    assert run.summary is not None
    assert {one.name: one.after for one in run.layers} == {
        name: layer["after"] for name, layer in run.summary["layers"].items()
    }
    assert [block["block"] for block in run.refinement] == ["blocks.0", "blocks.1"]
    assert run.skipped == {"fc": "its filters are the network's outputs"}
    assert {box.layer for box in run.boxes if box.kind == LAYER} == {one.name for one in run.layers}
    assert run.missing == {}


def test_an_unfinished_run_shows_what_is_there(unfinished: Path) -> None:
    run = read_run(unfinished)
    assert not run.finished and len(run.records) == 6 and run.summary is None
    assert sum(one.after for one in run.layers) == run.records[-1]["filters"] < run.records[-1]["filters_total"]
    assert run.refinement and "pruned" not in run.refinement[0]
    assert "Epoch 6 of 20 has ended, 1 of 2 of scores of cycle 2" in sentence(run)
    assert run.environment["torch"]
    Parsed(run_page(run))


def test_a_run_that_has_just_begun(unfinished: Path, tmp_path: Path) -> None:
    young = copy_of(unfinished, tmp_path / "run", "metrics.jsonl", "scores.jsonl")
    run = read_run(young)
    assert sentence(run) == "The run is about to begin: nothing has been trained yet."
    page = run_page(run)
    for said in ("No epoch has ended yet.", "No score epoch has been run yet.", "none has ended yet"):
        assert said in page
    assert all(one.after == one.before for one in run.layers)


def test_a_folder_says_what_it_does_not_hold(folder: Path, tmp_path: Path) -> None:
    older = copy_of(folder, tmp_path / "older", "network.json", "scores.jsonl")
    summary = json.loads((older / "summary.json").read_text())
    for key in ("refinement", "skipped"):
        del summary[key]
    for part in ("dense", "pruned"):
        for key in ("file_bytes", "latency_iqr_ms"):
            del summary[part][key]
    (older / "summary.json").write_text(json.dumps(summary))
    run = read_run(older)
    assert run.missing["scores"] == "The scores are not stored in this folder."
    assert run.missing["refinement"] == "The refinement of blocks is not stored in this folder."
    assert run.missing["network"] == "The network cannot be drawn: it is not stored."
    page = run_page(run)
    Parsed(page)
    for reason in run.missing.values():
        assert reason in page.replace("&#x27;", "'")
    assert "dense: not stored" in page
    assert 'class="kept"' in page, "the widths are in the summary"


def test_the_plan_is_read_from_the_checkpoint_where_no_scores_tell_it(unfinished: Path, tmp_path: Path) -> None:
    bare = copy_of(unfinished, tmp_path / "bare", "scores.jsonl")
    assert read_run(bare).layers == read_run(unfinished).layers
    assert any(one.after < one.before for one in read_run(bare).layers)
    (bare / "checkpoints/last.safetensors").write_bytes(b"cut short")
    assert read_run(bare).layers == [] and "kept" in read_run(bare).missing


def test_no_tensor_is_read_for_the_plan_in_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = {"conv": [0, 2], "last": [1]}
    save_checkpoint(tmp_path / "checkpoints", {"networks": {"plan": plan, "dense": {"x": torch.ones(9)}}})
    monkeypatch.setattr(files, "_digest", lambda *given: pytest.fail("a large one would take seconds"))
    assert checkpointed_plan(tmp_path) == {"conv": 2, "last": 1}


@pytest.mark.parametrize(
    "header", ['{"state"', "[]", '{"state": {}}', '{"state": {"dict": 5}}', '{"state": "text"}']
)
def test_a_header_that_was_changed_tells_no_plan(header: str, tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "checkpoints", {"networks": {"plan": {"conv": [0]}}})
    save_file({}, path, metadata={"sbf": json.dumps({"sha256": "", "header": header})})
    assert checkpointed_plan(tmp_path) is None


def test_a_last_line_cut_short_does_not_count(folder: Path, tmp_path: Path) -> None:
    torn = copy_of(folder, tmp_path / "torn")
    for name in ("metrics.jsonl", "scores.jsonl"):
        with (torn / name).open("a") as file:
            file.write('{"done": 99, "ph')
    assert len(read_run(torn).control) == EPOCHS and len(read_run(torn).scores) == 4


@pytest.mark.parametrize("overrides", [(), ("scores.joint=true",)])
@pytest.mark.parametrize("name", bundled_recipes())
def test_the_schedule_is_the_one_that_is_run(name: str, overrides: tuple[str, ...]) -> None:
    recipe = load_recipe(name, overrides)
    expected = [(p.kind, p.cycle, p.first, p.epochs) for p in phases(recipe)]
    assert [(s.kind, s.cycle, s.first, s.epochs) for s in phases_of(tomllib.loads(recipe.to_toml()))] == expected


def refused(match: str, folder: Path) -> None:
    with pytest.raises(RunError, match=match):
        write_report([folder])


def test_what_is_no_run_is_refused_with_the_remedy(folder: Path, tmp_path: Path) -> None:
    refused("does not exist; name the folder of a run", tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    refused(r"holds no run \(no recipe.toml\); name a folder that sbf run wrote", tmp_path / "empty")
    (tmp_path / "file").touch()
    refused("is a file; name the folder", tmp_path / "file")
    broken = copy_of(folder, tmp_path / "broken", "report.html")
    (broken / "metrics.jsonl").write_text("{nonsense}\n")
    refused("metrics.jsonl, line 1 is damaged", broken)
    (broken / "metrics.jsonl").unlink()
    (broken / "summary.json").write_text("[]")
    refused("summary.json is damaged; remove it", broken)
    (broken / "summary.json").unlink()
    (broken / "recipe.toml").write_text("name = 3\n")
    refused("recipe.toml is not the recipe of a run; put back the run's own", broken)
    (broken / "recipe.toml").write_text("name = \n")
    refused("recipe.toml cannot be read", broken)
    assert not (broken / "report.html").exists(), "nothing half-written"


# -- figures -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draw", [training_curves, kept_figure, refinement, scores_figure])
def test_every_mark_has_a_row_of_numbers(draw: Any, run: Run) -> None:
    figure = draw(run)
    marks = Parsed(figure.html()).of_class("hit")
    assert figure.table is not None
    assert [int(mark["data-row"] or -1) for mark in marks] == list(range(len(figure.table.rows)))
    assert all(len(row) == len(figure.table.head) for row in figure.table.rows)


def test_the_course_shows_every_epoch_and_every_phase(run: Run) -> None:
    figure = training_curves(run)
    parsed = Parsed(figure.html())
    assert len(parsed.of_class("epoch")) == EPOCHS
    assert len(parsed.of_class("score")) == 2 + 1 and len(parsed.of_class("tune")) == 1 + 1  # and the legend
    assert len(parsed.of_class("curve")) == 3 + 2 + 1
    assert figure.table is not None
    last, record = figure.table.rows[-1], run.records[-1]
    assert last[:2] == ["10", "fine-tuning"] and last[4] == f"{record['test_accuracy']:.2f} %"
    assert last[-1] == f"{run.control[-1]['test_accuracy']:.2f} %"


def test_a_run_whose_accuracy_is_taken_rarely_has_a_curve_all_the_same(run: Run) -> None:
    for record in [*run.records, *run.control]:
        if record["done"] % 5:
            record["test_accuracy"] = None
    assert "M" in training_curves(run).picture and DASH in training_curves(run).html()


def test_the_bars_are_as_high_as_the_layers_are_wide() -> None:
    layers = [LayerKept("a.one", 16, 8, 50.0), LayerKept("a.two", 16, 0, 25.0), LayerKept("b", 32, 32)]
    run = Run(Path("x"), "x", {"model": {"name": "n"}, "data": {"name": "d"}}, [], layers=layers)
    parsed = Parsed(kept_figure(run).html())
    before = [float(bar["height"] or 0) for bar in parsed.of_class("before") if "height" in bar]
    after = [float(bar["height"] or 0) for bar in parsed.of_class("kept") if "height" in bar]
    assert before[0] == before[1] == pytest.approx(before[2] / 2, abs=0.1)
    assert after == pytest.approx([before[0] / 2, before[2]], abs=0.1), "what is gone has no bar"
    assert "1 of 3 layers are removed entirely" in kept_figure(run).caption
    table = kept_figure(run).table
    assert table is not None and table.rows[1] == ["a.two", "0", "16", "0 %", "25.0 %"]


def test_scores_start_at_one_and_fit_the_picture(run: Run) -> None:
    figure = scores_figure(run)
    parsed = Parsed(figure.html())
    assert len(parsed.of_class("tile")) == len(run.layers)
    assert figure.table is not None
    now = run.scores[-1]["scores"]["stem"]
    top = max(1.1, *(score for line in run.scores for held in line["scores"].values() for score in held))
    assert figure.table.rows[0][:3] == ["stem", "8", str(sum(score >= 0.5 for score in now))]
    for path in parsed.of_class("span"):
        if "d" in path:
            numbers = [int(n) for n in re.findall(r"-?\d+", path["d"] or "")]
            across, down = (list(accumulate(numbers[start::2])) for start in (0, 1))
            assert min(across) == 0 and max(across) == 300, "from the start to the last epoch there will be"
            assert min(down) >= 0 and max(down) <= 140
            assert down[0] == down[-1] == pytest.approx(140 * (1 - 1 / top), abs=1), "all scores start at 1"


def test_scores_an_older_version_did_not_store_are_left_out_and_told(run: Run) -> None:
    run.scores = run.scores[2:]
    assert "The first 2 epochs were run by an older version" in scores_figure(run).caption


def test_the_refinement_figure_shows_bounds_ratios_and_blocks_that_are_gone(run: Run) -> None:
    run.refinement[0]["pruned"], run.refinement[1]["pruned"] = 0.1, 0.0
    parsed = Parsed(refinement(run).html())
    assert len(parsed.of_class("bounds")) == 2 + 1 and len(parsed.of_class("scored")) == 2 + 1
    assert len(parsed.of_class("final")) == 1 + 1 and len(parsed.of_class("cross")) == 1 + 1
    bars = [bar for bar in parsed.of_class("bounds") if "y" in bar]
    dots = [dot for dot in parsed.of_class("scored") if "cy" in dot]
    for bar, dot in zip(bars, dots, strict=True):
        top, height = float(bar["y"] or 0), float(bar["height"] or 0)
        assert top <= float(dot["cy"] or 0) <= top + height, "measured within the bounds"


def test_refinement_that_could_not_be_measured_says_why(folder: Path, unfinished: Path, tmp_path: Path) -> None:
    going = copy_of(unfinished, tmp_path / "going")
    lines = [json.loads(line) for line in (going / "scores.jsonl").read_text().splitlines()]
    changed = [line | ({"refinement": [], "unmeasured": "it <adds>"} if "kept" in line else {}) for line in lines]
    (going / "scores.jsonl").write_text("".join(json.dumps(line) + "\n" for line in changed))
    assert read_run(going).missing["refinement"] == "No residual block was measured: it <adds>."
    over = copy_of(folder, tmp_path / "over")
    summary = json.loads((over / "summary.json").read_text())
    (over / "summary.json").write_text(json.dumps(summary | {"unmeasured": {"pruned": "it <adds>"}}))
    assert "At the end nothing could be measured: it &lt;adds&gt;." in refinement(read_run(over)).html()
    both = {"refinement": [], "unmeasured": {"scored": "it <adds>", "pruned": "no pen"}}
    (over / "summary.json").write_text(json.dumps(summary | both))
    run = read_run(over)
    assert run.missing["refinement"] == "No residual block was measured: it <adds>; no pen."
    assert "it &lt;adds&gt;; no pen." in run_page(run)


def test_the_network_is_filled_as_far_as_it_is_kept() -> None:
    first = Box("input", "image", ("an image",))
    conv = Box(LAYER, "conv", ("conv", "a layer"), "16 · 8x8 · 3 %", 16, layer="conv", sources=[first])
    last = Box(LAYER, "gone", ("gone", "a layer"), "16 · 8x8 · 3 %", 16, layer="gone", sources=[conv])
    boxes = with_kept([first, conv, last], {"conv": 4, "gone": 0})
    assert [box.note for box in boxes] == ["", "16 → 4 · 8x8 · 3 %", "16 → 0 · 8x8 · 3 %"]
    assert boxes[2].sources == [boxes[1]] and conv.kept is None, "the originals are untouched"
    run = Run(Path("x"), "x", {}, [], boxes=[first, conv, last])
    run.layers = [LayerKept("conv", 16, 4), LayerKept("gone", 16, 0)]
    parsed = Parsed(network(run).html())
    whole = next(float(e["width"] or 0) for e in parsed.of_class("shape") if e.get("rx") == "6")
    left = [float(e["width"] or 0) for e in parsed.of_class("kept") if "width" in e]
    assert left == [pytest.approx(whole / 4, abs=0.1)]
    assert len([e for e in parsed.of_class("gone") if "box" in (e["class"] or "")]) == 1


def test_layers_that_follow_go_with_those_they_follow() -> None:
    def box(name: str, kind: str, *sources: Box) -> Box:
        return Box(kind, name, (name,), "8 · 4x4 · 1 %", 8, layer=name, sources=list(sources))

    first = box("expand", LAYER)
    second = box("depthwise", FOLLOWER, first)
    other = box("other", LAYER)
    last = box("gate", FOLLOWER, other, first)
    run = Run(Path("x"), "x", {}, [], boxes=[first, second, other, last])
    run.followers = {"depthwise": ["expand"], "gate": ["expand", "other"]}
    run.layers = [LayerKept("expand", 8, 0), LayerKept("other", 8, 2)]
    said = network(run).html()
    assert said.count("8 → 0") == 2 and said.count("8 → 2") == 1, "what follows two is not simply one of them"
    run.layers = [LayerKept("expand", 8, 3), LayerKept("other", 8, 0)]
    assert network(run).html().count("8 → 3") == 2


def test_the_headline_tells_before_and_after(run: Run) -> None:
    assert run.summary is not None
    run.summary["dense"] |= {"accuracy": 90.0, "params": 1000, "macs": 2_000_000, "file_bytes": 4096}
    run.summary["pruned"] |= {"accuracy": 89.5, "params": 250, "macs": 1_000_000, "file_bytes": 2048}
    assert sentence(run) == (
        "25 % of the parameters and 50 % of the multiply-accumulates are left, and 89.50 % of the "
        "test images are classified correctly, 0.50 points fewer than with the dense control."
    )
    said = headline(run).replace(MINUS, "-")
    for words in ("89.50 %", "-0.50", "-75.0 %", "-50.0 %", "4.10 kB", "2.05 kB", "Masked = extracted", "exact"):
        assert words in said
    run.summary["dense"]["accuracy"] = None
    assert "after the dense warm-up" in sentence(run) and "no dense control" in headline(run)


def test_a_little_that_is_left_is_not_told_as_nothing(run: Run) -> None:
    assert run.summary is not None
    run.summary["dense"] |= {"accuracy": 90.0, "params": 1_000_000, "macs": 1_000_000, "file_bytes": 4_000_000}
    run.summary["pruned"] |= {"accuracy": 99.998, "params": 2_000, "macs": 120, "file_bytes": 3_999_999}
    run.summary["dense"]["latency_ms"], run.summary["pruned"]["latency_ms"] = 3.0, 2.0  # whatever it took here
    assert sentence(run).startswith(
        "0.2 % of the parameters and 0.01 % of the multiply-accumulates are left, and 99.998 % of the test images"
    )
    said = headline(run).replace(MINUS, "-")
    assert "-99.8 %" in said and "-99.99 %" in said and "-0.00003 %" in said
    assert not re.search(r"\b(0|0\.0|100|100\.0) %", said)


def test_the_recipe_and_what_was_left_alone_are_told(run: Run) -> None:
    assert "<dt>penalty</dt><dd>0.02</dd>" in recipe(run).html()
    assert "<dt>fc</dt><dd>its filters are the network&#x27;s outputs</dd>" in skipped(run).html()
    run.followers = {"depthwise": ["conv"]}
    assert "<dt>depthwise</dt><dd>follows conv</dd>" in skipped(run).html()


def test_scales() -> None:
    scale = Scale(0, 50, 100)
    assert (scale(0), scale(25), scale(50)) == (100, 50, 0)
    logarithmic = Scale(0.01, 1, 100, True)
    assert logarithmic(0.1) == pytest.approx(50) and logarithmic(0) == 100, "below the scale is its bottom"
    for low, high in ((0, 0.004), (80, 100), (0, 1), (93.1, 93.4)):
        ticks = Scale(low, high, 1).ticks()
        assert 2 <= len(ticks) <= 11 and all(low - 1e-9 <= value <= high + 1e-9 for value in ticks)


# -- the time that was asked for -----------------------------------------------------------------------------

TIME: dict[str, Any] = {
    "asked": 0.6,
    "foretold": 0.62,
    "measured": 0.604,
    "dense_ms": 50.0,
    "asked_ms": 30.0,
    "runtime": "onnxruntime",
    "batch": 64,
    "threads": 2,
    "machine": {"cpu": "an <abacus>", "cores": 2, "torch": "2.13.0"},
    "way": "blocks",
    "macs_left": {"filters": 0.3, "streams": None, "blocks": 0.531},
    "mean_error": 0.046,
    "worst_error": 0.18,
    "landings": [{"foretold": 0.6, "measured": 0.7}, {"foretold": 0.6, "measured": 0.604}],
}


def timed_run(folder: Path, **changes: Any) -> Run:
    summary = json.loads((folder / "summary.json").read_text())
    return read_run(folder, {**summary, "latency": {**TIME, **changes}})


def test_a_time_that_was_asked_for_stands_beside_the_one_that_was_measured(folder: Path) -> None:
    drawn = latency_section(timed_run(folder))
    assert drawn is not None and drawn.table is not None
    assert [row[1:] for row in drawn.table.rows] == [
        *(["100.0 %", "50.00 ms"], ["60.0 %", "30.00 ms"], ["62.0 %", "31.00 ms"], ["60.4 %", "30.20 ms"])
    ]
    text = drawn.html()
    parsed = Parsed(text)
    widths = [attrs["width"] for tag, attrs in parsed.found if tag == "rect" and "data-row" not in attrs]
    assert widths == ["100.00%", "60.00%", "62.00%", "60.40%"]
    (bound,) = parsed.of_class("bound")
    assert bound["x1"] == "60.00%" and len(parsed.of_class("hit")) == 4
    for said in (
        "The target was 60.0 % of the dense network&#x27;s 50.00 ms, 30.00 ms, in onnxruntime, batch 64, 2 threads",
        "timed alternately with the dense network, the pruned one takes 60.4 % of its time.",
        "blocks, predicted to keep 53.1 % of the MACs; filters would keep 30.0 %; streams cannot reach the target",
        "an &lt;abacus&gt;, 2 cores, torch 2.13.0",
        "off by 4.6 % on average, 18.0 % at most",
        "70.0 % (predicted 60.0 %), then 60.4 % (predicted 60.0 %)",
    ):
        assert said in text, said


def test_a_time_that_was_not_measured_here_is_said_to_be_foretold(folder: Path) -> None:
    run = timed_run(folder, measured=None, landings=[], macs_left={}, way="as coupled", threads=1)
    text = run_page(run)
    assert "That was not measured here: the latency model is from another machine" in text
    assert "the latency model predicts 62.0 %" in text and "measured against the dense network" not in text
    assert "as coupled, set in the recipe" in text and "in onnxruntime, batch 64, 1 thread. That" in text
    head = headline(run)
    assert "Time, target 60.0 %" in head and "<b>62.0 %</b>" in head and ">predicted<" in head
    assert "onnxruntime, batch 64, 1 thread · as coupled; not measured here" in head


def test_a_time_that_was_missed_is_marked(folder: Path) -> None:
    assert 'class="note bad">measured, missed<' in headline(timed_run(folder, measured=0.685))
    assert "missed" not in headline(timed_run(folder, measured=0.62))


def test_a_size_that_was_asked_for_stands_beside_the_one_that_is_left(run: Run) -> None:
    budget = {"params": 0.3, "macs": 1.0, "size": 2.5e5}
    told = headline(dataclasses.replace(run, recipe={**run.recipe, "budget": budget}))
    assert "target: at most 30.0 %" in told and "target: at most 250 kB" in told
    assert told.count("target: ") == 2


def test_the_headline_has_the_time_and_runs_without_one_have_not(folder: Path, run: Run) -> None:
    assert "<b>60.4 %</b>" in headline(timed_run(folder)) and ">measured<" in headline(timed_run(folder))
    assert latency_section(run) is None and run_parts(run)["time"] == "" and "target" not in headline(run)
    page = comparison_page([run, timed_run(folder)])
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", page)
    assert "60.4 % measured" in cells and "onnxruntime, batch 64, 2 threads" in cells
    assert "latency target" not in comparison_page([run, run])


def test_a_run_under_way_tells_the_time_it_aims_at(unfinished: Path, tmp_path: Path) -> None:
    going = copy_of(unfinished, tmp_path / "run")
    text = (going / "recipe.toml").read_text()
    (going / "recipe.toml").write_text(text.replace("latency = 1.0", "latency = 30000.0"))
    assert "latency = 30000.0" in (going / "recipe.toml").read_text()
    assert read_run(going).time is None  # the file is not there yet
    held = {
        **{key: TIME[key] for key in ("runtime", "batch", "threads", "machine")},
        "dense_seconds": 0.05,
        "calibration": {"networks": [], "mean_error": 0.046, "worst_error": 0.18},
        "chosen": {"way": "blocks", "macs_left": TIME["macs_left"]},
        "rounds": [],
    }
    (going / "latency.json").write_text(json.dumps(held))
    run = read_run(going)
    assert run.time is not None and run.time["asked"] == pytest.approx(0.6) and run.time["measured"] is None
    assert "the filters that meet it are chosen after the last score phase" in run_page(run)
    assert ">filters not chosen yet<" in headline(run)
    rounds = [{"plan": str(n), "foretold": 0.6, "measured": found} for n, found in enumerate((0.7, 0.59, 0.65))]
    (going / "latency.json").write_text(json.dumps({**held, "rounds": rounds}))
    found = read_run(going).time
    assert found is not None and found["measured"] == 0.59 and len(found["landings"]) == 3
    (going / "latency.json").write_text("{")
    assert read_run(going).time is None


# -- the page ------------------------------------------------------------------------------------------------


def test_the_page_has_room_for_the_figures_that_are_wide(run: Run) -> None:
    drawn = {key: draw(run) for key, draw in FIGURES.items()}
    assert {key for key, figure in drawn.items() if figure is not None and figure.wide} == set(WIDE_SECTIONS)


def test_the_page_stands_alone_and_is_small(run: Run, folder: Path) -> None:
    page = (folder / "report.html").read_text("utf-8")
    assert page == run_page(run), "the run wrote the same page as `sbf report` does"
    assert len(page.encode()) < 200_000
    parsed = Parsed(page)
    links = [attrs for _, attrs in parsed.found if attrs.get("src") or (attrs.get("href") or "#")[0] not in "#d"]
    assert links == [] and "url(" not in page and "@import" not in page
    ids = [attrs["id"] for _, attrs in parsed.found if "id" in attrs]
    assert set(SECTIONS) <= set(ids)
    assert [tag for tag, _ in parsed.found].count("h1") == 1
    assert "prefers-color-scheme" in page and "@media print" in page
    assert set(run_parts(run)) == {"headline", *SECTIONS}


def test_a_report_goes_where_it_is_asked_to(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert write_report([folder]) == folder / "report.html"
    assert write_report([folder], tmp_path / "deep/page.html").is_file()
    monkeypatch.chdir(tmp_path)
    assert write_report([folder, folder / "checkpoints" / ".."]) == folder / "report.html", "it is one run"
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    assert write_report([folder, other, folder]) == Path("comparison.html")
    assert "2 runs compared" in Path("comparison.html").read_text("utf-8")


def test_a_summary_that_cannot_be_drawn_is_no_failure(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_own_report(folder / "nowhere", {})
    assert "no report was drawn (RunError" in caplog.text


# -- comparison ----------------------------------------------------------------------------------------------


def test_a_comparison_says_which_method_is_not_as_published(run: Run) -> None:
    amc = dataclasses.replace(run, recipe={**run.recipe, "method": "amc"})
    page = comparison_page([run, amc])
    assert "amc (its weights, in layers whose widths are chosen by an agent; not as published yet)." in page
    assert "Filters chosen by" not in comparison_page([run, run])


def test_runs_are_compared(folder: Path, unfinished: Path, tmp_path: Path) -> None:
    small_run(tmp_path / "other", scores={"lr": 3e-3, "penalty": 0.1}, dense_control=False, seed=1)
    runs = [read_run(path) for path in (folder, tmp_path / "other", unfinished)]
    page = comparison_page(runs)
    parsed = Parsed(page)
    assert "2 of 3 runs are finished." in page and "6/20" in page
    assert "A  small, seed 0 (" in page and "B  small, seed 1" in page, "what looks alike is told apart"
    points = [p for p in parsed.of_class("point") if "cx" in p]
    dense = [p for p in points if "dense" in (p["class"] or "").split()]
    assert len(points) == 2 * 4 and len(dense) == 2, "three runs and one control, against MACs and parameters"
    assert '<th scope="row">scores.penalty</th><td>0.02</td><td>0.1</td><td>0.02</td>' in page
    assert "phases.warmup</th>" not in page, "only what differs"
    assert all(f'id="kept-{sign}"' in page for sign in "ABC")
    assert len(page.encode()) < 200_000


def test_points_in_one_place_share_their_signs() -> None:
    points = [
        Point(name, accuracy, 100.0, "h0", name) for name, accuracy in (("A", 98.0), ("B", 98.0), ("C", 90.0))
    ]
    drawn = accuracy_plot("key", "parameters", points, "said").picture
    assert re.findall(r'class="sign"[^>]*>([^<]*)<', drawn) == ["A, B", "C"] and drawn.count("<circle") == 3


# -- strings of a foreign run folder --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def foreign(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("foreign") / FOLDER
    return foreign_copy(folder, path, latency=TIME, unmeasured={"pruned": "no images"}, dense_from="elsewhere")


def assert_harmless(text: str, script: str = "") -> None:
    """No element or attribute of the page was made of text, and no script but `script` can run."""
    parsed = Parsed(text)
    assert HOSTILE not in text and FOLDER not in text
    assert not {tag for tag, _ in parsed.found} & {"img", "iframe", "object", "embed", "base", "form"}
    for _, attrs in parsed.found:
        assert not [name for name in attrs if name.startswith("on")]
        assert "javascript:" not in "".join(filter(None, attrs.values())).lower()
    scripts = re.findall(r"<script[^>]*>(.*?)</script", text, re.S | re.I)
    assert scripts == ([script] if script else [])
    if script:
        policies = [attrs["content"] for _, attrs in parsed.found if "Security" in (attrs.get("http-equiv") or "")]
        (allowed,) = re.findall(r"script-src ([^;]*);", " ".join(filter(None, policies)))
        assert allowed == f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def script(name: str) -> str:
    return resources.files("sbf_pruner.report").joinpath(name).read_text("utf-8")


def test_a_page_holds_no_element_that_a_foreign_folder_put_there(foreign: Path, tmp_path: Path) -> None:
    page, code = run_page(read_run(foreign)), script("page.js")
    assert_harmless(page, code)
    assert page.count("&lt;script&gt;alert(1)") > 200
    assert_harmless(comparison_page([read_run(foreign), read_run(foreign)]), code)
    going = copy_of(foreign, tmp_path / FOLDER, "summary.json")
    assert_harmless(run_page(read_run(going)), code)
    view = _View(going, 0.0)
    assert_harmless(view.page(), code)
    for part in view.changed_parts("")["parts"].values():
        assert_harmless(part)
    (going / "recipe.toml").write_text("name = [")
    said = view.changed_parts("")["parts"]["headline"]
    assert "cannot be read" in said
    assert_harmless(said)


def test_a_box_of_an_unknown_kind_is_drawn_like_any(folder: Path, tmp_path: Path) -> None:
    path = copy_of(folder, tmp_path / "run")
    network, code = json.loads((path / "network.json").read_text()), script("page.js")
    for key in ("kind", "label", "note", "gate", "layer"):
        box = {**network["boxes"][1], key: HOSTILE}
        (path / "network.json").write_text(
            json.dumps({**network, "boxes": [network["boxes"][0], box, *network["boxes"][2:]]})
        )
        assert_harmless(run_page(read_run(path)), code)


def test_pictures_hold_no_element_that_a_name_put_there() -> None:
    point = {"accuracy": 50.0, "macs": 10, "params": 5, "latency_ms": 1.0, "share": 0.5, "reached": True}
    result = {
        "name": HOSTILE,
        "seed": HOSTILE,
        "of": "macs",
        "judged_images": 9,
        "judged_on": HOSTILE,
        "said": HOSTILE,
        "clock": {"runtime": HOSTILE, "batch": HOSTILE, "mean_error": 0.1, "worst_error": 0.2, "measured": 0.5},
        "points": [point],
        "dense": {**point, "control_accuracy": 60.0, "warmup_accuracy": None},
        "own": {**point, "finetuned_accuracy": 55.0},
    }
    assert_harmless(draw_frontier(result, ".html"), script("page.js"))
    assert_harmless(draw_frontier(result, ".svg"))
    ElementTree.fromstring(draw_frontier(result, ".svg"))
    net = torch.nn.Sequential()
    net.add_module(HOSTILE.replace(".", ""), torch.nn.Conv2d(3, 4, 1))
    net.add_module("last", torch.nn.Conv2d(4, 2, 1))
    seen = inspect_model(net, torch.zeros(1, 3, 8, 8))
    seen.facts["model"] = HOSTILE
    assert_harmless(draw(seen, ".html"), script("graph_page.js"))
    assert_harmless(draw(seen, ".svg"))
    ElementTree.fromstring(draw(seen, ".svg"))


def test_text_is_escaped_however_it_gets_into_an_element() -> None:
    cell = element("td", "<i>", title='"><i>')
    assert cell == '<td title="&quot;&gt;&lt;i&gt;">&lt;i&gt;</td>'
    assert concat(cell, "<i>") == cell + "&lt;i&gt;" == concat([cell], ["<i>"])
    for glued in (f"{cell}", cell + "", "".join([cell])):  # markup only as it was made
        assert concat(glued) == cell.replace("&", "&amp;").translate({60: "&lt;", 62: "&gt;", 34: "&quot;"})
    assert element("b", "\x00\ud800\x1b") == "<b>\ufffd\ufffd\ufffd</b>"
    assert "<td>&lt;i&gt;</td>" in Table(["a", "b"], [["x", "<i>"]]).html()
