"""Tables of the compatibility page, from the results of torch_versions.py, coverage.py and vs_torch_pruning.py."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from saving import origin


def torch_versions(result: dict[str, Any] | None) -> str:
    if result is None:
        return "No run yet."
    heads = ["torch", "torchvision", "Python", "passed", "failed", "skipped", "minutes", "date"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for run in result["runs"]:
        cells = [run[head.lower()] for head in heads[:6]] + [round(run["seconds"] / 60), run["date"]]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    machine = result["environment"]
    return "\n".join([*lines, "", f"`benchmarks/results/torch_versions.json`: {machine['cpu']}, no GPU."])


def headline(result: dict[str, Any] | None) -> str:
    """One sentence for the README."""
    if result is None:
        return "No run yet."
    told = result["summary"]
    zoos = " and ".join(
        f"{ours} of {all_} networks of {zoo}" for zoo, (ours, all_) in sorted(told["by_zoo"].items())
    )
    return (
        f"{zoos} are traced, cut by random plans and equal to their gated selves to {told['worst_error']:.0e} in "
        f"float64; analysis and extraction take {told['median_seconds']:.2f} s (median, one thread). The "
        "table, with the reasons for what is left alone, is in [docs/compatibility.md](docs/compatibility.md)."
    )


def coverage(result: dict[str, Any] | None) -> str:
    if result is None:
        return "No run yet."
    models, told = result["models"], result["summary"]
    good = {n: r for n, r in models.items() if r["ok"]}
    zoos = ", ".join(f"{ours} of {all_} of {zoo}" for zoo, (ours, all_) in sorted(told["by_zoo"].items()))
    lines = [
        f"**{told['pass']} of {told['models']} networks pass** ({zoos}): traced, cut by random plans that remove "
        "30, 50 and 80% of every layer and by plans with empty layers, equal to the gated network in float64, and "
        "trained for a step.",
        f"The worst relative difference is {told['worst_error']:.0e}; analysis and extraction take "
        f"{told['median_seconds']:.2f} s (median, one thread).",
    ]
    if all("other_size" in row for row in good.values()):
        elsewhere = sum(row["other_size"] is not None for row in good.values())
        lines.append(
            f"{elsewhere} were also compared at another image and batch size; the others take images of one size."
        )
    lines.append("")
    if told["failures"]:
        lines += ["What does not pass:", ""]
        lines += [f"- `{name}`: {_plain(reason)}" for name, reason in told["failures"].items()]
        lines.append("")
    lines += [
        "| network | image | filters prunable | MACs prunable | MACs left at 50% | worst error | seconds | note |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in sorted(models.items()):
        if name in good:
            shares = f"{row['filters_prunable']:.1%} | {row['macs_prunable']:.1%} | {row['macs_left']:.1%}"
            lines.append(
                f"| {name} | {row['size']} | {shares} | {row['error']:.0e} | {row['seconds']:.2f} | {_note(row)} |"
            )
        else:
            lines.append(f"| {name} | {row.get('size', '')} | | | | | | does not pass |")
    lines += ["", "Why filters of convolutions are left alone, over all these networks:", ""]
    lines += ["| filters | networks | reason |", "|---|---|---|"]
    filters, networks = Counter[str](), Counter[str]()
    for row in models.values():
        reasons = Counter[str]()
        for reason, count in row.get("reasons", {}).items():
            reasons[_kind(reason)] += count
        filters.update(reasons)
        networks.update(reasons.keys())
    lines += [f"| {count} | {networks[kind]} | {kind} |" for kind, count in filters.most_common()]
    return "\n".join([*lines, *origin(result)])


def _note(row: dict[str, Any]) -> str:
    """The main reason where a tenth of the filters or more stay."""
    if row["filters_prunable"] >= 0.9 or not row["reasons"]:
        return ""
    return _kind(max(row["reasons"], key=row["reasons"].get))


def _kind(reason: str) -> str:
    """A reason without the line and the layer it speaks of."""
    reason = re.sub(r" at [\w.]+:\d+", "", reason)
    another = r"(shares its weight with|is also held in|is also referenced by the attribute) [\w.]+"
    return _plain(re.sub(another, r"\1 another", reason))


def _plain(text: str) -> str:
    return text.replace("|", "/").replace("<", "(").replace(">", ")")


def vs_torch_pruning(result: dict[str, Any] | None) -> str:
    if result is None:
        return "No run yet."
    told = result["summary"]
    exact, defined = told["theirs_exact"]
    lines = [
        f"{told['models']} networks through both tools in one process each, every layer halved by Torch-Pruning "
        "1.6.1 and ours keeping the same filters:",
        "",
        "| | sbf-pruner | Torch-Pruning 1.6.1 |",
        "|---|---|---|",
        f"| a working network | {told['ours']} | {told['theirs']} |",
    ]
    if told["both"]:
        rows = (("median seconds, where both work", "seconds", ".2f"), ("median MACs left", "macs_left", ".1%"))
        for label, key, form in rows:
            ours, theirs = (format(told[f"{who}_median_{key}"], form) for who in ("ours", "theirs"))
            lines.append(f"| {label} ({told['both']}) | {ours} | {theirs} |")
    lines.append(
        f"| exact, of those where it is defined | {told['ours']} of {told['ours']} | {exact} of {defined} |"
    )
    if told.get("densenet201_ratio"):
        lines += ["", f"DenseNet-201 takes Torch-Pruning {told['densenet201_ratio']:.1f} times as long."]
    if told["not_run"]:
        names = ", ".join(f"`{name}`" for name in told["not_run"])
        lines += ["", f"Stopped before both tools were done, and not counted: {names}."]
    broken = {n: r["theirs"]["why"] for n, r in result["models"].items() if r["ok"] and not r["theirs"]["works"]}
    if broken:
        lines += ["", "Where Torch-Pruning gives no working network:", ""]
        lines += [f"- `{name}`: {_plain(reason)}" for name, reason in sorted(broken.items())]
    return "\n".join([*lines, *origin(result)])
