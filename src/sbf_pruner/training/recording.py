"""What a run writes down besides its metrics: the network it began with, its scores, and how blocks refine.

The networks of a run enter; `network.json` leaves when it begins, a line of `scores.jsonl` after every epoch
of scores.  They are read from the pruner between epochs, never inside a step.  A picture that cannot be made
is a reason written down, not a run lost.

How much each residual block refines what it is given: |S.f(x)|^2 / |x|^2, on real images.

A network, its residual blocks and images enter; plain records leave.  The additions are met in the order in
which the graph recorded them; a network that adds more or less often when it really runs is not measured,
and the error says so.  Energies are summed in float64 where they arise; the network is left as it was, with the
mode of each of its modules.

What a run came to: the dense network against the pruned one, and where it was measured.

The networks of a run enter, with a way to judge them; plain dictionaries leave, of which `summary.json` is made.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..budget.targets import contents
from ..errors import PruningError
from ..graph.channel_graph import ChannelGraph, ResidualBlock, additions, is_addition, residual_blocks
from ..measurement.counts import Latency, evaluating, latency, measure
from ..plan import Plan
from ..pruner import Pruner
from ..report.inspection import compose, inspect_model, to_json
from ..schedule import Phase
from ..utils.files import stored_bytes, write_text
from ..utils.timing import environment
from .networks import Networks
from .recipe import Recipe
from .run_folder import RunFolder
from .schedule import phases

Measured = TypeVar("Measured")


class Recording:
    """The network, the scores and the refinement of one run."""

    def __init__(self, folder: RunFolder, networks: Networks, images: Tensor, device: torch.device) -> None:
        self.folder, self.networks, self.images, self.device = folder, networks, images, device

    def begin(self) -> None:
        """Write down the network, if that has not been done."""
        if self.folder.network.is_file():
            return
        pruner = self.networks.pruner
        written: dict[str, Any] = {"environment": environment(self.device)}
        try:
            seen = inspect_model(pruner.model, self.images[:1], pruner.graph)
            written |= {"facts": seen.facts, "boxes": to_json(compose(seen))}
        except Exception as error:  # whatever a user's network does, it can still be trained
            written["undrawn"] = _told(error)
        write_text(self.folder.network, json.dumps(written) + "\n")

    def after_epoch(self, phase: Phase, done: int) -> None:
        """Write down the scores after an epoch of them, and after the last one what the gates let through."""
        if not phase.trains_scores:
            return
        pruner = self.networks.pruner
        scores = {name: [round(s, 3) for s in held.tolist()] for name, held in pruner.scores().items()}
        line: dict[str, Any] = {"done": done, "cycle": phase.cycle, "scores": scores}
        if done == phase.end:
            kept = self.networks.plan.widths()
            line["kept"] = {name: kept.get(name, len(held)) for name, held in scores.items()}
            measured, why = _tried(lambda: under_scores(pruner, self.images))
            line |= {"refinement": measured or [], **({"unmeasured": why} if why else {})}
        self.folder.append_scores(line)

    def finish(self, small: nn.Module) -> dict[str, Any]:
        """What the summary tells of layers left alone, and of the blocks' refinement at the end."""
        graph = self.networks.pruner.graph
        found: dict[str, Any] = next(
            (line for line in reversed(self.folder.read_scores()) if "refinement" in line), {}
        )
        pruned, why = _tried(lambda: when_pruned(self.networks.pruner, small, self.images))
        reasons = {"scored": found.get("unmeasured"), "pruned": why}
        return {
            "skipped": dict(graph.skipped),
            "refinement": joined(found.get("refinement", []), pruned or {}),
            "unmeasured": {which: reason for which, reason in reasons.items() if reason},
        }


def _tried(measure: Callable[[], Measured]) -> tuple[Measured | None, str]:
    """What was measured, or None and the reason: it is an analysis beside the run."""
    try:
        return measure(), ""
    except Exception as error:  # whatever a user's network does
        return None, _told(error)


def _told(error: Exception) -> str:
    said = " ".join(str(error).split())
    return said if isinstance(error, PruningError) else f"{type(error).__name__}: {said}"


MEASURED_ON = 64  # images: after every phase of scores, and a large network takes its time on a CPU


def under_scores(pruner: Pruner, images: Tensor) -> list[dict[str, Any]]:
    """Per residual block: the ratio under the continuous scores, without them, and the scores' extremes.

    With the scores S of the branch's last layer, delta the least and top the greatest of them, the ratio lies
    between delta^2 and top^2 times the one without scores: that is Lemma 1, put right.  None of a network whose
    branches end in no prunable layer; a PruningError where there are some and none could be measured.
    """
    layers = pruner.graph.layers
    known = [block for block in residual_blocks(pruner.graph) if block.layer]
    blocks = [block for block in known if layers[block.layer].site.kind != "sum"]
    if known and not blocks:
        raise PruningError("scores behind a sum leave the branch as it is, and the lemma is another one there")
    was, pruner.gates.mode = pruner.gates.mode, "soft"
    try:
        energies = _energies(pruner.model, blocks, images, len(additions(pruner.graph.trace.ops)))
    finally:
        pruner.gates.mode = was
    scores = pruner.scores()
    found, left = [], ""
    for block, (branch, shortcut) in zip(blocks, energies, strict=True):
        score = scores[block.layer].double()
        whole = float(shortcut.sum())
        if len(score) != len(branch):
            left = f"the branch of {block.name} has {len(branch)} channels and {len(score)} scores"
            continue
        if not whole > 0:
            left = f"the shortcut of {block.name} carries nothing"
            continue
        freed = torch.where(score > 0, branch / score.square().clamp_min(1e-300), 0.0)
        found.append(
            {
                "block": block.name,
                "layer": block.layer,
                "scored": float(branch.sum()) / whole,
                "unscored": float(freed.sum()) / whole,
                "delta": float(score.min()),
                "top": float(score.max()),
            }
        )
    if left and not found:
        raise PruningError(left)
    return found


def when_pruned(pruner: Pruner, small: nn.Module, images: Tensor) -> dict[str, float | None]:
    """Per residual block the ratio in the small network; none where nothing is left of the shortcut."""
    blocks = residual_blocks(pruner.graph)
    energies = _energies(small, blocks, images, len(additions(pruner.graph.trace.ops)))
    sums = {block.name: (float(f.sum()), float(x.sum())) for block, (f, x) in zip(blocks, energies, strict=True)}
    return {name: f / x if x > 0 else None for name, (f, x) in sums.items()}


def joined(scored: Sequence[Mapping[str, Any]], pruned: Mapping[str, float | None]) -> list[dict[str, Any]]:
    """Both as one record per block, in the order of the network.

    >>> joined([{"block": "a", "top": 1.0}], {"a": 0.5, "b": 0.25})
    [{'block': 'a', 'top': 1.0, 'pruned': 0.5}, {'block': 'b', 'pruned': 0.25}]
    """
    known = {record["block"]: record for record in scored}
    names = dict.fromkeys([*pruned, *known])
    return [{"block": name, **known.get(name, {}), "pruned": pruned.get(name)} for name in names]


def _energies(
    network: nn.Module, blocks: Sequence[ResidualBlock], images: Tensor, expected: int
) -> list[tuple[Tensor, Tensor]]:
    """Squares of branch and shortcut of every block, summed per channel."""
    listener = _Listener(blocks)
    with evaluating(network), torch.no_grad(), listener:
        network(images[:MEASURED_ON])
    if listener.count != expected:
        raise PruningError(f"the network adds maps {listener.count} times where its graph has {expected} additions")
    return [listener.heard[b.addition] for b in blocks]


class _Listener(TorchDispatchMode):
    def __init__(self, blocks: Sequence[ResidualBlock]) -> None:
        super().__init__()
        self.branch = {block.addition: block.branch for block in blocks}
        self.count = 0
        self.heard: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        maps = [a for a in args[:2] if isinstance(a, Tensor)]
        if len(maps) == 2 and is_addition(str(func._overloadpacket), maps[0].shape, maps[1].shape):
            if (branch := self.branch.get(self.count)) is not None:
                self.heard[self.count] = _energy(maps[branch]), _energy(maps[1 - branch])
            self.count += 1
        return func(*args, **(kwargs or {}))


def _energy(maps: Tensor) -> Tensor:
    return maps.transpose(0, 1).flatten(1).double().square().sum(1).cpu()


TIMED_SECONDS = 10.0  # about, for both networks together, however large they are
TIMED_AT_ONCE = 64
UNJUDGED = {"accuracy": None, "validation_accuracy": None}


def summarise(
    recipe: Recipe,
    networks: Networks,
    small: nn.Module,
    images: Tensor,
    judged: Callable[[nn.Module], dict[str, float | None]],
    before: dict[str, float | None],
) -> dict[str, Any]:
    """The dense network against the small one.

    Where no control was trained, the dense one has no accuracy but those of `before`, from earlier in the run.
    """
    control, timed = networks.control, networks.timed
    dense = networks.pruner.detach() if control is None else control
    batch = images[:TIMED_AT_ONCE]
    first, second = sizes(dense, small, batch)
    return {
        "name": recipe.name,
        "method": recipe.method,
        "seed": recipe.seed,
        "epochs": sum(phase.epochs for phase in phases(recipe) if phase.kind != "control"),
        "dense": {
            **(UNJUDGED if control is None else judged(control)),
            **before,
            **first,
        },
        "pruned": {**judged(small), **second},
        "latency_batch": len(batch),
        "cut_error": networks.cut_error,
        "layers": widths(networks.pruner.graph, networks.plan),
        **({} if timed is None else {"latency": timed.summary(networks.pruner, networks.plan)}),
    }


def sizes(dense: nn.Module, pruned: nn.Module, images: Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters, MACs of one image, bytes of a file and milliseconds of a pass on `images`, of both networks."""
    first = latency({"dense": dense}, images, pairs=1)["dense"].median / 1e3
    pairs = min(20, max(3, int(TIMED_SECONDS / (2 * first))))
    times = latency({"dense": dense, "pruned": pruned}, images, pairs=pairs)
    return _size(dense, images, times["dense"]), _size(pruned, images, times["pruned"])


def _size(network: nn.Module, images: Tensor, time: Latency) -> dict[str, Any]:
    cost = measure(network, images[:1])
    return {
        "params": cost.params,
        "macs": cost.macs,
        "file_bytes": stored_bytes(*contents(network)),
        "latency_ms": time.median,
        "latency_iqr_ms": time.iqr,
    }


def widths(graph: ChannelGraph, plan: Plan) -> dict[str, dict[str, int]]:
    """The filters of every prunable layer before and after."""
    kept = plan.widths()
    return {
        name: {"before": layer.filters, "after": kept.get(name, layer.filters)}
        for name, layer in graph.layers.items()
    }
