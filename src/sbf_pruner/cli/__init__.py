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
from ..utils.lazy import lazy_exports
from . import output
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
    with output.silence_other_ranks(), output.log_to_stderr(quiet=getattr(arguments, "quiet", False)):
        try:
            output.check_single_process(arguments.command)
            code = _COMMANDS[arguments.command](arguments, given)
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


def _run(arguments: argparse.Namespace, given: Sequence[str]) -> int:
    recipe, named = _recipe(arguments)  # before the training imports, so that errors in the recipe come sooner

    from ..training.run import fit
    from ..training.run_folder import RunFolder, build_dense
    from ..training.schedule import score_rate_key, total_epochs

    folder = RunFolder.of(recipe, arguments.run)
    if output.is_first():
        folder.check(recipe, resume=arguments.resume, force=arguments.force)
    others = [Path(arguments.dense_from)] if arguments.dense_from else []
    trust = named or arguments.trust
    model = build_dense(recipe, folder.origin(*others, trust=trust, resume=arguments.resume))
    options = {name: getattr(arguments, name) for name in ("resume", "force", "dense_from")}
    monitors = {"live": arguments.live, "tensorboard": arguments.tensorboard} if output.is_first() else {}
    try:
        with (
            output.progress(total_epochs(recipe), quiet=arguments.quiet) as report,
            output.with_monitors(report, folder.path, fresh=not arguments.resume, **monitors) as reports,
        ):
            result = fit(model, recipe, run=folder.path, trust=trust, report=reports, **options)
    except KeyboardInterrupt as interrupt:
        return _stopped(interrupt, resume_command(given) if folder.begun else "")
    if arguments.json:
        print(json.dumps({**result.summary, "folder": os.fspath(result.folder)}, indent=2))
        return output.exit_code(result.summary)
    if result.was_finished:
        print(f"{result.folder} was finished already; nothing was trained\n")
    scored, rate = recipe.phases.cycles > 0, score_rate_key(recipe)
    lines = output.summary_lines(result.summary, os.fspath(result.folder), scored=scored, rate=rate)
    if (page := result.folder / "report.html").is_file():
        lines.insert(-1, f"report: {page}")
    print("\n".join(lines))
    return output.exit_code(result.summary)


def _recipe(arguments: argparse.Namespace) -> tuple[Recipe, bool]:
    """Return the recipe of `sbf run` with its overrides, and whether the user named it.

    Without a name, `--resume` takes the recipe from the run folder.
    """
    from ..training.recipe import load_recipe

    if arguments.recipe is None and arguments.live and not arguments.live.isdigit():
        arguments.recipe, arguments.live = arguments.live, ""  # `--live RECIPE` parses it as a port
    named = not (arguments.recipe is None and arguments.resume)
    if not named:
        from ..training.run_folder import RunFolder

        if not arguments.run:
            raise RunError("name the folder of the run to resume, such as --run runs/digits-seed0")
        folder = RunFolder(Path(arguments.run))
        if not folder.begun:
            raise RunError(f"there is no run to resume in {arguments.run}; name a recipe to begin one")
        folder.read_recipe()  # raises an error with a remedy if the file is damaged
        arguments.recipe = folder.recipe
    overrides = recipe_overrides(arguments.target, arguments.set)
    overrides += [] if arguments.seed is None else [f"seed={arguments.seed}"]
    return load_recipe(known_recipe(arguments.recipe), overrides), named


def _compare(arguments: argparse.Namespace, given: Sequence[str]) -> int:
    methods = parse_names("--methods", arguments.methods, (OWN, *METHODS))
    seeds = parse_ints("--seeds", arguments.seeds)

    from ..training.recipe import load_recipe

    recipe = load_recipe(known_recipe(arguments.recipe), recipe_overrides(arguments.target, arguments.set))

    from ..compare.method_runs import check_methods, finished_before, plan_runs, rank_methods, write_comparison
    from ..training.schedule import total_epochs

    root, summaries = Path(arguments.run or f"runs/{recipe.name}-compared"), []
    check_methods(entrants := plan_runs(recipe, methods, seeds, root))
    try:
        for place, entrant in enumerate(entrants, 1):
            output.message_printer(quiet=arguments.quiet)(f"run {place} of {len(entrants)}: {entrant.folder.path}")
            with output.progress(total_epochs(entrant.recipe), quiet=arguments.quiet) as report:
                summaries.append(entrant.run(report).summary)
    except KeyboardInterrupt as interrupt:
        return _stopped(interrupt, f"sbf {shlex.join(given)}")
    earlier = finished_before(recipe, entrants, root)
    summaries += [folder.read_summary() for folder in earlier]
    folders = [*(entrant.folder for entrant in entrants), *earlier]
    result = write_comparison(root, [folder.path for folder in folders], summaries)
    ranked = rank_methods(summaries)
    lines = output.compare_lines(ranked, result["dense_accuracy"], result["epochs"], root)
    print(json.dumps(result, indent=2) if arguments.json else "\n".join(lines))
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

    target = Path(arguments.to).expanduser() if arguments.to else default_folder()
    with output.transfer(quiet=arguments.quiet) as report:
        path = prepare_cifar10(arguments.source, target, report)
    print(path)
    if target.resolve() not in [folder.resolve() for folder in data_folders()] and not arguments.quiet:
        print(f"sbf: recipes find it with --set data.path={shlex.quote(str(path))}", file=sys.stderr)
    return 0


def _inspect(arguments: argparse.Namespace, given: Sequence[str]) -> int:
    if arguments.model is None and arguments.json not in (None, STDOUT):
        arguments.model, arguments.json = arguments.json, STDOUT  # `--json MODEL` parses it as a file
    if arguments.model is None:
        names = "a bundled one such as resnet56, torchvision:NAME, timm:NAME or package.module:callable"
        raise PruningError(f"name a model to inspect: {names}")
    shapes, options = _network_options(arguments)
    shapes = shapes or [parse_shape(default_input(arguments.model))]
    graph = target_file("--graph", arguments.graph, (".svg", ".html"))
    facts = json_file(arguments.json)

    import torch

    from ..models import resolve
    from ..report.graph_drawing import draw
    from ..report.inspection import inspect_model

    model = resolve(arguments.model, **{"in_channels": shapes[0][0], **options})
    seen = inspect_model(model, tuple(torch.zeros(1, *shape) for shape in shapes))
    files = {graph: draw(seen, graph.suffix)} if graph is not None else {}
    return _finish(arguments, files, [facts], seen.facts, output.overview_lines(seen.facts))


def _bench(arguments: argparse.Namespace, given: Sequence[str]) -> int:
    facts = json_file(arguments.json)
    if arguments.save and arguments.plan:
        raise PruningError(
            "--save writes into a run's folder, and a model with --plan has none; use --json FILE.json"
        )
    shapes, options = _network_options(arguments)
    if not arguments.plan and (shapes or options):
        raise PruningError("--input and --option apply to a model with --plan; a run has its own")

    from ..compare.bench import Subject, read_settings, run_bench

    settings = read_settings(
        arguments.batch, arguments.runtimes, arguments.device, arguments.pairs, arguments.threads
    )
    if arguments.plan:
        shapes = shapes or [parse_shape(default_input(arguments.subject))]
        subject = Subject.of_plan(arguments.subject, shapes, options, arguments.plan)
    else:
        subject = Subject.of_run(arguments.subject, trust=arguments.trust)
    saved = target_file("--save", f"{arguments.subject}/bench.json", (".json",)) if arguments.save else None
    result = run_bench(subject, settings, output.message_printer(quiet=arguments.quiet))
    return _finish(arguments, {}, [facts, saved], result, output.bench_lines(result, pretty=sys.stdout.isatty()))


def _latency(arguments: argparse.Namespace, given: Sequence[str]) -> int:
    facts = json_file(arguments.json)
    out = target_file("--out", arguments.out, (".json",), facts)
    shapes, options = _network_options(arguments)

    from ..compare.bench import LatencyOptions, latency_model_of, latency_summary, resolve_subject

    request = LatencyOptions(arguments.runtime, arguments.batch, arguments.threads, arguments.again)
    usual = parse_shape(default_input(arguments.subject))
    network, example, ignore = resolve_subject(arguments.subject, shapes, options, usual)
    model = latency_model_of(network, example, ignore, request, output.message_printer(quiet=arguments.quiet))
    result = latency_summary(arguments.subject, model)
    files = {out: json.dumps(model.to_dict(), indent=1)} if out is not None else {}
    return _finish(arguments, files, [facts], result, output.latency_lines(result, pretty=sys.stdout.isatty()))


def _frontier(arguments: argparse.Namespace, given: Sequence[str]) -> int:
    facts = json_file(arguments.json)
    drawing = target_file("--draw", arguments.draw, (".svg", ".html"))

    from ..compare.frontier import USUAL, FrontierOptions, draw_frontier, run_frontier

    names = ("of", "batches", "device", "runtime", "batch", "trust")
    at = USUAL if arguments.at is None else _names(arguments.at)
    request = FrontierOptions(at=at, **{name: getattr(arguments, name) for name in names})
    result = run_frontier(arguments.run, request, output.message_printer(quiet=arguments.quiet))
    files = {drawing: draw_frontier(result, drawing.suffix)} if drawing is not None else {}
    return _finish(arguments, files, [facts], result, output.frontier_lines(result, pretty=sys.stdout.isatty()))


def _export(arguments: argparse.Namespace, given: Sequence[str]) -> int:
    if arguments.batch < 1 or (arguments.threads is not None and arguments.threads < 1):
        raise PruningError("--batch and --threads count samples and threads: give at least 1")

    from ..export import ExportOptions, export_run

    names = ("target", "batch", "threads", "force", "trust")
    options = {name: getattr(arguments, name) for name in names}
    request = ExportOptions(formats=tuple(_names(arguments.formats)), **options)
    manifest = export_run(arguments.run, arguments.to, request, output.message_printer(quiet=arguments.quiet))
    print(json.dumps(manifest, indent=2) if arguments.json else "\n".join(output.export_lines(manifest)))
    return 0


def _stopped(interrupt: KeyboardInterrupt, command: str) -> int:
    """Print what was saved and the command that continues, if there is one; return the exit code."""
    stopped = interrupt if isinstance(interrupt, Stopped) else Stopped(signal.SIGINT)
    saved = stopped.saved or "stopped"
    output.print_message(f"{saved}; continue with: {command}" if command else saved)
    return 128 + stopped.signal


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _network_options(arguments: argparse.Namespace) -> tuple[list[tuple[int, ...]], dict[str, Any]]:
    """Parse `--input` and `--option`."""
    return [*map(parse_shape, arguments.input)], dict(map(parse_option, arguments.option))


def _finish(
    arguments: argparse.Namespace,
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
        "output": ("bench_lines", "frontier_lines", "progress", "summary_lines", "transfer"),
    },
)
