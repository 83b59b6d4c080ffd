"""What the engine and the ImageNet-scale steps came to, as Markdown: nothing measured here.

The content of results/engine.json or results/imagenet_scale.json enters; a block of text leaves, in which every
goal stands beside its figure, the missed ones too.
"""

from __future__ import annotations

from typing import Any

from saving import origin

NONE = "Not measured yet."
STEPS = {"weight": "weight step", "score": "score step"}
SHARES = {"score_step_time": "a score step, of a dense training step", "scores_memory": "peak memory with scores"}
CUTS = {"filters": "single filters", "streams": "the same filters in a whole stage", "blocks": "whole blocks"}


def engine(result: dict[str, Any] | None) -> str:
    """Plain against captured, what is cut against the dense network, and how near the two engines are."""
    if result is None:
        return NONE
    plain, fast, goals = result["plain"], result["captured"], result["goals"]
    setting = result["setting"]
    lines = [f"ResNet-56, batch {setting['batch']}, {setting['side']}x{setting['side']}, bfloat16:", ""]
    lines += ["| | plain loop | captured | times as fast | goal |", "|---|---|---|---|---|"]
    for key, title in STEPS.items():
        most, least = result["limits"][f"{key}_step_ms"][1], result["limits"][f"{key}_step_speedup"][1]
        times = [f"{found[f'{key}_ms']:.2f} ms" for found in (plain, fast)]
        wanted = f"{most} ms, {least:g} times"
        lines.append(f"| {title} | {' | '.join(times)} | {goals[f'{key}_step_speedup']:.1f} | {wanted} |")
    seconds = [f"{found['evaluation_seconds']:.2f} s" for found in (plain, fast)]
    ratio = plain["evaluation_seconds"] / fast["evaluation_seconds"]
    wanted = f"{result['limits']['evaluation_seconds'][1]} s"
    lines.append(f"| evaluation, 10,000 images | {' | '.join(seconds)} | {ratio:.1f} | {wanted} |")
    if "weight_kernels" in fast:
        lines += ["", "Where the time of a captured step goes, milliseconds (kernels):", "", *_kernels(fast)]
    if cut := result.get("finetune"):
        lines += ["", "Fine-tuning of what is left, against a weight step of the dense network:", ""]
        lines += ["| what goes | MACs left | times as fast | goal |", "|---|---|---|---|"]
        for way, found in cut.items():
            limit = result["limits"][f"finetune_{way}_speedup"][1]
            left, speedup = f"{100 * found['small_macs']:.0f} %", f"{goals[f'finetune_{way}_speedup']:.2f}"
            lines.append(f"| {CUTS[way]} | {left} | {speedup} | {limit:g} |")
    lines += [
        "",
        f"Trained in float32 for four short phases, the weights of both engines differ by "
        f"{goals['float32_weight_difference']:.0e} of their norm; in bfloat16 the losses by "
        f"{goals['bfloat16_loss_difference']:.0e}.",
    ]
    return "\n".join([*lines, *origin(result)])


def _kernels(fast: dict[str, Any]) -> list[str]:
    """A row per kind of kernel, those that a weight step spends most on first."""
    steps = [fast[f"{key}_kernels"]["kinds"] for key in STEPS]
    lines = [f"| | {' | '.join(STEPS.values())} |", "|---|---|---|"]
    for kind in dict.fromkeys(kind for step in steps for kind in step):
        cells = (f"{step[kind]['ms']:.2f} ({step[kind]['kernels']:.0f})" if kind in step else "-" for step in steps)
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return lines


def imagenet_scale(result: dict[str, Any] | None) -> str:
    """Scores and surgery on ResNet-50, as parts of a dense training step."""
    if result is None:
        return NONE
    setting, dense, goals = result["setting"], result["dense"], result["goals"]
    lines = [
        f"ResNet-50, {setting['side']}x{setting['side']}, batch {setting['batch']}, bfloat16, eager; a dense "
        f"training step takes {dense['ms']:.1f} ms and {dense['peak_bytes'] / 1e9:.1f} GB:",
        "",
        "| | measured | goal |",
        "|---|---|---|",
    ]
    for key, title in SHARES.items():
        lines.append(f"| {title} | {goals[key]:.3f} | at most {result['limits'][key][1]:g} |")
    for way, found in result["extracted"].items():
        lines.append(
            f"| training step of what is left ({way}; {100 * found['macs']:.0f} % of the MACs), times as fast | "
            f"{dense['ms'] / found['ms']:.2f} | at least {result['limits']['extracted_speedup'][1]:g} |"
        )
    lines += [
        "",
        f"The paper's score matrices, taken literally, would need {result['scored']['literal_bytes'] / 1e9:.0f} GB "
        "here with gradient and Adam's state.",
    ]
    return "\n".join([*lines, *origin(result)])
