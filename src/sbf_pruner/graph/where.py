"""Where in the user's code something happened: the innermost frame that is neither torch's nor ours.

The stack of the caller, or an exception, enters; a file with its line leaves, or the sentence about it that a user
reads.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from types import FrameType
from typing import Any

import torch
from torch import Tensor

_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
_MODELS = os.path.join(_PACKAGE, "models", "")  # of ours, but read like a user's
_QUIET = (
    os.path.join(os.path.dirname(torch.__file__), ""),
    contextlib.__file__,  # whose frames stand around those of a decorated function
    _PACKAGE,
)


def where() -> str:
    """File and line, or "" if no frame is the user's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_users(frame.f_code.co_filename):
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def explain(error: Exception, inputs: Any) -> str:
    """One sentence about a model that failed on its inputs: the line, the cause, and what to do."""
    frames = _frames_of(error)
    if not frames:
        remedy = "give inputs like those it is trained on"
        if not isinstance(inputs, (Tensor, tuple, dict)):
            remedy = f"give a tensor, or a tuple or dict of its arguments, not {type(inputs).__name__}"
        elif isinstance(inputs, dict) and isinstance(error, TypeError):
            remedy = "give a dict of its keyword arguments or, if it takes a dict itself, a tuple with it: (batch,)"
        return f"the model cannot run on the example inputs ({cause(error)}); {remedy}"
    return (
        f"the model cannot run on the example inputs: at {failing_line(error)}; give inputs like those it is "
        "trained on, or repair that line"
    )


def failing_line(error: Exception) -> str:
    """The line of the user's that failed, and how."""
    at = (_frames_of(error) or traceback.extract_tb(error.__traceback__))[-1]
    line = f" (`{at.line}`)" if at.line else ""
    return f"{os.path.basename(at.filename)}:{at.lineno}{line} {type(error).__name__}: {cause(error)}"


def _frames_of(error: Exception) -> list[traceback.FrameSummary]:
    return [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]


def _is_users(filename: str) -> bool:
    return filename.startswith(_MODELS) or not filename.startswith(_QUIET)


def cause(error: Exception) -> str:
    """The first line of what an exception says."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def not_from_torch(line: str) -> str:
    """What is wrong with a tensor that came out of nowhere."""
    return (
        f"at {line} a tensor arrives that torch did not compute from the inputs (NumPy, or a list made from "
        "values?), so what it depends on cannot be followed; keep that step in torch"
    )


def holds_the_model(line: str, name: str) -> str:
    """What is wrong with a copy of a model that reads the tensors of the model itself."""
    return (
        f"at {line} a copy of the model reads {name} of the model itself: a function that it holds is "
        "bound to the one model, by an object or a global name; make it a method"
    )


def nested(line: str) -> str:
    """What is wrong with a tensor of rows that differ in length."""
    return (
        f"at {line} a nested tensor arises, whose sizes cannot be followed; pad what goes in, and give an "
        "nn.TransformerEncoder enable_nested_tensor=False"
    )
