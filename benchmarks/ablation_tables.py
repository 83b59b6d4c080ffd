"""The page of ablations from the collected runs: text, nothing measured here.

Results of benchmarks/ablations.toml and of benchmarks/cifar10.toml enter; blocks of Markdown leave.  A row is
made of all seeds of one setting.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from cifar10_tables import accuracy_of, machines, removed_of

Entry = dict[str, Any]
NONE = "No run yet."

# The question, then the settings that answer it: the name of the runs, and what is said of them.
QUESTIONS: dict[str, dict[str, str]] = {
    "What the scores see, at half of the MACs": {
        "half-base": "all weights of the layer, the paper's speed",
        "half-even": "all weights of the layer, every layer at the same speed",
        "half-free": "nothing: a free logit per filter, at the same speed",
    },
    "The activation, at half of the MACs": {
        "half-base": "leaky exponential, a = 0.1",
        "half-leak-0": "leaky exponential, a = 0",
        "half-leak-1": "leaky exponential, a = 1",
        "half-sigmoid": "sigmoid",
    },
    "The balance, at half of the MACs": {
        "half-base": "area of the maps",
        "half-side": "side of the maps",
        "half-none": "none",
        "half-cost": "what a filter costs among its neighbours",
        "half-steered": "the same, and lambda follows the budget",
    },
    "Scores and weights, at half of the MACs": {
        "half-base": "take turns",
        "half-joint": "in the same steps, scores at the same rate",
        "half-joint-slow": "in the same steps, scores at a third of the rate",
    },
    "Where the scores of a block's last layer stand, at half of the MACs": {
        "half-base": "before the addition",
        "half-after-addition": "behind the addition",
    },
    "Batch norm in score phases": {"norms-frozen": "frozen", "norms-moving": "batch statistics, updated"},
    "Lambda, where the scores alone decide": {
        "lambda-0": "0",
        "lambda-2e-4": "2e-4",
        "norms-frozen": "5e-4",
        "lambda-1e-3": "1e-3",
        "lambda-15e-4": "15e-4",
        "lambda-2e-3": "2e-3",
    },
}


def ablations(result: dict[str, Any] | None) -> str:
    """One table per question."""
    groups: dict[str, list[Entry]] = {}
    for run in result["runs"] if result else []:
        groups.setdefault(run["recipe"]["name"], []).append(run)
    blocks = []
    for question, settings in QUESTIONS.items():
        rows = [
            f"| {said} | {accuracy_of(groups[name])} | {removed_of(groups[name], 'left')} |"
            for name, said in settings.items()
            if name in groups
        ]
        if rows:
            blocks.append(
                "\n".join([f"| {question} | accuracy | removed, parameters / MACs |", "|---|---|---|", *rows])
            )
    if not blocks or result is None:
        return NONE
    return "\n\n".join([*blocks, machines(result)])


def bottleneck(result: dict[str, Any] | None) -> str:
    """How the two convolutions of a block end up, for every pruned network of the table."""
    groups: dict[str, list[Entry]] = {}
    for run in result["runs"] if result else []:
        if run["left"]["params_removed"] > 0:
            groups.setdefault(run["recipe"]["name"], []).append(run)
    if not groups or result is None:
        return NONE
    lines = ["| recipe | first narrower, blocks | equal | first wider | kept of the first | kept of the second |"]
    lines += ["|---" * 6 + "|"]
    lines += [f"| `{name}` | {' | '.join(_blocks(group))} |" for name, group in sorted(groups.items())]
    return "\n".join([*lines, "", machines(result)])


def _blocks(group: Sequence[Entry]) -> list[str]:
    counts = [0, 0, 0]
    kept: tuple[list[float], list[float]] = ([], [])
    for run in group:
        for name, (before, after) in run["layers"].items():
            second = run["layers"].get(name.removesuffix("1") + "2")
            if name.endswith(".conv1") and second is not None:
                whole, other = second
                counts[0 if after < other else 1 if after == other else 2] += 1
                kept[0].append(after / before)
                kept[1].append(other / whole)
    shares = [f"{100 * statistics.fmean(part):.0f} %" if part else "-" for part in kept]
    return [*map(str, counts), *shares]
