"""What the form of a compact network is worth: every form that `sbf export` tries, beside the dense network.

ResNet-56 with the plan of a real run at half the MACs, whose layers keep filters of their own, and ResNet-50 with
half the channels of every layer.  Per runtime and batch, the dense network in its fastest form and the compact one
in all its forms take turns; a speed-up is the median over the rounds of dense divided by compact.

python benchmarks/forms.py [--plan runs/X/plan.json] [--rounds 100] [--networks resnet56,resnet50]
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from speed import PLAN, resnet50, resnet56

from saving import save_result
from sbf_pruner.compare import Subject
from sbf_pruner.measurement import measure
from sbf_pruner.runtimes import RUNTIMES, CapturedNetwork, make_forms, make_runner, min_times
from sbf_pruner.utils import median_ratio, time_interleaved, torch_threads

NETWORKS = {"resnet56": (resnet56, (1, 64)), "resnet50": (resnet50, (8,))}
TARGETS = ("onnxruntime", "eager")
TRIAL = 5.0  # seconds in which the dense network's form is chosen


def forms_of(subject: Subject, target: str, batch: int, threads: int, rounds: int) -> dict[str, Any]:
    """One runtime and batch: milliseconds of all, and how much faster than dense each form of the compact is."""
    inputs = subject.inputs(batch)
    named = {str(form): form for form in RUNTIMES[target].forms}
    calls: dict[str, dict[str, Any]] = {}
    macs = {}
    for side, network in (("dense", subject.dense), ("compact", subject.compact)):
        made = make_forms(CapturedNetwork(network, subject.example), named)
        calls[side] = {name: make_runner(form, inputs, target, threads) for name, form in made.items()}
        macs |= {name: measure(form, subject.example).macs for name, form in made.items()}
    tried = min_times(calls["dense"], TRIAL)
    dense = min(tried, key=tried.__getitem__)
    # The network as it was saved is timed beside its forms.
    as_saved = make_runner(subject.compact, inputs, target, threads)
    taken = time_interleaved({"dense": calls["dense"][dense], "as saved": as_saved, **calls["compact"]}, rounds)
    return {
        "target": target,
        "batch": batch,
        "dense_form": dense,
        "milliseconds": {name: 1e3 * sorted(times)[len(times) // 2] for name, times in taken.items()},
        "macs": macs,
        "speedup": {n: asdict(median_ratio(taken["dense"], times)) for n, times in taken.items() if n != "dense"},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--plan", type=Path, default=PLAN, help="plan.json of a run of ResNet-56")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="one round of ResNet-56 in eager torch, nothing saved")
    args = parser.parse_args()
    found: dict[str, Any] = {}
    with torch_threads(args.threads):
        for name in ["resnet56"] if args.quick else args.networks.split(","):
            build, batches = NETWORKS[name]
            torch.manual_seed(0)
            subject = build(args.plan)
            sizes = {side: measure(getattr(subject, side), subject.example).macs for side in ("dense", "compact")}
            found[name] = {
                "fewer_macs": sizes["dense"] / sizes["compact"],
                "macs": sizes,
                "load": os.getloadavg()[0],
            }
            found[name]["measured"] = measured = []
            for target in ("eager",) if args.quick else TARGETS:
                for batch in (1,) if args.quick else batches:
                    row = forms_of(subject, target, batch, args.threads, 1 if args.quick else args.rounds)
                    measured.append(row)
                    for form, speed in row["speedup"].items():
                        print(f"{name} {target} b{batch} {form}: {speed['median']:.2f}", flush=True)
            if not args.quick:
                save_result("forms", {"plan": args.plan.stem, "rounds": args.rounds, "networks": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
