"""Whole networks on the clock: the dense one and what is left of it, in turns, in their compact forms.

A network and example inputs enter; calls leave, one per form, that run it once in the runtime asked for; and of
two networks the ratio of their times, pair by pair.  What holds: the dense network has the same care as the compact
one, as in `sbf bench`; a pass ends when its result is there, on a GPU too.  What is needed can be rehearsed, so
that nobody learns after hours of training that something is not installed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ..deploy.captured import first_line
from ..deploy.choose import FORMS, fastest, ready, written
from ..deploy.forms import Deployable, Form
from ..errors import PruningError
from ..inputs import made_up_inputs
from ..latency.model import Conditions
from ..timing import Interval, compared, take_turns, using_threads
from .runtimes import RUNTIMES

Pass = Callable[[], Any]
BESIDE = 4.0  # seconds that networks are timed side by side, about
FEWEST, MOST = 11, 60  # rounds
TRIAL = 2.0  # seconds in which the forms of one network are tried


def all_forms(runtime: str) -> dict[str, Form]:
    """Every form that `sbf bench` and `sbf export` try."""
    return {str(form): form for form in FORMS[RUNTIMES[runtime].target]}


def passes(
    network: nn.Module, example: Any, forms: Mapping[str, Form], runtime: str, batch: int, threads: int
) -> dict[str, Pass]:
    """Calls that run a network once, by form; forms that are the same network are there once."""
    held = RUNTIMES[runtime]
    held.check_device()
    made = written(Deployable(network, example), forms)
    inputs = made_up_inputs(example, batch)
    with tempfile.TemporaryDirectory() as folder:
        return {
            name: ready(network_, inputs, held.target, threads, Path(folder) / f"{place}.onnx", held.device)
            for place, (name, network_) in enumerate(made.items())
        }


def rehearse(network: nn.Module, example: Any, conditions: Conditions) -> None:
    """Run a network once as it will be timed; one sentence of what stands in the way."""
    held = conditions
    form = dict([next(iter(all_forms(held.runtime).items()))])
    try:
        with using_threads(held.threads):
            (once,) = passes(network.eval(), example, form, held.runtime, held.batch, held.threads).values()
            once()
    except Exception as error:  # a compiler, or a package that is only half installed, may fail in any way
        cause = str(error) if isinstance(error, PruningError) else first_line(error)
        raise PruningError(f"a time is to be measured here, in {held.told()}, and cannot be: {cause}") from error


def quickest(held: Mapping[str, Pass]) -> Pass:
    """The pass of the form that is fastest."""
    if len(held) == 1:
        return next(iter(held.values()))
    times = fastest(held, TRIAL)
    return held[min(times, key=times.__getitem__)]


def time_pairs(dense: Pass, compact: Pass, pairs: int) -> Interval:
    """The compact network's time as a part of the dense one's."""
    taken = take_turns({"dense": dense, "compact": compact}, pairs)
    return compared(taken["compact"], taken["dense"])


def time_beside(dense: Pass, others: Mapping[str, Pass]) -> tuple[dict[str, float], float]:
    """The least seconds of several passes, and of the dense network beside them.

    The least, because whatever else the machine does can only add to it.
    """
    once = fastest({"dense": dense, **others}, 0.0)
    rounds = min(MOST, max(FEWEST, round(BESIDE / sum(once.values()))))
    taken = take_turns({"dense": dense, **others}, rounds)
    return {name: min(once[name], *taken[name]) for name in others}, min(once["dense"], *taken["dense"])
