"""Sizes asked for beside sizes left, as Markdown: nothing measured here.

The content of results/targets.json (digits) or results/cifar10_targets.json enters; a block of text leaves, with
the least and the most that was left over the seeds of every target.
"""

from __future__ import annotations

import statistics
from typing import Any

from cifar10_tables import NONE, accuracy_of, machines

from saving import origin

WORDS = {"macs": "MACs", "params": "parameters"}
NETWORKS = {"resnet20": "ResNet-20", "resnet56": "ResNet-56"}


def targets(result: dict[str, Any] | None) -> str:
    if result is None:
        return "Not measured yet."
    runs = result["runs"]
    asked = sorted({(r["of"], -r["share"]) for r in runs if r["kind"] == "target"})
    lines = ["| asked for | left, least and most | accuracy |", "|---|---|---|"]
    for key, share in asked:
        group = [r for r in runs if r["kind"] == "target" and (r["of"], -r["share"]) == (key, share)]
        left = _ends([100 * r[key] for r in group])
        lines.append(f"| {-100 * share:g} % of the {WORDS[key]} | {left} | {_mean(group)} |")
    fixed, beside = ([r for r in runs if r["kind"] == kind] for kind in ("fixed lambda", "beside"))
    if fixed and len(fixed) == len(beside):
        macs = [100 * r["macs"] for r in fixed]
        lines += ["", _paired("Beside a fixed lambda", macs, _mean(fixed), _mean(beside))]
    return "\n".join(
        ["The digits recipe, lambda never touched, mean ± deviation (seeds):", "", *lines, *origin(result)]
    )


def _mean(group: list[dict[str, Any]]) -> str:
    return accuracy_of(group, unit=" %")


def _ends(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f} %"


def _paired(opening: str, macs: list[float], fixed: str, beside: str) -> str:
    """What a fixed lambda left, and what asking for just that came to."""
    left = ", ".join(f"{one:.1f}" for one in macs)
    return f"{opening}, which left {left} % of the MACs with {fixed}: asked for just that, seed by seed, {beside}."


def cifar10_targets(result: dict[str, Any] | None) -> str:
    """Both networks, every target; and the fixed lambda beside the same size asked for."""
    if not result or not result["runs"]:
        return NONE
    lines = ["| network | epochs | asked for | left, least and most | accuracy (runs) |", "|---|---|---|---|---|"]
    for network, title in NETWORKS.items():
        for key, said in WORDS.items():
            groups: dict[float, list[dict[str, Any]]] = {}
            for run in result["runs"]:
                if run["recipe"]["name"].startswith(f"{network}-{key}-"):
                    groups.setdefault(run["recipe"]["budget"][key], []).append(run)
            for share, group in sorted(groups.items(), reverse=True):
                left = _ends([100 - run["left"][f"{key}_removed"] for run in group])
                asked = f"{group[0]['epochs']} | {100 * share:g} % of the {said}"
                lines.append(f"| {title} | {asked} | {left} | {accuracy_of(group)} |")
    for name in ("fixed-lambda", "resnet56-fixed-lambda", "fixed-lambda-fast"):
        fixed, beside = (_named(result, one) for one in (name, f"beside-{name}"))
        if fixed and len(fixed) == len(beside):
            macs = [100 - run["left"]["macs_removed"] for run in fixed]
            network = NETWORKS[fixed[0]["recipe"]["model"]["name"]]
            epochs = fixed[0]["epochs"]
            opening = f"{network}, {epochs} epochs, beside a fixed lambda (scores' rate {_rate(fixed):g})"
            lines += ["", _paired(opening, macs, accuracy_of(fixed), accuracy_of(beside))]
    if same := _named(result, "same-rate"):
        lines[-1] += f" With its rate of the scores, {_rate(same):g}, too: {accuracy_of(same)}."
    if untuned := [run for run in result["runs"] if "recalibrate" not in run["recipe"]["scores"]]:
        lines += ["", f"{len(untuned)} of these runs are older than the tuning of norms after a landing."]
    return "\n".join([*lines, "", machines(result)])


def cifar10_latency(result: dict[str, Any] | None) -> str:
    """A latency target beside single filters that were foretold to take as long: both as trained, and timed."""
    if not result or not result["runs"]:
        return NONE
    lines = ["| latency target | what goes | time found, least and most | MACs left | accuracy |", "|---" * 5 + "|"]
    for share in ("0.6", "0.4"):
        for name, asked in ((f"latency-{share}", f"{share} of the time"), (f"macs-as-latency-{share}", "")):
            if group := [run for run in result["runs"] if run["group"] == name]:
                ways = ", ".join(sorted({run["way"] for run in group}))
                times = [run["pairs"]["median"] for run in group]
                left = statistics.fmean(100 * run["macs"] for run in group)
                cells = [
                    asked or "(MACs)",
                    ways,
                    f"{min(times):.3f} to {max(times):.3f}",
                    f"{left:.1f} %",
                    _mean(group),
                ]
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, *origin(result)])


def tuning(result: dict[str, Any] | None) -> str:
    """What it is worth that norms are tuned to the scores."""
    if result is None:
        return NONE
    lines = ["| MACs asked for | tuned | loss of the last scores | loss of the last gated weights | accuracy |"]
    lines.append("|---" * 5 + "|")
    for share, batches in sorted({(run["share"], run["batches"]) for run in result["runs"]}, reverse=True):
        group = [run for run in result["runs"] if (run["share"], run["batches"]) == (share, batches)]
        losses = [f"{statistics.median(run[key] for run in group):.2g}" for key in ("score_loss", "gated_loss")]
        lines.append(
            f"| {100 * share:g} % | {'yes' if batches else 'no'} | {' | '.join(losses)} | {_mean(group)} |"
        )
    head = "ResNet-32 on the digits; losses before fine-tuning, medians:"
    return "\n".join([head, "", *lines, *origin(result)])


def _named(result: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [run for run in result["runs"] if run["recipe"]["name"] == name]


def _rate(group: list[dict[str, Any]]) -> float:
    rate: float = group[0]["recipe"]["scores"]["lr"]
    return rate
