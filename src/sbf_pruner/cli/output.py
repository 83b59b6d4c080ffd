"""Terminal output of the `sbf` command: results as tables, progress bars, and messages on stderr.

stdout is for results only, so progress and messages go to stderr. Functions named `*_lines` format the result of a
command (in most cases the dictionary that `--json` prints) as a table followed by notes. Tables and bars are drawn
by rich if it is installed, else as plain lines. Of the processes that torchrun starts, only rank 0 prints.
Importing this module does not import torch.
"""

from __future__ import annotations

import errno
import importlib
import io
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ..budget.targets import is_missed
from ..criteria import OWN, describe_method, judged_by
from ..errors import PruningError, RunError
from ..utils.formatting import first_names, format_percentage, pluralize

if TYPE_CHECKING:
    from ..compare.method_runs import MethodResult

Record = dict[str, Any]
Report = Callable[[Record], None]


def table(rows: Sequence[Sequence[str]], align: str) -> list[str]:
    """Format rows as lines with aligned columns, "<" to the left or ">" to the right.

    >>> table([["a", "10"], ["bc", "7"]], "<>")
    ['a   10', 'bc   7']
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(align))]
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True)).rstrip()
        for row in rows
    ]


def boxed(rows: Sequence[Sequence[str]], align: str) -> list[str]:
    """Format rows, of which the first is the header: framed if rich is installed, else as `table` does."""
    try:
        drawn, console = (importlib.import_module(f"rich.{name}") for name in ("table", "console"))
    except ImportError:
        return table(rows, align)
    box = drawn.Table(header_style="bold")
    for head, side in zip(rows[0], align, strict=True):
        box.add_column(head, justify="left" if side == "<" else "right", no_wrap=True)
    for row in rows[1:]:
        box.add_row(*row)
    width = max(len(line) for line in table(rows, align)) + 4 * len(align)
    text = io.StringIO()
    console.Console(width=width, force_terminal=True, file=text).print(box)
    return text.getvalue().rstrip("\n").splitlines()


def percent(value: float | None) -> str:
    """Format an accuracy, or a dash for None."""
    return "-" if value is None else f"{format_percentage(value, 2)} %"


def share(part: float, digits: int = 1) -> str:
    """Format a fraction as a percentage."""
    return f"{format_percentage(100 * part, digits)}%"


def change(before: float, after: float) -> str:
    """Format a relative change in percent, or a dash if the number was zero before."""
    sign = "+" if after >= before else ""
    return f"{sign}{format_percentage(100 * (after / before - 1))} %" if before else "-"


def summary_lines(
    summary: Mapping[str, Any], folder: str, *, scored: bool = False, rate: str = "scores.lr"
) -> list[str]:
    """Format the summary of a run: dense against pruned, the changes, notes, and the run folder.

    If `scored` is true (the run trained scores) and nothing was removed, a note lists remedies; `rate` is the key
    of the setting with the learning rate of the scores.
    """
    dense, pruned = summary["dense"], summary["pruned"]
    accuracy = dense["accuracy"] if dense["accuracy"] is not None else dense.get("given_accuracy")
    points = "" if accuracy is None else f"{pruned['accuracy'] - accuracy:+.2f}"
    rows = [["", "dense", "pruned", "change"], ["accuracy", percent(accuracy), percent(pruned["accuracy"]), points]]
    for key, label in (("params", "parameters"), ("macs", "MACs"), ("file_bytes", "file, bytes")):
        if key in pruned:  # summaries of older versions lack the size of the file
            rows.append([label, f"{dense[key]:,}", f"{pruned[key]:,}", change(dense[key], pruned[key])])
    times = [part["latency_ms"] for part in (dense, pruned)]
    label = f"latency, batch {summary['latency_batch']}"
    rows.append([label, *(f"{ms:.2f} ms" for ms in times), change(*times)])
    before, after = (sum(layer[when] for layer in summary["layers"].values()) for when in ("before", "after"))
    lines = table(rows, "<>>>")
    if dense["accuracy"] is None:
        warmed = dense["warmup_accuracy"]
        parts = [] if accuracy is None else ["the accuracy is that of the network as it was given"]
        parts += [] if warmed is None else [f"{warmed:.2f} % after the warm-up"]
        why = ", ".join(parts) or "there was no warm-up"
        lines.append(f"no dense control was trained ({why}; set dense_control=true to compare)")
    if "dense_from" in summary:
        lines.append(f"dense stage: taken over from {summary['dense_from']}")
    method = summary.get("method", OWN)  # older versions had one method and did not store it
    by = "" if method == OWN else f", chosen by {describe_method(method)}"
    lines.append(f"filters kept: {after:,} of {before:,}{by}")
    if scored and method == OWN and before and before == after:
        lines.append(f"nothing was removed; ask for a size (--target macs=0.5), or raise {rate} or scores.penalty")
    lines.append(
        "latency: of the network as it is saved, in eager PyTorch; `sbf bench` times the network on other runtimes"
    )
    if "latency" in summary:
        lines.append(_latency_note(summary["latency"]))
    if summary["cut_error"] is not None:  # None if the gated network gave no output to compare
        lines.append(f"gated and extracted network differ by {summary['cut_error']:.1e} at most, in float64")
    lines.append(f"run folder: {folder}")
    return lines


def exit_code(summary: Mapping[str, Any]) -> int:
    """Return the exit code of a finished run: 1 if it missed a latency target, else 0."""
    latency = summary.get("latency")
    return int(latency is not None and is_missed(latency["asked"], latency["measured"]))


def _latency_note(latency: Mapping[str, Any]) -> str:
    target, measured = latency["asked"], latency["measured"]
    if measured is None:
        found = f"{share(latency['foretold'])} predicted, not measured (another machine, or no such runtime here)"
    else:
        found = f"{share(measured)} measured against the dense network"
        if is_missed(target, measured):
            off = share(measured / target - 1, 0)
            found += f" (missed by {off}; if the machine was busy, `sbf bench` times it again)"
    conditions = f"{latency['runtime']}, batch {latency['batch']}"
    return f"latency target: {share(target)} in {conditions}; {found}; way: {latency['way']}"


def export_lines(manifest: Mapping[str, Any]) -> list[str]:
    """Format an export: files and their sizes, the chosen form with the reason, int8 accuracy, and the folder."""
    rows = [["file", "bytes"], *([name, f"{file['bytes']:,}"] for name, file in manifest["files"].items())]
    times = manifest["chosen"]["milliseconds"]
    lines = table(rows, "<>")
    lines += [f"{times[name]:>10.2f} ms  {name}" for name in sorted(times, key=times.__getitem__)]
    lines.append(f"form: {manifest['chosen']['why']}")
    for name, error in manifest.get("differences", {}).items():
        lines.append(f"{name} differs from the saved network by {error:.1e} at most")
    if int8 := manifest.get("int8"):
        lines.append(f"int8: {int8['accuracy']:.2f} % of the test images, float {int8['float_accuracy']:.2f} %")
    return [*lines, f"exported to: {manifest['folder']}"]


def overview_lines(seen: Mapping[str, Any]) -> list[str]:
    """Format an inspection: prunable layers, coupled groups, followers, skipped layers, and totals."""
    rows = [["layer", "kind", "filters", "map", "parameters", "MACs", "a filter's MACs", "meets", "gated at"]]
    for layer in seen["layers"]:
        met = ",".join(str(place + 1) for place in layer["groups"]) or "-"
        again = f", again at {first_names(layer['later_gates'], 1)}" if layer["later_gates"] else ""
        gate = f"{layer['gated_at']} ({layer['gate']}){again}"
        rows.append([*_costs(layer), f"{layer['first_filter']['macs']:,}", met, gate])
    lines = table(rows, "<<>>>>><<")
    groups = [
        [str(number), ", ".join(group["meet"]), first_names(group["layers"], 4)]
        for number, group in enumerate(seen["groups"], start=1)
    ]
    followers = [[*_costs(layer), f"follows {first_names(layer['follows'], 3)}"] for layer in seen["followers"]]
    for title, rows, align in (
        (
            "layers that meet (added or multiplied: they share one layout; concatenated: side by side):",
            groups,
            "><<",
        ),
        ("follow others (no scores of their own, their filters go with those they follow):", followers, "<<>>>><"),
        ("left alone:", [[layer["name"], layer["reason"]] for layer in seen["skipped"]], "<<"),
    ):
        if rows:
            lines += ["", title, *(f"  {line}" for line in table(rows, align))]
    total = f"{seen['params']:,} parameters, {seen['macs']:,} MACs"
    prunable = f"{len(seen['layers'])} prunable layers with {seen['filters']:,} filters"
    return [*lines, "", f"{seen['model']}: {prunable}; {total}"]


def bench_lines(result: Mapping[str, Any], *, pretty: bool = False) -> list[str]:
    """Format `sbf bench`: times of both networks on each runtime, runtimes that could not be timed, and advice."""
    subject, machine = result["subject"], result["environment"]
    rows = [["runtime", "batch", "dense", "compact", "speed-up", "95 % interval", "pairs", "compact form"]]
    for record in result["measured"]:
        speed, where = record["speedup"], "" if record["device"] == "cpu" else f" ({record['device']})"
        times = [f"{record[side]['median']:.3g} ms" for side in ("dense_ms", "compact_ms")]
        row = [record["runtime"] + where, str(record["batch"]), *times, f"{speed['median']:.2f}x"]
        row += [f"{speed['low']:.2f} to {speed['high']:.2f}", str(speed["n"]), record["form"]["compact"]]
        rows.append(row)
    align = "<>>>>>><"
    lines = [*(boxed(rows, align) if pretty else table(rows, align)), ""]
    macs = [subject[side]["macs"] for side in ("dense", "compact")]
    lines.append(f"MACs of one sample: {macs[0]:,} to {macs[1]:,}, {subject['fewer_macs']:.2f} times fewer")
    for record in result["measured"]:
        tried = record["tried_ms"]["compact"]
        if len(tried) > 1:
            where, dense = f"{record['runtime']}, batch {record['batch']}", record["form"]["dense"]
            listed = "; ".join(f"{name} {tried[name]:.3g}" for name in sorted(tried, key=tried.__getitem__))
            lines.append(f"forms tried on {where} (ms): {listed} (dense as: {dense})")
    threads = pluralize(result["settings"]["threads"], "thread")
    lines.append(f"{machine['cpu']}, {threads}, torch {machine['torch']}")
    if why := result["not_rewritten"]:
        lines.append(f"both networks were timed as they are, without a form for a runtime: {why}")
    lines += [f"{m['runtime']} on {m['device']}: left out, {m['reason']}" for m in result["missing"]]
    return lines + [text if text.startswith(" ") else f"- {text}" for text in result["advice"]]


def latency_lines(result: Mapping[str, Any], *, pretty: bool = False) -> list[str]:
    """Format `sbf latency`: predicted and measured times, and the MACs that latency targets would leave."""
    draw = boxed if pretty else table
    rows = [["removed", "share kept", "measured", "predicted", "error"]]
    for one in result["networks"]:
        measured, predicted = one["measured"], one["foretold"]
        error = f"{predicted / measured - 1:+.1%}"
        rows.append([one["way"], share(one["share"], 0), f"{measured:.3f}", f"{predicted:.3f}", error])
    lines = [*draw(rows, "<>>>>"), ""]
    ways = list(result["targets"][0]["macs_left"])
    rows = [["latency target", *(f"MACs left, {way}" for way in ways), "chosen"]]
    for target in result["targets"]:
        left = ["cannot" if (part := target["macs_left"][way]) is None else share(part) for way in ways]
        rows.append([share(target["asked"], 0), *left, target["way"]])
    lines += [*draw(rows, "<" + ">" * len(ways) + "<"), ""]
    conditions = f"{result['runtime']}, batch {result['batch']}, {result['threads']} threads"
    lines.append(f"dense: {result['dense_ms']:.3g} ms in {conditions}, {result['machine']['cpu']}")
    if result["mean_error"] is not None:
        lines.append(
            f"each predicted by a fit to the other networks, from {result['layers']} measured layers: off by "
            f"{share(result['mean_error'])} on average, {share(result['worst_error'])} at most"
        )
    return lines


def frontier_lines(result: Mapping[str, Any], *, pretty: bool = False) -> list[str]:
    """Format `sbf frontier`: size and accuracy of the network for each target, and notes on how to read them."""
    words = {"macs": "MACs", "params": "parameters", "size": "file size", "latency": "time"}[result["of"]]
    clock = result["clock"]
    time = ["time, predicted", "left"] if clock else []
    head = [f"target, {words}", "MACs", "left", "parameters", "left", "file", *time, "filters"]
    head.append("accuracy, recalibrated")
    rows = [head, _frontier_row("all filters", result["dense"])]
    for point in result["points"]:
        name = f"{100 * point['share']:.4g} %"
        unreached = [name, *"-" * (len(head) - 2), "cannot be reached"]
        rows.append(_frontier_row(name, point) if point["reached"] else unreached)
    if result["smallest"] is not None:
        rows.append(_frontier_row("the smallest possible", result["smallest"]))
    rows.append(_frontier_row("the run's own", result["own"]))
    align = "<" + ">" * (len(head) - 1)
    lines = [*(boxed(rows, align) if pretty else table(rows, align)), ""]
    dense, own = result["dense"], result["own"]
    trained = {"dense, after the warm-up": dense["warmup_accuracy"], "dense control": dense["control_accuracy"]}
    trained["the run's own, fine-tuned"] = own["finetuned_accuracy"]
    if known := [f"{what}: {percent(accuracy)}" for what, accuracy in trained.items() if accuracy is not None]:
        lines.append("; ".join(known))
    images = f"{result['judged_images']:,} {result['judged_on']} images"
    recalibrated = f"batch-norm statistics from {result['recalibrated_on']['images']:,} training images"
    lines.append(f"accuracy on {images}; {recalibrated}, nothing retrained")
    lines += [_clock_note(clock)] if clock else []
    if result["judged_on"] == "test":
        lines.append(
            "the recipe holds no images out (data.validation), so a size chosen here is chosen on the test images"
        )
    return [*lines, result["said"]]


def _clock_note(clock: Mapping[str, Any]) -> str:
    threads = pluralize(clock["threads"], "thread")
    text = f"times are predicted for {clock['runtime']}, batch {clock['batch']}, {threads}"
    if (cpu := clock["machine"].get("cpu")) is not None:
        text += f", {cpu}"
    if clock["mean_error"] is not None:
        text += f" (off by {share(clock['mean_error'])} on average, {share(clock['worst_error'])} at most)"
    if clock["measured"] is not None:
        text += f"; the run's own network was measured: {share(clock['measured'])}"
    return text


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

    >>> from sbf_pruner.compare.method_runs import MethodResult
    >>> l1 = MethodResult("l1", (90.0, 92.0), (), 0.4, 0.5)
    >>> print("\\n".join(compare_lines([l1], [93.0], 50, Path("runs"))))
    method  accuracy          parameters left  MACs left  judges a filter by
    dense   93.00 % (1)                100.0%     100.0%
    l1      91.00 ± 1.41 (2)            40.0%      50.0%  the sum of its absolute weights
    <BLANKLINE>
    accuracy on the test images after the last of 50 epochs, mean ± deviation (seeds)
    report: runs/comparison.html
    folder of all runs: runs
    """
    from ..compare.method_runs import PAGE

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


@contextmanager
def progress(total: int, *, quiet: bool = False, stream: TextIO | None = None) -> Iterator[Report]:
    """Yield a function that takes the record of an epoch and shows the progress.

    It updates a bar if rich is installed and the stream is a terminal, else prints a line; nothing if `quiet`.
    """
    stream = stream or sys.stderr
    rich = _rich(stream)
    if quiet:
        yield lambda record: None
    elif rich is None:
        yield _print_epochs(stream)
    else:
        columns = [rich.MofNCompleteColumn(), "{task.fields[facts]}", rich.TimeRemainingColumn()]
        with _bar(rich, stream, *columns) as bar:
            task = bar.add_task("starting", total=total, facts="")

            def show(record: Record) -> None:
                bar.update(task, completed=record["done"], description=_stage(record), facts=_facts(record))

            yield show


def _rich(stream: TextIO) -> Any:
    """Return the module rich.progress, or None if it is not installed or the stream is no terminal."""
    try:
        return importlib.import_module("rich.progress") if stream.isatty() else None
    except ImportError:
        return None


def _bar(rich: Any, stream: TextIO, *columns: Any) -> Any:
    console = importlib.import_module("rich.console").Console(file=stream)
    return rich.Progress("[bold]{task.description}", rich.BarColumn(), *columns, console=console)


@contextmanager
def with_monitors(
    report: Report, folder: Path, *, live: str | None = None, tensorboard: bool = False, fresh: bool = True
) -> Iterator[Report]:
    """Yield `report` extended to write TensorBoard events, and serve the live page meanwhile, each if requested."""
    reports = [report]
    with ExitStack() as stack:
        if tensorboard:
            from ..report.live import tensorboard_log

            reports.append(stack.enter_context(tensorboard_log(folder)))
        if live is not None:
            from ..report.live import PORT, live_view

            if live and not live.isdigit():
                raise PruningError(f"--live {live!r}: a port is a number from 1 to 65535")
            address = stack.enter_context(live_view(folder, int(live or PORT), fresh=fresh))
            print_message(f"live at {address}")

        def report_all(record: Record) -> None:
            for each in reports:
                each(record)

        yield report_all


@contextmanager
def transfer(*, quiet: bool = False, stream: TextIO | None = None) -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function that shows a transfer, given a description, the bytes done and the total (0 if unknown)."""
    stream = stream or sys.stderr
    rich = _rich(stream)
    if quiet:
        yield lambda what, done, total: None
    elif rich is None:
        yield _print_tenths(stream)
    else:
        with _bar(rich, stream, rich.DownloadColumn(), rich.TransferSpeedColumn()) as bar:
            tasks: dict[str, Any] = {}

            def show(what: str, done: int, total: int) -> None:
                if not total:
                    bar.console.print(what, highlight=False, soft_wrap=True, markup=False)
                    return
                if what not in tasks:
                    tasks[what] = bar.add_task(what.partition(" ")[0], total=total)
                bar.update(tasks[what], completed=done)

            yield show


def _print_tenths(stream: TextIO) -> Callable[[str, int, int], None]:
    """Return a function that prints one plain line per description, and one for every tenth of a transfer."""
    printed = "", 0

    def show(what: str, done: int, total: int) -> None:
        nonlocal printed
        tenth = 10 * done // total if total else 0
        if (what, tenth) != printed:
            printed = what, tenth
            size = f": {done / 1e6:.1f} of {total / 1e6:.1f} MB" if total else ""
            print(what + size, file=stream, flush=True)

    return show


def _print_epochs(stream: TextIO) -> Report:
    """Return a function that prints one plain line per epoch, with the time left."""
    start: tuple[int, float] | None = None  # epochs done before the first one shown, and its start time

    def show(record: Record) -> None:
        nonlocal start
        done, total = record["done"], record["total"]
        # Time is counted from the start of the first epoch, because earlier work (measuring layers) does not recur.
        start = start or (done - 1, time.perf_counter() - record["seconds"])
        left = (time.perf_counter() - start[1]) / (done - start[0]) * (total - done)
        where = f"[{done:>{len(str(total))}}/{total}] {_stage(record)}"
        print(f"{where:<32} {_facts(record)}  {_clock(left)} left", file=stream, flush=True)

    return show


def _stage(record: Record) -> str:
    cycle = f" {record['cycle']}" if record["cycle"] else ""
    return f"{record['phase']}{cycle}, epoch {record['epoch']}/{record['epochs']}"


def _facts(record: Record) -> str:
    which = "test" if record["validation_accuracy"] is None else "validation"
    accuracy = f"train {percent(record['train_accuracy'])}  {which} {percent(record[f'{which}_accuracy'])}"
    filters = f"{record['filters']}/{record['filters_total']}"
    return f"loss {record['loss']:.3f}  {accuracy}  filters {filters}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def is_first() -> bool:
    """Return True in the process of rank 0, the only one that prints."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def silence_other_ranks() -> Iterator[None]:
    """Silence stdout and stderr of all ranks but 0 while the context is open."""
    if is_first():
        yield
        return
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


@contextmanager
def log_to_stderr(*, quiet: bool) -> Iterator[None]:
    """Print the package's log records on stderr while the context is open: warnings, and the progress of training.

    If `quiet` is true, a null handler is installed, because logging prints warnings if there is no handler.
    """
    package, training = logging.getLogger("sbf_pruner"), logging.getLogger("sbf_pruner.training")
    handler = logging.NullHandler() if quiet else logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("sbf: %(message)s"))
    before = training.level
    package.addHandler(handler)
    try:
        if not quiet:
            training.setLevel(logging.INFO)
        yield
    finally:
        package.removeHandler(handler)
        training.setLevel(before)


def check_single_process(command: str) -> None:
    """Raise a RunError if several processes were started for a command other than `run`."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count > 1 and command != "run":
        raise RunError(f"sbf {command} works in one process, and {count} were started; leave torchrun out")


def print_error(error: PruningError) -> None:
    """Print an error so that it appears once, whichever rank raised it.

    An error that only one rank raises (`error.alone`) is printed to the original stderr on ranks other than 0,
    where `silence_other_ranks` has redirected the current one.
    """
    hidden = error.alone and not is_first()
    print(f"sbf: {error}", file=sys.__stderr__ if hidden else sys.stderr, flush=True)


def print_message(line: str) -> None:
    """Print a message on stderr."""
    print(f"sbf: {line}", file=sys.stderr, flush=True)


def message_printer(*, quiet: bool) -> Callable[[str], None]:
    """Return the function that prints progress messages; it prints nothing if `quiet`."""
    return (lambda line: None) if quiet else print_message


def report_machine_failure(error: Exception) -> bool:
    """Print a line about a lost process or a lack of memory or disk; return False, unprinted, for other errors."""
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    lost = ("onnection closed", "onnection reset", "Broken pipe")
    if several and any(words in str(error) for words in lost):
        print_message("another process of this run has ended, and this one cannot go on alone")
    elif isinstance(error, MemoryError) or any(text in str(error) for text in ("out of memory", "allocate memory")):
        # The message is searched, because torch has an error class only for the memory of a GPU.
        print_message(f"not enough memory ({' '.join(str(error).split())}); ask for less")
    elif isinstance(error, OSError) and is_first():  # on other ranks the message would be silenced
        full = error.errno == errno.ENOSPC or "No space left" in str(error)
        line = f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"
        print_message(f"{line}; make room, then go on (a run: with --resume)" if full else line)
    else:
        return False
    return True
