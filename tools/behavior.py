"""Record what the package computes, bit for bit, so that a refactoring can be shown to change nothing.

    python tools/behavior.py record before.json              # about ten minutes on two cores
    python tools/behavior.py record after.json --only runs   # or zoo, networks
    python tools/behavior.py compare before.json after.json  # prints "identical", or what differs

Recorded on the CPU with one thread: for short training runs the digests of every weight, the plan, the scores and
the metrics; for the networks of the test zoo the layers and the outputs of extracted networks under fixed random
plans; for the networks of torchvision and timm the names of the prunable, following and skipped layers. A recording
is valid on the machine that made it, because other processors round differently. To compare with an older commit,
check it out with `git worktree` and run its own copy of this script there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / name) for name in ("src", "tests", "benchmarks")]

SHORT = [
    "phases.warmup=1",
    "phases.cycles=2",
    "phases.score=1",
    "phases.weights=1",
    "phases.finetune=1",
    "dense_control=false",
    "device=cpu",
    "threads=1",
]
BUDGET = ["budget.macs=0.4", "scores.speed=0.02"]
RUNS: dict[str, list[str]] = {
    "plain": ["scores.lr=3e-4"],
    "budget": BUDGET,
    "resumed": BUDGET,
    "method": ["method=taylor", "budget.macs=0.4"],
    "distillation": ["distill.alpha=0.5", "finetune.ema=0.9", "finetune.cutout=2", "finetune.mixup=1", *BUDGET],
    "folder": ["scores.lr=2e-3"],
    "two processes": ["scores.lr=3e-4"],
    "constraints": ["budget.size=0.5", "constraints.round_to=4", "constraints.min_filters=3", "scores.speed=0.02"],
}
KILL_AFTER_EPOCHS = 3


def record_runs() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        return {label: record_run(label, Path(name) / label.replace(" ", "-")) for label in RUNS}


def record_run(label: str, folder: Path) -> dict[str, Any]:
    """Train one short run in `folder` and return what its files hold."""
    print(label, flush=True)
    recipe = "digits"
    if label == "folder":
        recipe = str(image_folder_recipe(folder.parent))
    options = [word for change in [*SHORT, *RUNS[label]] for word in ("--set", change)]
    words = ["run", recipe, "--seed", "3", "--run", str(folder), "--quiet", *options]
    starter = [sys.executable, "-m", "sbf_pruner"]
    if label == "two processes":
        starter = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=29611"]
        starter += ["-m", "--", "sbf_pruner"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    if label == "resumed":
        kill_after(KILL_AFTER_EPOCHS, [*starter, *words], folder, environment)
        words.append("--resume")
    subprocess.run([*starter, *words], env=environment, check=True, stdout=subprocess.DEVNULL)
    return read_run(folder)


def kill_after(epochs: int, words: list[str], folder: Path, environment: dict[str, str]) -> None:
    """Start a run and kill it once its metrics hold so many epochs."""
    child = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL)
    metrics = folder / "metrics.jsonl"
    while child.poll() is None and (not metrics.is_file() or metrics.read_bytes().count(b"\n") < epochs):
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    if child.wait() == 0:
        raise SystemExit("the run ended before it could be killed")


def image_folder_recipe(parent: Path) -> Path:
    """Write a few PNG images in a folder for each class, and a recipe that trains on them with two workers."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    for split, count in (("train", 12), ("test", 4)):
        for label in range(4):
            place = parent / "images" / split / f"class{label}"
            place.mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 128, (14, 14, 3)) + 32 * label
                Image.fromarray(pixels.astype(np.uint8)).save(place / f"{number}.png")
    recipe = parent / "folder.toml"
    recipe.write_text(
        f"""name = "folder"
[model]
name = "resnet20"
num_classes = 4
[data]
name = "folder"
path = "{parent / "images"}"
image_size = 12
batch_size = 8
in_memory = false
workers = 2
flip = true
crop = 1
[phases]
warmup = 1
""",
        "utf-8",
    )
    return recipe


def read_run(folder: Path) -> dict[str, Any]:
    """What a finished run left, without times and other numbers that differ from one run to the next."""
    from safetensors import safe_open

    digests = {}
    with safe_open(folder / "model.safetensors", "pt") as file:
        for name in sorted(file.keys()):
            digests[name] = digest(file.get_tensor(name))
    plan = json.loads((folder / "plan.json").read_text("utf-8"))
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    scores = folder / "scores.jsonl"
    timed = ("seconds", "images_per_second", "rate")
    return {
        "tensors": digests,
        "plan": plan,
        "scores": hashlib.sha256(scores.read_bytes()).hexdigest() if scores.is_file() else None,
        "metrics": [{k: v for k, v in record.items() if not k.endswith(timed)} for record in metrics],
    }


def record_zoo() -> dict[str, Any]:
    import sbf_pruner as sbf
    from cases import leaves, random_plans
    from sbf_pruner.utils import call
    from zoo import ZOO, fresh_inputs

    found: dict[str, Any] = {}
    for name, make in ZOO.items():
        print(name, flush=True)
        model, inputs = make()
        graph = sbf.trace(model, inputs)
        plans = []
        for plan in random_plans(graph, 6):
            small = sbf.extract(model, inputs, plan, graph)
            outputs = leaves(call(small.eval(), fresh_inputs(inputs)))
            measured = sbf.measure(small, inputs)
            plans.append(
                {"outputs": [digest(t) for t in outputs], "params": measured.params, "macs": measured.macs}
            )
        found[name] = {**layer_names(graph), "plans": plans}
    return found


def record_networks() -> dict[str, Any]:
    import zoos

    import sbf_pruner as sbf

    found: dict[str, Any] = {}
    for name in zoos.names():
        if name in zoos.LARGE:
            continue
        print(name, flush=True)
        model, images = zoos.build(name)
        found[name] = layer_names(sbf.trace(model, images))
    return found


def layer_names(graph: Any) -> dict[str, Any]:
    return {
        "layers": {name: layer.filters for name, layer in graph.layers.items()},
        "followers": sorted(getattr(graph, "followers", ())),
        "skipped": sorted(graph.skipped),
    }


def digest(tensor: Any) -> str:
    import torch

    plain = tensor.detach().contiguous()
    raw = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{plain.dtype} {tuple(plain.shape)} ".encode() + raw).hexdigest()[:16]


PARTS = {"runs": record_runs, "zoo": record_zoo, "networks": record_networks}


def differences(before: Any, after: Any, where: str = "") -> Iterator[str]:
    """Say where two recordings differ; parts that only one of them holds count as well."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in [*before, *(key for key in after if key not in before)]:
            if key not in before or key not in after:
                yield f"{where}/{key}: only {'before' if key in before else 'after'}"
            else:
                yield from differences(before[key], after[key], f"{where}/{key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from differences(one, other, f"{where}/{number}")
    elif before != after:
        yield f"{where}: {before!r} before, {after!r} after"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    record = commands.add_parser("record")
    record.add_argument("file", type=Path)
    record.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    compare = commands.add_parser("compare")
    compare.add_argument("before", type=Path)
    compare.add_argument("after", type=Path)
    given = parser.parse_args()
    if given.command == "record":
        import torch

        torch.set_num_threads(1)
        given.file.write_text(json.dumps({part: PARTS[part]() for part in given.only}, indent=1) + "\n", "utf-8")
        return 0
    before, after = (json.loads(path.read_text("utf-8")) for path in (given.before, given.after))
    shared = before.keys() & after.keys()
    found = list(
        differences({k: before[k] for k in before if k in shared}, {k: after[k] for k in after if k in shared})
    )
    print("\n".join(found[:50]) if found else f"identical ({', '.join(sorted(shared))})")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
