"""A small network in a folder, and back.

A network that `extract` made enters; `model.safetensors` (its tensors) and `plan.json` (the filters each
layer of the original keeps) leave, without pickle.  Reading back is: build the original network, apply the
plan, load the tensors; an exported folder also gives the network without the user's code.  The header of
`model.safetensors` also holds, as JSON, what the example inputs looked like and every plan in turn, if the
network was pruned more than once; a checksum there guards it all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .attached import attached_hooks
from .errors import PruningError, RunError
from .files import from_plain, read_tensors, write_tensors, write_text
from .inputs import check_model
from .manifest import MANIFEST, check_files
from .plan import Plan
from .program import read_program
from .stored import FORMAT, contents, wiring
from .surgery import extract

MODEL, PLAN, PROGRAM = "model.safetensors", "plan.json", "network.pt2"
_REMEDY = "write it again with sbf_pruner.save"
_INPUTS = "give the inputs it was pruned with: load(folder, build, example_inputs)"
_OF_A_RUN = "remove summary.json from the run's folder, and --resume to write it anew"


def save(model: nn.Module, folder: str | Path) -> None:
    """Save a network that `extract` made, or an ordinary one, into a folder.

    >>> import tempfile
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    >>> small = extract(net, torch.rand(1, 3, 16, 16), Plan({"0": [0, 5]}))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(small, folder)
    ...     again = load(folder, lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)))
    >>> torch.equal(again[2].weight, small[2].weight)
    True
    """
    check_model(model)
    if any(attached_hooks(model)):
        raise PruningError("the model is gated and still has all its filters; save what pruner.extract() gives")
    write_tensors(Path(folder) / MODEL, *contents(model))
    write_text(Path(folder) / PLAN, _joined(getattr(model, "sbf_plans", ())).to_json())


def load(folder: str | Path, build: Callable[[], nn.Module] | None = None, example_inputs: Any = None) -> nn.Module:
    """Load the network of a run's folder, of an exported one, or one that `save` wrote.

    `build` makes the dense original.  An exported folder needs none: without it, the network comes from
    `network.pt2`, in evaluation mode and not to be trained.  Nothing that a file holds is run.

    What is connected to what is found anew, on zeros.  Where a network decides that by the values it sees,
    `example_inputs` are to be those that it was pruned with.
    """
    path = Path(folder)
    if not path.is_dir():
        raise RunError(f"{path} is no folder; give that of a run, of an export, or one that save wrote")
    exported = (path / MANIFEST).is_file()
    if build is None:
        if not exported:
            raise RunError(
                f"{path} is no exported folder; give the function that builds the dense network as well: "
                "load(folder, build)"
            )
        check_files(path, [PROGRAM])
        return read_program(path / PROGRAM)
    if isinstance(build, nn.Module):  # it can be called too, but would not build anything
        raise RunError(
            "build is a network already; give the function that builds the dense one: load(folder, build)"
        )
    if exported:
        check_files(path, [MODEL, PLAN])
    remedy = _OF_A_RUN if (path / "recipe.toml").is_file() else _REMEDY
    tensors, written = read_tensors(path / MODEL, remedy)
    if written.get("format") != FORMAT:
        raise RunError(f"{path / MODEL} is no saved network of this version ({FORMAT}); {remedy}")
    plans = [Plan(keep) for keep in written["plans"]]
    _check_plan(path / PLAN, _joined(plans), remedy)
    model = build()
    if not isinstance(model, nn.Module):
        raise RunError(f"build() returned {type(model).__name__}; give a function that builds the dense network")
    if example_inputs is None:
        first = next(model.parameters())
        inputs = from_plain(written["inputs"], lambda described: _made(described, first))
    else:
        inputs = example_inputs
    for plan in plans:
        model = _cut(model, inputs, plan, path / MODEL, made_up=example_inputs is None)
    _fill(model, tensors, path / MODEL)
    if written.get("wiring", wiring(model)) != wiring(model):
        raise RunError(f"{path / MODEL}: on zeros its channels meet differently than when it was cut; {_INPUTS}")
    return model


def _cut(model: nn.Module, inputs: Any, plan: Plan, path: Path, *, made_up: bool) -> nn.Module:
    try:
        return extract(model, inputs, plan)
    except PruningError as error:
        if not made_up:
            raise
        reason = str(error).partition("; ")[0]
        raise RunError(
            f"{path}: the network that build() makes cannot be cut on zeros ({reason}); build the one that was "
            f"pruned, or, if it goes by the values it sees, {_INPUTS}"
        ) from error


def _joined(plans: tuple[Plan, ...] | list[Plan]) -> Plan:
    """Several plans, each for the network the one before gave, as one for the first network."""
    return reduce(Plan.then, plans, Plan({}))


def _check_plan(path: Path, expected: Plan, remedy: str) -> None:
    try:
        found = Plan.load(path)
    except OSError as error:
        raise RunError(f"{path} cannot be read ({error.strerror or error}); {remedy}") from error
    except PruningError as error:
        raise RunError(f"{path} is damaged ({str(error).partition('; ')[0]}); {remedy}") from error
    if found != expected:
        raise RunError(f"{path} and {MODEL} do not belong together; put back the file that was changed")


def _fill(model: nn.Module, tensors: dict[str, Tensor], path: Path) -> None:
    held: dict[str, Any] = model.state_dict(keep_vars=True)
    odd = next((name for name in [*held, *tensors] if name not in held or name not in tensors), None)
    if odd is None:
        odd = next((name for name in held if held[name].shape != tensors[name].shape), None)
    if odd is not None:
        raise RunError(
            f"{path} does not fit the network that build() makes, first at {odd!r}; build the same dense "
            "network, with the same options, as the one that was pruned"
        )
    for name, tensor in held.items():
        if tensor.dtype != tensors[name].dtype:  # a network saved in half precision comes back so
            tensor.data = tensor.data.to(tensors[name].dtype)
    model.load_state_dict(tensors)


def _made(described: dict[str, Any], like: Tensor) -> Tensor:
    """Zeros of the described shape, in the network's precision: tracing asks only what is connected."""
    kind: torch.dtype = getattr(torch, described["dtype"])
    return torch.zeros(described["shape"], dtype=like.dtype if kind.is_floating_point else kind, device=like.device)
