"""The channel graph: the layers that can be pruned, where each is gated, and the rest with reasons.

`flow` runs liveness forward and need backward for any choice of filters; `settle` says which filters really
survive it; `lifelines` names the layers that must keep one.  `build.trace` makes a graph from a model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ..errors import PlanError
from .boundary import Boundary
from .liveness import Liveness
from .masks import Flow, Grids, Mask, level, some, whole_groups
from .nodes import Elementwise, Node, Sum
from .records import Call, Trace, Value
from .relations import Relations
from .ties import Ties
from .weighted import Contract, Product


@dataclass(frozen=True)
class Site:
    """A place in the model where a gate stands.

    "affine": folded into the module's scale and shift; "map": multiplied into its output; "bias": into its
    bias; "sum": into a sum that the layer's output goes into, where the model has a `GatePlace`.  `layer` owns the
    gate; a site without one only follows: it closes where nothing alive arrives, so that a norm or a bias does
    not bring a dead channel back.
    """

    module: str
    kind: str
    layer: str
    parameters: tuple[str, ...] = ()
    dim: int = 1
    edges: tuple[Boundary, ...] = field(default=(), repr=False, compare=False)

    def open(self, flow: Flow) -> Mask:
        """Which gates are open under the given flow."""
        masks = [flow.alive[e.out].reshape(-1) for e in self.edges]
        return np.logical_or.reduce(masks)


@dataclass(frozen=True)
class Layer:
    """A convolution or linear layer whose filters can be removed."""

    name: str
    filters: int
    kind: str  # the module's class
    weight: str  # the parameter's qualified name
    map_size: tuple[int, ...]  # height and width of the input map; () for a linear layer
    groups: int
    site: Site
    unit: int = 1  # filters that go together, because a norm shares their statistics
    nodes: tuple[Contract, ...] = field(default=(), repr=False, compare=False)


@dataclass
class Pinned:
    """Where the model's own code insists on sizes: operators, and calls of modules, that get all their channels."""

    positions: set[int] = field(default_factory=set)
    whole: set[Call] = field(default_factory=set)


@dataclass
class ChannelGraph:
    """What is connected to what; see `trace`.

    Every convolution and linear layer of the model is in exactly one of `layers`, which can be pruned, `followers`,
    which lose filters when others do, and `skipped`, which are left alone.
    """

    layers: dict[str, Layer]
    unscored: dict[str, str]  # every other layer -> why it has no score of its own
    sites: list[Site]
    nodes: list[Node] = field(repr=False)
    grids: Grids = field(repr=False)
    trace: Trace = field(repr=False)
    outputs: list[Value] = field(repr=False)
    entries: dict[Call, tuple[Value, ...]] = field(repr=False)  # what goes into every call of a module
    pinned: Pinned = field(default_factory=Pinned, repr=False, compare=False)  # as far as cuts have shown it

    @cached_property
    def relations(self) -> Relations:
        """How the layers hang together."""
        return Relations(self)

    @property
    def followers(self) -> dict[str, tuple[str, ...]]:
        """The layers without scores that lose filters when others do, each with those others."""
        return self.relations.followers

    @cached_property
    def skipped(self) -> dict[str, str]:
        """The layers that keep all their filters, each with the reason."""
        return {name: reason for name, reason in self.unscored.items() if name not in self.followers}

    def flow(self, keep: Mapping[str, Mask]) -> Flow:
        """Liveness and need of every channel when each layer has only the given filters."""
        flow = self._liveness.of(keep)
        for value in self.outputs:
            flow.need(value, np.ones(self.grids[value], bool), self.grids[value])
        for node in reversed(self.nodes):
            node.pull(flow)
        return flow

    def carried(self, origin: Mapping[str, Mask]) -> Flow:
        """How far the channels of some layers get, whatever those are fed, while no other layer gives anything."""
        flow = Flow(dict(self._given))
        for node in self.nodes:
            node.push(flow)
            if isinstance(node, Boundary) and node.layer:
                grid = self.grids[node.out]
                given = origin.get(node.layer)
                flow.alive[node.out] = np.zeros(grid, bool) if given is None else given.reshape(grid)
        return flow

    def thinned(self, layers: Collection[str]) -> Flow:
        """What is alive whichever filters the given layers lose, if what adds up channels still gets some."""
        flow = Flow(dict(self._given))
        for node in self.nodes:
            node.push(flow)
            if isinstance(node, Boundary) and node.layer in layers:
                node.gate(flow, np.zeros(self.grids[node.out], bool))
            whole = isinstance(node, (Sum, Product)) and max(self.grids[node.outputs[0]], default=1) == 1
            if whole or (isinstance(node, Contract) and not node.depthwise):
                flow.alive[node.outputs[0]] = np.ones(self.grids[node.outputs[0]], bool)
        return flow

    def undefined(self, flow: Flow) -> list[Elementwise]:
        """The operators given a zero where they have no value, or no gradient, though all filters give none."""
        return [
            node
            for node in self.avoiding
            if any((self._whole.alive[v] & ~flow.alive[v]).any() for v in node.avoiding)
        ]

    @cached_property
    def avoiding(self) -> list[Elementwise]:
        """The operators that must not be given a zero."""
        return [node for node in self.nodes if isinstance(node, Elementwise) and node.avoiding]

    @cached_property
    def _whole(self) -> Flow:
        return self._liveness.of({})

    @cached_property
    def _given(self) -> dict[Value, Mask]:
        """Inputs, parameters and constants: all of them is alive."""
        return {v: np.broadcast_to(np.True_, grid) for v, grid in self.grids.items() if v.kind != "result"}

    @cached_property
    def _liveness(self) -> Liveness:
        return Liveness(self.nodes, self._given, self.trace.inputs)

    @cached_property
    def ties(self) -> Ties:
        """What the layouts of its tensors have to do with each other."""
        return Ties(self.nodes, self.grids)

    def all_filters(self) -> dict[str, Mask]:
        """Every filter of every layer."""
        return {name: np.ones(layer.filters, bool) for name, layer in self.layers.items()}

    def settle(self, keep: Mapping[str, Mask]) -> dict[str, Mask]:
        """The filters that are left once those without live input, or that nothing needs, are gone too.

        A grouped convolution keeps equal numbers in the groups it keeps: the fullest decides.  Filters that
        a group norm looks at together stay together.
        """
        return self.settled(keep)[0]

    def settled(self, keep: Mapping[str, Mask]) -> tuple[dict[str, Mask], Flow]:
        """What `settle` leaves, and the flow under it."""
        held = self.all_filters() | {n: np.asarray(m, bool) for n, m in keep.items()}
        for _ in range(len(self.layers) + 2):
            flow = self.flow(held)
            left = {name: self._left(layer, held[name], flow) for name, layer in self.layers.items()}
            if all(np.array_equal(left[n], held[n]) for n in left):
                return held, flow
            held = left
        return held, self.flow(held)

    def _left(self, layer: Layer, held: Mask, flow: Flow) -> Mask:
        left = np.zeros(layer.filters, bool)
        for edge in layer.site.edges:
            wanted = edge.wanted(flow)
            if wanted is not None:
                left |= wanted.reshape(-1)
        left = whole_groups(left & held, layer.unit)
        if layer.site.kind != "sum":  # there a channel may be alive without its filter
            left &= np.logical_or.reduce([n.fed(flow) for n in layer.nodes])
        if layer.groups > 1 and left.any():
            rows = left.reshape(layer.groups, -1)
            # Where all inputs stay, as those of the network do, no group can go.
            whole = any(self.grids[n.x][1] < n.x.shape[1] for n in layer.nodes)
            left = level(rows, some(rows, 1) | whole).reshape(-1)
        return left

    def connected(self, keep: Mapping[str, Mask]) -> bool:
        """Does every output still depend on the inputs, as it does with all filters, and is it a number?"""
        flow = self._liveness.of(keep)
        return self._led <= flow.reached and not self.undefined(flow)

    @cached_property
    def _led(self) -> set[Value]:
        """The outputs that depend on the inputs."""
        return self._whole.reached & set(self.outputs)

    def lifelines(self, keep: Mapping[str, Mask], order: Sequence[str] = ()) -> list[str]:
        """The layers that cut the network: a smallest set that must keep more filters to connect it again.

        Layers early in `order` are given up first.
        """
        if self.connected(keep):
            return []
        short = [n for n, m in keep.items() if not m.any()]
        restored = dict(keep) | {n: np.ones(len(keep[n]), bool) for n in short}
        if not self.connected(restored):  # no layer is empty, but what is left meets nothing: a * b, groups
            short = [n for n, m in keep.items() if not m.all()]
            restored = dict(keep) | {n: np.ones(len(keep[n]), bool) for n in short}
        for name in (n for n in (order or short) if n in short):
            without = {**restored, name: keep[name]}
            if self.connected(without):
                restored = without
        return [n for n in short if restored[n] is not keep[n]]

    def check_connected(self, keep: Mapping[str, Mask]) -> None:
        """Raise a PlanError that names the culprits if the input is cut from an output, or a divisor is."""
        culprits = self.lifelines(keep)
        if culprits:
            names = ", ".join(culprits[:5]) + (" ..." if len(culprits) > 5 else "")
            empty = not any(keep[n].any() for n in culprits)
            flow = self._liveness.of(keep)
            harm = "cuts the input from the output"
            if self._led <= flow.reached:
                node = self.undefined(flow)[0]
                harm = f"leaves {node.op.name} at {node.op.where} a zero, where it has no {node.lacks}"
            raise PlanError(
                f"the plan {harm}: {names} would keep no filter "
                + ("and nothing leads around; keep at least one filter there" if empty
                   else "that leads on and nothing leads around; keep others there")
            )  # fmt: skip
