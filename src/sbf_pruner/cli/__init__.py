"""The `sbf` command: run a subcommand and print its result.

Exit codes: 0 for success; 1 for a missed latency target, or a failure outside the input (memory, disk, a lost
process); 2 for an error that the user can repair (one sentence on stderr); 130 for SIGINT; 143 for SIGTERM.
Subcommands import torch only when they need it, so that `sbf --help` answers at once.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..criteria import METHODS, OWN
from ..errors import DataError, PruningError, RunError, Stopped, suggestion
from ..utils import lazy_exports
from .arguments import (
    STDOUT,
    default_input,
    json_file,
    known_recipe,
    make_parser,
    parse_ints,
    parse_names,
    parse_option,
    parse_shape,
    recipe_overrides,
    resume_command,
    target_file,
)
from .console import (
    check_single_process,
    is_first,
    log_to_stderr,
    message_printer,
    print_error,
    print_message,
    report_machine_failure,
    silence_other_ranks,
)

if TYPE_CHECKING:
    from ..training.recipe import Recipe


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with the given arguments and return its exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = make_parser()
    arguments = parser.parse_args(given)
    if arguments.command is None:
        parser.print_help()
        return 0
    with silence_other_ranks(), log_to_stderr(quiet=getattr(arguments, "quiet", False)):
        return _answered(arguments, given)


def _answered(arguments: argparse.Namespace, given: Sequence[str]) -> int:
    try:
        check_single_process(arguments.command)
        code = _COMMANDS[arguments.command](arguments, given)
        sys.stdout.flush()
        return code
    except PruningError as error:
        print_error(error)
        return 2
    except KeyboardInterrupt:
        print("sbf: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of stdout, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (MemoryError, RuntimeError, OSError) as error:
        if not report_machine_failure(error):
            raise
        return 1


def _run(arguments: argparse.Namespace, given: Sequence[str]) -> int:
    recipe, named = _recipe(arguments)  # before the training imports, so that errors in the recipe come sooner

    from ..training.run import fit
    from ..training.run_folder import RunFolder, build_dense
    from ..training.schedule import score_rate_key, total_epochs
    from .console import progress, with_monitors
    from .output import exit_code, summary_lines

    folder = RunFolder.of(recipe, arguments.run)
    if is_first():
        folder.check(recipe, resume=arguments.resume, force=arguments.force)
    others = [Path(arguments.dense_from)] if arguments.dense_from else []
    trust = named or arguments.trust
    model = build_dense(recipe, folder.origin(*others, trust=trust, resume=arguments.resume))
    try:
        with (
            progress(total_epochs(recipe), quiet=arguments.quiet) as report,
            with_monitors(
                report,
                folder.path,
                live=arguments.live if is_first() else None,
                tensorboard=arguments.tensorboard and is_first(),
                fresh=not arguments.resume,
            ) as reports,
        ):
            result = fit(
                model,
                recipe,
                run=folder.path,
                resume=arguments.resume,
                force=arguments.force,
                dense_from=arguments.dense_from,
                trust=trust,
                report=reports,
            )
    except KeyboardInterrupt as interrupt:
        return _stopped(interrupt, resume_command(given) if folder.begun else "")
    if arguments.json:
        print(json.dumps({**result.summary, "folder": os.fspath(result.folder)}, indent=2))
        return exit_code(result.summary)
    if result.was_finished:
        print(f"{result.folder} was finished already; nothing was trained\n")
    scored, rate = recipe.phases.cycles > 0, score_rate_key(recipe)
    lines = summary_lines(result.summary, os.fspath(result.folder), scored=scored, rate=rate)
    if (page := result.folder / "report.html").is_file():
        lines.insert(-1, f"report: {page}")
    print("\n".join(lines))
    return exit_code(result.summary)


def _recipe(arguments: argparse.Namespace) -> tuple[Recipe, bool]:
    """Return the recipe of `sbf run` with its overrides, and whether the user named it.

    Without a name, `--resume` takes the recipe from the run folder.
    """
    from ..training.recipe import load_recipe

    if arguments.recipe is None and arguments.live and not arguments.live.isdigit():
        arguments.recipe, arguments.live = arguments.live, ""  # `--live RECIPE` parses it as a port
    named = not (arguments.recipe is None and arguments.resume)
    if not named:
        if not arguments.run:
            raise RunError("name the folder of the run to resume, such as --run runs/digits-seed0")
        from ..training.run_folder import RunFolder

        folder = RunFolder(Path(arguments.run))
        if not folder.begun:
            raise RunError(f"there is no run to resume in {arguments.run}; name a recipe to begin one")
        folder.read_recipe()  # raises an error with a remedy if the file is damaged
        arguments.recipe = folder.recipe
    overrides = recipe_overrides(arguments.target, arguments.set)
    overrides += [] if arguments.seed is None else [f"seed={arguments.seed}"]
    return load_recipe(known_recipe(arguments.recipe), overrides), named


def _compare(arguments: argparse.Namespace, given: Sequence[str]) -> int:
    methods, seeds = (
        parse_names("--methods", arguments.methods, (OWN, *METHODS)),
        parse_ints("--seeds", arguments.seeds),
    )

    from ..training.recipe import load_recipe

    recipe = load_recipe(known_recipe(arguments.recipe), recipe_overrides(arguments.target, arguments.set))

    from ..compare.method_runs import check_methods, finished_before, plan_runs, rank_methods, write_comparison
    from ..training.schedule import total_epochs
    from .console import progress
    from .output import compare_lines

    root, summaries = Path(arguments.run or f"runs/{recipe.name}-compared"), []
    check_methods(entrants := plan_runs(recipe, methods, seeds, root))
    try:
        for place, entrant in enumerate(entrants, 1):
            message_printer(quiet=arguments.quiet)(f"run {place} of {len(entrants)}: {entrant.folder.path}")
            with progress(total_epochs(entrant.recipe), quiet=arguments.quiet) as report:
                summaries.append(entrant.run(report).summary)
    except KeyboardInterrupt as interrupt:
        return _stopped(interrupt, f"sbf {shlex.join(given)}")
    runs = [entrant.folder for entrant in entrants]
    for folder in finished_before(recipe, entrants, root):
        runs.append(folder)
        summaries.append(folder.read_summary())
    result = write_comparison(root, [folder.path for folder in runs], summaries)
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        print("\n".join(compare_lines(rank_methods(summaries), result["dense_accuracy"], result["epochs"], root)))
    return 0


def _report(arguments: argparse.Namespace, given: Sequence[str]) -> int:
    target = target_file("--to", arguments.to, (".html",))

    from ..report import write_report

    print(write_report(arguments.runs, target))
    return 0


def _data(arguments: argparse.Namespace, given: Sequence[str]) -> int:
    if arguments.name != "cifar10":
        hint = suggestion(arguments.name, ["cifar10"])
        raise DataError(f"no data set called {arguments.name!r} is fetched from elsewhere; {hint}")

    from ..training.data.cifar10 import data_folders, default_folder, prepare_cifar10
    from .console import transfer

    target = Path(arguments.to).expanduser() if arguments.to else default_folder()
    with transfer(quiet=arguments.quiet) as report:
        path = prepare_cifar10(arguments.source, target, report)
    print(path)
    if target.resolve() not in [folder.resolve() for folder in data_folders()] and not arguments.quiet:
        print(f"sbf: recipes find it with --set data.path={shlex.quote(str(path))}", file=sys.stderr)
    return 0


def _inspect(arguments: argparse.Namespace, given: Sequence[str]) -> int:
    if arguments.model is None and arguments.json not in (None, STDOUT):
        arguments.model, arguments.json = arguments.json, STDOUT  # `--json MODEL` parses it as a file
    if arguments.model is None:
        raise PruningError("name a model to inspect: a bundled one such as resnet56, torchvision:NAME, timm:NAME "
                           "or package.module:callable")  # fmt: skip
    shapes = [parse_shape(text) for text in arguments.input or [default_input(arguments.model)]]
    options = dict(parse_option(text) for text in arguments.option)
    graph = target_file("--graph", arguments.graph, (".svg", ".html"))
    facts = json_file(arguments.json)

    import torch

    from ..models import resolve
    from ..report.inspection import inspect_model
    from .output import overview_lines

    model = resolve(arguments.model, **{"in_channels": shapes[0][0], **options})
    seen = inspect_model(model, tuple(torch.zeros(1, *shape) for shape in shapes))
    text = json.dumps(seen.facts, indent=2)
    drawn = ""
    if graph is not None:
        from ..report.graph_drawing import draw

        drawn = draw(seen, graph.suffix)
    _write({graph: drawn, facts: text})
    return _show(arguments, text, overview_lines(seen.facts))


def _bench(arguments: argparse.Namespace, given: Sequence[str]) -> int:
    facts = json_file(arguments.json)
    if arguments.save and arguments.plan:
        raise PruningError(
            "--save writes into a run's folder, and a model with --plan has none; use --json FILE.json"
        )
    shapes = [parse_shape(text) for text in arguments.input]
    options = dict(parse_option(text) for text in arguments.option)
    if not arguments.plan and (shapes or options):
        raise PruningError("--input and --option apply to a model with --plan; a run has its own")

    from ..compare.bench import Subject, read_settings, run_bench
    from .output import bench_lines

    settings = read_settings(
        arguments.batch, arguments.runtimes, arguments.device, arguments.pairs, arguments.threads
    )
    if arguments.plan:
        subject = Subject.of_plan(
            arguments.subject, shapes or [parse_shape(default_input(arguments.subject))], options, arguments.plan
        )
    else:
        subject = Subject.of_run(arguments.subject, trust=arguments.trust)
    kept = target_file("--save", f"{arguments.subject}/bench.json", (".json",)) if arguments.save else None
    result = run_bench(subject, settings, message_printer(quiet=arguments.quiet))
    text = json.dumps(result, indent=2)
    _write({facts: text, kept: text})
    return _show(arguments, text, bench_lines(result, pretty=sys.stdout.isatty()))


def _latency(arguments: argparse.Namespace, given: Sequence[str]) -> int:
    facts = json_file(arguments.json)
    out = target_file("--out", arguments.out, (".json",), facts)
    shapes = [parse_shape(text) for text in arguments.input]
    options = dict(parse_option(text) for text in arguments.option)

    from ..compare.bench import LatencyOptions, latency_model_of, latency_summary, resolve_subject
    from .output import latency_lines

    request = LatencyOptions(arguments.runtime, arguments.batch, arguments.threads, arguments.again)
    usual = parse_shape(default_input(arguments.subject))
    network, example, ignore = resolve_subject(arguments.subject, shapes, options, usual)
    model = latency_model_of(network, example, ignore, request, message_printer(quiet=arguments.quiet))
    result = latency_summary(arguments.subject, model)
    text = json.dumps(result, indent=2)
    _write({out: json.dumps(model.to_dict(), indent=1), facts: text})
    return _show(arguments, text, latency_lines(result, pretty=sys.stdout.isatty()))


def _frontier(arguments: argparse.Namespace, given: Sequence[str]) -> int:
    facts = json_file(arguments.json)
    drawing = target_file("--draw", arguments.draw, (".svg", ".html"))

    from ..compare.frontier import USUAL, FrontierOptions, draw_frontier, run_frontier
    from .output import frontier_lines

    at = USUAL if arguments.at is None else [text.strip() for text in arguments.at.split(",") if text.strip()]
    clock = {"runtime": arguments.runtime, "batch": arguments.batch}
    request = FrontierOptions(arguments.of, at, arguments.batches, arguments.device, **clock, trust=arguments.trust)
    result = run_frontier(arguments.run, request, message_printer(quiet=arguments.quiet))
    text = json.dumps(result, indent=2)
    _write({drawing: draw_frontier(result, drawing.suffix) if drawing is not None else "", facts: text})
    return _show(arguments, text, frontier_lines(result, pretty=sys.stdout.isatty()))


def _export(arguments: argparse.Namespace, given: Sequence[str]) -> int:
    if arguments.batch < 1 or (arguments.threads is not None and arguments.threads < 1):
        raise PruningError("--batch and --threads count samples and threads: give at least 1")

    from ..export import ExportOptions, export_run
    from .output import export_lines

    request = ExportOptions(
        formats=tuple(name.strip() for name in arguments.formats.split(",") if name.strip()),
        target=arguments.target,
        batch=arguments.batch,
        threads=arguments.threads,
        force=arguments.force,
        trust=arguments.trust,
    )
    manifest = export_run(arguments.run, arguments.to, request, message_printer(quiet=arguments.quiet))
    print(json.dumps(manifest, indent=2) if arguments.json else "\n".join(export_lines(manifest)))
    return 0


def _stopped(interrupt: KeyboardInterrupt, command: str) -> int:
    """Print what was saved and the command that continues, if there is one; return the exit code."""
    stopped = interrupt if isinstance(interrupt, Stopped) else Stopped(signal.SIGINT)
    print_message("; ".join([stopped.saved or "stopped", *([f"continue with: {command}"] if command else [])]))
    return 128 + stopped.signal


def _write(files: Mapping[Path | None, str]) -> None:
    """Write each text, with a final newline, to its path; entries whose path is None are skipped."""
    from ..utils.files import write_text

    for path, text in files.items():
        if path is not None:
            write_text(path, text if text.endswith("\n") else f"{text}\n")
            print_message(f"wrote {path}")


def _show(arguments: argparse.Namespace, text: str, lines: Sequence[str]) -> int:
    """Print the result: as JSON if `--json` was given without a file, else as a table. Return exit code 0."""
    print(text if arguments.json == STDOUT else "\n".join(lines))
    return 0


_COMMANDS = {
    "run": _run,
    "compare": _compare,
    "frontier": _frontier,
    "inspect": _inspect,
    "bench": _bench,
    "latency": _latency,
    "export": _export,
    "report": _report,
    "data": _data,
}

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "arguments": ("make_parser",),
        "console": (
            "progress",
            "transfer",
        ),
        "output": (
            "bench_lines",
            "frontier_lines",
            "summary_lines",
        ),
    },
)
