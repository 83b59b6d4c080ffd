"""Benchmarks behind `sbf bench` and `sbf latency`; all results are JSON-compatible.

`run_bench` times a dense and a compact network for every runtime, device and batch size. It first times the forms
of each network (see `runtimes.forms`) and then the two fastest in pairs. Only the pairs give the speed-up, because
the minimum over forms is biased. A runtime that is missing or fails is listed with the reason, and the others
are still timed. The networks are not changed. `latency_summary` summarizes a `LatencyModel`, its errors on
extracted networks that were held out of the fit, and the sizes that some targets would leave.
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

from ..budget.constraints import Constraints
from ..budget.targets import Budget
from ..errors import PruningError, suggestion
from ..measurement.calibration import choose_coupling, conditions_here, load_or_calibrate
from ..measurement.counts import Latency, measure
from ..measurement.latency_model import LatencyModel
from ..models import resolve
from ..plan import Plan
from ..runtimes.forms import CapturedNetwork, make_forms
from ..runtimes.table import RUNTIMES, Bound, Pass, Placement, Unavailable, latency_runtime, min_times, outputs
from ..surgery.extract import extract
from ..training.data.datasets import load_data
from ..training.recipe import bundled_recipes, load_recipe
from ..training.run_folder import build_dense, read_run
from ..utils.timing import (
    SAMPLE,
    busy_cores,
    environment,
    median_ratio,
    time_interleaved,
    torch_threads,
    version_of,
)
from ..utils.user_code import TRUSTED
from ..utils.user_model import call, map_tensors, random_inputs
from .bench_advice import Part, advise, dissect


@dataclass(frozen=True)
class Subject:
    """A dense and a compact network in evaluation mode, with an example of the inputs that both take."""

    name: str
    dense: nn.Module
    compact: nn.Module
    example: Any

    @classmethod
    def of(cls, name: str, dense: nn.Module, compact: nn.Module) -> Subject:
        """Create a subject from a dense network and the one extracted from it; both are set to evaluation mode."""
        return cls(name, dense.eval(), compact.eval(), random_inputs(compact.sbf_inputs, 1))

    @classmethod
    def of_run(cls, path: str | Path, *, trust: bool = False) -> Subject:
        """Read the networks of a finished run; code that its recipe names is imported only if `trust` is true.

        The dense network has newly initialized weights, because a run stores only those of the pruned one; its
        speed does not depend on them.
        """
        run = read_run(path, ", or a model with --plan", trust=trust)
        return cls.of(str(path), run.build(), run.small)

    @classmethod
    def of_plan(
        cls, name: str, shapes: Sequence[Sequence[int]], options: Mapping[str, Any], plan: str | Path
    ) -> Subject:
        """Build a dense network by its name, and extract the compact one by the plan in a file."""
        try:
            read = Plan.load(plan)
        except OSError as error:
            raise PruningError(f"the plan {plan} cannot be read ({error.strerror or error}); name a file") from None
        torch.manual_seed(0)
        dense = resolve(name, **{"in_channels": shapes[0][0], **options})
        return cls.of(name, dense, extract(dense, tuple(torch.zeros(1, *shape) for shape in shapes), read))

    def inputs(self, batch: int) -> Any:
        """Return random inputs of this batch size."""
        return random_inputs(self.example, batch)

    def shapes(self) -> list[list[int]]:
        """Return the shape of one sample of every input."""
        found: list[list[int]] = []
        map_tensors(self.example, lambda t: found.append(list(t.shape[1:])))
        return found


@dataclass(frozen=True)
class BenchOptions:
    """Options of a benchmark; raises a PruningError if one is invalid."""

    batches: tuple[int, ...] = (1, 64)
    runtimes: tuple[str, ...] = tuple(RUNTIMES)
    devices: tuple[str, ...] = ("cpu",)
    pairs: int | None = None
    """None: as many as fit into about 20 seconds, at least 10 and at most 100."""
    threads: int | None = None
    """None: the number that torch uses."""

    def __post_init__(self) -> None:
        for flag, numbers in (("--batch", self.batches), ("--pairs", [self.pairs]), ("--threads", [self.threads])):
            if not numbers or any(number is not None and number < 1 for number in numbers):
                raise PruningError(f"{flag} must be at least 1")
        for name in self.runtimes:
            if name not in RUNTIMES:
                raise PruningError(f"--runtimes: none is called {name!r}; {suggestion(name, RUNTIMES)}")


def read_settings(
    batches: str, runtimes: str | None, device: str, pairs: int | None = None, threads: int | None = None
) -> BenchOptions:
    """Parse the arguments of the command line; raises a PruningError if they are invalid.

    >>> read_settings("1,8", "eager", "cpu").batches
    (1, 8)
    """
    try:
        sizes = tuple(dict.fromkeys(int(word) for word in batches.split(",")))
    except ValueError:
        raise PruningError(f"--batch {batches!r}: write numbers with commas between them, such as 1,64") from None
    names = tuple(dict.fromkeys(RUNTIMES if runtimes is None else map(str.strip, runtimes.split(","))))
    gpu = torch.cuda.is_available()
    if device == "cuda" and not gpu:
        raise PruningError("--device cuda: torch sees no GPU here; use --device cpu")
    every = ("cpu", "cuda") if gpu else ("cpu",)
    return BenchOptions(sizes, names, every if device == "auto" else (device,), pairs, threads)


def machine(devices: Sequence[str], runtimes: Sequence[str]) -> dict[str, Any]:
    """Describe the machine: processor, versions, threads, current load in cores, and allocator settings."""
    packages = dict.fromkeys(package for name in runtimes for package in RUNTIMES[name].packages)
    return {
        **environment(torch.device("cuda" if "cuda" in devices else "cpu")),
        **{name: found for name in packages if (found := version_of(name)) is not None},
        "cores": os.cpu_count(),
        "load": busy_cores(),
        "allocator": {key: value for key, value in os.environ.items() if key.startswith(("MALLOC_", "LD_PRELOAD"))},
    }


def page_faults(run: Callable[[], Any]) -> float | None:
    """Return the mean number of minor page faults per pass, which slow down any network; None if not counted."""
    try:
        import resource
    except ImportError:  # Only Unix has this module.
        return None
    passes = 3
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(passes):
        run()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / passes


TRIAL = 2.0  # approximate seconds for trying the forms of a network
SECONDS = 20.0  # approximate seconds for the pairs of one combination, unless their number is given
FEWEST, MOST = 10, 100  # limits of the number of pairs

Report = Callable[[str], None]


def run_bench(subject: Subject, settings: BenchOptions, report: Report = lambda line: None) -> dict[str, Any]:
    """Time both networks on every requested runtime that is available; raises a PruningError if there is none."""
    with torch_threads(settings.threads), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Exporters and compilers warn about their own internals.
        return _Bench(subject, settings, report).run()


class _Bench:
    def __init__(self, subject: Subject, settings: BenchOptions, report: Report) -> None:
        self.subject, self.settings, self.report = subject, settings, report
        report("reading both networks")
        self.machine = machine(settings.devices, settings.runtimes)  # Measured before this process adds load.
        self.networks = {"dense": subject.dense, "compact": subject.compact}
        sizes = {side: measure(network, subject.example) for side, network in self.networks.items()}
        self.sizes = {side: {"params": size.params, "macs": size.macs} for side, size in sizes.items()}
        self.not_rewritten: str | None = None
        self.sources: dict[str, CapturedNetwork] = {}
        try:
            self.sources = {side: CapturedNetwork(net, subject.example) for side, net in self.networks.items()}
        except PruningError as error:  # Neither network is rewritten then, for a fair comparison.
            self.not_rewritten = str(error)
        self.forms: dict[tuple[str, str], dict[str, fx.GraphModule]] = {}

    def run(self) -> dict[str, Any]:
        measured: list[dict[str, Any]] = []
        missing: list[dict[str, str]] = []
        for device in self.settings.devices:
            for runtime in self.settings.runtimes:
                try:
                    measured += self._measure(runtime, torch.device(device))
                except PruningError as error:
                    missing.append({"device": device, "runtime": runtime, "reason": str(error)})
                    self.report(f"{runtime}, {device}: {error}")
        if not measured:
            reasons = "; ".join(f"{one['runtime']}, {one['device']}: {one['reason']}" for one in missing)
            raise PruningError(f"nothing could be timed ({reasons}); name other runtimes (--runtimes)")
        parts = {batch: self._profile(batch) for batch in self.settings.batches if self.sources}
        fewer = self.sizes["dense"]["macs"] / max(1, self.sizes["compact"]["macs"])
        anatomy = [
            {"batch": batch, **{side: [*map(asdict, timed)] for side, timed in both.items()}}
            for batch, both in parts.items()
        ]
        about = {"name": self.subject.name, "input": self.subject.shapes(), **self.sizes, "fewer_macs": fewer}
        return {
            "subject": about,
            "settings": {**asdict(self.settings), "threads": torch.get_num_threads(), "trial_seconds": TRIAL},
            "measured": measured,
            "missing": missing,
            "not_rewritten": self.not_rewritten,
            "anatomy": anatomy,
            "advice": advise(measured, parts, fewer, self.machine),
            "environment": self.machine,
        }

    def _measure(self, runtime: str, device: torch.device) -> list[dict[str, Any]]:
        if device.type not in RUNTIMES[runtime].devices:
            raise Unavailable("timed only on the CPU")
        place = Placement(device, torch.get_num_threads(), self.subject.example)
        ready: dict[str, dict[str, Bound]] = {"dense": {}, "compact": {}}
        for side, forms in ready.items():
            for name, network in self._candidates(side, runtime).items():
                self.report(f"{runtime}, {device}: making the {side} network ready ({name})")
                forms[name] = RUNTIMES[runtime].prepare(network, place)
        found = []
        for batch in self.settings.batches:
            self.report(f"{runtime}, {device}: batch {batch}")
            inputs = self.subject.inputs(batch)
            passes = {side: {name: bind(inputs) for name, bind in forms.items()} for side, forms in ready.items()}
            with torch.inference_mode():
                record = self._time_pairs(passes, device, inputs)
            network = self._candidates("compact", runtime)[record["form"]["compact"]]
            macs = measure(network, self.subject.example).macs
            found.append({"device": str(device), "runtime": runtime, "batch": batch, "form_macs": macs, **record})
        return found

    def _time_pairs(
        self, passes: Mapping[str, Mapping[str, Pass]], device: torch.device, inputs: Any
    ) -> dict[str, Any]:
        """Choose the fastest form of each network, then time these two in pairs; return the times as a record."""
        tried = {side: _seconds(forms, device) for side, forms in passes.items()}
        chosen = {side: min(seconds, key=seconds.__getitem__) for side, seconds in tried.items()}
        both = {side: passes[side][name] for side, name in chosen.items()}
        one_pair = sum(max(SAMPLE, tried[side][name]) for side, name in chosen.items())
        pairs = self.settings.pairs or min(MOST, max(FEWEST, round(SECONDS / one_pair)))
        times = time_interleaved(both, pairs, device=device)
        return {
            "form": chosen,
            "tried_ms": {side: {name: 1e3 * s for name, s in seconds.items()} for side, seconds in tried.items()},
            "dense_ms": asdict(Latency.of(times["dense"])),
            "compact_ms": asdict(Latency.of(times["compact"])),
            "speedup": asdict(median_ratio(times["dense"], times["compact"])),
            "page_faults": {side: page_faults(run) for side, run in both.items()},
            "difference": self._difference(both["compact"], inputs),
        }

    def _difference(self, run: Pass, inputs: Any) -> float:
        """Return the largest output difference from the unmodified compact network, relative to its largest one."""
        expected, found = outputs(partial(call, self.subject.compact, inputs)), outputs(run)
        return max((_error(a, b) for a, b in zip(expected, found, strict=True)), default=0.0)

    def _profile(self, batch: int) -> dict[str, list[Part]]:
        """Profile an eager pass of both networks on the CPU, operator by operator."""
        self.report(f"profiling a pass of batch {batch}")
        inputs, names = self.subject.inputs(batch), [name for name, _ in self.subject.dense.named_modules()]
        form = RUNTIMES["eager"].forms[0]
        return {side: dissect(source.form(form), inputs, names) for side, source in self.sources.items()}

    def _candidates(self, side: str, runtime: str) -> Mapping[str, nn.Module]:
        """Return the forms of a network to try on a runtime, by name, without duplicates."""
        if not self.sources:
            return {"as it is": self.networks[side]}
        if (side, runtime) not in self.forms:
            forms = {str(form): form for form in RUNTIMES[runtime].forms}
            self.forms[side, runtime] = make_forms(self.sources[side], forms)
        return self.forms[side, runtime]


def _seconds(passes: Mapping[str, Pass], device: torch.device) -> dict[str, float]:
    """Return the minimum seconds per pass of every form; if there is only one, it is timed for a few passes."""

    def finished(run: Pass) -> None:
        run()
        torch.cuda.synchronize(device)

    if device.type == "cuda":
        passes = {name: partial(finished, run) for name, run in passes.items()}
    return min_times(passes, TRIAL if len(passes) > 1 else 0.0)


def _error(expected: Tensor, found: Tensor) -> float:
    largest = expected.abs().max().item() if expected.numel() else 0.0
    return (expected - found.to(expected.dtype)).abs().max().item() / largest if largest else 0.0


TARGETS = (0.8, 0.6, 0.4)  # latency targets, as fractions of the dense network's time


@dataclass(frozen=True)
class LatencyOptions:
    """Options of `sbf latency`; raises a PruningError if one is invalid."""

    runtime: str = "onnxruntime"
    batch: int = 64
    threads: int | None = None
    fresh: bool = False
    """Measure again instead of reading the cache."""

    def __post_init__(self) -> None:
        latency_runtime(self.runtime, "--runtime")
        for flag, number in (("--batch", self.batch), ("--threads", self.threads)):
            if number is not None and number < 1:
                raise PruningError(f"{flag} must be at least 1")


def resolve_subject(
    subject: str, shapes: Sequence[Sequence[int]], options: Mapping[str, Any], usual: Sequence[int]
) -> tuple[nn.Module, tuple[Tensor, ...], tuple[str, ...]]:
    """Return the network of a model name or a recipe, example inputs, and the names of layers to ignore.

    `shapes` are the shapes of the inputs without the batch; if it is empty, there is one input of shape `usual`.
    """
    if Path(subject).suffix == ".toml" or subject in bundled_recipes():
        if shapes or options:
            raise PruningError("--input and --option apply to a model; a recipe sets its own")
        recipe = load_recipe(subject)
        data = load_data(recipe.data, recipe.model.num_classes, recipe.seed, TRUSTED)
        return build_dense(recipe, TRUSTED).eval(), (torch.zeros(1, *data.test.shape),), recipe.constraints.ignore
    torch.manual_seed(0)
    given = shapes or [usual]
    network = resolve(subject, **{"in_channels": given[0][0], **options}).eval()
    return network, tuple(torch.zeros(1, *shape) for shape in given), ()


def latency_model_of(
    network: nn.Module, example: Any, ignore: tuple[str, ...], request: LatencyOptions, report: Report
) -> LatencyModel:
    """Return the latency model of a network on this machine, from the cache or else measured."""
    conditions = conditions_here(request.runtime, request.batch, request.threads or torch.get_num_threads())
    return load_or_calibrate(network, example, conditions, ignore=ignore, fresh=request.fresh, report=report)


def latency_summary(subject: str, model: LatencyModel) -> dict[str, Any]:
    """Summarize a latency model, its errors, and the MACs that each of TARGETS would leave; JSON-compatible."""
    targets = []
    for share in TARGETS:
        chosen = choose_coupling(model.graph, model, Budget(latency=share), Constraints())
        targets.append({"asked": share, **chosen.to_dict()})
    keys = ("way", "share", "measured", "foretold")
    return {
        "subject": subject,
        **asdict(model.conditions),
        "load": model.calibration.get("load"),
        "dense_ms": 1e3 * model.dense_seconds,
        "layers": sum(map(len, model.table.points.values())),
        "networks": [{key: network[key] for key in keys} for network in model.calibration["networks"]],
        **{key: model.calibration.get(key) for key in ("mean_error", "worst_error")},
        "targets": targets,
    }
