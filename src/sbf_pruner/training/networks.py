"""Networks of a run: the dense one with its pruner, the pruned one and the dense control; loading and checks.

Errors are raised before anything is written or trained: for weights or images that do not fit the network, a
network that cannot be pruned, and a target that cannot be met or that the dense network already meets. The pruned
network is extracted once, when it is first needed, and must then give the same outputs in float64 as the gated one.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from ..budget.constraints import Constraints, at_least
from ..budget.file_size import state_tensors
from ..errors import PruningError, RunError, suggestion
from ..graph.build import trace
from ..graph.channel_graph import ChannelGraph
from ..measurement.counts import measure
from ..plan import Plan
from ..pruner import Pruner, try_cuts
from ..schedule import Phase
from ..scores.config import Scores
from ..surgery.extract import extract
from ..surgery.verify import prove
from ..utils.user_model import real_copy, remove_pruner_hooks
from .data.batches import Data, RunBatches
from .data.datasets import SOURCES
from .device import to_memory_format, training_outputs
from .latency_target import LatencyTarget, check_measurable, make_plan_timer, with_way
from .recipe import Recipe
from .run_folder import ELSEWHERE
from .schedule import batch_size, is_steered, phases, tightening_cycles

FINETUNE_ON = {"cpu": "small", "cuda": "gated"}  # the fastest choice on each device
STEERS_PER_EPOCH = 4  # adjustments of the penalty; each includes a landing, 1/8 second for ResNet-56
LOGIT_TRAVEL = 3.0  # distance that a logit can move while the limits tighten; a gate closes after 0.7
# Smallest number of cycles for that distance: in a single one, gates would close before steering reacts.
MIN_TIGHTENING_CYCLES = 2
PROOF_IMAGES = 32  # images on which outputs are compared; in float64 a large network needs much memory for each

_log = logging.getLogger(__name__)


class Networks:
    """The dense network with its pruner, the pruned network and the dense control.

    `measured` is the file with the latency model of a run that is resumed.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        data: Data,
        feed: RunBatches,
        device: torch.device,
        measured: Path | None = None,
    ) -> None:
        self.images, self.order = feed.images, feed.order
        self.dense = to_memory_format(real_copy(model).to(device), self.order)
        if recipe.model.weights:
            load_weights(self.dense, Path(os.path.expanduser(recipe.model.weights)))
        check_fit(self.dense, self.images[:2], data)
        self.initial = {name: tensor.detach().clone() for name, tensor in state_tensors(self.dense).items()}
        self._recipe = recipe
        self.pruner, self.timed = build_pruner(self.dense, self.images, recipe, len(data.train), measured)
        self._finetune_on = recipe.finetune_on
        if self._finetune_on == "auto":
            self._finetune_on = FINETUNE_ON.get(device.type, "small")
        self.small: nn.Module | None = None
        self.control: nn.Module | None = None
        self.plan = self.pruner.plan()
        self.cut_error: float | None = None
        self._dense_cost = self._small_cost = measure(self.dense, self.images[:1])

    def of(self, phase: Phase) -> tuple[nn.Module, Pruner | None]:
        """Return the network that a phase trains, and the pruner if its gates are in that network."""
        if phase.kind == "control":
            return self._controlled(), None
        if phase.kind != "finetune" or self._finetune_on == "gated":
            return self.dense, self.pruner
        return self.pruned(), None

    def pruned(self) -> nn.Module:
        """Return the pruned network; the first call extracts it and compares its outputs with the gated one's."""
        if self.small is None:
            if self.timed is None:
                small = to_memory_format(self.pruner.extract(), self.order)
            else:
                # `Pruner.extract` would compare the predicted time with the latency target and warn, but this plan
                # was chosen by the measured time, which may differ.
                small = self._extract()
            try:
                self.cut_error = prove(self.dense, small, self.images[:PROOF_IMAGES])
            except PruningError as error:
                raise RunError(str(error)) from error
            self.small = small
        return self.small

    def bare_copy(self) -> nn.Module:
        """Return a frozen copy of the dense network as it is now, in evaluation mode and without gates."""
        return remove_pruner_hooks(real_copy(self.dense)).eval().requires_grad_(False)

    def scored(self) -> dict[str, Any]:
        """Return the dense network's state dict, scores and plan, for `sbf frontier`; call it before extraction."""
        return {
            "dense": self.dense.state_dict(),
            "scores": self.pruner.scores(),
            "plan": {name: list(kept) for name, kept in self.plan.keep.items()},
        }

    def cost(self, phase: Phase) -> dict[str, int]:
        """Return filters, parameters and MACs of the network of a phase, without filters with closed gates."""
        alive, filters = self.pruner.alive()
        cost = self._small_cost
        if phase.kind == "control":
            alive, cost = filters, self._dense_cost
        return {"filters": alive, "filters_total": filters, "params": cost.params, "macs": cost.macs}

    def after_step(self, phase: Phase, epoch: int, step: int, steps: int) -> None:
        """Call `update_progress` at evenly spaced steps of a score epoch; `step` counts from 1 to `steps`."""
        if step < steps and step * STEERS_PER_EPOCH // steps > (step - 1) * STEERS_PER_EPOCH // steps:
            self.update_progress(phase, epoch - phase.first + step / steps)

    def update_progress(self, phase: Phase, epochs: float) -> None:
        """Tighten the limits of the budget after `epochs` epochs of a score phase, and adjust the penalty."""
        closing = tightening_cycles(self._recipe)
        self.pruner.progress = min((phase.cycle - 1 + epochs / phase.epochs) / closing, 1.0)
        if epochs < phase.epochs:  # At the end of a phase, the penalty is adjusted when the gates are set.
            self.pruner.steer()

    def check_timer(self) -> None:
        """Raise a PruningError if there is a latency target, to be measured on this machine, and timing fails."""
        if self.timed is not None:
            check_measurable(self.timed.clock, self.bare_copy(), self.images)

    def correct_by_measurement(self) -> None:
        """Correct the last landing by measurements, if there is a latency target and it can be measured here."""
        if self.timed is not None:
            timer = make_plan_timer(self.timed.clock, self.bare_copy(), self.images)
            if timer is not None:
                self.timed.correct_by_measurement(self.pruner, timer)

    def refresh_plan(self) -> None:
        """Update the plan and the cost of the pruned network after the gates have changed."""
        self.plan = self.pruner.plan()
        self._small_cost = measure(self._extract(), self.images[:1])

    def state(self) -> dict[str, Any]:
        """Return everything that training has changed so far, for a checkpoint."""
        pruning = self.small is None
        return {
            "dense": self.dense.state_dict() if pruning else None,
            "pruner": self.pruner.state_dict() if pruning else None,
            "plan": {name: list(kept) for name, kept in self.plan.keep.items()},
            "small": None if self.small is None else self.small.state_dict(),
            "control": None if self.control is None else self.control.state_dict(),
            "cut_error": self.cut_error,
        }

    def restore(self, state: dict[str, Any], initial: dict[str, Tensor]) -> None:
        """Restore a result of `state`, and `initial`, the weights that the run began with."""
        self.load_initial(initial)
        if state["small"] is None:
            self.dense.load_state_dict(state["dense"])
            self.pruner.load_state_dict(state["pruner"])
        else:
            self.pruner.gate(Plan(state["plan"]))
            self.small = self._extract()
            self.small.load_state_dict(state["small"])
        if state["control"] is not None:
            self._controlled().load_state_dict(state["control"])
        self.cut_error = state["cut_error"]
        self.refresh_plan()

    def load_initial(self, initial: dict[str, Tensor]) -> None:
        """Load the weights that the run was begun with; raise a RunError if they are of another network."""
        if not self._has_shapes_of(initial):
            raise RunError(f"the run was begun with another network; resume it with the same model, {ELSEWHERE}")
        self.initial = initial
        self.dense.load_state_dict(initial)

    def take_over(self, weights: dict[str, Tensor]) -> None:
        """Load the weights of another run's dense stage; raise a RunError if they are of another network."""
        if not self._has_shapes_of(weights):
            raise RunError("the dense stage belongs to another network; use that of a run of this network")
        self.dense.load_state_dict(weights)

    def _has_shapes_of(self, weights: dict[str, Tensor]) -> bool:
        ours, theirs = ({name: t.shape for name, t in state.items()} for state in (self.initial, weights))
        return ours == theirs

    def _extract(self) -> nn.Module:
        """Return the network with the filters that the gates keep now; it need not meet the budget yet."""
        pruner = self.pruner
        return to_memory_format(extract(self.dense, pruner.example_inputs, pruner.plan(), pruner.graph), self.order)

    def _controlled(self) -> nn.Module:
        if self.control is None:
            self.pruned()  # Extract it now, because the control overwrites the weights of the dense network.
            self.control = self.pruner.detach()
            self.control.load_state_dict(self.initial)
        return self.control


def build_pruner(
    dense: nn.Module, images: Tensor, recipe: Recipe, trained_on: int, measured: Path | None = None
) -> tuple[Pruner, LatencyTarget | None]:
    """Create the pruner of a run on its dense network, and its `LatencyTarget` if there is a latency target.

    `trained_on` is the number of training images, and `measured` the latency file of a run that is resumed. Raises
    a PruningError if a target cannot be met, or if the dense network meets all of them already.
    """
    example = images[:2]
    graph = trace(dense, example, recipe.constraints.ignore)
    constraints = replace(_constraints(dense, example, graph, recipe), ignore=())  # The graph leaves these out.
    scores: Scores = replace(recipe.scores, speed=_speed(recipe, trained_on))
    timed = None
    if recipe.budget.latency != 1:
        timed = LatencyTarget.of(dense, images, graph, recipe, measured, constraints)
        scores, constraints = with_way(timed.chosen.way, scores, constraints)
    pruner = Pruner(
        dense,
        example,
        budget=recipe.budget,
        scores=scores,
        constraints=constraints,
        clock=None if timed is None else timed.clock,
        graph=graph,
    )
    reached = pruner.selector.limits
    if reached is not None and reached.hold(reached.whole):
        found = " and ".join(reached.told(name, reached.whole) for name in reached.most)
        raise PruningError(f"the dense network already meets the budget ({found}); set a smaller one")
    return pruner, timed


def _constraints(dense: nn.Module, example: Tensor, graph: ChannelGraph, recipe: Recipe) -> Constraints:
    """Return the recipe's constraints, with at least one filter per layer if the model cannot lose whole layers."""
    constraints = recipe.constraints
    constraints.check_patterns(graph)  # Before `try_cuts`, which takes longer.
    why = try_cuts(dense, example, graph)
    if why is None:
        return constraints
    least = at_least(constraints.min_filters, 1, graph.layers)
    if least != constraints.min_filters:
        _log.warning("every layer keeps at least one filter, because with whole layers removed %s", why)
    return replace(constraints, min_filters=least)


def _speed(recipe: Recipe, images: int) -> float:
    """Return the distance that logits move per step; 0 if `scores.lr` determines it.

    If the penalty is steered and `scores.speed` is 0, logits can move by `LOGIT_TRAVEL` while the limits tighten.
    """
    if recipe.scores.speed or not is_steered(recipe):
        return recipe.scores.speed
    first = [phase for phase in phases(recipe) if phase.trains_scores][:1]
    steps = sum(phase.epochs * max(images // batch_size(recipe, phase), 1) for phase in first)
    return LOGIT_TRAVEL / max(tightening_cycles(recipe), MIN_TIGHTENING_CYCLES) / max(steps, 1)


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a state dict from a .safetensors, .pt or .pth file.

    Raises a RunError and leaves the model unchanged if a name or shape does not match, or if a value is NaN or, in
    a parameter, infinite.
    """
    where = f"model.weights: {path}"
    given = _read(path, where)
    state, trained = model.state_dict(), dict(model.named_parameters())
    missing = [name for name in state if name not in given]
    unknown = [name for name in given if name not in state]
    if unknown and all(name.startswith("module.") for name in given):
        raise RunError(f"{where} was saved from a DataParallel wrapper; save model.module.state_dict()")
    if missing or unknown:
        parts = [f"has no {missing[0]!r}{_more(missing)}"] if missing else []
        if unknown:
            hint = "" if missing else f" ({suggestion(unknown[0], state)})"
            parts.append(f"has {unknown[0]!r}{_more(unknown)}, which the model does not have{hint}")
        raise RunError(f"{where} {' and '.join(parts)}; give the weights of this network")
    for name, tensor in given.items():
        ours = state[name]
        if tensor.shape != ours.shape:
            raise RunError(
                f"{where}: {name} has shape {tuple(tensor.shape)}, the model's {tuple(ours.shape)}; "
                "set model.num_classes, model.in_channels or model.options to what it was trained with"
            )
        if tensor.is_floating_point() != ours.is_floating_point():
            dtypes = f"{name} has dtype {tensor.dtype}, but the model's is {ours.dtype}"
            raise RunError(f"{where}: {dtypes}; convert it before saving")
        if tensor.isnan().any() or (name in trained and tensor.isinf().any()):  # A mask may be infinite.
            raise RunError(f"{where}: {name} contains NaN or infinity; give other weights")
    model.load_state_dict(given)


def check_fit(model: nn.Module, images: Tensor, data: Data) -> None:
    """Raise a RunError unless the network can be trained and gives one logit per class for each image.

    Leaves the network in evaluation mode.
    """
    name, shape = type(model).__name__, "x".join(map(str, images.shape[1:]))
    try:
        with torch.no_grad():
            outputs = model.eval()(images)
    except Exception as error:  # User code may raise anything.
        cause = " ".join(str(error).split())
        remedy = f"build it for {images.shape[1]} channels (model.in_channels), or set data.image_size"
        if data.name not in SOURCES:
            remedy += "; images of your own dataset must have the shape (channels, height, width)"
        if others := sorted({str(p.dtype) for p in model.parameters() if p.dtype != images.dtype}):
            remedy = f"images are {images.dtype} and weights {', '.join(others)}: build a network of {images.dtype}"
        failure = f"({type(error).__name__}: {cause})"
        raise RunError(f"{name} does not run on the images of {data.name}, {shape} {failure}; {remedy}") from error
    if not isinstance(outputs, Tensor) or outputs.dim() != 2:
        what = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise RunError(
            f"{name} gives {what} for {len(images)} images; training needs a network that gives one row of "
            f"{data.num_classes} logits per image; return these alone, or prune it in a loop of your own "
            "(sbf.Pruner)"
        )
    if outputs.shape[1] != data.num_classes:
        raise RunError(
            f"{name} gives {outputs.shape[1]} numbers per image but {data.name} has {data.num_classes} classes; "
            f"build it with num_classes = {data.num_classes}, or set model.num_classes = {outputs.shape[1]} if "
            "those are the classes meant"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise RunError(f"all weights of {name} are frozen, so nothing is trained; call requires_grad_(True)")
    trained = training_outputs(model, images)  # None on errors, e.g. from too small a batch
    if trained is not None and not isinstance(trained, Tensor):
        raise RunError(
            f"{name} gives {type(trained).__name__} in training mode, where the loss needs logits alone; build it "
            "without auxiliary outputs (such as model.options.aux_logits = false), or train it in a loop of your "
            "own with sbf_pruner.Pruner"
        )


def _read(path: Path, where: str) -> dict[str, Tensor]:
    if not path.is_file():
        raise RunError(f"{where} does not exist; give a .safetensors, .pt or .pth file")
    safe = path.suffix == ".safetensors"
    try:
        path.open("rb").close()  # safetensors reports any file that it cannot open as missing.
        given: Any = load_file(path) if safe else torch.load(path, "cpu", weights_only=True)
    except SafetensorError as error:
        raise RunError(f"{where} cannot be read ({error}); save it with safetensors.torch.save_file") from error
    except OSError as error:
        raise RunError(f"{where} cannot be read ({error.strerror or error}); give another file") from error
    except Exception as error:  # Unpickling may raise anything; omit torch's hint to load unsafely.
        why = "it is damaged, or holds a whole model, which is never unpickled"
        remedy = "save it with torch.save(model.state_dict(), path)"
        raise RunError(f"{where} cannot be read ({why}); {remedy}") from error
    if not isinstance(given, dict) or not all(isinstance(tensor, Tensor) for tensor in given.values()):
        raise RunError(f"{where} holds something other than a state_dict; save model.state_dict() alone")
    return given


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
