"""The paper's Table 1 and Figure 4 from the collected runs: text and pictures, nothing measured here.

The content of results/cifar10.json enters; a block of Markdown and the SVG files it shows leave.  A cell is
made of all runs of one recipe, which must agree in everything but the seed.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from pictures import kept_filters

from sbf_pruner import Recipe

Entry = dict[str, Any]
NETWORKS = {"resnet56": "ResNet-56", "resnet110": "ResNet-110"}
RATIOS = {"medium": "medium", "high": "high", "rivals": "at the ratio of rivals"}
NONE = "No run yet."
EARLIER = " (*)"


class Published(NamedTuple):
    """What somebody published: accuracy, and the percentages of parameters and FLOPs removed, as they count."""

    accuracy: float
    params: float
    macs: float
    whose: str = "the paper"


PUBLISHED = {
    ("resnet56", "medium"): [Published(94.28, 52.3, 49.3)],
    ("resnet56", "high"): [Published(92.42, 83.0, 70.5)],
    ("resnet56", "rivals"): [
        Published(92.43, 71.8, 72.3, "CHIP"),
        Published(93.81, 75.0, 71.0, "NORTON, which also decomposes layers"),
    ],
    ("resnet110", "medium"): [Published(94.69, 54.9, 51.3)],
    ("resnet110", "high"): [Published(93.68, 79.3, 74.8)],
}


def cifar10(result: dict[str, Any] | None) -> str:
    """The table as Markdown; one sentence where there is nothing to tell."""
    if not result or not result["runs"]:
        return NONE
    runs: list[Entry] = result["runs"]
    epochs = " or ".join(str(count) for count in sorted({run["epochs"] for run in runs}))
    lines = [
        f"CIFAR-10, accuracy after the last epoch, mean ± deviation (number of seeds), {epochs} epochs each; "
        "removed are parameters / MACs of the network that is really left, in percent of the dense one. The dense "
        "stage is what a run begins with: the network before anything was removed, after so many epochs.",
        "",
        "| | recipe | accuracy | dense stage | removed | removed, counted sequentially |",
        "|---|---|---|---|---|---|",
    ]
    for network, title in NETWORKS.items():
        for name in (f"cifar10-{network}-dense", f"cifar10-{network}-best-dense"):
            if dense := runs_of(runs, name):
                lines.append(f"| {title}, dense control | `{name}` | {accuracy_of(dense)} | - | - | - |")
        for ratio, said in RATIOS.items():
            rows = []
            for kind in ("paper", "best"):
                name = f"cifar10-{network}-{kind}-{ratio}"
                if found := runs_of(runs, name):
                    parts = [accuracy_of(found), dense_stage_of(found)]
                    parts += [removed_of(found, part) for part in ("left", "sequential")]
                    mark = "" if is_of(found[0], name) else EARLIER
                    rows.append(f"| {title}, {said} | `{name}`{mark} | {' | '.join(parts)} |")
            if rows:
                for beside in PUBLISHED[network, ratio]:
                    figures = f"{beside.accuracy:.2f} | | | {beside.params} / {beside.macs}"
                    lines.append(f"| {title}, {said} | {beside.whose} | {figures} |")
                lines += rows
    return "\n".join([*lines, *earlier_note(lines), "", machines(result)])


def earlier_note(rows: Iterable[str]) -> list[str]:
    """What the mark means, below a table that has it."""
    marked = any(EARLIER in row for row in rows)
    return ["", f"{EARLIER.strip()} Run with the recipe as it was before its last change."] if marked else []


def machines(result: dict[str, Any]) -> str:
    """The line under a table that says where its runs were made."""
    runs: list[Entry] = result["runs"]
    dates = sorted({run["date"] for run in runs})
    devices = sorted({run["environment"]["gpu"] or run["environment"]["cpu"] for run in runs})
    versions = sorted({run["environment"]["torch"] for run in runs})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    origin = f"{', '.join(devices)}, torch {', '.join(versions)}, {when}"
    return f"`benchmarks/results/{result['benchmark']}.json`: {origin}."


def budgets(result: dict[str, Any] | None) -> str:
    """Markdown that shows the pictures there are."""
    shown = [f"![{title}]({name})" for name, (title, _) in _drawn(result).items()]
    return "\n\n".join(shown) or NONE


def pictures(result: dict[str, Any] | None) -> dict[str, str]:
    """The files of the pictures, by name."""
    return {name: text for name, (_, text) in _drawn(result).items()}


def _drawn(result: dict[str, Any] | None) -> dict[str, tuple[str, str]]:
    """One picture per network and kind of recipe: the filters each layer keeps, as a mean over the seeds."""
    runs: list[Entry] = result["runs"] if result else []
    found: dict[str, tuple[str, str]] = {}
    for network, title in NETWORKS.items():
        for kind in ("paper", "best"):
            panels = {
                f"{said}: {removed_of(group, 'left')} % of parameters / MACs removed, {len(group)} seeds": _kept(
                    group
                )
                for ratio, said in RATIOS.items()
                if (group := runs_of(runs, f"cifar10-{network}-{kind}-{ratio}"))
            }
            if panels:
                heading = f"{title}, filters kept per layer, {kind} recipes"
                found[f"cifar10-{network}-{kind}.svg"] = heading, kept_filters(heading, panels)
    return found


def runs_of(runs: Iterable[Entry], name: str) -> list[Entry]:
    """The runs of one recipe; a table must not mix two of the same name."""
    found = [run for run in runs if run["recipe"]["name"] == name]
    recipes = [Recipe.from_dict({**run["recipe"], "seed": 0}) for run in found]  # settings of later are at rest
    if any(recipe != recipes[0] for recipe in recipes):
        raise SystemExit(f"the runs of {name} differ in more than the seed; remove the old ones from the results")
    return found


def is_of(run: Entry, recipe: str, overrides: Sequence[str] = ()) -> bool:
    """Was it run with a bundled recipe, and what a job sets in it, as that is now?"""
    now = Recipe.load(recipe, [*overrides, f"name={run['recipe']['name']}"])
    return Recipe.from_dict({**run["recipe"], "seed": 0}) == now


def _kept(group: Sequence[Entry]) -> dict[str, tuple[int, float]]:
    return {
        layer: (before, statistics.fmean(run["layers"][layer][1] for run in group))
        for layer, (before, _) in group[0]["layers"].items()
    }


def accuracy_of(group: Sequence[Entry], key: str = "accuracy", unit: str = "") -> str:
    """Mean and deviation over the seeds, and how many there are."""
    values = [run[key] for run in group]
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.2f}{spread}{unit} ({len(values)})"


def dense_stage_of(group: Sequence[Entry]) -> str:
    """What the network had reached before anything was removed, and in how many epochs."""
    accuracy, _, _ = accuracy_of(group, "warmup_accuracy").rpartition(" ")
    return f"{accuracy} ({group[0]['recipe']['phases']['warmup']} epochs)"


def removed_of(group: Sequence[Entry], part: str) -> str:
    """Percentages of parameters and of MACs removed, as means over the seeds."""
    means = (statistics.fmean(run[part][f"{key}_removed"] for run in group) for key in ("params", "macs"))
    return " / ".join(f"{mean:.1f}" for mean in means)
