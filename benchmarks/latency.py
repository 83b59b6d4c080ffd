"""The claim of `--target latency`: the pruned network meets it, on the machine that was measured.

ResNet-56 (3x32x32, batch 64) for 0.6 and 0.4 of the dense network's time, in ONNX Runtime and in torch: landed,
really cut, corrected as a run corrects, and then timed anew, dense and compact in turns, at least 100 pairs.  Time
does not depend on weights, so scores are made up and nothing is trained.  Beside it, at half of the MACs: filters,
streams and whole blocks, and widths in multiples of 8.  Waits for a quiet machine, and saves after every figure.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from typing import Any

import torch
from quiet import wait

from saving import save_result
from sbf_pruner import Budget, Plan, Pruner, Scores
from sbf_pruner.budget import Constraints, Selector
from sbf_pruner.graph import ChannelGraph, network_cost, trace
from sbf_pruner.measurement import (
    COUPLINGS,
    LatencyModel,
    PlanTimer,
    choose_coupling,
    conditions_here,
    constraints_for,
    from_dict,
    load_or_calibrate,
    synthetic_scores,
)
from sbf_pruner.models import resolve
from sbf_pruner.training import LatencyTarget, with_way
from sbf_pruner.utils import busy_cores

RUNTIMES = ("onnxruntime", "eager")
TARGETS = (0.6, 0.4)
HALF = 0.5
WITHIN = 0.05


def timed_pairs(pairs: PlanTimer, plan: Plan, count: int, patience: float) -> dict[str, Any]:
    before = wait(patience)
    found = asdict(pairs.interval(plan, count))
    return {**found, "load_before": before, "load_after": busy_cores()}


def to_target(model: LatencyModel, pairs: PlanTimer, share: float, args: argparse.Namespace) -> dict[str, Any]:
    """Land at a part of the dense network's time, as a run does at its end; then time it anew."""
    network, example = pairs.network, pairs.example
    graph = trace(network, example)
    clock, budget = from_dict(model.to_dict(), graph), Budget(latency=share)
    chosen = choose_coupling(graph, clock, budget, Constraints())
    settings, constraints = with_way(chosen.way, Scores(), Constraints())
    pruner = Pruner(
        network, example, budget=budget, scores=settings, constraints=constraints, clock=clock, graph=graph
    )
    pruner.rank(synthetic_scores(graph, pruner.selector.constraints))
    timed = LatencyTarget(clock, chosen)

    def ratio(plan: Plan) -> float:
        wait(args.patience)
        return pairs.ratio(plan)

    timed.correct_by_measurement(pruner, ratio)
    plan = pruner.plan()
    pruner.detach()
    kept = network_cost(graph, plan.masks(graph))
    return {
        "asked": share,
        **timed.summary(pruner, plan),
        "macs": kept.macs / network_cost(graph, {}).macs,
        "params": kept.params / network_cost(graph, {}).params,
        "pairs": timed_pairs(pairs, plan, args.pairs, args.patience),
    }


def at_half_the_macs(
    graph: ChannelGraph, model: LatencyModel, pairs: PlanTimer, args: argparse.Namespace
) -> list[Any]:
    """What equal MACs are worth in time, by the way they are taken."""
    found = []
    cases = [*((way, 1) for way in COUPLINGS), ("filters", 8), ("streams", 8)]
    for way, unit in cases:
        guards = constraints_for(graph, Constraints(round_to=unit), way)
        assert guards is not None
        masks = Selector(graph, Budget(macs=HALF), guards).choose(synthetic_scores(graph, guards)).masks
        plan = Plan.from_masks(graph.settle(masks))
        left = network_cost(graph, masks).macs / network_cost(graph, {}).macs
        foretold = model.ratio(plan.masks(graph))
        record = {"way": way, "round_to": unit, "macs": left, "foretold": foretold}
        found.append({**record, "pairs": timed_pairs(pairs, plan, args.pairs, args.patience)})
        print(found[-1], flush=True)
    return found


def said(line: str) -> None:
    print(line, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runtimes", default=",".join(RUNTIMES))
    parser.add_argument("--pairs", type=int, default=120)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--patience", type=float, default=120.0, help="seconds to wait for a quiet machine")
    parser.add_argument("--again", action="store_true", help="measure the layers anew")
    args = parser.parse_args()
    found: dict[str, Any] = {}
    torch.manual_seed(0)
    network, example = resolve("resnet56").eval(), torch.zeros(1, 3, 32, 32)
    missed = 0
    for runtime in args.runtimes.split(","):
        conditions = conditions_here(runtime, 64, args.threads)
        began = wait(args.patience)
        model = load_or_calibrate(network, example, conditions, fresh=args.again, report=said)
        held = model.calibration
        pairs = PlanTimer(network, example, conditions)
        found[runtime] = {
            "dense_ms": 1e3 * model.dense_seconds,
            "layers": sum(map(len, model.table.points.values())),
            "coefficients": dict(model.predictor.coefficients),
            "mean_error": held["mean_error"],
            "worst_error": held["worst_error"],
            "networks": [
                {key: one[key] for key in ("way", "share", "measured", "foretold")} for one in held["networks"]
            ],
            "load": began,
            "targets": [],
        }
        print(found[runtime], flush=True)
        for share in TARGETS:
            result = to_target(model, pairs, share, args)
            found[runtime]["targets"].append(result)
            missed += abs(result["pairs"]["median"] / share - 1) > WITHIN
            print(result, flush=True)
            save_result("latency", {"network": "ResNet-56, 3x32x32, batch 64", "runtimes": found})
        found[runtime]["half"] = at_half_the_macs(model.graph, model, pairs, args)
        save_result("latency", {"network": "ResNet-56, 3x32x32, batch 64", "runtimes": found})
    print(f"{missed} of the targets missed by more than {WITHIN:.0%}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
