"""The model card of an export: what it is, what it can do, what it costs, how to load it, and its limits.

A finished run's recipe and summary, and the facts of an export, enter; Markdown leaves.  Every figure on it
comes from the run's summary or was measured by the export.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..deploy.choose import SMALLEST
from ..figures import rounded, some
from ..training.finished import FinishedRun

_LISTED = 30  # classes that the card names

_ABOUT = {
    "network.onnx": "the network for ONNX Runtime, TensorRT, OpenVINO and others; any batch",
    "network.pt2": "the same for PyTorch, without the code of the model; any batch",
    "network-int8.onnx": "the same in eight-bit integers",
    "model.safetensors": "the weights of the pruned network, as trained; no pickle",
    "plan.json": "the filters that each layer of the dense network keeps",
    "recipe.toml": "the recipe of the run",
}


def card(run: FinishedRun, facts: Mapping[str, Any], sizes: Mapping[str, int]) -> str:
    """The card, as Markdown."""
    recipe, summary = run.recipe, run.summary
    dense, pruned = summary["dense"], summary["pruned"]
    lines = [
        f"# {recipe.name}, pruned",
        "",
        f"`{recipe.model.name}` for {recipe.model.num_classes} classes, trained on {recipe.data.name} and pruned "
        f"while it was trained, with sbf-pruner {facts['versions']['sbf-pruner']}.",
        "",
        "| | dense | pruned |",
        "|---|---|---|",
        f"| accuracy on the test images | {_percent(dense['accuracy'])} | {_percent(pruned['accuracy'])} |",
        f"| parameters | {dense['params']:,} | {pruned['params']:,} |",
        f"| multiply-accumulates of one image | {dense['macs']:,} | {pruned['macs']:,} |",
        "",
    ]
    if dense["accuracy"] is None:
        lines += ["No dense network was trained beside it (`dense_control` of the recipe).", ""]
    if "int8" in facts:
        int8 = facts["int8"]
        lines += [
            f"In eight-bit integers (ranges from {int8['images']} training images): "
            f"{_percent(int8['accuracy'])} of the test images, {_percent(int8['float_accuracy'])} in floating "
            "point.",
            "",
        ]
    lines += ["## Files", "", "| file | bytes | |", "|---|---|---|"]
    lines += [f"| `{name}` | {size:,} | {_ABOUT.get(name, '')} |" for name, size in sizes.items()]
    lines += ["", _input(facts["input"]), ""]
    if classes := facts["classes"]:
        rest = " (the rest in `export.json`)" if len(classes) > _LISTED else ""
        lines += [f"Outputs: one number per class, in this order: {some(classes, _LISTED)}{rest}.", ""]
    lines += ["## Loading", "", *_loading(run, sizes), "", "## Form", "", _form(facts), ""]
    lines += ["## Recipe", "", "```toml", recipe.to_toml().strip(), "```", "", "## Limits", ""]
    lines += [
        f"- The accuracy is that of one run (seed {recipe.seed}) on the test images of {recipe.data.name}; nothing "
        "is known about other images.",
        *_untrained(sizes),
        "- The form was chosen on one machine; on another one, a different form may be faster. What it computes is "
        "the same.",
        "- The checksums in `export.json` tell a damaged file, not a forged folder.",
    ]
    return "\n".join(lines) + "\n"


def _loading(run: FinishedRun, sizes: Mapping[str, int]) -> list[str]:
    blocks = []
    onnx = [name for name in ("network.onnx", "network-int8.onnx") if name in sizes]
    if onnx:
        blocks.append(
            f'import onnxruntime\nsession = onnxruntime.InferenceSession("{onnx[0]}")\n'
            "(outputs,) = session.run(None, {session.get_inputs()[0].name: images})  # a NumPy array"
        )
    if "network.pt2" in sizes:
        blocks.append('import sbf_pruner as sbf\nnetwork = sbf.load(".")  # checks the file, runs nothing it holds')
    if "model.safetensors" in sizes:
        config = run.recipe.model
        options = {"num_classes": config.num_classes, "in_channels": config.in_channels, **config.options}
        given = ", ".join(f"{key}={value!r}" for key, value in options.items())
        blocks.append(
            "import sbf_pruner as sbf\nfrom sbf_pruner.models import resolve\n"
            f'network = sbf.load(".", lambda: resolve("{config.name}", {given}))  # can be trained on'
        )
    return ["```python", "\n\n".join(blocks), "```"]


def _untrained(sizes: Mapping[str, int]) -> list[str]:
    """Which of the files only compute."""
    names = [f"`{name}`" for name in sizes if name.startswith("network")]
    if not names:
        return []
    instead = "load the weights with the model's code" if "model.safetensors" in sizes else "take the run's weights"
    return [f"- {' and '.join(names)} compute{'s' * (len(names) == 1)} outputs; to train on, {instead}."]


def _input(given: Mapping[str, Any]) -> str:
    shape = " x ".join(map(str, given["shape"]))
    if "mean" not in given:
        return f"Input: float32, {shape}, scaled as in training."
    return (
        f"Input: float32, {shape}; pixels in 0..1, less the mean ({_numbers(given['mean'])}), over the deviation "
        f"({_numbers(given['std'])}), by channel."
    )


def _form(facts: Mapping[str, Any]) -> str:
    chosen = facts["chosen"]
    if chosen["form"] is None:
        return f"The network as it was saved; {chosen['why']}."
    form = ", ".join(f"{key} {value}" for key, value in chosen["form"].items() if value and value != 1)
    zeros = ", some of them zeros that make widths even" if chosen["params"] > facts["pruned"]["params"] else ""
    purpose = "to be small" if facts["target"] == SMALLEST else f"for {facts['target']}"
    return (
        f"Written {purpose} ({form}): {chosen['why']}. It computes what the saved weights "
        f"compute, with {chosen['params']:,} numbers{zeros}."
    )


def _percent(accuracy: float | None) -> str:
    return "not measured" if accuracy is None else f"{rounded(accuracy, 2)} %"


def _numbers(values: Any) -> str:
    return ", ".join(f"{value:.4f}" for value in values)
