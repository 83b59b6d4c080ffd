"""Tables and pictures of the CIFAR-10 runs in results/cifar10.json, beside published figures.

A cell is the mean over all runs of one recipe, which must agree in everything but the seed.
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


class Rebuilt(NamedTuple):
    """A ResNet-56 of other widths, to count what somebody's network has left.

    `streams` are the channels between the blocks of the three stages, `middles` those inside the blocks.
    """

    streams: tuple[int, int, int] = (16, 32, 64)
    middles: tuple[int, int, int] = (16, 32, 64)
    rank: int = 0
    """each filter is the sum of this many products of 1x1, 3x1 and 1x3 filters (NORTON); 0: plain 3x3 filters"""

    def count(self) -> dict[str, int]:
        """Parameters with those of the norms, MACs of convolutions and classifier, and outputs of all norms."""
        found = {"params": 10 * self.streams[2] + 10, "macs": 10 * self.streams[2], "normed": 0}

        def convolve(inputs: int, filters: int, pixels: int, stride: int = 1) -> int:
            if self.rank:  # the 1x1 part sees all input pixels, the 3x1 part strides in one direction
                parts = self.rank * filters
                weights, macs = parts * (inputs + 6), parts * pixels * (inputs * stride**2 + 3 * stride + 3)
            else:
                weights = 9 * inputs * filters
                macs = weights * pixels
            found["params"] += weights + 2 * filters
            found["macs"] += macs
            found["normed"] += filters * pixels
            return filters

        width = convolve(3, 16, 32**2)
        for stage, (stream, middle) in enumerate(zip(self.streams, self.middles, strict=True)):
            pixels = (32 >> stage) ** 2
            for block in range(9):
                width = convolve(width, middle, pixels, 2 if stage and not block else 1)
                width = convolve(width, stream, pixels)
        return found

    def removed(self) -> str:
        """Percentages of parameters and of MACs removed, as `removed_of` gives them for runs."""
        left, whole = self.count(), Rebuilt().count()
        return " / ".join(f"{100 * (1 - left[key] / whole[key]):.1f}" for key in ("params", "macs"))


class Published(NamedTuple):
    """What somebody published: accuracy, and the percentages of parameters and FLOPs removed, as they count."""

    accuracy: str
    removed: str
    whose: str = "the paper"
    rebuilt: Rebuilt | None = None


# CHIP: widths from github.com/Eclipsess/CHIP_NeurIPS2021; its paper's accuracies are as the SbF paper cites them.
# NORTON: github.com/pvti/NORTON names no rank for this row; of its settings, this one alone has the published size.
PUBLISHED = {
    ("resnet56", "medium"): [
        Published("94.28", "52.3 / 49.3"),
        Published(
            "94.01; repository 94.16", "42.8 / 47.4", "CHIP", Rebuilt(streams=(13, 27, 64), middles=(9, 19, 38))
        ),
    ],
    ("resnet56", "high"): [Published("92.42", "83.0 / 70.5")],
    ("resnet56", "rivals"): [
        Published(
            "92.05; repository 92.43", "71.8 / 72.3", "CHIP", Rebuilt(streams=(9, 19, 64), middles=(8, 12, 19))
        ),
        Published("93.81", "75 / 71", "NORTON: layers decomposed, no filter pruned", Rebuilt(rank=2)),
    ],
    ("resnet110", "medium"): [Published("94.69", "54.9 / 51.3")],
    ("resnet110", "high"): [Published("93.68", "79.3 / 74.8")],
}
RIVALS = (
    "What CHIP and NORTON have removed is counted here, from the settings in their repositories. The paper's own "
    "sizes are as reported; it does not say how it counts. Rivals report the best epoch on the test images and "
    "often the best of several runs (CHIP's author says so in "
    "[issue 8](https://github.com/Eclipsess/CHIP_NeurIPS2021/issues/8) of its repository); ours are the last "
    "epoch, mean of seeds."
)
BEST = (
    "The `best` recipes are asked for the published sizes and add to the paper's training: a longer dense stage, "
    "distillation from it, a running average of the weights (EMA), cutout, Nesterov momentum and twice the weight "
    "decay; their cycles are shorter, and all layers' scores move at one speed."
)


def cifar10(result: dict[str, Any] | None) -> str:
    """The table as Markdown; one sentence where there is nothing to tell."""
    if not result or not result["runs"]:
        return NONE
    runs: list[Entry] = result["runs"]
    shown: list[Entry] = []
    rows: list[str] = []
    for network, title in NETWORKS.items():
        for name in (f"cifar10-{network}-dense", f"cifar10-{network}-best-dense"):
            if dense := runs_of(runs, name):
                shown += dense
                rows.append(f"| {title}, dense control | `{name}` | {accuracy_of(dense)} | - | - | - | |")
        for ratio, said in RATIOS.items():
            ours = []
            for kind in ("paper", "best"):
                name = f"cifar10-{network}-{kind}-{ratio}"
                if found := runs_of(runs, name):
                    shown += found
                    parts = [accuracy_of(found), dense_stage_of(found)]
                    parts += [removed_of(found, part) for part in ("left", "sequential")]
                    mark = "" if is_of(found[0], name) else EARLIER
                    ours.append(f"| {title}, {said} | `{name}`{mark} | {' | '.join(parts)} | |")
            if ours:
                for beside in PUBLISHED[network, ratio]:
                    counted = beside.rebuilt.removed() if beside.rebuilt else ""
                    cells = [f"{title}, {said}", beside.whose, beside.accuracy, "", counted, "", beside.removed]
                    rows.append(f"| {' | '.join(cells)} |")
                rows += ours
    epochs = " or ".join(str(count) for count in sorted({run["epochs"] for run in shown}))
    lines = [
        f"CIFAR-10, accuracy after the last epoch, mean ± deviation (number of seeds), {epochs} epochs each; "
        "removed are parameters / MACs of the network that is really left, in percent of the dense one. The dense "
        "stage is what a run begins with: the network before anything was removed, after so many epochs.",
        "",
        "| | recipe | accuracy | dense stage | removed | removed, counted sequentially | removed, as published |",
        "|---" * 7 + "|",
        *rows,
        *earlier_note(rows),
        "",
        f"{BEST}{_below_the_paper(runs)}",
        "",
        RIVALS,
    ]
    return "\n".join([*lines, "", machines({**result, "runs": shown})])


def _below_the_paper(runs: Sequence[Entry]) -> str:
    """How far the paper's own settings end from its figures."""
    found = []
    for (network, ratio), (paper, *_) in PUBLISHED.items():
        if ratio != "rivals" and (group := runs_of(runs, f"cifar10-{network}-paper-{ratio}")):
            distance = statistics.fmean(run["accuracy"] for run in group) - float(paper.accuracy)
            found.append(f"{distance:+.1f} ({NETWORKS[network]}, {ratio})")
    if not found:
        return ""
    return f" With the paper's own settings the accuracy, in points from the paper's, is {' and '.join(found)}."


def counting(result: dict[str, Any] | None) -> str:
    """The sizes that the paper's settings come to, by both balances and both ways to count, beside its own."""
    runs: list[Entry] = result["runs"] if result else []
    shown: list[Entry] = []
    rows: list[str] = []
    for (network, ratio), (paper, *_) in PUBLISHED.items():
        name, title = f"cifar10-{network}-paper-{ratio}", f"{NETWORKS[network]}, {ratio}"
        groups = {"`area`": runs_of(runs, name), "`none`": runs_of(runs, f"{name}-none")}
        if ratio == "rivals" or not any(groups.values()):
            continue
        rows.append(f"| {title} | the paper | | | {paper.removed} |")
        for balance, group in groups.items():
            shown += group
            sizes = [removed_of(group, part) if group else "not run" for part in ("left", "sequential")]
            seeds = f" ({len(group)})" if group else ""
            rows.append(f"| {title} | {balance}{seeds} | {' | '.join(sizes)} | |")
    if not rows or result is None:
        return NONE
    head = "| | balance (number of seeds) | removed | removed, counted sequentially | removed, as published |"
    return "\n".join([head, "|---" * 5 + "|", *rows, "", machines({**result, "runs": shown})])


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
