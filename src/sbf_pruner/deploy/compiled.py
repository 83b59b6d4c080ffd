"""A network compiled by torch, and its first pass, in which the compiling is done.

A network in evaluation mode enters; one leaves that computes the same.  What holds: the compiler's own warnings are
not shown, and where it fails one line says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..errors import PruningError
from .captured import first_line, without_warnings


def compiled(network: nn.Module, device: torch.device | str = "cpu") -> Any:
    """The network as torch.compile makes it, for inputs of one size."""
    # On the CPU the weights become constants, so that the compiler may bring them into the order it likes.
    options = {"freezing": True} if torch.device(device).type == "cpu" else None
    return torch.compile(network, dynamic=False, options=options)  # type: ignore[arg-type]


def first_pass(run: Callable[[], Any]) -> None:
    """Have it compiled."""
    try:
        # The compiler warns of its own internals and logs a page when it fails; the sentence we raise is enough.
        with without_warnings(logging.CRITICAL, "torch._inductor", "torch._dynamo"):
            run()
    except Exception as error:
        raise PruningError(f"torch.compile failed here ({first_line(error)})") from error
