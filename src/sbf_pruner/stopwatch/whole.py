"""Whole networks on the clock: the dense one and what is left of it, in turns, in their compact forms.

A network and example inputs enter; calls leave, one per form, that run it once in the runtime asked for; and of
two networks the ratio of their times, pair by pair.  What holds: the dense network has the same care as the compact
one, as in `sbf bench`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ..deploy.choose import FORMS, batch_of, fastest, ready, written
from ..deploy.forms import Deployable, Form
from ..timing import Interval, compared, take_turns

TARGET = {"onnxruntime": "onnxruntime", "torch": "eager"}  # what deploy calls the runtimes
# The two ways to join a branch with its stream, each in the forms that serve it best as a rule.
JOINS: dict[str, dict[str, tuple[Form, ...]]] = {
    "onnxruntime": {
        "zeros": (
            Form("zeros", 16, 16, shortcuts=True),
            Form("zeros", 4, shortcuts=True),
            Form("zeros", 16, shortcuts=True),
        ),
        "moves": (Form("mixed", 16, 16, shortcuts=True),),
    },
    "torch": {
        "zeros": (Form("zeros", in_place=True, channels_last=True),),
        "moves": (Form("add", in_place=True, channels_last=True),),
    },
}
Pass = Callable[[], Any]
BESIDE = 4.0  # seconds that networks are timed side by side, about
FEWEST, MOST = 11, 60  # rounds
TRIAL = 2.0  # seconds in which the forms of one network are tried


def all_forms(runtime: str) -> dict[str, Form]:
    """Every form that `sbf bench` and `sbf export` try."""
    return {str(form): form for form in FORMS[TARGET[runtime]]}


def passes(
    network: nn.Module, example: Any, forms: Mapping[str, Form], runtime: str, batch: int, threads: int
) -> dict[str, Pass]:
    """Calls that run a network once, by form; forms that are the same network are there once."""
    made = written(Deployable(network, example), forms)
    inputs = batch_of(example, batch)
    with tempfile.TemporaryDirectory() as folder:
        return {
            name: ready(network_, inputs, TARGET[runtime], threads, Path(folder) / f"{place}.onnx")
            for place, (name, network_) in enumerate(made.items())
        }


def quickest(held: Mapping[str, Pass]) -> Pass:
    """The pass of the form that is fastest."""
    if len(held) == 1:
        return next(iter(held.values()))
    times = fastest(held, TRIAL)
    return held[min(times, key=times.__getitem__)]


def time_pairs(dense: Pass, compact: Pass, pairs: int) -> tuple[Interval, list[float]]:
    """The compact network's time as a part of the dense one's, and the seconds that the dense one took."""
    taken = take_turns({"dense": dense, "compact": compact}, pairs)
    return compared(taken["compact"], taken["dense"]), taken["dense"]


def time_beside(dense: Pass, others: Mapping[str, Pass]) -> tuple[dict[str, float], float]:
    """The least seconds of several passes, and of the dense network beside them.

    The least, because whatever else the machine does can only add to it.
    """
    once = fastest({"dense": dense, **others}, 0.0)
    rounds = min(MOST, max(FEWEST, round(BESIDE / sum(once.values()))))
    taken = take_turns({"dense": dense, **others}, rounds)
    return {name: min(once[name], *taken[name]) for name in others}, min(once["dense"], *taken["dense"])
