"""Tables that compare methods, from results/methods.json (digits), few_methods.json and cifar10_methods.json.

A row is the mean over the runs of one method; the best stands first.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from cifar10_tables import accuracy_of, machines, removed_of

from saving import origin
from sbf_pruner.criteria import METHODS

Runs = list[dict[str, Any]]


def few_methods(result: dict[str, Any] | None) -> str:
    """On a fifth of CIFAR-10."""
    return methods(result, "10,000 images of CIFAR-10")


def methods(result: dict[str, Any] | None, data: str = "the digits") -> str:
    """On the digits, or on other data that stay small."""
    if result is None:
        return "Not measured yet."
    runs: Runs = result["runs"]
    shares = sorted({run["share"] for run in runs}, reverse=True)
    heads = [f"{100 * share:g} % of the MACs | parameters left" for share in shares]
    lines = [f"| method | {' | '.join(heads)} |", "|---" * (1 + 2 * len(shares)) + "|"]
    # The control of a seed is the same at every size.
    controls = {run["seed"]: run["dense_accuracy"] for run in runs if run["dense_accuracy"] is not None}
    dense = [{"accuracy": accuracy} for accuracy in controls.values()]
    groups = {name: [run for run in runs if run["method"] == name] for name in sorted({r["method"] for r in runs})}
    for name, group in sorted(groups.items(), key=lambda item: -_mean(item[1])):
        cells = [_cells([run for run in group if run["share"] == share]) for share in shares]
        lines.append(f"| {labelled(name)} | {' | '.join(cells)} |")
    about = f"ResNet-20 on {data}, {runs[0]['epochs']} epochs, accuracy in percent, mean ± deviation (seeds)"
    control = f"; the dense control has {accuracy_of(dense)}" if dense else _dense_stages(runs)
    head = f"{about}{control}. Sorted by the mean over all runs."
    return "\n".join([head, "", *lines, *notes(groups), *origin(result)])


def cifar10_methods(result: dict[str, Any] | None) -> str:
    """On CIFAR-10."""
    if result is None or not result["runs"]:
        return "No run on CIFAR-10 yet."
    groups: dict[str, Runs] = {}
    for run in result["runs"]:
        groups.setdefault(run["recipe"]["method"], []).append(run)
    share, epochs = result["runs"][0]["recipe"]["budget"]["macs"], result["runs"][0]["epochs"]
    lines = [f"ResNet-20 on CIFAR-10, {epochs} epochs, {100 * share:g} % of the MACs asked for:", ""]
    lines += ["| method | accuracy | removed, parameters / MACs |", "|---|---|---|"]
    for name, group in sorted(groups.items(), key=lambda item: -_mean(item[1])):
        lines.append(f"| {labelled(name)} | {accuracy_of(group)} | {removed_of(group, 'left')} |")
    return "\n".join([*lines, *notes(groups), "", machines(result)])


def labelled(name: str) -> str:
    """A method as tables call it: what is not as published yet has a mark, what departs from its model says so."""
    method = METHODS.get(name)
    if method is None:
        return f"`{name}`"
    return f"`{name}`" + (f" (after {method.after})" if method.after else " †" if method.unlike else "")


def notes(names: Iterable[str]) -> list[str]:
    """What the mark means, below a table that has it."""
    unlike = {name: METHODS[name].unlike for name in sorted(names) if name in METHODS}
    said = [f"`{name}` ({missing})" for name, missing in unlike.items() if missing]
    return ["", f"† Not as published yet: {', '.join(said)}."] if said else []


def _dense_stages(runs: Runs) -> str:
    """What the networks of all methods had come to before anything went."""
    stages = {run["seed"]: run["warmup_accuracy"] for run in runs}
    return f"; the dense stage had {accuracy_of([{'accuracy': accuracy} for accuracy in stages.values()])}"


def _mean(group: Runs) -> float:
    return statistics.fmean(run["accuracy"] for run in group)


def _cells(group: Runs) -> str:
    if not group:
        return " | "
    return f"{accuracy_of(group)} | {100 * statistics.fmean(run['params_left'] for run in group):.0f} %"
