"""What is timed: a dense network and the compact one that a plan leaves of it.

A run's folder, or a network with a plan, enters; both networks leave in evaluation mode, with an example of
their inputs.  The dense network of a run has fresh weights, because a run keeps the small one alone; how long
a pass takes does not depend on them.

What a bench is asked for, checked before any work is done.

Words of the command line enter; frozen `Settings` leave, or one sentence that says what is wrong.

The machine a bench ran on, and how quiet it was.

Nothing enters but what is asked for; plain data leaves: processor, versions, threads, how busy the machine was
before anything was timed, and how the memory allocator was set.

Dense against compact on every runtime, device and batch that is asked for.

A subject and settings enter; plain data leaves, all of it JSON.  For each combination the forms a network may
take are tried for a few seconds, those of the dense network as well; then the fastest of each are timed in pairs,
anew, so that the choice does not flatter the result.  What holds: a runtime that is missing or fails is listed
with the reason, and the others go on; the networks come out as they went in.

`sbf latency`: what a network's time is made of here, how well it is foretold, and what a target would leave.

A network, or a recipe, enters; plain data leaves, all of it JSON, and the file that `latency.table` takes.  What
holds: the errors stated are of networks that were really cut, and that the fit had not seen.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..budget.constraints import Guards
from ..budget.targets import Budget
from ..errors import PruningError, nearest
from ..measurement.calibration import choose_way, get_model, here
from ..measurement.counts import Latency, measure
from ..measurement.latency_model import LatencyModel
from ..measurement.runtimes import RUNTIMES
from ..models import resolve
from ..plan import Plan
from ..runtimes.forms import FORMS, Deployable, fastest, written
from ..surgery.extract import extract
from ..training.data.datasets import load_data
from ..training.recipe import bundled_recipes, load_recipe
from ..training.run_folder import build_dense, read_run
from ..utils.timing import SAMPLE, compared, environment, load, take_turns, using_threads, version_of
from ..utils.user_code import NAMED
from ..utils.user_model import call, made_up_inputs, map_tensors
from .bench_advice import Part, advise, dissect
from .runtimes import BENCH_RUNTIMES, Bound, Pass, Place, Unavailable, outputs


@dataclass(frozen=True)
class Subject:
    """Two networks that take the same inputs."""

    name: str
    dense: nn.Module
    compact: nn.Module
    example: Any

    @classmethod
    def of(cls, name: str, dense: nn.Module, compact: nn.Module) -> Subject:
        """A network and what `extract` made of it."""
        return cls(name, dense.eval(), compact.eval(), made_up_inputs(compact.sbf_inputs, 1))

    @classmethod
    def of_run(cls, path: str | Path, *, trust: bool = False) -> Subject:
        """The networks of a finished run; code that its recipe names is imported only with `trust`."""
        run = read_run(path, ", or a model with --plan", trust=trust)
        return cls.of(str(path), run.build(), run.small)

    @classmethod
    def of_plan(
        cls, name: str, shapes: Sequence[Sequence[int]], options: Mapping[str, Any], plan: str | Path
    ) -> Subject:
        """A network by its name, and what a plan in a file leaves of it."""
        try:
            read = Plan.load(plan)
        except OSError as error:
            raise PruningError(f"the plan {plan} cannot be read ({error.strerror or error}); name a file") from None
        torch.manual_seed(0)
        dense = resolve(name, **{"in_channels": shapes[0][0], **options})
        return cls.of(name, dense, extract(dense, tuple(torch.zeros(1, *shape) for shape in shapes), read))

    def inputs(self, batch: int) -> Any:
        """Made-up inputs, so many samples at once."""
        return made_up_inputs(self.example, batch)

    def shapes(self) -> list[list[int]]:
        """The sizes of one sample of every input."""
        found: list[list[int]] = []
        map_tensors(self.example, lambda t: found.append(list(t.shape[1:])))
        return found


@dataclass(frozen=True)
class Settings:
    """What is timed, and how often."""

    batches: tuple[int, ...] = (1, 64)
    runtimes: tuple[str, ...] = tuple(BENCH_RUNTIMES)
    devices: tuple[str, ...] = ("cpu",)
    pairs: int | None = None
    """None: as many as fit into about 20 seconds, at least 10 and at most 100"""
    threads: int | None = None
    """None: as many as torch uses by itself"""

    def __post_init__(self) -> None:
        for flag, numbers in (("--batch", self.batches), ("--pairs", [self.pairs]), ("--threads", [self.threads])):
            if not numbers or any(number is not None and number < 1 for number in numbers):
                raise PruningError(f"{flag} must be at least 1")
        for name in self.runtimes:
            if name not in BENCH_RUNTIMES:
                raise PruningError(f"--runtimes: none is called {name!r}; {nearest(name, BENCH_RUNTIMES)}")


def read_settings(
    batches: str, runtimes: str | None, device: str, pairs: int | None = None, threads: int | None = None
) -> Settings:
    """Settings from the words of the command line.

    >>> read_settings("1,8", "eager", "cpu").batches
    (1, 8)
    """
    try:
        sizes = tuple(dict.fromkeys(int(word) for word in batches.split(",")))
    except ValueError:
        raise PruningError(f"--batch {batches!r}: write numbers with commas between them, such as 1,64") from None
    asked = BENCH_RUNTIMES if runtimes is None else (word.strip() for word in runtimes.split(","))
    names = tuple(dict.fromkeys(asked))
    gpu = torch.cuda.is_available()
    if device == "cuda" and not gpu:
        raise PruningError("--device cuda: torch sees no GPU here; use --device cpu")
    devices = ("cpu", *(("cuda",) if gpu else ())) if device == "auto" else (device,)
    return Settings(sizes, names, devices, pairs, threads)


_PASSES = 3  # in which page faults are counted


def machine(devices: Sequence[str], runtimes: Sequence[str]) -> dict[str, Any]:
    """What belongs beside every figure."""
    packages = dict.fromkeys(package for name in runtimes for package in BENCH_RUNTIMES[name].packages)
    return {
        **environment(torch.device("cuda" if "cuda" in devices else "cpu")),
        **{name: found for name in packages if (found := version_of(name)) is not None},
        "cores": os.cpu_count(),
        "load": load(),
        "allocator": {key: value for key, value in os.environ.items() if key.startswith(("MALLOC_", "LD_PRELOAD"))},
    }


def faults(run: Callable[[], Any]) -> float | None:
    """Pages that the system had to hand over in one pass; each takes a time that no network is to blame for."""
    try:
        import resource
    except ImportError:  # only Unix counts them
        return None
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(_PASSES):
        run()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / _PASSES


TRIAL = 2.0  # seconds in which the forms of a network are tried, about
SECONDS = 20.0  # that the pairs of one combination take, about, unless their number is given
FEWEST, MOST = 10, 100  # pairs

Report = Callable[[str], None]
LIKE = {"openvino": "onnxruntime"}  # runtimes that are given another's forms


def run_bench(subject: Subject, settings: Settings, report: Report = lambda line: None) -> dict[str, Any]:
    """Time both networks on everything that is asked for and there; what was found, as plain data."""
    with using_threads(settings.threads), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # exporters and compilers speak of their own internals
        return _Bench(subject, settings, report).run()


class _Bench:
    def __init__(self, subject: Subject, settings: Settings, report: Report) -> None:
        self.subject, self.settings, self.report = subject, settings, report
        report("reading both networks")
        self.machine = machine(settings.devices, settings.runtimes)  # first: later the load is our own
        networks = {"dense": subject.dense, "compact": subject.compact}
        self.sizes = {side: measure(network, subject.example) for side, network in networks.items()}
        self.as_it_is = ""
        self.sources: dict[str, Deployable] = {}
        try:
            self.sources = {side: Deployable(network, subject.example) for side, network in networks.items()}
        except PruningError as error:  # then neither network is rewritten, so that both have the same care
            self.as_it_is = str(error)
        self.forms: dict[tuple[str, str], dict[str, fx.GraphModule]] = {}

    def run(self) -> dict[str, Any]:
        measured: list[dict[str, Any]] = []
        missing: list[dict[str, str]] = []
        for device in self.settings.devices:
            for runtime in self.settings.runtimes:
                try:
                    measured += self._measured(runtime, torch.device(device))
                except Unavailable as error:
                    missing.append({"device": device, "runtime": runtime, "reason": str(error)})
                    self.report(f"{runtime}, {device}: {error}")
        if not measured:
            reasons = "; ".join(f"{held['runtime']}, {held['device']}: {held['reason']}" for held in missing)
            raise PruningError(f"nothing could be timed ({reasons}); name other runtimes (--runtimes)")
        parts = {batch: self._anatomy(batch) for batch in self.settings.batches if self.sources}
        sides = {side: {"params": size.params, "macs": size.macs} for side, size in self.sizes.items()}
        fewer = sides["dense"]["macs"] / max(1, sides["compact"]["macs"])
        return {
            "subject": {"name": self.subject.name, "input": self.subject.shapes(), **sides, "fewer_macs": fewer},
            "settings": {**asdict(self.settings), "threads": torch.get_num_threads(), "trial_seconds": TRIAL},
            "measured": measured,
            "missing": missing,
            "not_rewritten": self.as_it_is or None,
            "anatomy": [
                {"batch": batch, **{side: [asdict(part) for part in held] for side, held in both.items()}}
                for batch, both in parts.items()
            ],
            "advice": advise(measured, parts, fewer, self.machine),
            "environment": self.machine,
        }

    def _measured(self, runtime: str, device: torch.device) -> list[dict[str, Any]]:
        """One runtime on one device, with all batches."""
        if device.type not in BENCH_RUNTIMES[runtime].devices:
            raise Unavailable("timed on the CPU alone")
        place = Place(device, torch.get_num_threads(), self.subject.example)
        ready: dict[str, dict[str, Bound]] = {"dense": {}, "compact": {}}
        for side, held in ready.items():
            for name, network in self._candidates(side, runtime).items():
                self.report(f"{runtime}, {device}: making the {side} network ready ({name})")
                held[name] = BENCH_RUNTIMES[runtime].prepare(network, place)
        found = []
        for batch in self.settings.batches:
            self.report(f"{runtime}, {device}: batch {batch}")
            inputs = self.subject.inputs(batch)
            passes = {side: {name: bind(inputs) for name, bind in held.items()} for side, held in ready.items()}
            with torch.inference_mode():
                record = self._compared(passes, device, inputs)
            network = self._candidates("compact", runtime)[record["form"]["compact"]]
            macs = measure(network, self.subject.example).macs
            found.append({"device": str(device), "runtime": runtime, "batch": batch, "form_macs": macs, **record})
        return found

    def _compared(
        self, passes: Mapping[str, Mapping[str, Pass]], device: torch.device, inputs: Any
    ) -> dict[str, Any]:
        """Choose the fastest form of either network, then time these two in pairs."""
        tried = {side: _tried(held, device) for side, held in passes.items()}
        chosen = {side: min(held, key=held.__getitem__) for side, held in tried.items()}
        both = {side: passes[side][name] for side, name in chosen.items()}
        seconds = sum(max(SAMPLE, tried[side][name]) for side, name in chosen.items())
        pairs = self.settings.pairs or min(MOST, max(FEWEST, round(SECONDS / seconds)))
        taken = take_turns(both, pairs, device=device)
        return {
            "form": chosen,
            "tried_ms": {side: {n: 1e3 * s for n, s in held.items()} for side, held in tried.items()},
            "dense_ms": asdict(Latency.of(taken["dense"])),
            "compact_ms": asdict(Latency.of(taken["compact"])),
            "speedup": asdict(compared(taken["dense"], taken["compact"])),
            "page_faults": {side: faults(run) for side, run in both.items()},
            "difference": self._difference(both["compact"], inputs),
        }

    def _difference(self, run: Pass, inputs: Any) -> float:
        """How far the outputs are from those of the network as it was saved, as a part of the largest."""
        wanted, found = outputs(partial(call, self.subject.compact, inputs)), outputs(run)
        return max((_apart(a, b) for a, b in zip(wanted, found, strict=True)), default=0.0)

    def _anatomy(self, batch: int) -> dict[str, list[Part]]:
        """Where an eager pass on the CPU spends its time."""
        self.report(f"looking where a pass of batch {batch} spends its time")
        inputs, names = self.subject.inputs(batch), [name for name, _ in self.subject.dense.named_modules()]
        form = FORMS["eager"][0]
        return {side: dissect(source.form(form), inputs, names) for side, source in self.sources.items()}

    def _candidates(self, side: str, runtime: str) -> Mapping[str, nn.Module]:
        """The forms of a network that are worth trying on a runtime, each once, by name."""
        if self.as_it_is:
            return {"as it is": self.subject.dense if side == "dense" else self.subject.compact}
        if (side, runtime) not in self.forms:
            forms = {str(form): form for form in FORMS[LIKE.get(runtime, runtime)]}
            self.forms[side, runtime] = written(self.sources[side], forms)
        return self.forms[side, runtime]


def _tried(passes: Mapping[str, Pass], device: torch.device) -> dict[str, float]:
    """The least seconds of every form; where there is nothing to choose, a few passes are enough."""
    if device.type == "cuda":
        passes = {name: partial(_finished, run, device) for name, run in passes.items()}
    return fastest(passes, TRIAL if len(passes) > 1 else 0.0)


def _finished(run: Pass, device: torch.device) -> None:
    run()
    torch.cuda.synchronize(device)


def _apart(wanted: Tensor, found: Tensor) -> float:
    largest = wanted.abs().max().item() if wanted.numel() else 0.0
    return (wanted - found.to(wanted.dtype)).abs().max().item() / largest if largest else 0.0


TARGETS = (0.8, 0.6, 0.4)  # of the dense network's time


@dataclass(frozen=True)
class Request:
    """What is asked for."""

    runtime: str = "onnxruntime"
    batch: int = 64
    threads: int | None = None
    fresh: bool = False
    """measure again what is known already"""

    def __post_init__(self) -> None:
        if self.runtime not in RUNTIMES:
            raise PruningError(f"--runtime: none is called {self.runtime!r}; {nearest(self.runtime, RUNTIMES)}")
        for flag, number in (("--batch", self.batch), ("--threads", self.threads)):
            if number is not None and number < 1:
                raise PruningError(f"{flag} must be at least 1")


def known_by(
    subject: str, shapes: Sequence[Sequence[int]], options: Mapping[str, Any], usual: Sequence[int]
) -> tuple[nn.Module, tuple[Tensor, ...], tuple[str, ...]]:
    """The network that a model's or a recipe's name stands for, inputs for it, and the layers to leave alone.

    `shapes` are the sizes of its inputs that were given, `usual` is that of the only one where none was.
    """
    if Path(subject).suffix == ".toml" or subject in bundled_recipes():
        if shapes or options:
            raise PruningError("--input and --option belong to a model; a recipe knows its own")
        recipe = load_recipe(subject)
        data = load_data(recipe.data, recipe.model.num_classes, recipe.seed, NAMED)
        return build_dense(recipe, NAMED).eval(), (torch.zeros(1, *data.test.shape),), recipe.guards.ignore
    torch.manual_seed(0)
    given = shapes or [usual]
    network = resolve(subject, **{"in_channels": given[0][0], **options}).eval()
    return network, tuple(torch.zeros(1, *shape) for shape in given), ()


def measured(
    network: nn.Module, example: Any, ignore: tuple[str, ...], request: Request, report: Report
) -> LatencyModel:
    """What there is to know of a network's time on this machine."""
    conditions = here(request.runtime, request.batch, request.threads or torch.get_num_threads())
    return get_model(network, example, conditions, ignore=ignore, fresh=request.fresh, report=report)


def latency(subject: str, model: LatencyModel) -> dict[str, Any]:
    """What was found, as plain data."""
    held = model.conditions
    targets = []
    for share in TARGETS:
        chosen = choose_way(model.graph, model, Budget(latency=share), Guards())
        targets.append({"asked": share, **chosen.to_dict()})
    networks = [
        {key: one[key] for key in ("way", "share", "measured", "foretold")} for one in model.calibration["networks"]
    ]
    return {
        "subject": subject,
        "runtime": held.runtime,
        "batch": held.batch,
        "threads": held.threads,
        "machine": dict(held.machine),
        "load": model.calibration.get("load"),
        "dense_ms": 1e3 * model.dense_seconds,
        "layers": sum(map(len, model.table.points.values())),
        "networks": networks,
        "mean_error": model.calibration.get("mean_error"),
        "worst_error": model.calibration.get("worst_error"),
        "targets": targets,
    }
