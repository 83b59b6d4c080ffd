"""Read a run folder into plain values for reports, including the state of its latency target.

Only files are read and the model's code is not imported, so unfinished runs and runs from other machines can be
read too. Fields without data are empty, and `Run.missing` gives the reason. An incomplete last line of a .jsonl
file is ignored.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..budget.targets import MICROSECONDS
from ..criteria import METHODS, OWN, describe_method
from ..errors import RunError, check_version
from ..schedule import RECIPE_FORMAT, RUN_FORMAT, SCORE_KINDS, Phase, phases_of
from ..utils.files import from_plain, path_exists, read_header, read_records, read_text
from .inspection import Box, from_json

Record = dict[str, Any]


@dataclass(frozen=True)
class LayerKept:
    """Filters of a prunable layer before and after pruning."""

    name: str
    before: int
    after: int
    macs_share: float | None = None  # percent of the dense network's MACs


@dataclass
class Run:
    """The contents of a run folder."""

    folder: Path
    name: str
    recipe: Record
    schedule: list[Phase]
    records: list[Record] = field(default_factory=list)  # epochs of the pruned network
    control: list[Record] = field(default_factory=list)
    summary: Record | None = None
    layers: list[LayerKept] = field(default_factory=list)
    scores: list[Record] = field(default_factory=list)
    refinement: list[Record] = field(default_factory=list)
    unmeasured: dict[str, str] = field(default_factory=dict)  # "scored" or "pruned" -> why there is no refinement
    boxes: list[Box] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    followers: dict[str, list[str]] = field(default_factory=dict)
    environment: Record = field(default_factory=dict)
    time: Record | None = None  # the latency target and its result, if there is one
    missing: dict[str, str] = field(default_factory=dict)  # part of the report -> reason

    @property
    def finished(self) -> bool:
        """True once the run has ended and has a summary."""
        return self.summary is not None

    @property
    def epochs(self) -> int:
        """Number of epochs of the pruned network, including those to come."""
        return max((s.end for s in self.schedule if s.kind != "control"), default=0)

    @property
    def last(self) -> Record | None:
        """Record of the latest epoch; the dense control is trained last."""
        records = self.control or self.records
        return records[-1] if records else None

    @property
    def method(self) -> str | None:
        """Name of the method that ranks the filters, or None if scores are learned."""
        found = str(self.recipe.get("method", OWN))
        return None if found == OWN or (found in METHODS and METHODS[found].learned) else found

    @property
    def title(self) -> str:
        """Names of the network and the data set."""
        return f"{self.recipe['model']['name']} on {self.recipe['data']['name']}"


def last_known(records: Sequence[Record], key: str) -> Any:
    """Return the latest value of a key that is not None, or None if every record lacks one."""
    return next((record[key] for record in reversed(records) if record[key] is not None), None)


def read_run(folder: str | Path, summary: Record | None = None) -> Run:
    """Read a run folder; `summary`, if given, is used instead of summary.json, which may not be written yet.

    Raises RunError if the folder is not that of a run, or if one of its files is damaged.
    """
    path = Path(folder)
    recipe = _recipe(path)
    run = Run(path, str(recipe.get("name") or path.resolve().name), recipe, phases_of(recipe))
    for record in read_records(path / "metrics.jsonl"):
        (run.control if record["phase"] == "control" else run.records).append(record)
    run.scores = read_records(path / "scores.jsonl")
    run.summary = summary if summary is not None else _object(path / "summary.json", "dense", "pruned", "layers")
    network = _object(path / "network.json", "environment") or {}
    run.environment = (run.summary or network).get("environment", {})
    facts: Record = network.get("facts", {})
    if facts:
        run.boxes = from_json(network["boxes"])
        run.skipped = {fact["name"]: fact["reason"] for fact in facts["skipped"]}
        run.followers = {fact["name"]: fact["follows"] for fact in facts["followers"]}
    else:
        run.missing["network"] = f"The network cannot be drawn: {network.get('undrawn', 'it is not stored')}."
        run.skipped = (run.summary or {}).get("skipped", {})
    run.layers = _layers(run, {fact["name"]: fact for fact in facts.get("layers", ())})
    run.refinement, run.unmeasured = _refinement(run)
    run.time = _latency(path, recipe, run.summary)
    _explain_missing(run)
    return run


def _recipe(path: Path) -> Record:
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise RunError(f"{path} {what}; name the folder of a run, such as runs/digits-seed0")
    file = path / "recipe.toml"
    try:
        recipe = tomllib.loads(file.read_text("utf-8"))
        check_version(recipe.pop("format", None), RECIPE_FORMAT, file)
        phases = {"warmup", "cycles", "score", "weights", "finetune"}
        needed = {"model": {"name"}, "data": {"name"}, "phases": phases}
        if all(keys <= set(recipe[section]) for section, keys in needed.items()):
            return recipe
    except FileNotFoundError:
        raise RunError(f"{path} holds no run (no recipe.toml); name a folder that sbf run wrote") from None
    except (OSError, ValueError) as error:
        raise RunError(f"{file} cannot be read ({error}); put back the run's own") from error
    except (KeyError, TypeError):
        pass
    raise RunError(f"{file} is not the recipe of a run; put back the run's own")


def _object(path: Path, *keys: str) -> Record | None:
    if not path_exists(path):
        return None
    try:
        found = json.loads(read_text(path))
    except ValueError:
        found = None
    if isinstance(found, dict):
        check_version(found.get("format"), RUN_FORMAT, path)
    if not isinstance(found, dict) or not found.keys() >= set(keys):
        raise RunError(f"{path} is damaged; remove it (--resume writes it anew where the run has not ended)")
    return found


def _layers(run: Run, facts: Mapping[str, Record]) -> list[LayerKept]:
    shares = {name: fact["macs_share"] for name, fact in facts.items()}
    if run.summary is not None:
        stored = run.summary["layers"].items()
        return [LayerKept(name, layer["before"], layer["after"], shares.get(name)) for name, layer in stored]
    kept = next((line["kept"] for line in reversed(run.scores) if "kept" in line), None)
    if kept is None and run.records and run.records[-1]["filters"] < run.records[-1]["filters_total"]:
        kept = checkpointed_plan(run.folder)  # methods without learned scores store it only there
        if kept is None:
            return []
    before = {name: fact["filters"] for name, fact in facts.items()}
    return [LayerKept(name, width, (kept or {}).get(name, width), shares[name]) for name, width in before.items()]


def checkpointed_plan(folder: Path) -> dict[str, int] | None:
    """Return how many filters each layer keeps in the last checkpoint, or None if none can be read."""
    try:  # Read only the header, because a live page does so after every epoch and the tensors can be large.
        header = read_header(folder / "checkpoints" / "last.safetensors", "")
        plan = from_plain(header["state"], lambda name: None)["networks"]["plan"]
        return {name: len(kept) for name, kept in plan.items()}
    except (RunError, LookupError, TypeError, ValueError, AttributeError):
        return None


def _refinement(run: Run) -> tuple[list[Record], dict[str, str]]:
    """Return the refinement per residual block, and the reasons for what was not measured."""
    if run.summary is not None and (run.summary.get("refinement") or run.summary.get("unmeasured")):
        return list(run.summary["refinement"]), dict(run.summary.get("unmeasured", {}))
    last: Record = next((line for line in reversed(run.scores) if "refinement" in line), {})
    return last.get("refinement", []), {"scored": last["unmeasured"]} if "unmeasured" in last else {}


def _explain_missing(run: Run) -> None:
    stored = run.scores or not any(record["phase"] in SCORE_KINDS for record in run.records)
    if not run.layers:
        run.missing["kept"] = "Which filters each layer keeps is not stored in this folder yet."
    if run.method is not None:
        run.missing["scores"] = f"No scores are learned: filters are chosen by {describe_method(run.method)}."
    elif not stored:
        run.missing["scores"] = "The scores are not stored in this folder."
    elif not run.scores:
        run.missing["scores"] = "No score epoch has been run yet."
    if run.refinement:
        return
    if run.unmeasured:
        why = f"No residual block was measured: {'; '.join(dict.fromkeys(run.unmeasured.values()))}."
    elif any("kept" in line for line in run.scores):
        why = "No residual block was measured: none has a branch that ends in a prunable layer."
    elif not stored:
        why = "The refinement of blocks is not stored in this folder."
    else:
        ended = "this run has none" if run.method is not None else "none has ended yet"
        why = f"The refinement of blocks is measured at the end of every score phase, and {ended}."
    run.missing["refinement"] = why


def _latency(folder: Path, recipe: Record, summary: Record | None) -> Record | None:
    """Return the latency target, its result and its conditions; None without a target or if nothing is stored yet.

    The values come from the summary if there is one, else from latency.json. "foretold" is the predicted and
    "measured" the measured time relative to the dense network; both are None until known.
    """
    if summary is not None:
        return summary.get("latency")
    wanted = float(recipe.get("budget", {}).get("latency", 1.0))
    if wanted == 1:
        return None
    try:
        stored = json.loads((folder / "latency.json").read_text("utf-8"))
        dense = float(stored["dense_seconds"])
        target = wanted if wanted < 1 else min(wanted / MICROSECONDS / dense, 1.0)
        landings = [{key: landing[key] for key in ("foretold", "measured")} for landing in stored["rounds"]]
        found = [float(landing["measured"]) for landing in landings]
        return {
            "asked": target,
            "foretold": None,
            "measured": min(found, key=lambda ratio: abs(ratio / target - 1)) if found else None,
            "dense_ms": 1e3 * dense,
            "asked_ms": 1e3 * target * dense,
            **{key: stored[key] for key in ("runtime", "batch", "threads", "machine")},
            **stored["chosen"],
            **{key: error for key, error in stored["calibration"].items() if key.endswith("_error")},
            "landings": landings,
        }
    except (OSError, ValueError, KeyError, TypeError):  # the file does not exist yet or is incomplete
        return None
