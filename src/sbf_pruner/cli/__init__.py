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
from typing import TYPE_CHECKING, Any

from ..criteria import METHODS, OWN
from ..errors import DataError, PruningError, RunError, Stopped, suggestion
from . import arguments, output
from .arguments import make_parser
from .output import bench_lines, frontier_lines, progress, summary_lines, transfer

if TYPE_CHECKING:
    from ..training.recipe import Recipe

__all__ = ["bench_lines", "frontier_lines", "main", "make_parser", "progress", "summary_lines", "transfer"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with the given arguments and return its exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = make_parser()
    args = parser.parse_args(given)
    if args.command is None:
        parser.print_help()
        return 0
    with output.silence_other_ranks(), output.log_to_stderr(quiet=getattr(args, "quiet", False)):
        try:
            output.check_single_process(args.command)
            code = _COMMANDS[args.command](args, given)
            sys.stdout.flush()
            return code
        except PruningError as error:
            output.print_error(error)
            return 2
        except KeyboardInterrupt:
            print("sbf: stopped", file=sys.stderr)
            return 130
        except BrokenPipeError:  # the reader of stdout, such as `head`, has closed the pipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        except (MemoryError, RuntimeError, OSError) as error:
            if not output.report_machine_failure(error):
                raise
            return 1


def _run(args: argparse.Namespace, given: Sequence[str]) -> int:
    recipe, named = _recipe(args)  # before the slow imports, so that errors in the recipe are reported sooner

    from ..training.run import fit
    from ..training.run_folder import RunFolder, build_dense
    from ..training.schedule import score_rate_key, total_epochs

    folder = RunFolder.of(recipe, args.run)
    if output.is_first():
        folder.check(recipe, resume=args.resume, force=args.force)
    others = [Path(args.dense_from)] if args.dense_from else []
    trust = named or args.trust
    model = build_dense(recipe, folder.origin(*others, trust=trust, resume=args.resume))
    options = {name: getattr(args, name) for name in ("resume", "force", "dense_from")}
    monitors = {"live": args.live, "tensorboard": args.tensorboard} if output.is_first() else {}
    try:
        with (
            progress(total_epochs(recipe), quiet=args.quiet) as report,
            output.with_monitors(report, folder.path, fresh=not args.resume, **monitors) as reports,
        ):
            result = fit(model, recipe, run=folder.path, trust=trust, report=reports, **options)
    except KeyboardInterrupt as interrupt:
        return _stopped(interrupt, arguments.resume_command(given) if folder.begun else "")
    if args.json:
        print(json.dumps({**result.summary, "folder": os.fspath(result.folder)}, indent=2))
        return output.exit_code(result.summary)
    if result.was_finished:
        print(f"{result.folder} was finished already; nothing was trained\n")
    scored, rate = recipe.phases.cycles > 0, score_rate_key(recipe)
    lines = summary_lines(result.summary, os.fspath(result.folder), scored=scored, rate=rate)
    if (page := result.folder / "report.html").is_file():
        lines.insert(-1, f"report: {page}")
    print("\n".join(lines))
    return output.exit_code(result.summary)


def _recipe(args: argparse.Namespace) -> tuple[Recipe, bool]:
    """Return the recipe of `sbf run` with its overrides, and True if the user named it.

    If no recipe is named, `--resume` reads it from the run folder.
    """
    from ..training.recipe import load_recipe

    if args.recipe is None and args.live and not args.live.isdigit():
        args.recipe, args.live = args.live, ""  # argparse takes `--live RECIPE` as a port
    named = not (args.recipe is None and args.resume)
    if not named:
        from ..training.run_folder import RunFolder

        if not args.run:
            raise RunError("name the folder of the run to resume, such as --run runs/digits-seed0")
        folder = RunFolder(Path(args.run))
        if not folder.begun:
            raise RunError(f"there is no run to resume in {args.run}; name a recipe to begin one")
        folder.read_recipe()  # raises an error with a remedy if the file is damaged
        args.recipe = folder.recipe
    overrides = arguments.recipe_overrides(args.target, args.set)
    overrides += [] if args.seed is None else [f"seed={args.seed}"]
    return load_recipe(arguments.known_recipe(args.recipe), overrides), named


def _compare(args: argparse.Namespace, given: Sequence[str]) -> int:
    methods = arguments.parse_names("--methods", args.methods, (OWN, *METHODS))
    seeds = arguments.parse_ints("--seeds", args.seeds)

    from ..training.recipe import load_recipe

    recipe = load_recipe(arguments.known_recipe(args.recipe), arguments.recipe_overrides(args.target, args.set))

    from ..compare.method_runs import check_methods, finished_before, plan_runs, rank_methods, write_comparison
    from ..training.schedule import total_epochs

    root, summaries = Path(args.run or f"runs/{recipe.name}-compared"), []
    check_methods(entrants := plan_runs(recipe, methods, seeds, root))
    try:
        for place, entrant in enumerate(entrants, 1):
            output.message_printer(quiet=args.quiet)(f"run {place} of {len(entrants)}: {entrant.folder.path}")
            with progress(total_epochs(entrant.recipe), quiet=args.quiet) as report:
                summaries.append(entrant.run(report).summary)
    except KeyboardInterrupt as interrupt:
        return _stopped(interrupt, f"sbf {shlex.join(given)}")
    earlier = finished_before(recipe, entrants, root)
    summaries += [folder.read_summary() for folder in earlier]
    folders = [*(entrant.folder for entrant in entrants), *earlier]
    result = write_comparison(root, [folder.path for folder in folders], summaries)
    ranked = rank_methods(summaries)
    lines = output.compare_lines(ranked, result["dense_accuracy"], result["epochs"], root)
    print(json.dumps(result, indent=2) if args.json else "\n".join(lines))
    return 0


def _report(args: argparse.Namespace, given: Sequence[str]) -> int:
    target = arguments.target_file("--to", args.to, (".html",))

    from ..report import write_report

    print(write_report(args.runs, target))
    return 0


def _data(args: argparse.Namespace, given: Sequence[str]) -> int:
    if args.name != "cifar10":
        hint = suggestion(args.name, ["cifar10"])
        raise DataError(f"no data set called {args.name!r} is fetched from elsewhere; {hint}")

    from ..training.data.cifar10 import data_folders, default_folder, prepare_cifar10

    target = Path(args.to).expanduser() if args.to else default_folder()
    with transfer(quiet=args.quiet) as report:
        path = prepare_cifar10(args.source, target, report)
    print(path)
    if target.resolve() not in [folder.resolve() for folder in data_folders()] and not args.quiet:
        print(f"sbf: recipes find it with --set data.path={shlex.quote(str(path))}", file=sys.stderr)
    return 0


def _inspect(args: argparse.Namespace, given: Sequence[str]) -> int:
    if args.model is None and args.json not in (None, arguments.STDOUT):
        args.model, args.json = args.json, arguments.STDOUT  # argparse takes `--json MODEL` as a file
    if args.model is None:
        names = "a bundled one such as resnet56, torchvision:NAME, timm:NAME or package.module:callable"
        raise PruningError(f"name a model to inspect: {names}")
    shapes, options = _network_options(args)
    shapes = shapes or [arguments.parse_shape(arguments.default_input(args.model))]
    graph = arguments.target_file("--graph", args.graph, (".svg", ".html"))
    facts = arguments.json_file(args.json)

    import torch

    from ..models import resolve
    from ..report.graph_drawing import draw
    from ..report.inspection import inspect_model

    model = resolve(args.model, **{"in_channels": shapes[0][0], **options})
    seen = inspect_model(model, tuple(torch.zeros(1, *shape) for shape in shapes))
    files = {graph: draw(seen, graph.suffix)} if graph is not None else {}
    return _finish(args, files, [facts], seen.facts, output.overview_lines(seen.facts))


def _bench(args: argparse.Namespace, given: Sequence[str]) -> int:
    facts = arguments.json_file(args.json)
    if args.save and args.plan:
        raise PruningError(
            "--save writes into a run's folder, and a model with --plan has none; use --json FILE.json"
        )
    shapes, options = _network_options(args)
    if not args.plan and (shapes or options):
        raise PruningError("--input and --option apply to a model with --plan; a run has its own")

    from ..compare.bench import Subject, read_settings, run_bench

    settings = read_settings(args.batch, args.runtimes, args.device, args.pairs, args.threads)
    if args.plan:
        shapes = shapes or [arguments.parse_shape(arguments.default_input(args.subject))]
        subject = Subject.of_plan(args.subject, shapes, options, args.plan)
    else:
        subject = Subject.of_run(args.subject, trust=args.trust)
    saved = arguments.target_file("--save", f"{args.subject}/bench.json", (".json",)) if args.save else None
    result = run_bench(subject, settings, output.message_printer(quiet=args.quiet))
    return _finish(args, {}, [facts, saved], result, bench_lines(result, pretty=sys.stdout.isatty()))


def _latency(args: argparse.Namespace, given: Sequence[str]) -> int:
    facts = arguments.json_file(args.json)
    out = arguments.target_file("--out", args.out, (".json",), facts)
    shapes, options = _network_options(args)

    from ..compare.bench import LatencyOptions, latency_model_of, latency_summary, resolve_subject

    request = LatencyOptions(args.runtime, args.batch, args.threads, args.again)
    usual = arguments.parse_shape(arguments.default_input(args.subject))
    network, example, ignore = resolve_subject(args.subject, shapes, options, usual)
    model = latency_model_of(network, example, ignore, request, output.message_printer(quiet=args.quiet))
    result = latency_summary(args.subject, model)
    files = {out: json.dumps(model.to_dict(), indent=1)} if out is not None else {}
    return _finish(args, files, [facts], result, output.latency_lines(result, pretty=sys.stdout.isatty()))


def _frontier(args: argparse.Namespace, given: Sequence[str]) -> int:
    facts = arguments.json_file(args.json)
    drawing = arguments.target_file("--draw", args.draw, (".svg", ".html"))

    from ..compare.frontier import USUAL, FrontierOptions, draw_frontier, run_frontier

    names = ("of", "batches", "device", "runtime", "batch", "trust")
    at = USUAL if args.at is None else _names(args.at)
    request = FrontierOptions(at=at, **{name: getattr(args, name) for name in names})
    result = run_frontier(args.run, request, output.message_printer(quiet=args.quiet))
    files = {drawing: draw_frontier(result, drawing.suffix)} if drawing is not None else {}
    return _finish(args, files, [facts], result, frontier_lines(result, pretty=sys.stdout.isatty()))


def _export(args: argparse.Namespace, given: Sequence[str]) -> int:
    if args.batch < 1 or (args.threads is not None and args.threads < 1):
        raise PruningError("--batch and --threads count samples and threads: give at least 1")

    from ..export import ExportOptions, export_run

    names = ("target", "batch", "threads", "force", "trust")
    options = {name: getattr(args, name) for name in names}
    request = ExportOptions(formats=tuple(_names(args.formats)), **options)
    manifest = export_run(args.run, args.to, request, output.message_printer(quiet=args.quiet))
    print(json.dumps(manifest, indent=2) if args.json else "\n".join(output.export_lines(manifest)))
    return 0


def _stopped(interrupt: KeyboardInterrupt, command: str) -> int:
    """Print what was saved and, unless it is empty, the `command` that resumes the run; return the exit code."""
    stopped = interrupt if isinstance(interrupt, Stopped) else Stopped(signal.SIGINT)
    saved = stopped.saved or "stopped"
    output.print_message(f"{saved}; continue with: {command}" if command else saved)
    return 128 + stopped.signal


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _network_options(args: argparse.Namespace) -> tuple[list[tuple[int, ...]], dict[str, Any]]:
    return [*map(arguments.parse_shape, args.input)], dict(map(arguments.parse_option, args.option))


def _finish(
    args: argparse.Namespace,
    files: Mapping[Path, str],
    results: Sequence[Path | None],
    result: Mapping[str, Any],
    lines: Sequence[str],
) -> int:
    """Write the files, write the result as JSON to the paths `results`, print it, and return exit code 0.

    The result is printed as JSON if `--json` was given without a file, else as `lines`.
    """
    from ..utils.files import write_text

    text = json.dumps(result, indent=2)
    for path, content in [*files.items(), *((path, text) for path in results if path is not None)]:
        write_text(path, content if content.endswith("\n") else f"{content}\n")
        output.print_message(f"wrote {path}")
    print(text if args.json == arguments.STDOUT else "\n".join(lines))
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
