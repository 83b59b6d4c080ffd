"""Dense against compact on every runtime, device and batch that is asked for.

A subject and settings enter; plain data leaves, all of it JSON.  For each combination the forms a network may
take are tried in a few rounds, those of the dense network as well; then the fastest of each are timed in pairs,
anew, so that the choice does not flatter the result.  What holds: a runtime that is missing or fails is listed
with the reason, and the others go on; the networks come out as they went in.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from ..deploy.forms import Deployable, Form
from ..inputs import call
from ..measuring import Latency, measure
from ..timing import compared, take_turns, using_threads
from .advice import advise
from .anatomy import Part, dissect
from .candidates import candidates
from .machine import faults, machine
from .runtimes import RUNTIMES, Bound, Pass, Place, Unavailable, outputs
from .settings import Settings
from .subject import Subject

TRIAL = 6  # rounds in which the forms are tried
SECONDS = 20.0  # that the pairs of one combination take, about, unless their number is given
FEWEST, MOST = 10, 100  # pairs

Report = Callable[[str], None]
Passes = Mapping[str, Mapping[str, Pass]]  # by side and form


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
        self.sources = {side: Deployable(network, subject.example) for side, network in networks.items()}
        self.forms: dict[tuple[str, str], fx.GraphModule] = {}

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
        parts = {batch: self._anatomy(batch) for batch in self.settings.batches}
        sides = {side: {"params": size.params, "macs": size.macs} for side, size in self.sizes.items()}
        fewer = sides["dense"]["macs"] / max(1, sides["compact"]["macs"])
        return {
            "subject": {"name": self.subject.name, "input": self.subject.shapes(), **sides, "fewer_macs": fewer},
            "settings": {**asdict(self.settings), "threads": torch.get_num_threads(), "trial_rounds": TRIAL},
            "measured": measured,
            "missing": missing,
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
            for name, form in candidates(runtime, dense=side == "dense").items():
                self.report(f"{runtime}, {device}: making the {side} network ready ({name})")
                held[name] = RUNTIMES[runtime].prepare(self._form(side, form), place)
        found = []
        for batch in self.settings.batches:
            self.report(f"{runtime}, {device}: batch {batch}")
            inputs = self.subject.inputs(batch)
            passes = {side: {name: bind(inputs) for name, bind in held.items()} for side, held in ready.items()}
            with torch.inference_mode():
                record = self._compared(passes, device, inputs)
            forms = candidates(runtime, dense=False)
            macs = measure(self._form("compact", forms[record["form"]["compact"]]), self.subject.example).macs
            found.append({"device": str(device), "runtime": runtime, "batch": batch, "form_macs": macs, **record})
        return found

    def _compared(self, passes: Passes, device: torch.device, inputs: Any) -> dict[str, Any]:
        tried = self._trial(passes, device)
        chosen = {side: min(held, key=held.__getitem__) for side, held in tried.items()}
        both = {side: passes[side][name] for side, name in chosen.items()}
        seconds = sum(max(0.01, tried[side][name]) for side, name in chosen.items())
        pairs = self.settings.pairs or min(MOST, max(FEWEST, round(SECONDS / seconds)))
        taken = take_turns(both, pairs, device=device, seed=1)
        return {
            "form": chosen,
            "trial_ms": {side: {n: 1e3 * s for n, s in held.items()} for side, held in tried.items()},
            "dense_ms": asdict(Latency.of(taken["dense"])),
            "compact_ms": asdict(Latency.of(taken["compact"])),
            "speedup": asdict(compared(taken["dense"], taken["compact"])),
            "page_faults": {side: faults(run) for side, run in both.items()},
            "difference": self._difference(both["compact"], inputs),
        }

    def _trial(self, passes: Passes, device: torch.device) -> dict[str, dict[str, float]]:
        """Seconds of every form; where there is nothing to choose, of one round."""
        rounds = TRIAL if any(len(held) > 1 for held in passes.values()) else 1
        flat = {f"{side}: {name}": run for side, held in passes.items() for name, run in held.items()}
        taken = take_turns(flat, rounds, device=device)
        return {
            side: {name: statistics.median(taken[f"{side}: {name}"]) for name in held}
            for side, held in passes.items()
        }

    def _difference(self, run: Pass, inputs: Any) -> float:
        """How far the outputs are from those of the network as it was saved, as a part of the largest."""
        wanted, found = outputs(partial(call, self.subject.compact, inputs)), outputs(run)
        return max((_apart(a, b) for a, b in zip(wanted, found, strict=True)), default=0.0)

    def _anatomy(self, batch: int) -> dict[str, list[Part]]:
        """Where an eager pass on the CPU spends its time."""
        self.report(f"looking where a pass of batch {batch} spends its time")
        form = next(iter(candidates("eager", dense=False).values()))
        inputs = self.subject.inputs(batch)
        return {
            side: dissect(self._form(side, form), inputs, [name for name, _ in network.named_modules()])
            for side, network in (("dense", self.subject.dense), ("compact", self.subject.dense))
        }

    def _form(self, side: str, form: Form) -> fx.GraphModule:
        key = side, str(form)
        if key not in self.forms:
            self.forms[key] = self.sources[side].form(form)
        return self.forms[key]


def _apart(wanted: Tensor, found: Tensor) -> float:
    largest = wanted.abs().max().item() if wanted.numel() else 0.0
    return (wanted - found.to(wanted.dtype)).abs().max().item() / largest if largest else 0.0
