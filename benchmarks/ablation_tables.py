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
    """How the two convolutions of a block end up, for every pruned and fine-tuned network of the table."""
    groups: dict[str, list[Entry]] = {}
    for run in result["runs"] if result else []:
        if run["left"]["params_removed"] > 0 and run["recipe"]["phases"]["finetune"]:
            groups.setdefault(run["recipe"]["name"], []).append(run)
    if not groups or result is None:
        return NONE
    lines = [
        "| recipe | first narrower, blocks | equal | first wider | kept, mean over layers: first / second "
        "| kept of all filters: first / second |",
        "|---" * 6 + "|",
    ]
    lines += [f"| `{name}` | {' | '.join(_blocks(group))} |" for name, group in sorted(groups.items())]
    return "\n".join([*lines, "", machines(result)])


def _blocks(group: Sequence[Entry]) -> list[str]:
    """Of all blocks: which convolution is narrower, then what is kept of the first and of the second."""
    pairs = [
        (layer, run["layers"][second])
        for run in group
        for name, layer in run["layers"].items()
        if name.endswith(".conv1") and (second := name.removesuffix("1") + "2") in run["layers"]
    ]
    if not pairs:
        return ["0", "0", "0", "-", "-"]
    narrower = sum(first[1] < second[1] for first, second in pairs)
    wider = sum(first[1] > second[1] for first, second in pairs)
    layers = [statistics.fmean(pair[place][1] / pair[place][0] for pair in pairs) for place in (0, 1)]
    filters = [sum(pair[place][1] for pair in pairs) / sum(pair[place][0] for pair in pairs) for place in (0, 1)]
    shares = [" / ".join(f"{100 * share:.0f}" for share in both) + " %" for both in (layers, filters)]
    return [str(narrower), str(len(pairs) - narrower - wider), str(wider), *shares]
