"""Records of a run besides its metrics: `network.json`, `scores.jsonl`, refinement of residual blocks, and summary.

The network is recorded when the run begins and the scores after every score epoch, read from the pruner between
epochs, never inside a step. The refinement ratio of a residual block is |S.f(x)|^2 / |x|^2 on real images: the sum
of squares of its branch, multiplied by scores, divided by that of its shortcut. If drawing or measuring a network
fails, the reason is recorded and the run continues.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..budget.file_size import contents
from ..errors import PruningError
from ..graph.channel_graph import ChannelGraph, ResidualBlock, additions, is_addition, residual_blocks
from ..measurement.counts import Latency, evaluating, latency, measure
from ..pruner import Pruner
from ..report.inspection import inspect_model, to_boxes, to_json
from ..schedule import RUN_FORMAT, Phase
from ..utils.files import stored_bytes, write_text
from ..utils.timing import environment
from .networks import Networks
from .recipe import Recipe
from .run_folder import RunFolder
from .schedule import phases

Found = TypeVar("Found")
MEASURED_ON = 64  # images; few, because ratios are measured after every score phase, which is slow on a CPU
TIMED_SECONDS = 10.0  # approximate total for timing both networks
TIMED_AT_ONCE = 64


class RunRecorder:
    """Recorder of the network, the scores and the refinement ratios of one run."""

    def __init__(self, folder: RunFolder, networks: Networks, images: Tensor, device: torch.device) -> None:
        self.folder, self.networks, self.images, self.device = folder, networks, images, device

    def begin(self) -> None:
        """Write `network.json`, unless it exists."""
        if self.folder.network.is_file():
            return
        pruner = self.networks.pruner

        def draw() -> dict[str, Any]:
            inspected = inspect_model(pruner.model, self.images[:1], pruner.graph)
            return {"facts": inspected.facts, "boxes": to_json(to_boxes(inspected))}

        drawn, why = _try(draw)
        written = {"format": RUN_FORMAT, "environment": environment(self.device), **(drawn or {"undrawn": why})}
        write_text(self.folder.network, json.dumps(written) + "\n")

    def after_epoch(self, phase: Phase, done: int) -> None:
        """Append the scores after a score epoch; for the last one of a phase, also widths and refinement ratios."""
        if not phase.trains_scores:
            return
        pruner = self.networks.pruner
        scores = {name: [round(s, 3) for s in vector.tolist()] for name, vector in pruner.scores().items()}
        line: dict[str, Any] = {"done": done, "cycle": phase.cycle, "scores": scores}
        if done == phase.end:
            kept = self.networks.plan.widths()
            line["kept"] = {name: kept.get(name, len(vector)) for name, vector in scores.items()}
            measured, why = _try(lambda: scored_refinement(pruner, self.images))
            line |= {"refinement": measured or [], **({"unmeasured": why} if why else {})}
        self.folder.append_scores(line)

    def finish(self, small: nn.Module) -> dict[str, Any]:
        """Return the summary entries on skipped layers and on the final refinement ratios, scored and pruned."""
        graph = self.networks.pruner.graph
        found: dict[str, Any] = next(
            (line for line in reversed(self.folder.read_scores()) if "refinement" in line), {}
        )
        pruned, why = _try(lambda: pruned_refinement(self.networks.pruner, small, self.images))
        reasons = {"scored": found.get("unmeasured"), "pruned": why}
        return {
            "skipped": dict(graph.skipped),
            "refinement": merge_refinement(found.get("refinement", []), pruned or {}),
            "unmeasured": {which: reason for which, reason in reasons.items() if reason},
        }


def _try(analyse: Callable[[], Found]) -> tuple[Found | None, str]:
    """Return the result and "", or None and why it failed: a failed analysis must not stop the run."""
    try:
        return analyse(), ""
    except Exception as error:  # User code may raise anything.
        reason = " ".join(str(error).split())
        return None, reason if isinstance(error, PruningError) else f"{type(error).__name__}: {reason}"


def scored_refinement(pruner: Pruner, images: Tensor) -> list[dict[str, Any]]:
    """Return per residual block the refinement ratio with and without continuous scores, and the extreme scores.

    If `delta` is the smallest and `top` the largest score of the branch's last layer, the ratio with scores lies
    between delta^2 and top^2 times the ratio without (Lemma 1 of the paper, corrected). Blocks whose branch does
    not end in a prunable layer are left out. Raises a PruningError if there are others but none could be measured.
    """
    layers = pruner.graph.layers
    known = [block for block in residual_blocks(pruner.graph) if block.layer]
    blocks = [block for block in known if layers[block.layer].site.kind != "sum"]
    if known and not blocks:
        raise PruningError("the gates come after the residual addition, where Lemma 1 does not apply")
    mode, pruner.gates.mode = pruner.gates.mode, "soft"
    try:
        energies = _energies(pruner.model, blocks, images, pruner.graph)
    finally:
        pruner.gates.mode = mode
    scores = pruner.scores()
    found, why = [], ""
    for block, (branch, shortcut) in zip(blocks, energies, strict=True):
        score = scores[block.layer].double()
        whole = float(shortcut.sum())
        if len(score) != len(branch):
            why = f"the branch of {block.name} has {len(branch)} channels and {len(score)} scores"
        elif not whole > 0:
            why = f"the shortcut of {block.name} is all zero"
        else:
            unscored = torch.where(score > 0, branch / score.square().clamp_min(1e-300), 0.0)
            found.append(
                {
                    "block": block.name,
                    "layer": block.layer,
                    "scored": float(branch.sum()) / whole,
                    "unscored": float(unscored.sum()) / whole,
                    "delta": float(score.min()),
                    "top": float(score.max()),
                }
            )
    if why and not found:
        raise PruningError(why)
    return found


def pruned_refinement(pruner: Pruner, small: nn.Module, images: Tensor) -> dict[str, float | None]:
    """Return the refinement ratio of each residual block of the pruned network; None if its shortcut is zero."""
    blocks = residual_blocks(pruner.graph)
    energies = _energies(small, blocks, images, pruner.graph)
    sums = {block.name: (float(f.sum()), float(x.sum())) for block, (f, x) in zip(blocks, energies, strict=True)}
    return {name: f / x if x > 0 else None for name, (f, x) in sums.items()}


def merge_refinement(
    scored: Sequence[Mapping[str, Any]], pruned: Mapping[str, float | None]
) -> list[dict[str, Any]]:
    """Merge the results of `scored_refinement` and `pruned_refinement` into one record per block, in network order.

    >>> merge_refinement([{"block": "a", "top": 1.0}], {"a": 0.5, "b": 0.25})
    [{'block': 'a', 'top': 1.0, 'pruned': 0.5}, {'block': 'b', 'pruned': 0.25}]
    """
    known = {record["block"]: record for record in scored}
    names = dict.fromkeys([*pruned, *known])
    return [{"block": name, **known.get(name, {}), "pruned": pruned.get(name)} for name in names]


def _energies(
    network: nn.Module, blocks: Sequence[ResidualBlock], images: Tensor, graph: ChannelGraph
) -> list[tuple[Tensor, Tensor]]:
    """Return for every block the sums of squares per channel, in float64, of its branch and of its shortcut.

    Additions are matched to blocks by the order in which they run, so a PruningError is raised if the network runs
    more or fewer of them than its graph has. The training mode of all modules is restored.
    """
    recorder, expected = _AdditionRecorder(blocks), len(additions(graph.trace.ops))
    with evaluating(network), torch.no_grad(), recorder:
        network(images[:MEASURED_ON])
    if (count := recorder.count) != expected:
        raise PruningError(f"the network adds feature maps {count} times, but its graph has {expected} additions")
    return [recorder.energies[block.addition] for block in blocks]


class _AdditionRecorder(TorchDispatchMode):
    def __init__(self, blocks: Sequence[ResidualBlock]) -> None:
        super().__init__()
        self.branch = {block.addition: block.branch for block in blocks}
        self.count = 0
        self.energies: dict[int, tuple[Tensor, Tensor]] = {}  # of branch and shortcut, by number of the addition

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        maps = [a for a in args[:2] if isinstance(a, Tensor)]
        if len(maps) == 2 and is_addition(str(func._overloadpacket), maps[0].shape, maps[1].shape):
            if (branch := self.branch.get(self.count)) is not None:
                self.energies[self.count] = _energy(maps[branch]), _energy(maps[1 - branch])
            self.count += 1
        return func(*args, **(kwargs or {}))


def _energy(maps: Tensor) -> Tensor:
    return maps.transpose(0, 1).flatten(1).double().square().sum(1).cpu()


def summarize(
    recipe: Recipe,
    networks: Networks,
    small: nn.Module,
    images: Tensor,
    judged: Callable[[nn.Module], dict[str, float | None]],
    before: dict[str, float | None],
) -> dict[str, Any]:
    """Return the comparison of the dense and the pruned network for `summary.json`.

    `judged` returns the accuracies of a network; `before` holds those measured on the dense network during the run.
    """
    control, timed, kept = networks.control, networks.timed, networks.plan.widths()
    dense = networks.pruner.detach() if control is None else control
    batch = images[:TIMED_AT_ONCE]
    first, second = sizes(dense, small, batch)
    judgement = {"accuracy": None, "validation_accuracy": None} if control is None else judged(control)
    return {
        "name": recipe.name,
        "method": recipe.method,
        "seed": recipe.seed,
        "epochs": sum(phase.epochs for phase in phases(recipe) if phase.kind != "control"),
        "dense": {**judgement, **before, **first},
        "pruned": {**judged(small), **second},
        "latency_batch": len(batch),
        "cut_error": networks.cut_error,
        "layers": {
            name: {"before": layer.filters, "after": kept.get(name, layer.filters)}
            for name, layer in networks.pruner.graph.layers.items()
        },
        **({} if timed is None else {"latency": timed.summary(networks.pruner, networks.plan)}),
    }


def sizes(dense: nn.Module, pruned: nn.Module, images: Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return parameters, MACs per image, file size in bytes and latency on `images` in ms of both networks."""
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
