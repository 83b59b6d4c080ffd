"""How fast the training engine is on a GPU, and that its fast path computes what the plain one does.

ResNet-56, batch 256, made-up images.  In one run: the plain eager loop against the captured engine for weight
and for score steps; the dense network against what stands for the extracted one at half the MACs in
fine-tuning, cut in three ways; an evaluation of 10,000 images; and short runs of both engines, compared.  Every
section is saved as soon as it is there.  On a machine without a GPU only `--quick` makes sense: the same code,
tiny.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from anatomy import dissect
from limits import gather
from torch import Tensor, nn

from saving import save_result
from sbf_pruner import Plan, Pruner, Scores, measure
from sbf_pruner.models import resolve
from sbf_pruner.training import ComputeConfig, OptimizerConfig
from sbf_pruner.training.data import Augment, DeviceBatches, Split
from sbf_pruner.training.engine import CapturedEngine, Engine, EpochResult, captured, make_engine, make_optimizer

LIMITS = {  # at most, or at least where a ratio says how many times as fast
    "weight_step_ms": ("most", 5.0),
    "score_step_ms": ("most", 4.2),
    "weight_step_speedup": ("least", 4.0),
    "score_step_speedup": ("least", 4.0),
    "finetune_filters_speedup": ("least", 1.5),
    "finetune_streams_speedup": ("least", 1.5),
    "finetune_blocks_speedup": ("least", 1.5),
    "evaluation_seconds": ("most", 0.2),
    "float32_weight_difference": ("most", 1e-3),
    "bfloat16_loss_difference": ("most", 0.03),
}
KERNEL = "sbf_pruner.training.engine.triton_kernels"  # imported where there is Triton
WAYS = ("filters", "streams", "blocks")  # what goes: single filters, the same ones in a whole stage, whole blocks
# Mean part of the filters that conv1 and conv2 of a block keep, by stage: about half of the MACs.
KEPT = {"layer1": (0.62, 0.77), "layer2": (0.54, 0.7), "layer3": (0.65, 0.75)}
KEPT_WIDTHS = {16: 8, 32: 24, 64: 48}  # where all layers of a stage keep the same filters
KEPT_BLOCKS = {"layer1": 4 / 9, "layer2": 5 / 9, "layer3": 5 / 9}  # part of each stage's blocks


@dataclass(frozen=True)
class Setting:
    """What is timed."""

    model: str = "resnet56"
    batch: int = 256
    side: int = 32
    steps: int = 100
    """of a timed epoch of the captured engine"""
    eager_steps: int = 20
    evaluated: int = 10_000
    repeats: int = 3
    checked: str = "resnet20"
    """the network that both engines train for the comparison"""


QUICK = Setting("resnet20", 8, 8, 2, 2, 20, 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes, nothing saved")
    parser.add_argument("--ways", default=",".join(WAYS), help="what goes in fine-tuning; each is compiled anew")
    parser.add_argument("--sections", default="plain,captured,finetune,checks", help="what to run, of these four")
    parser.add_argument("--plan", type=Path, help="plan.json of a run, instead of made-up filters at half the MACs")
    parser.add_argument("--option", action="append", default=[], help="key=json for the compiler, to try it")
    parser.add_argument("--name", default="engine", help="the result's file name, for trials beside the real one")
    args = parser.parse_args()
    setting = QUICK if args.quick else Setting()
    if args.quick:
        torch.set_num_threads(1)  # tiny networks: a second thread costs more than it gives
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for option in args.option:
        key, _, value = option.partition("=")
        captured.OPTIONS[key] = json.loads(value)
    figures: dict[str, Any] = {"setting": asdict(setting), "compiler": dict(captured.OPTIONS), "limits": LIMITS}
    parts = run(setting, device, args.sections.split(","), args.ways.split(","), args.plan)
    save = None if args.quick else lambda figures: save_result(args.name, figures, str(device))
    return 0 if gather(parts, figures, goals, LIMITS, save) or args.quick else 1


def run(
    setting: Setting, device: torch.device, sections: list[str], ways: list[str], path: Path | None = None
) -> Iterator[dict[str, Any]]:
    """The sections' figures, one after another."""
    if "plain" in sections:
        # The loop anyone would write: eager, in bfloat16 where that is safe, with the data on the device.
        plain = ComputeConfig(device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)
        yield {"plain": time_engine(plain, setting, setting.eager_steps)}
        release()
    if "captured" in sections:
        fast = ComputeConfig(device, captured=True, dtype=torch.bfloat16)
        yield {"captured": time_engine(fast, setting, setting.steps, dissected=True)}
        yield {"chosen": chosen_ways()}
        release()
    timed: dict[str, Any] = {}
    for way in ways if "finetune" in sections else ():
        timed[way] = time_finetuning(way, setting, device, path)
        yield {"finetune": dict(timed)}
        release()
    if "checks" in sections:
        for dtype in (torch.bfloat16, torch.float32):
            yield {str(dtype).removeprefix("torch."): compare_engines(setting, device, dtype)}
            release()


def goals(figures: dict[str, Any]) -> dict[str, float]:
    """The figures that have limits, as far as they are there."""
    plain, fast, cut = (figures.get(part) for part in ("plain", "captured", "finetune"))
    found: dict[str, float] = {}
    if fast:
        found |= {"weight_step_ms": fast["weight_ms"], "score_step_ms": fast["score_ms"]}
        found["evaluation_seconds"] = fast["evaluation_seconds"]
    if fast and plain:
        found |= {f"{kind}_step_speedup": plain[f"{kind}_ms"] / fast[f"{kind}_ms"] for kind in ("weight", "score")}
    if fast and cut:
        found |= {f"finetune_{way}_speedup": fast["weight_ms"] / each["weight_ms"] for way, each in cut.items()}
    if "float32" in figures:
        found["float32_weight_difference"] = figures["float32"]["weight_difference"]
    if "bfloat16" in figures:
        found["bfloat16_loss_difference"] = figures["bfloat16"]["loss_difference"]
    return found


# -- speed ---------------------------------------------------------------------------------------------------


def time_engine(machine: ComputeConfig, setting: Setting, steps: int, *, dissected: bool = False) -> dict[str, Any]:
    """Milliseconds of a weight step and of a score step on the dense network, and seconds of an evaluation.

    Where it is dissected, also what kinds of kernels the time of a step goes to.
    """
    torch.manual_seed(0)
    device = machine.device
    model = resolve(setting.model).to(device)
    pruner = Pruner(model, torch.zeros(1, 3, setting.side, setting.side, device=device))
    engine = make_engine(model, machine, pruner)
    found: dict[str, Any] = weight_steps(engine, setting, steps, dissected=dissected)
    batches = made_up(setting, setting.batch * steps, device)
    with pruner.scoring():
        first, times = timed_epochs(lambda epoch: engine.score_epoch(batches, epoch), setting.repeats, device)
        if dissected:
            found["score_kernels"] = dissect(lambda: engine.score_epoch(batches, 0), steps, device)
    found |= {"score_ms": 1e3 * statistics.median(times) / steps, "score_ready_seconds": first}
    pictures = made_up(setting, setting.evaluated, device, training=False)
    first, times = timed_epochs(lambda epoch: engine.evaluate(pictures), setting.repeats, device)
    return found | {"evaluation_seconds": statistics.median(times), "evaluation_ready_seconds": first}


def time_finetuning(way: str, setting: Setting, device: torch.device, path: Path | None) -> dict[str, Any]:
    """Milliseconds of a fine-tuning step of the extracted network."""
    torch.manual_seed(0)
    images = torch.zeros(1, 3, setting.side, setting.side, device=device)
    model = resolve(setting.model).to(device)
    pruner = Pruner(model, images)
    pruner.gate(Plan.load(path) if path is not None and way == "filters" else plan_of(way, pruner))
    small = pruner.extract()
    engine = CapturedEngine(small, device)
    macs = [measure(each, images).macs for each in (model, small)]
    parts = {"small_macs": macs[1] / macs[0]}
    return parts | {"widths": conv_widths(small)} | weight_steps(engine, setting, setting.steps)


def weight_steps(engine: Engine, setting: Setting, steps: int, *, dissected: bool = False) -> dict[str, Any]:
    batches = made_up(setting, setting.batch * steps, engine.device)
    optimizer = make_optimizer(engine.network, OptimizerConfig(lr=0.1))

    def epoch(index: int) -> EpochResult:
        return engine.train_epoch(batches, index, optimizer, [1e-3] * steps)

    first, times = timed_epochs(epoch, setting.repeats, engine.device)
    found = {"weight_ms": 1e3 * statistics.median(times) / steps, "weight_ready_seconds": first}
    return found | ({"weight_kernels": dissect(lambda: epoch(0), steps, engine.device)} if dissected else {})


def timed_epochs(
    epoch: Callable[[int], EpochResult], repeats: int, device: torch.device
) -> tuple[float, list[float]]:
    """Seconds of the first epoch, which compiles what there is to compile, and of those after it."""
    seconds = []
    for index in range(repeats + 1):
        began = time.perf_counter()
        epoch(index)  # it reads its sums at its end, and so waits for the device
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return round(seconds[0], 2), seconds[1:]


def plan_of(way: str, pruner: Pruner) -> Plan:
    """About half of the MACs, cut in one of the three ways; what is not in it stays whole."""
    if way == "filters":
        return half_plan(pruner)
    if way == "streams":
        return Plan({name: tuple(range(KEPT_WIDTHS[each.filters])) for name, each in pruner.graph.layers.items()})
    keep: dict[str, tuple[int, ...]] = {}
    for stage, part in KEPT_BLOCKS.items():
        layers = [name for name in pruner.graph.layers if name.startswith(f"{stage}.")]
        keep |= dict.fromkeys(layers[2 * round(part * len(layers) / 2) :], ())
    return Plan(keep)


def half_plan(pruner: Pruner) -> Plan:
    """A plan like a real run's: every layer keeps filters of its own, some layers few and some nearly all."""
    chosen = random.Random(0)
    keep = {}
    for name, layer in pruner.graph.layers.items():
        stage, _, inner = name.partition(".")
        if stage in KEPT:
            part = KEPT[stage][inner.endswith("conv2")] + chosen.uniform(-0.25, 0.25)
            count = min(layer.filters, max(1, round(part * layer.filters)))
            keep[name] = tuple(sorted(chosen.sample(range(layer.filters), count)))
    return Plan(keep)


def conv_widths(network: nn.Module) -> dict[str, int]:
    """How often each pair of widths stands in a network."""
    pairs = [f"{m.in_channels}-{m.out_channels}" for m in network.modules() if isinstance(m, nn.Conv2d)]
    return {pair: pairs.count(pair) for pair in sorted(set(pairs))}


def chosen_ways() -> dict[str, str]:
    """How weight gradients are computed, where our kernel competes."""
    kernel = sys.modules.get(KERNEL)
    return {} if kernel is None else kernel.CHOICES.told()


def made_up(setting: Setting, count: int, device: torch.device, *, training: bool = True) -> DeviceBatches:
    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 3, setting.side, setting.side), dtype=torch.uint8, generator=random)
    split = Split(images, torch.randint(0, 10, (count,), generator=random))
    augment = Augment(crop=setting.side // 8, flip=True) if training else None
    return DeviceBatches(split, setting.batch, (0.5,) * 3, (0.25,) * 3, device=device, augment=augment)


def release() -> None:
    """Forget what was compiled and captured, and give its memory back."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# -- correctness ---------------------------------------------------------------------------------------------


def compare_engines(setting: Setting, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Both engines on the same short run, compiled without tuning: what they come to, and how far apart."""
    exact = dtype == torch.float32
    before = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision(), dict(captured.OPTIONS)
    try:
        captured.OPTIONS["max_autotune"] = False
        if exact:
            torch.backends.cudnn.allow_tf32 = False
            torch.set_float32_matmul_precision("highest")
        of_plain = dtype if device.type == "cuda" else torch.float32
        plain = short_run(ComputeConfig(device, dtype=of_plain), setting)
        fast = short_run(ComputeConfig(device, captured=True, dtype=dtype), setting)
    finally:
        torch.backends.cudnn.allow_tf32 = before[0]
        torch.set_float32_matmul_precision(before[1])
        captured.OPTIONS.update(before[2])
    losses = [[tally.loss for tally in tallies] for tallies, _ in (plain, fast)]
    return {
        "plain_losses": losses[0],
        "captured_losses": losses[1],
        "loss_difference": max(abs(a - b) / abs(a) for a, b in zip(*losses, strict=True)),
        "weight_difference": float((plain[1] - fast[1]).norm() / plain[1].norm()),
    }


def short_run(machine: ComputeConfig, setting: Setting) -> tuple[list[EpochResult], Tensor]:
    """Weights, scores, gated weights, evaluation; what every epoch came to, and all weights at the end."""
    torch.manual_seed(0)
    device = machine.device
    model = resolve(setting.checked).to(device)
    pruner = Pruner(model, torch.zeros(1, 3, setting.side, setting.side, device=device), scores=Scores(lr=1e-4))
    engine, batches = make_engine(model, machine, pruner), made_up(setting, 4 * setting.batch, device)
    optimizer = make_optimizer(model, OptimizerConfig(lr=0.01))
    tallies = [engine.train_epoch(batches, epoch, optimizer, [0.01] * 4) for epoch in range(2)]
    with pruner.scoring():
        tallies.append(engine.score_epoch(batches, 2))
    pruner.gate(half_plan(pruner))
    with pruner.gated():
        optimizer = make_optimizer(model, OptimizerConfig(lr=0.01))
        tallies.append(engine.train_epoch(batches, 3, optimizer, [0.01] * 4))
    tallies.append(engine.evaluate(made_up(setting, 3 * setting.batch + 5, device, training=False)))
    return tallies, torch.cat([p.detach().reshape(-1) for p in model.parameters()])


if __name__ == "__main__":
    sys.exit(main())
