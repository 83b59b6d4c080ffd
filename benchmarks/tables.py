"""The figures in the documents, written from the saved results so that none can drift from its run.

python benchmarks/tables.py            writes them into README.md and docs/compatibility.md
python benchmarks/tables.py --check    says whether they are what the results say
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGES = [HERE.parent / "README.md", HERE.parent / "docs" / "compatibility.md"]


def demo(result: dict[str, Any]) -> str:
    spread, recipe, seeds = result["spread"], result["recipe"]["phases"], result["seeds"]
    epochs = recipe["warmup"] + recipe["cycles"] * (recipe["score"] + recipe["weights"]) + recipe["finetune"]
    rows = [
        ("accuracy, dense control of equal epochs", "dense_accuracy", "%"),
        ("accuracy, pruned", "pruned_accuracy", "%"),
        ("multiply-accumulates removed", "macs_removed", "%"),
        ("parameters removed", "params_removed", "%"),
    ]
    lines = [f"ResNet-20 on the embedded 8x8 digits, {epochs} epochs, seeds {seeds[0]} to {seeds[-1]}:", ""]
    lines += ["| | mean | deviation |", "|---|---|---|"]
    for label, key, unit in rows:
        lines.append(f"| {label} | {spread[key]['mean']:.1f} {unit} | {spread[key]['deviation']:.1f} |")
    error = max(run["cut_error"] for run in result["runs"])
    lines += [
        "",
        f"The gated and the extracted network differ by at most {error:.0e} of the largest output, in float64.",
    ]
    return "\n".join([*lines, *_origin(result)])


def overhead(result: dict[str, Any]) -> str:
    names = {
        "score_step": "a score step, of a dense training step",
        "gated_step": "a gated weight step, of a dense training step",
        "forward_scores_at_1": "a forward with all scores at 1, of a dense forward",
        "saved_activations": "activations saved in a score step, of those of a dense step",
    }
    lines = ["ResNet-20, batch 128, on the CPU, as ratios to the dense network in the same run:", ""]
    lines += ["| | ratio |", "|---|---|"]
    lines += [f"| {label} | {result['ratios'][key]:.2f} |" for key, label in names.items()]
    return "\n".join([*lines, *_origin(result)])


def coverage(result: dict[str, Any]) -> str:
    models, told = result["models"], result["summary"]
    good = {n: r for n, r in models.items() if r["ok"]}
    zoos = ", ".join(f"{ours} of {all_} of {zoo}" for zoo, (ours, all_) in sorted(told["by_zoo"].items()))
    lines = [
        f"**{told['pass']} of {told['models']} networks pass** ({zoos}): traced, cut by random plans that remove "
        "30, 50 and 80% of every layer and by plans with empty layers, equal to the gated network in float64, and "
        "trained for a step.",
        f"The worst relative difference is {told['worst_error']:.0e}; analysis and extraction take "
        f"{told['median_seconds']:.2f} s (median, one thread).",
        "",
    ]
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
    return "\n".join([*lines, *_origin(result)])


def _note(row: dict[str, Any]) -> str:
    """The main reason where a tenth of the filters or more stay."""
    if row["filters_prunable"] >= 0.9 or not row["reasons"]:
        return ""
    return _kind(max(row["reasons"], key=row["reasons"].get))


def _kind(reason: str) -> str:
    """A reason without the line and the layer it speaks of."""
    reason = re.sub(r" at [\w.]+:\d+", "", reason)
    return _plain(re.sub(r"(shares its weight with|is also held in) [\w.]+", r"\1 another", reason))


def _plain(text: str) -> str:
    return text.replace("|", "/").replace("<", "(").replace(">", ")")


def vs_torch_pruning(result: dict[str, Any]) -> str:
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
    broken = {n: r["theirs"]["why"] for n, r in result["models"].items() if r["ok"] and not r["theirs"]["works"]}
    if broken:
        lines += ["", "Where Torch-Pruning gives no working network:", ""]
        lines += [f"- `{name}`: {_plain(reason)}" for name, reason in sorted(broken.items())]
    return "\n".join([*lines, *_origin(result)])


def _origin(result: dict[str, Any]) -> list[str]:
    machine = result["environment"]
    where = machine["gpu"] or f"{machine['cpu']}, {machine['threads']} threads"
    return [
        "",
        f"`benchmarks/results/{result['benchmark']}.json`: {where}, torch {machine['torch']}, {result['date']}.",
    ]


BLOCKS: dict[str, Callable[[dict[str, Any]], str]] = {
    "digits": demo,
    "overhead": overhead,
    "coverage": coverage,
    "vs_torch_pruning": vs_torch_pruning,
}


def _with_block(text: str, name: str, block: str) -> str:
    opening, closing = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    head, found, rest = text.partition(opening)
    return head + opening + block + "\n" + closing + rest.partition(closing)[2] if found else text


def main(check: bool) -> int:
    stale = []
    for page in PAGES:
        text = before = page.read_text("utf-8")
        for name, block in BLOCKS.items():
            if f"<!-- {name} -->" in text:
                result = json.loads((HERE / "results" / f"{name}.json").read_text("utf-8"))
                text = _with_block(text, name, block(result))
        if text != before:
            stale.append(page.name)
            if not check:
                page.write_text(text, "utf-8")
    if check and stale:
        print(f"figures differ from the results in {', '.join(stale)}; run python benchmarks/tables.py")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
