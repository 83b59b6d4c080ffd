"""The runtimes that a time can be asked for, one row each.

A name enters; a `Runtime` leaves: where it runs, what `deploy` calls it, the forms that suit it, and which facts of
a machine make its speed.  What holds: all else about clocks is the same for every runtime that torch itself runs,
so one more of them is one more row; another library also has its own way to time single layers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import PruningError
from ..runtimes.forms import Form
from ..utils.timing import cpu, version_of

Joins = Mapping[str, tuple[Form, ...]]


@dataclass(frozen=True)
class Runtime:
    """A way to run a network."""

    target: str
    """what `deploy` calls it"""
    joins: Joins = field(hash=False)
    """the two ways to join a branch with its stream, each in the forms that serve it best as a rule"""
    packages: tuple[str, ...] = ("torch",)
    """whose versions make its speed"""
    device: str = "cpu"

    def facts(self) -> dict[str, Any]:
        """All of this machine that a time depends on; None where something is not there."""
        found: dict[str, Any] = {"cpu": cpu(), "cores": os.cpu_count()}
        if self.device == "cuda":
            there = torch.cuda.is_available()
            found["gpu"] = torch.cuda.get_device_name() if there else None
            found["cuda"] = torch.version.cuda if there else None
            found["dtype"] = "float32, convolutions in tf32" if torch.backends.cudnn.allow_tf32 else "float32"
        return {**found, **{package: version_of(package) for package in self.packages}}

    def check_device(self) -> None:
        """Is there what it runs on?"""
        if self.device == "cuda" and not torch.cuda.is_available():
            raise PruningError(
                "this machine has no cuda device that torch can use; measure on one that has (sbf latency "
                "--runtime cuda --out FILE) and give the file (latency.table)"
            )


_EAGER: Joins = {
    "zeros": (Form("zeros", in_place=True, channels_last=True),),
    "moves": (Form("add", in_place=True, channels_last=True),),
}
RUNTIMES = {
    "onnxruntime": Runtime(
        "onnxruntime",
        {
            "zeros": (
                Form("zeros", 16, 16, shortcuts=True),
                Form("zeros", 4, shortcuts=True),
                Form("zeros", 16, shortcuts=True),
            ),
            "moves": (Form("mixed", 16, 16, shortcuts=True),),
        },
        ("onnxruntime", "torch"),
    ),
    "torch": Runtime("eager", _EAGER),
    "compile": Runtime(
        "compile",
        {"zeros": (Form("zeros", channels_last=True),), "moves": (Form("gather", channels_last=True),)},
    ),
    "cuda": Runtime("eager", _EAGER, device="cuda"),
}
