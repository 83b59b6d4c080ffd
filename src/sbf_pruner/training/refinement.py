"""How much each residual block refines what it is given: |S.f(x)|^2 / |x|^2, on real images.

A network, its residual blocks and images enter; plain records leave.  The additions are met in the order in
which the graph recorded them; a network that adds more or less often when it really runs is not measured,
and the error says so.  Energies are summed in float64 where they arise; the network is left as it was, with the
mode of each of its modules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import PruningError
from ..graph.residual import ResidualBlock, additions, is_addition, residual_blocks
from ..measuring import evaluating
from ..pruner import Pruner

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
