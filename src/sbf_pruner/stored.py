"""The file of a network's weights: what its header says, and how long it is for any choice of filters.

A dense network and its channel graph enter; for the layout that surgery would cut, bytes leave, without cutting
or writing anything.  What holds: the file that is written is never longer (but where the model's own code insists
on sizes, see `graph.costs`).  It is shorter by a few bytes per tensor, because which names surgery makes longer,
and where in the file a tensor lies, is not looked at.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from .errors import PruningError
from .files import metadata_of, stored_bytes, to_plain
from .graph.channels import ChannelGraph
from .graph.costs import Laid, entries_left
from .graph.records import Value
from .layers import Remap, Zeros
from .plan import Plan

FORMAT = "sbf-pruner network 1"
_INSERTED = len("module.")  # what surgery may put into a name
_DTYPE = len("F8_E4M3")  # the longest there is
_ALIGNED = 8
_ANY = "0" * 16  # in the place of a wiring: all are as long
_EXTRA = "_extra_state"  # what torch calls the rest of a module's state


def header(plans: Sequence[Plan], inputs: Any, wired: str) -> dict[str, Any]:
    """What stands before the tensors: every plan in turn, what the example inputs looked like, and the wiring."""
    return {
        "format": FORMAT,
        "plans": [{name: list(kept) for name, kept in plan.keep.items()} for plan in plans],
        "inputs": to_plain(inputs, _describe),
        "wiring": wired,
    }


def wiring(network: nn.Module) -> str:
    """Tells networks apart whose tensors are alike, and whose channels meet differently.

    >>> kept = [wiring(nn.Sequential(Remap(source))) for source in ([0, -1, 1], [0, 1, -1], [0, -1, 1])]
    >>> [kept[0] == other for other in kept]
    [True, False, True]
    """
    told = [
        (name, module.dim, module.source if isinstance(module, Remap) else module.width)
        for name, module in network.named_modules()
        if isinstance(module, (Remap, Zeros))
    ]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[: len(_ANY)]


def tensors_of(model: nn.Module, *, keep_vars: bool = False) -> dict[str, Tensor]:
    """The tensors of a network by name; refused where its state holds anything else, which no file would."""
    state: dict[str, Any] = model.state_dict(keep_vars=keep_vars)
    for name, held in state.items():
        if not isinstance(held, Tensor):
            module = name.removesuffix(_EXTRA).removesuffix(".") or type(model).__name__
            raise PruningError(
                f"{module} puts a {type(held).__name__!r} into its state, as get_extra_state does, and the "
                "file of a network holds tensors alone; keep it in a buffer, or give a tensor there"
            )
    return state


def contents(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What the file of a network holds: its tensors, and its header."""
    plans, inputs = getattr(model, "sbf_plans", ()), getattr(model, "sbf_inputs", None)
    return tensors_of(model), header(plans, inputs, wiring(model))


def saved_bytes(model: nn.Module, inputs: Any, plan: Plan) -> int:
    """How long the file of weights would be if `model` were what `plan` left."""
    return stored_bytes(tensors_of(model), header((plan,), inputs, _ANY))


class Stored:
    """Bytes of the file that `save` would write.

    >>> import numpy as np, torch
    >>> from .graph.build import trace
    >>> from .graph.costs import lay_out, cost_of
    >>> net, images = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 4, 1)), torch.rand(1, 3, 5, 5)
    >>> graph = trace(net, images)
    >>> stored, laid = Stored(net, images, graph), lay_out(graph, {"0": np.arange(8) < 2})
    >>> stored.dense > stored.bytes(laid, cost_of(graph, laid).size) > 0
    True
    """

    def __init__(self, model: nn.Module, inputs: Any, graph: ChannelGraph) -> None:
        self._graph, self._inputs = graph, inputs
        self._before: tuple[Plan, ...] = getattr(model, "sbf_plans", ())
        state = tensors_of(model, keep_vars=True)
        used = {id(state[name]): name for name in graph.trace.states if name in state}
        self._twins = {  # a tensor with several names is stored under each of them
            name: used[id(tensor)]
            for name, tensor in state.items()
            if id(tensor) in used and name not in graph.trace.states
        }
        self._entries = {name: _entry(name, tensor) for name, tensor in state.items()}
        self._fixed = {
            name: tensor.numel() * tensor.element_size()
            for name, tensor in state.items()
            if name not in graph.trace.states and name not in self._twins
        }
        self.dense = stored_bytes(*contents(model))
        """with all filters: the network itself, whose file tells of no plan"""

    def bytes(self, laid: Laid, tensors: int) -> int:
        """At most how long the file is, if what can be pruned takes so many bytes."""
        if all(mask.all() for mask in laid.keep.values()):
            return self.dense
        there = [n for n in self._entries if self._twins.get(n, n).rpartition(".")[0] not in laid.gone]
        data = tensors + sum(self._fixed.get(name, 0) for name in there)
        if self._twins:
            left, states = entries_left(self._graph, laid), self._graph.trace.states
            twins = [self._twins[name] for name in there if name in self._twins]
            data += sum(left[name] * _bytes_each(states[name]) for name in twins)
        plans = (*self._before, Plan.from_masks(laid.keep))
        told = len(json.dumps({"__metadata__": metadata_of("0" * 64, header(plans, self._inputs, _ANY))}))
        offsets = 2 * len(str(data))
        told += sum(self._entries[name] + _INSERTED + offsets for name in there)
        return 8 + -(-told // _ALIGNED) * _ALIGNED + data


def _bytes_each(value: Value) -> int:
    return value.data.element_size() if value.data is not None else 0


def _entry(name: str, tensor: Tensor) -> int:
    """Characters of a tensor's entry in the header, without the digits of its place."""
    shape = json.dumps(list(tensor.shape), separators=(",", ":"))
    told = json.dumps(name, ensure_ascii=False) + f':{{"dtype":"","shape":{shape},"data_offsets":[,]}},'
    return len(told.encode()) + _DTYPE


def _describe(at: str, tensor: Tensor) -> dict[str, Any]:
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
