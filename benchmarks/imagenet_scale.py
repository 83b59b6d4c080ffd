"""Scores and surgery at ImageNet scale: what they cost and what they are worth, on made-up images.

torchvision's ResNet-50, 224x224, batch 256, bfloat16, plain eager steps.  A dense training step against a
score step and a gated one, in time and in peak memory; and against a training step of the extracted network
at about half the MACs: with every layer narrower alike, to multiples of 8 and of 32 (so the residual streams
are narrower too), with only the layers inside the blocks narrower, with the early ones the narrowest, and without
whole blocks.  Every section is saved as soon as it is there.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from limits import gather
from resnet50 import ResNet50
from torch import nn

from saving import save_result
from sbf_pruner import Plan, Pruner, extract, measure

LIMITS = {"score_step_time": ("most", 1.0), "scores_memory": ("most", 1.01), "extracted_speedup": ("least", 1.4)}
# The part of its filters that a layer keeps, by the first of these that its name matches; and what widths are
# multiples of.  Early maps are the largest: where they are narrower, the same MACs take less time.
ALIKE = {"*": 0.7}
INSIDE = {"layer*.conv[12]": 0.56, "*": 1.0}
EARLY = {"conv1": 0.5, "layer1*": 0.375, "layer2*": 0.5, "layer3*": 0.8, "layer4*": 1.0}
NARROWER = {"all, 8": (ALIKE, 8), "all, 32": (ALIKE, 32), "inside, 8": (INSIDE, 8), "early, 32": (EARLY, 32)}
KEPT_BLOCKS = {"layer1": 1, "layer2": 2, "layer3": 2, "layer4": 2}


@dataclass(frozen=True)
class Setting:
    """What is timed."""

    batch: int = 256
    side: int = 224
    steps: int = 8
    repeats: int = 3


QUICK = Setting(2, 32, 1, 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes, nothing saved")
    parser.add_argument("--compile", action="store_true", help="compile forward and backward (minutes more)")
    args = parser.parse_args()
    setting = QUICK if args.quick else Setting()
    if args.quick:
        torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.benchmark = True
    figures: dict[str, Any] = {"setting": asdict(setting), "compiled": args.compile, "limits": LIMITS}
    parts = run(setting, device, args.compile)
    save = None if args.quick else lambda figures: save_result("imagenet_scale", figures, str(device))
    return 0 if gather(parts, figures, goals, LIMITS, save) or args.quick else 1


def run(setting: Setting, device: torch.device, compiled: bool) -> Iterator[dict[str, Any]]:
    """The sections' figures, one after another."""
    bench = Bench(setting, device, compiled)
    yield {"dense": bench.time_weights(bench.fresh())}
    yield {"scored": bench.time_scores()}
    yield {"gated": bench.time_gated()}
    extracted: dict[str, Any] = {}
    for name in (*NARROWER, "blocks"):
        extracted[name] = bench.time_extracted(name)
        yield {"extracted": dict(extracted)}


def goals(figures: dict[str, Any]) -> dict[str, float]:
    """The figures that have limits, as far as they are there."""
    dense, scored, gated = (figures.get(part) for part in ("dense", "scored", "gated"))
    found: dict[str, float] = {}
    if scored:
        found["score_step_time"] = scored["ms"] / dense["ms"]
    if gated and dense["peak_bytes"]:
        found["scores_memory"] = max(scored["peak_bytes"], gated["peak_bytes"]) / dense["peak_bytes"]
    if "extracted" in figures:
        found["extracted_speedup"] = dense["ms"] / min(form["ms"] for form in figures["extracted"].values())
    return found


class Bench:
    """One batch of images, and steps on it."""

    def __init__(self, setting: Setting, device: torch.device, compiled: bool) -> None:
        self.setting, self.device, self.compiled = setting, device, compiled
        random = torch.Generator().manual_seed(0)
        images = torch.randn(setting.batch, 3, setting.side, setting.side, generator=random)
        self.images = images.to(device).contiguous(memory_format=torch.channels_last)
        self.labels = torch.randint(0, 1000, (setting.batch,), generator=random).to(device)

    def fresh(self) -> nn.Module:
        torch.manual_seed(0)
        return ResNet50().to(self.device, memory_format=torch.channels_last).train()  # type: ignore[call-overload]

    def time_weights(self, model: nn.Module) -> dict[str, float]:
        """A training step: forward, backward, SGD with momentum."""
        optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9, weight_decay=1e-4)
        loss = self._loss(model)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            loss().backward()
            optimizer.step()

        figures = self._timed(step)
        optimizer.zero_grad(set_to_none=True)
        return figures

    def time_scores(self) -> dict[str, Any]:
        """A score step: weights and statistics frozen, one score per filter trained."""
        model = self.fresh()
        pruner = Pruner(model, self.images[:1])
        loss = self._loss(model)

        def step() -> None:
            (loss() + pruner.penalty()).backward()
            pruner.step()

        with pruner.scoring():
            figures = self._timed(step)
        weights = dict(model.named_parameters())
        literal = sum(weights[layer.weight].numel() * layer.filters for layer in pruner.graph.layers.values())
        # The paper's matrices with their gradient and Adam's two moments, in float32; for comparison only.
        return figures | {"scores": pruner.gates.soft.numel(), "literal_bytes": 16 * literal}

    def time_gated(self) -> dict[str, float]:
        """A training step under gates, half of them closed."""
        model = self.fresh()
        pruner = Pruner(model, self.images[:1])
        pruner.gate(Plan({name: tuple(range(0, layer.filters, 2)) for name, layer in pruner.graph.layers.items()}))
        with pruner.gated():
            return self.time_weights(model)

    def time_extracted(self, name: str) -> dict[str, Any]:
        """A training step of the extracted network."""
        model = self.fresh()
        pruner = Pruner(model, self.images[:1])
        plan = without_blocks(pruner) if name == "blocks" else narrower(pruner, *NARROWER[name])
        small = extract(model, self.images[:1], plan, pruner.graph)
        macs = [measure(network, self.images[:1]).macs for network in (model, small)]
        return {"macs": macs[1] / macs[0], **self.time_weights(small.train())}

    def _loss(self, model: nn.Module) -> Callable[[], torch.Tensor]:
        forward = torch.compile(model) if self.compiled else model

        def loss() -> torch.Tensor:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
                outputs = forward(self.images)
            return F.cross_entropy(outputs.float(), self.labels)

        return loss

    def _timed(self, step: Callable[[], None]) -> dict[str, float]:
        """Milliseconds of a step, and the most memory it held at once."""
        cuda = self.device.type == "cuda"
        gc.collect()  # what the section before has left
        for _ in range(3 if cuda else 1):  # the library tries its kernels, and some need much memory to try
            step()
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(self.setting.repeats):
            began = time.perf_counter()
            for _ in range(self.setting.steps):
                step()
            if cuda:
                torch.cuda.synchronize()
            times.append((time.perf_counter() - began) / self.setting.steps)
        peak = torch.cuda.max_memory_allocated() if cuda else 0
        return {"ms": 1e3 * statistics.median(times), "peak_bytes": peak}


def narrower(pruner: Pruner, parts: Mapping[str, float], unit: int) -> Plan:
    """Every layer keeps its part, the same filters wherever several are added up."""
    keep = {}
    for name, layer in pruner.graph.layers.items():
        part = next(part for pattern, part in parts.items() if fnmatchcase(name, pattern))
        keep[name] = tuple(range(min(layer.filters, max(unit, unit * round(part * layer.filters / unit)))))
    return Plan(keep)


def without_blocks(pruner: Pruner) -> Plan:
    """The last blocks of every stage go, the others stay whole."""
    blocks = {name: name.split(".")[:2] for name in pruner.graph.layers if name.startswith("layer")}
    return Plan({name: () for name, (stage, number) in blocks.items() if int(number) >= KEPT_BLOCKS[stage]})


if __name__ == "__main__":
    sys.exit(main())
