"""Which recorded operators are layers and norms, and whose weights they use.

A recorded operator enters; the module that holds its weight leaves, also where the weight is computed or
transposed on its way.  Of every such weight it is known which of its dimensions are filters and inputs.
"""

from __future__ import annotations

from .masks import Grids, along
from .records import INSTANCE_NORM, Op, Trace, Value

LAYERS = {"aten.convolution": 1, "aten.mm": 1, "aten.addmm": 2}
PRODUCTS = {"aten.mm", "aten.addmm"}
BATCH_NORMS = {f"aten.{name}" for name in ("native_batch_norm", "cudnn_batch_norm", "_native_batch_norm_legit")}
GROUP_NORM = "aten.native_group_norm"
_NORMS = BATCH_NORMS | {INSTANCE_NORM, GROUP_NORM}


def owner(op: Op) -> str | None:
    """The module whose weight a layer or norm operator uses."""
    if op.name in LAYERS:
        weight: Value = op.args[LAYERS[op.name]]
        weight = weight.transpose_of or weight
        # What a computed weight is made of is held by the layer itself, or by its parametrisations.
        holders = {root.name.rpartition(".")[0].partition(".parametrizations.")[0] for root in weight.roots or ()}
        return holders.pop() if len(holders) == 1 else None
    if op.name in _NORMS:
        for held in op.args[1:5]:
            if isinstance(held, Value) and held.kind == "state":
                return held.name.rpartition(".")[0]
    return None


def weight_grids(trace: Trace) -> Grids:
    """Of a stored weight, however large, filters and inputs are told apart.

    Of those behind a computed weight only the filters are: whatever normalises a filter does so over its
    inputs, which must therefore all stay.
    """
    grids: Grids = {}
    for op in trace.ops:
        if op.name in LAYERS:
            weight: Value = op.args[LAYERS[op.name]]
            axis = 0
            if weight.transpose_of is not None:
                weight = weight.transpose_of
            elif op.name in PRODUCTS or op.args[6]:
                axis = 1
            if weight.kind == "state":
                grids[weight] = weight.shape
            elif weight.kind == "result":
                for root in weight.roots or ():
                    if root.shape == weight.shape and grids.get(root) != root.shape:
                        grids[root] = along(axis, root.shape)
    return grids
