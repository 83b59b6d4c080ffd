"""Which channels are alive under a choice of filters: pushed forward through the nodes of a graph.

Masks by layer enter; what is alive of every tensor leaves, and which of them the network's inputs reach.  Choices
that are asked about one after the other are much alike, so the last answer is kept: a node whose gate and inputs
are as they were then is passed over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from .boundary import Boundary
from .masks import Flow, Mask
from .nodes import Node
from .records import Value
from .weighted import Contract


class Liveness:
    """Asks the nodes of one graph; `given` is what is alive from the start, `inputs` what the network is fed."""

    def __init__(self, nodes: Sequence[Node], given: Mapping[Value, Mask], inputs: Iterable[Value]) -> None:
        self._nodes = [(node, node.inputs, node.layer if isinstance(node, Boundary) else "") for node in nodes]
        self._gates: dict[str, bytes] = {}
        self._last = Flow(dict(given), reached=set(inputs))
        self._last = self.of({}, anew=True)

    def of(self, keep: Mapping[str, Mask], *, anew: bool = False) -> Flow:
        """What is alive, and reached from the inputs, when each layer has only the given filters."""
        before, gates = self._gates, {name: mask.tobytes() for name, mask in keep.items()}
        moved = {name for name in gates.keys() | before.keys() if gates.get(name) != before.get(name)}
        last, changed = self._last, set[Value]()
        flow = Flow(dict(last.alive), reached=set(last.reached))
        for node, inputs, layer in self._nodes:
            if changed.isdisjoint(inputs) and layer not in moved and not anew:
                continue
            node.push(flow)
            if isinstance(node, Boundary) and layer in keep:
                node.gate(flow, keep[layer])
            led = not flow.reached.isdisjoint(inputs)
            if isinstance(node, Contract):
                led = led and bool(flow.alive[node.x].any())
            for value in node.outputs:
                mask = flow.alive[value]
                flow.reached -= {value}
                if led and np.count_nonzero(mask):
                    flow.reached.add(value)
                same = value in last.alive and mask.tobytes() == last.alive[value].tobytes()
                if not same or (value in flow.reached) != (value in last.reached):
                    changed.add(value)
        self._last, self._gates = flow, gates
        return Flow(flow.alive, reached=flow.reached)
