"""Where in the user's code something happened: the innermost frame that is neither torch's nor ours."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch

_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_QUIET = (
    os.path.join(os.path.dirname(torch.__file__), ""),
    *(os.path.join(_PACKAGE, room) for room in ("graph", "inputs", "layers")),
)


def _user_frames() -> Iterator[Any]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_QUIET):
            yield frame
        frame = frame.f_back


def where() -> str:
    """File and line, or "" if no frame is the user's."""
    for frame in _user_frames():
        return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
    return ""


def explain(error: Exception) -> str:
    """One sentence about a model that failed: the line, the cause, and what to do."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_QUIET)]
    cause = (str(error).strip() or type(error).__name__).splitlines()[0]
    if not frames:
        return f"the model cannot run on the example inputs ({cause}); give inputs like those it is trained on"
    at = frames[-1]
    line = f" (`{at.line}`)" if at.line else ""
    return (
        f"the model cannot run on the example inputs: at {os.path.basename(at.filename)}:{at.lineno}{line} "
        f"{type(error).__name__}: {cause}; give inputs like those it is trained on, or repair that line"
    )


def not_from_torch(line: str) -> str:
    """What is wrong with a tensor that came out of nowhere."""
    return (
        f"at {line} a tensor arrives that torch did not compute from the inputs (NumPy, or a list made from "
        "values?), so what it depends on cannot be followed; keep that step in torch"
    )
