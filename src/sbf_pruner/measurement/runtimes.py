"""Runtimes that a latency can be measured in or predicted for, one `Runtime` each.

Every runtime that torch itself executes needs only a row here; a runtime of another library also needs its own way
of timing single layers, in `stopwatch`.
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
    """A runtime, the forms of a network that suit it, and the facts of a machine that decide its speed."""

    target: str
    """Its name in `runtimes.forms`."""
    joins: Joins = field(hash=False)
    """The two ways of joining a branch to the residual stream, each with the forms that are usually fastest."""
    packages: tuple[str, ...] = ("torch",)
    """Packages whose versions affect its speed."""
    device: str = "cpu"

    def facts(self) -> dict[str, Any]:
        """Return the facts of this machine that a time depends on; None for what is missing."""
        found: dict[str, Any] = {"cpu": cpu(), "cores": os.cpu_count()}
        if self.device == "cuda":
            there = torch.cuda.is_available()
            found["gpu"] = torch.cuda.get_device_name() if there else None
            found["cuda"] = torch.version.cuda if there else None
            found["dtype"] = "float32, convolutions in tf32" if torch.backends.cudnn.allow_tf32 else "float32"
        return {**found, **{package: version_of(package) for package in self.packages}}

    def check_device(self) -> None:
        """Raise a PruningError if this machine lacks the device that the runtime needs."""
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
