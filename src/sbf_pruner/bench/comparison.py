"""Dense against compact on every runtime, device and batch that is asked for.

A subject and settings enter; plain data leaves, all of it JSON.  For each combination the forms a network may
take are tried for a few seconds, those of the dense network as well; then the fastest of each are timed in pairs,
anew, so that the choice does not flatter the result.  What holds: a runtime that is missing or fails is listed
with the reason, and the others go on; the networks come out as they went in.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..deploy.choose import FORMS, fastest, written
from ..deploy.forms import Deployable
from ..errors import PruningError
from ..inputs import call
from ..measuring import Latency, measure
from ..timing import SAMPLE, compared, take_turns, using_threads
from .advice import advise
from .anatomy import Part, dissect
from .machine import faults, machine
from .runtimes import RUNTIMES, Bound, Pass, Place, Unavailable, outputs
from .settings import Settings
from .subject import Subject

TRIAL = 2.0  # seconds in which the forms of a network are tried, about
SECONDS = 20.0  # that the pairs of one combination take, about, unless their number is given
FEWEST, MOST = 10, 100  # pairs

Report = Callable[[str], None]
LIKE = {"openvino": "onnxruntime"}  # runtimes that are given another's forms


def bench(subject: Subject, settings: Settings, report: Report = lambda line: None) -> dict[str, Any]:
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
        if device.type not in RUNTIMES[runtime].devices:
            raise Unavailable("timed on the CPU alone")
        place = Place(device, torch.get_num_threads(), self.subject.example)
        ready: dict[str, dict[str, Bound]] = {"dense": {}, "compact": {}}
        for side, held in ready.items():
            for name, network in self._candidates(side, runtime).items():
                self.report(f"{runtime}, {device}: making the {side} network ready ({name})")
                held[name] = RUNTIMES[runtime].prepare(network, place)
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
