"""The state of a run, in a file, and back.

A nest of dicts, lists, tuples, tensors, numbers, text and None enters and comes back equal; `torch.optim`
state_dicts are such nests.  It is one safetensors file, and the old one stays until the new one is complete.
A file that is cut short or was changed is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import RunError
from ..files import from_plain, read_tensors, to_plain, write_tensors

NAME = "last.safetensors"
_FORMAT = "sbf-pruner checkpoint 1"
ELSEWHERE = "or begin a run in another folder (--run)"
REMEDY = f"put the file back, {ELSEWHERE}"


def save_checkpoint(folder: Path, state: dict[str, Any], name: str = NAME) -> Path:
    """Write `state` to the checkpoint in `folder`, in one step, and return its path.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = save_checkpoint(Path(folder), {"done": 3, "weights": [torch.ones(2)]})
    ...     load_checkpoint(Path(folder))
    {'done': 3, 'weights': [tensor([1., 1.])]}
    """
    tensors: dict[str, Tensor] = {}

    def store(at: str, tensor: Tensor) -> str:
        name = at
        while name in tensors:  # a key that holds a dot may look like a path
            name += "'"
        tensors[name] = tensor
        return name

    skeleton = to_plain(state, store)
    path = Path(folder) / name
    write_tensors(path, tensors, {"format": _FORMAT, "state": skeleton})
    return path


def load_checkpoint(folder: Path, name: str = NAME, remedy: str = REMEDY) -> dict[str, Any]:
    """Read the checkpoint in `folder`; a RunError that names the remedy if it is missing or not whole."""
    path = Path(folder) / name
    tensors, header = read_tensors(path, remedy)
    if header.get("format") != _FORMAT:
        raise RunError(f"{path} is no checkpoint of this version ({_FORMAT}); {remedy}")
    state = from_plain(header["state"], tensors.__getitem__)
    assert isinstance(state, dict)
    return state
