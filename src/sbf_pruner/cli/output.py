"""Format the results of `sbf` commands as lines of text, one public function per command.

Most take the dictionary that `--json` prints. The table comes first and notes on it below.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..budget.targets import is_missed
from ..compare.method_runs import PAGE, MethodResult
from ..criteria import OWN, describe_method, judged_by
from ..utils.formatting import first_names, format_percentage, pluralize
from .console import boxed, change, percent, share, table


def summary_lines(
    summary: Mapping[str, Any], folder: str, *, scored: bool = False, rate: str = "scores.lr"
) -> list[str]:
    """Format the summary of a run: dense against pruned, the changes, notes, and the run folder.

    With `scored`, the run trained scores, and a note with remedies is added if nothing was removed; `rate` is the
    setting that controls how fast scores move.
    """
    dense, pruned = summary["dense"], summary["pruned"]
    rows = [["", "dense", "pruned", "change"]]
    beside = dense["accuracy"] if dense["accuracy"] is not None else dense.get("given_accuracy")
    points = "" if beside is None else f"{pruned['accuracy'] - beside:+.2f}"
    rows.append(["accuracy", percent(beside), percent(pruned["accuracy"]), points])
    for key, label in (("params", "parameters"), ("macs", "MACs")):
        rows.append([label, f"{dense[key]:,}", f"{pruned[key]:,}", change(dense[key], pruned[key])])
    if "file_bytes" in pruned:  # not in the summaries of older versions
        sizes = [part["file_bytes"] for part in (dense, pruned)]
        rows.append(["file, bytes", *(f"{size:,}" for size in sizes), change(*sizes)])
    times = [part["latency_ms"] for part in (dense, pruned)]
    label = f"latency, batch {summary['latency_batch']}"
    rows.append([label, *(f"{ms:.2f} ms" for ms in times), change(*times)])
    before, after = (sum(layer[when] for layer in summary["layers"].values()) for when in ("before", "after"))
    lines = table(rows, "<>>>")
    if dense["accuracy"] is None:
        known = dense["warmup_accuracy"]
        parts = [] if beside is None else ["the accuracy is that of the network as it was given"]
        parts += [] if known is None else [f"{known:.2f} % after the warm-up"]
        said = ", ".join(parts) or "there was no warm-up"
        lines.append(f"no dense control was trained ({said}; set dense_control=true to compare)")
    if "dense_from" in summary:
        lines.append(f"dense stage: taken over from {summary['dense_from']}")
    method = summary.get("method", OWN)  # older summaries lack it, from when there was only one
    by = "" if method == OWN else f", chosen by {describe_method(method)}"
    lines.append(f"filters kept: {after:,} of {before:,}{by}")
    if scored and method == OWN and before and before == after:
        lines.append(f"nothing was removed; ask for a size (--target macs=0.5), or raise {rate} or scores.penalty")
    lines.append(
        "latency: of the network as it is saved, in eager PyTorch; `sbf bench` times the network on other runtimes"
    )
    if "latency" in summary:
        lines.append(_timed(summary["latency"]))
    if summary["cut_error"] is not None:  # None if the gated network gave no output to compare
        lines.append(f"gated and extracted network differ by {summary['cut_error']:.1e} at most, in float64")
    lines.append(f"run folder: {folder}")
    return lines


def exit_code(summary: Mapping[str, Any]) -> int:
    """Return the exit code of a finished run: 1 if it missed a latency target, else 0."""
    latency = summary.get("latency")
    return int(latency is not None and is_missed(latency["asked"], latency["measured"]))


def _timed(latency: Mapping[str, Any]) -> str:
    """Format the latency target and its result."""
    if latency["measured"] is None:
        found = f"{share(latency['foretold'])} predicted, not measured (another machine, or no such runtime here)"
    else:
        found = f"{share(latency['measured'])} measured against the dense network"
        if is_missed(latency["asked"], latency["measured"]):
            off = latency["measured"] / latency["asked"] - 1
            found += f" (missed by {share(off, 0)}; if the machine was busy, `sbf bench` times it again)"
    way = f"; way: {latency['way']}"
    asked = f"{share(latency['asked'])} in {latency['runtime']}, batch {latency['batch']}"
    return f"latency target: {asked}; {found}{way}"


def export_lines(manifest: Mapping[str, Any]) -> list[str]:
    """Format an export: its files with sizes, the chosen form and why, the accuracy of int8, and the folder."""
    rows = [["file", "bytes"], *([name, f"{held['bytes']:,}"] for name, held in manifest["files"].items())]
    lines = table(rows, "<>")
    chosen = manifest["chosen"]
    times = chosen["milliseconds"]
    for name in sorted(times, key=times.__getitem__):
        lines.append(f"{times[name]:>10.2f} ms  {name}")
    lines.append(f"form: {chosen['why']}")
    for name, apart in manifest.get("differences", {}).items():
        lines.append(f"{name} differs from the saved network by {apart:.1e} at most")
    if "int8" in manifest:
        int8 = manifest["int8"]
        lines.append(f"int8: {int8['accuracy']:.2f} % of the test images, float {int8['float_accuracy']:.2f} %")
    return [*lines, f"exported to: {manifest['folder']}"]


def overview_lines(seen: Mapping[str, Any]) -> list[str]:
    """Format an inspection: prunable layers, coupled groups, followers, layers left alone, and totals."""
    rows = [["layer", "kind", "filters", "map", "parameters", "MACs", "a filter's MACs", "meets", "gated at"]]
    for layer in seen["layers"]:
        met = ",".join(str(place + 1) for place in layer["groups"]) or "-"
        again = f", again at {first_names(layer['later_gates'], 1)}" if layer["later_gates"] else ""
        rows.append(
            [
                *_costs(layer),
                f"{layer['first_filter']['macs']:,}",
                met,
                f"{layer['gated_at']} ({layer['gate']}){again}",
            ]
        )
    lines = table(rows, "<<>>>>><<")
    if seen["groups"]:
        lines += ["", "layers that meet (added or multiplied: they share one layout; concatenated: side by side):"]
        met_rows = [
            [str(place), ", ".join(group["meet"]), first_names(group["layers"], 4)]
            for place, group in enumerate(seen["groups"], start=1)
        ]
        lines += [f"  {line}" for line in table(met_rows, "><<")]
    if seen["followers"]:
        lines += ["", "follow others (no scores of their own, their filters go with those they follow):"]
        rows = [[*_costs(layer), f"follows {first_names(layer['follows'], 3)}"] for layer in seen["followers"]]
        lines += [f"  {line}" for line in table(rows, "<<>>>><")]
    if seen["skipped"]:
        lines += ["", "left alone:"]
        lines += [f"  {line}" for line in table([[s["name"], s["reason"]] for s in seen["skipped"]], "<<")]
    lines.append("")
    lines.append(
        f"{seen['model']}: {len(seen['layers'])} prunable layers with {seen['filters']:,} filters; "
        f"{seen['params']:,} parameters, {seen['macs']:,} MACs"
    )
    return lines


def bench_lines(result: Mapping[str, Any], *, pretty: bool = False) -> list[str]:
    """Format `sbf bench`: dense against compact on each runtime, runtimes left out, and advice."""
    subject, machine = result["subject"], result["environment"]
    rows = [["runtime", "batch", "dense", "compact", "speed-up", "95 % interval", "pairs", "compact form"]]
    for record in result["measured"]:
        speed, where = record["speedup"], "" if record["device"] == "cpu" else f" ({record['device']})"
        rows.append(
            [
                record["runtime"] + where,
                str(record["batch"]),
                *(f"{record[side]['median']:.3g} ms" for side in ("dense_ms", "compact_ms")),
                f"{speed['median']:.2f}x",
                f"{speed['low']:.2f} to {speed['high']:.2f}",
                str(speed["n"]),
                record["form"]["compact"],
            ]
        )
    align = "<>>>>>><"
    lines = [*(boxed(rows, align) if pretty else table(rows, align)), ""]
    macs = [subject[side]["macs"] for side in ("dense", "compact")]
    lines.append(f"MACs of one sample: {macs[0]:,} to {macs[1]:,}, {subject['fewer_macs']:.2f} times fewer")
    for record in result["measured"]:
        tried = sorted(record["tried_ms"]["compact"].items(), key=lambda held: held[1])
        if len(tried) > 1:
            where, dense = f"{record['runtime']}, batch {record['batch']}", record["form"]["dense"]
            listed = "; ".join(f"{name} {ms:.3g}" for name, ms in tried)
            lines.append(f"forms tried on {where} (ms): {listed} (dense as: {dense})")
    lines.append(
        f"{machine['cpu']}, {pluralize(result['settings']['threads'], 'thread')}, torch {machine['torch']}"
    )
    if result["not_rewritten"]:
        lines.append(
            f"both networks were timed as they are, without a form for a runtime: {result['not_rewritten']}"
        )
    lines += [f"{m['runtime']} on {m['device']}: left out, {m['reason']}" for m in result["missing"]]
    return lines + [said if said.startswith(" ") else f"- {said}" for said in result["advice"]]


def latency_lines(result: Mapping[str, Any], *, pretty: bool = False) -> list[str]:
    """Format `sbf latency`: predicted against measured times, and what a latency target would leave."""
    draw = boxed if pretty else table
    rows = [["removed", "share kept", "measured", "predicted", "error"]]
    for one in result["networks"]:
        off = f"{one['foretold'] / one['measured'] - 1:+.1%}"
        rows.append([one["way"], share(one["share"], 0), f"{one['measured']:.3f}", f"{one['foretold']:.3f}", off])
    lines = [*draw(rows, "<>>>>"), ""]
    ways = list(result["targets"][0]["macs_left"])
    rows = [["latency target", *(f"MACs left, {way}" for way in ways), "chosen"]]
    for target in result["targets"]:
        left = [target["macs_left"][way] for way in ways]
        shown = ["cannot" if part is None else share(part) for part in left]
        rows.append([share(target["asked"], 0), *shown, target["way"]])
    lines += [*draw(rows, "<" + ">" * len(ways) + "<"), ""]
    lines.append(
        f"dense: {result['dense_ms']:.3g} ms in {result['runtime']}, batch {result['batch']}, {result['threads']} "
        f"threads, {result['machine']['cpu']}"
    )
    if result["mean_error"] is not None:
        lines.append(
            f"each predicted by a fit to the other networks, from {result['layers']} measured layers: off by "
            f"{share(result['mean_error'])} on average, {share(result['worst_error'])} at most"
        )
    return lines


def frontier_lines(result: Mapping[str, Any], *, pretty: bool = False) -> list[str]:
    """Format `sbf frontier`: what each target leaves, its accuracy, and notes on how to read it."""
    words = {"macs": "MACs", "params": "parameters", "size": "file size", "latency": "time"}[result["of"]]
    clock = result["clock"]
    time = ["time, predicted", "left"] if clock else []
    head = [f"target, {words}", "MACs", "left", "parameters", "left", "file", *time, "filters"]
    head.append("accuracy, recalibrated")
    rows = [head, _frontier_row("all filters", result["dense"])]
    for point in result["points"]:
        name = f"{100 * point['share']:.4g} %"
        lost = [name, *"-" * (len(head) - 2), "cannot be reached"]
        rows.append(_frontier_row(name, point) if point["reached"] else lost)
    if result["smallest"] is not None:
        rows.append(_frontier_row("the smallest possible", result["smallest"]))
    rows.append(_frontier_row("the run's own", result["own"]))
    align = "<" + ">" * (len(head) - 1)
    lines = [*(boxed(rows, align) if pretty else table(rows, align)), ""]
    on = result["recalibrated_on"]
    trained = {
        "dense, after the warm-up": result["dense"]["warmup_accuracy"],
        "dense control": result["dense"]["control_accuracy"],
        "the run's own, fine-tuned": result["own"]["finetuned_accuracy"],
    }
    known = [f"{what}: {percent(accuracy)}" for what, accuracy in trained.items() if accuracy is not None]
    lines += ["; ".join(known)] if known else []
    lines.append(
        f"accuracy on {result['judged_images']:,} {result['judged_on']} images; batch-norm statistics from "
        f"{on['images']:,} training images, nothing retrained"
    )
    if clock:
        lines.append(_clocked(clock))
    if result["judged_on"] == "test":
        lines.append(
            "the recipe holds no images out (data.validation), so a size chosen here is chosen on the test images"
        )
    return [*lines, result["said"]]


def _clocked(clock: Mapping[str, Any]) -> str:
    """Describe the conditions of predicted times, and their error."""
    threads = pluralize(clock["threads"], "thread")
    said = f"times are predicted for {clock['runtime']}, batch {clock['batch']}, {threads}"
    if (cpu := clock["machine"].get("cpu")) is not None:
        said += f", {cpu}"
    if clock["mean_error"] is not None:
        said += f" (off by {share(clock['mean_error'])} on average, {share(clock['worst_error'])} at most)"
    if clock["measured"] is not None:
        said += f"; the run's own network was measured: {share(clock['measured'])}"
    return said


def _frontier_row(target: str, point: Mapping[str, Any]) -> list[str]:
    left = {key: f"{format_percentage(100 * part)} %" for key, part in point["left"].items()}
    sizes = [f"{point['macs']:,}", left["macs"], f"{point['params']:,}", left["params"], f"{point['size']:,} B"]
    time = [f"{point['latency_ms']:.3g} ms", left["latency"]] if "latency_ms" in point else []
    return [target, *sizes, *time, f"{point['filters']:,}", percent(point["accuracy"])]


def _costs(layer: Mapping[str, Any]) -> list[str]:
    size = "x".join(map(str, layer["map_size"])) or "-"
    counts = [str(layer["filters"]), size, f"{layer['params']:,}", f"{format_percentage(layer['macs_share'])} %"]
    return [layer["name"], layer["kind"], *counts]


def compare_lines(found: Sequence[MethodResult], dense: Sequence[float], epochs: int, root: Path) -> list[str]:
    """Format `sbf compare`: the dense network if a control was trained, then a row per method in the given order.

    >>> for line in compare_lines([MethodResult("l1", (90.0, 92.0), (), 0.4, 0.5)], [93.0], 50, Path("runs")):
    ...     print(line)
    method  accuracy          parameters left  MACs left  judges a filter by
    dense   93.00 % (1)                100.0%     100.0%
    l1      91.00 ± 1.41 (2)            40.0%      50.0%  the sum of its absolute weights
    <BLANKLINE>
    accuracy on the test images after the last of 50 epochs, mean ± deviation (seeds)
    report: runs/comparison.html
    folder of all runs: runs
    """
    rows = [["method", "accuracy", "parameters left", "MACs left", "judges a filter by"]]
    if dense:
        rows.append(["dense", _accuracy(dense), share(1.0), share(1.0), ""])
    for one in found:
        sizes = [share(one.params), share(one.macs)]
        rows.append([one.method, _accuracy(one.accuracy), *sizes, judged_by(one.method)])
    note = f"accuracy on the test images after the last of {epochs} epochs, mean ± deviation (seeds)"
    return [*table(rows, "<<>><"), "", note, f"report: {root / PAGE}", f"folder of all runs: {root}"]


def _accuracy(values: Sequence[float]) -> str:
    mean = f"{statistics.fmean(values):.2f}"
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else " %"
    return f"{mean}{spread} ({len(values)})"
