"""The tables of latency targets, from benchmarks/results/latency.json."""

from __future__ import annotations

from typing import Any

from saving import origin

NONE = "Not measured yet."
NAMES = {"onnxruntime": "ONNX Runtime", "eager": "eager"}


def latency(result: dict[str, Any] | None) -> str:
    """What was asked for and what was found."""
    if result is None:
        return NONE
    lines = [f"{result['network']}, made-up scores, nothing trained:", ""]
    lines += [
        "| runtime | dense | asked for | foretold | landings | found (95 %) | way | MACs left |",
        "|---" * 8 + "|",
    ]
    for runtime, found in result["runtimes"].items():
        for target in found["targets"]:
            pairs = target["pairs"]
            cells = [NAMES[runtime], f"{found['dense_ms']:.3g} ms", f"{target['asked']:.2f}"]
            cells += [f"{target['foretold']:.3f}", str(len(target["landings"]))]
            cells += [f"**{pairs['median']:.3f}** ({pairs['low']:.3f} to {pairs['high']:.3f})", target["way"]]
            cells.append(f"{target['macs']:.1%}")
            lines.append(f"| {' | '.join(cells)} |")
    counts = [t["pairs"]["n"] for f in result["runtimes"].values() for t in f["targets"]]
    lines += [
        "",
        f"At least {min(counts)} pairs, dense and compact in turns; the found time is that of pairs taken anew.",
    ]
    for runtime, found in result["runtimes"].items():
        lines.append(
            f"Foretold for {len(found['networks'])} networks that the fit had not seen, {NAMES[runtime]}: off by "
            f"{found['mean_error']:.1%} on average, {found['worst_error']:.1%} at most."
        )
    return "\n".join([*lines, *origin(result)])


def equal_macs(result: dict[str, Any] | None) -> str:
    """What half of the MACs is worth, by the way it is taken."""
    if result is None or not all("half" in found for found in result["runtimes"].values()):
        return NONE
    names = list(result["runtimes"])
    lines = ["| what goes | MACs left | " + " | ".join(f"time left, {NAMES[name]}" for name in names) + " |"]
    lines.append("|---" * (2 + len(names)) + "|")
    for place, first in enumerate(result["runtimes"][names[0]]["half"]):
        label = first["way"] + (f", multiples of {first['round_to']}" if first["round_to"] > 1 else "")
        found = [result["runtimes"][name]["half"][place]["pairs"]["median"] for name in names]
        lines.append(f"| {label} | {first['macs']:.1%} | {' | '.join(f'{ratio:.2f}' for ratio in found)} |")
    return "\n".join([*lines, *origin(result)])
