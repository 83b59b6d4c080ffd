"""What the recipes of our own were chosen by, from the collected runs: text, nothing measured here.

Results of benchmarks/choices.toml enter, and that file; a block of Markdown leaves, with its heading, or nothing as
long as there are no runs.  A row is made of all seeds of one job, told by what the job sets.  What holds: only
validation accuracies are shown, and neither a run that is among the results nor a job of the file is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cifar10_tables import (
    EARLIER,
    NETWORKS,
    RATIOS,
    accuracy_of,
    earlier_note,
    is_of,
    machines,
    removed_of,
    runs_of,
)
from jobs import Run, read_runs

from sbf_pruner import Recipe

JOBS = Path(__file__).with_name("choices.toml")
HELD_OUT = "data.validation"
PHASES = {"warmup": "the dense stage", "weights": "the cycles", "finetune": "fine-tuning"}


def choices(result: dict[str, Any] | None, jobs: Path = JOBS) -> str:
    """One row per job, in the order of the file; then those that have gone from it since."""
    if not result or not result["runs"]:
        return ""
    jobs_by_name = {run.group: run for run in read_runs(jobs, Path())}
    gone = [name for run in result["runs"] if (name := run["recipe"]["name"]) not in jobs_by_name]
    rows = [_row(run, runs_of(result["runs"], name)) for name, run in jobs_by_name.items()]
    rows += [
        f"| `{name}`, which is no longer asked for | | {_figures(name, runs_of(result['runs'], name))} |"
        for name in dict.fromkeys(gone)
    ]
    shares = sorted({run["recipe"]["data"]["validation"] for run in result["runs"]})
    parts = " or ".join(f"{100 * share:g} %" for share in shares)
    lines = [
        "### What they were chosen by",
        f"Accuracy after the last epoch on {parts} of the training images, which were held out of training; mean ± "
        "deviation (number of seeds). Removed are parameters / MACs, in percent of the dense network.",
        "",
        "| tried | network | validation accuracy | removed |",
        "|---|---|---|---|",
        *rows,
    ]
    return "\n".join([*lines, *earlier_note(rows), "", machines(result)])


def _row(run: Run, group: Sequence[dict[str, Any]]) -> str:
    recipe = Recipe.load(run.recipe, run.overrides)
    kind = run.recipe.rpartition("-")[2]
    network = f"{NETWORKS.get(recipe.model.name, recipe.model.name)}, {RATIOS.get(kind, kind)}"
    mark = "" if not group or is_of(group[0], run.recipe, run.overrides) else EARLIER
    return f"| {told(run.overrides)}{mark} | {network} | {_figures(run.group, group)} |"


def _figures(name: str, group: Sequence[dict[str, Any]]) -> str:
    if any(entry["validation_accuracy"] is None for entry in group):
        raise SystemExit(f"the runs of {name} held no images out ({HELD_OUT} = 0); remove them from the results")
    return f"{accuracy_of(group, 'validation_accuracy')} | {removed_of(group, 'left')}" if group else "not run |"


def told(overrides: Sequence[str]) -> str:
    """What settings change, in words; what is held out goes without saying.

    >>> told(["data.validation=0.2", "warmup.cutout=8", "finetune.cutout=8", "distill.alpha=0"])
    'cutout 8 in the dense stage and fine-tuning, no teacher'
    >>> told(["warmup.cutout=8", "finetune.cutout=0", "distill.alpha=0.5", "scores.speed=2e-3"])
    "cutout 8 in the dense stage, no cutout in fine-tuning, the teacher's part 0.5, `scores.speed=2e-3`"
    >>> told(["phases.warmup=220", "warmup.weight_decay=1e-3"])
    '220 epochs in the dense stage, weight decay 1e-3 in the dense stage'
    >>> told(["distill.mirrored=false"])
    'a teacher that is not asked about mirror images'
    """
    said: dict[str, list[str]] = {}  # what is set, and the phases it is set in
    for change in overrides:
        key, _, value = change.partition("=")
        section, _, setting = key.partition(".")
        if section == "phases" and setting in PHASES:
            said[f"{value} epochs in {PHASES[setting]}"] = []
        elif section in PHASES:
            said.setdefault(_amount(setting, value), []).append(PHASES[section])
        elif key == "distill.alpha":
            said[_amount("teacher", value).replace("teacher ", "the teacher's part ")] = []
        elif key == "distill.mirrored":
            said[f"a teacher that {'is' if value == 'true' else 'is not'} asked about mirror images"] = []
        elif key != HELD_OUT:
            said[f"`{change}`"] = []
    words = [f"{what} in {' and '.join(where)}" if where else what for what, where in said.items()]
    return ", ".join(words) or "the recipe as it is"


def _amount(setting: str, value: str) -> str:
    named = setting.replace("_", " ")
    return f"{named} {value}" if value not in ("0", "0.0", "false") else f"no {named}"
