"""What removal is worth in time: dense against compact on the CPU, in every runtime, as `sbf bench` times it.

ResNet-56 with the plan of a real run at half the MACs (plans/), whose layers keep filters of their own, and
ResNet-50 with every layer at half its channels; small and large batches, 100 alternating pairs each.  The
compiler, ONNX Runtime and eager torch run what they run fastest, of the dense network too.  Waits for a quiet
machine; what was timed on a busy one is not saved.  Saved as soon as a network is done.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from quiet import QUIET, wait
from resnet50 import ResNet50
from torch import nn

from saving import RESULTS, save_result
from sbf_pruner import Plan, Pruner, extract
from sbf_pruner.cli import bench_lines
from sbf_pruner.compare import BenchOptions, Subject, run_bench
from sbf_pruner.models import resolve

PLAN = Path(__file__).parent / "plans" / "cifar10-resnet56-best-medium-seed0.json"
RUNTIMES = ("eager", "compile", "onnxruntime")


def resnet56(plan: Path) -> Subject:
    model, images = resolve("resnet56"), torch.zeros(1, 3, 32, 32)
    return Subject.of("ResNet-56, 32x32", model, extract(model, images, Plan.load(plan)))


def resnet50(plan: Path) -> Subject:
    model, images = ResNet50(), torch.zeros(1, 3, 224, 224)
    return Subject.of("ResNet-50, 224x224", model, extract(model, images, half_the_channels(model, images)))


def half_the_channels(model: nn.Module, images: torch.Tensor) -> Plan:
    """The first half of every layer's filters, so that layers that meet keep the same."""
    layers = Pruner(model, images).graph.layers
    return Plan({name: tuple(range(layer.filters // 2)) for name, layer in layers.items()})


NETWORKS: dict[str, tuple[Callable[[Path], Subject], tuple[int, ...]]] = {
    "resnet56": (resnet56, (1, 64)),
    "resnet50": (resnet50, (1, 8)),
}


def kept(plan: str) -> dict[str, Any]:
    """What is saved of other networks, if it was measured with the same plan."""
    path = RESULTS / "speed.json"
    saved = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    return dict(saved["networks"]) if saved.get("plan") == plan else {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--networks", default=",".join(NETWORKS), help=f"of {', '.join(NETWORKS)}")
    parser.add_argument("--plan", type=Path, default=PLAN, help="plan.json of a run of ResNet-56")
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--patience", type=float, default=600.0, help="seconds to wait for a quiet machine")
    parser.add_argument("--runtimes", default=",".join(RUNTIMES))
    parser.add_argument("--quick", action="store_true", help="one pair of ResNet-56 in eager torch, nothing saved")
    args = parser.parse_args()
    found = kept(args.plan.stem)
    for name in ["resnet56"] if args.quick else args.networks.split(","):
        build, batches = NETWORKS[name]
        runtimes = ("eager",) if args.quick else tuple(args.runtimes.split(","))
        settings = BenchOptions((1,) if args.quick else batches, runtimes, pairs=1 if args.quick else args.pairs)
        torch.manual_seed(0)
        if not args.quick and (busy := wait(args.patience)) > QUIET:
            print(f"others keep {busy:.1f} cores busy; measure again when it is quiet", file=sys.stderr)
            return 1
        began = time.perf_counter()
        result = run_bench(build(args.plan), settings, lambda line: print(line, file=sys.stderr, flush=True))
        environment = result.pop("environment")
        del result["anatomy"]
        found[name] = {**result, "load": environment["load"], "seconds": round(time.perf_counter() - began, 1)}
        print("\n".join(bench_lines({**result, "environment": environment})), flush=True)
        if not args.quick:
            save_result("speed", {"plan": args.plan.stem, "networks": found, "environment": environment})
    return 0


if __name__ == "__main__":
    sys.exit(main())
