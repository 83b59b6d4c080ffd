"""The figures in the documents, written from the saved results so that none can drift from its run.

python benchmarks/tables.py            writes them into README.md and docs/, with the pictures
python benchmarks/tables.py --check    says whether they are what the results say
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ablation_tables import ablations, bottleneck
from choice_tables import choices
from cifar10_tables import budgets, cifar10, counting, pictures
from coverage_tables import coverage, headline, torch_versions, vs_torch_pruning
from engine_tables import engine, imagenet_scale
from glance import glance
from latency_tables import equal_macs, latency
from method_tables import cifar10_methods, few_methods, methods
from reference_tables import public_names, recipe_settings
from target_tables import cifar10_latency, cifar10_targets, targets, tuning

from saving import origin

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


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
    return "\n".join([*lines, *origin(result)])


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
    return "\n".join([*lines, *origin(result)])


def speed(result: dict[str, Any] | None) -> str:
    if result is None:
        return "Not measured yet."
    lines = ["| | fewer MACs | runtime | batch | dense | compact | times as fast (95 %) |", "|---" * 7 + "|"]
    for found in result["networks"].values():
        for record in found["measured"]:
            times = [f"{record[side]['median']:.3g} ms" for side in ("dense_ms", "compact_ms")]
            spread = record["speedup"]
            cells = [found["subject"]["name"], f"{found['subject']['fewer_macs']:.2f}x", record["runtime"]]
            cells += [str(record["batch"]), *times]
            cells.append(f"**{spread['median']:.2f}** ({spread['low']:.2f} to {spread['high']:.2f})")
            lines.append(f"| {' | '.join(cells)} |")
    pairs = {record["speedup"]["n"] for found in result["networks"].values() for record in found["measured"]}
    busy = max(found["load"] for found in result["networks"].values())
    lines += ["", f"{min(pairs)} pairs each; load of the machine before: {busy:.1f}."]
    return "\n".join([*lines, *origin(result)])


def forms(result: dict[str, Any] | None) -> str:
    if result is None:
        return "Not measured yet."
    lines = []
    for name, found in result["networks"].items():
        measured = found["measured"]
        heads = [f"{record['target']}, batch {record['batch']}" for record in measured]
        title = {"resnet56": "ResNet-56, 32x32", "resnet50": "ResNet-50, 224x224"}[name]
        lines += [f"{title}, {found['fewer_macs']:.2f} times fewer MACs; times as fast as dense:", ""]
        lines += [f"| form | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
        for form in dict.fromkeys(form for record in measured for form in record["speedup"]):
            cells = [record["speedup"].get(form) for record in measured]
            shown = ["" if cell is None else f"{cell['median']:.2f}" for cell in cells]
            lines.append(f"| {form} | {' | '.join(shown)} |")
        lines.append("")
    lines.append(
        f"Medians of {result['rounds']} rounds in turns, each against the dense network in its fastest form."
    )
    return "\n".join([*lines, *origin(result)])


# The name of a block in the pages, the results it is made from (None for those that are not there yet), and how.
BLOCKS: dict[str, tuple[str, Callable[..., str]]] = {
    "glance": ("coverage vs_torch_pruning cifar10 speed", glance),
    "digits": ("digits", demo),
    "overhead": ("overhead", overhead),
    "speed": ("speed", speed),
    "forms": ("forms", forms),
    "zoos": ("coverage", headline),
    "coverage": ("coverage", coverage),
    "torch_versions": ("torch_versions", torch_versions),
    "vs_torch_pruning": ("vs_torch_pruning", vs_torch_pruning),
    "cifar10": ("cifar10", cifar10),
    "counting": ("cifar10", counting),
    "budgets": ("cifar10", budgets),
    "choices": ("choices", choices),
    "methods": ("methods", methods),
    "few_methods": ("few_methods", few_methods),
    "cifar10_methods": ("cifar10_methods", cifar10_methods),
    "targets": ("targets", targets),
    "cifar10_targets": ("cifar10_targets", cifar10_targets),
    "cifar10_latency": ("cifar10_times", cifar10_latency),
    "tuning": ("tuning", tuning),
    "latency": ("latency", latency),
    "equal_macs": ("latency", equal_macs),
    "ablations": ("ablations", ablations),
    "bottleneck": ("cifar10", bottleneck),
    "engine": ("engine", engine),
    "imagenet_scale": ("imagenet_scale", imagenet_scale),
    "names": ("", public_names),
    "settings": ("", recipe_settings),
}


def _with_block(text: str, name: str, block: str) -> str:
    opening, closing = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    head, found, rest = text.partition(opening)
    return head + opening + block + "\n" + closing + rest.partition(closing)[2] if found else text


def written(results: Path, root: Path) -> dict[Path, str]:
    """Every file that is made from the results, with the text it must have."""
    read = {name: _result(results / f"{name}.json") for names, _ in BLOCKS.values() for name in names.split()}
    files = {}
    for page in [root / "README.md", *sorted((root / "docs").glob("*.md"))]:
        text = page.read_text("utf-8")
        for block, (names, make) in BLOCKS.items():
            if f"<!-- {block} -->" in text:
                text = _with_block(text, block, make(*(read[name] for name in names.split())))
        files[page] = text
    return files | {root / "docs" / name: text for name, text in pictures(read["cifar10"]).items()}


def _result(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text("utf-8")) if path.is_file() else None


def main(check: bool, results: Path = RESULTS, root: Path = ROOT) -> int:
    files = written(results, root)
    stale = [path for path, text in files.items() if not path.is_file() or path.read_text("utf-8") != text]
    if not check:
        for path in stale:
            path.write_text(files[path], "utf-8")
        return 0
    if stale:
        names = ", ".join(path.name for path in stale)
        print(f"figures differ from the results in {names}; run python benchmarks/tables.py")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
