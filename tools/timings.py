"""Print one line with the seconds of an import, of `sbf --help`, and of trace and extract for three networks.

Printed at the end of every CI run, so that a slow-down is noticed with the commit that caused it.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

import torch

import sbf_pruner as sbf
from sbf_pruner.models import resolve

NETWORKS = ("resnet56", "vgg16_bn", "mobilenet_v2")


def seconds(work: Callable[[], object]) -> float:
    """Return the minimum time of two calls."""
    times = []
    for _ in range(2):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def run(*words: str) -> Callable[[], object]:
    return lambda: subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)


def main() -> int:
    torch.set_num_threads(1)
    parts = [f"import {seconds(run('-c', 'import sbf_pruner.pruner')):.1f} s"]
    parts.append(f"help {seconds(run('-m', 'sbf_pruner', '--help')):.1f} s")
    for name in NETWORKS:
        model, images = resolve(name), torch.zeros(1, 3, 32, 32)
        graph = sbf.trace(model, images)
        plan = sbf.Plan({layer: range(0, found.filters, 2) for layer, found in graph.layers.items()})
        traced = seconds(lambda m=model, x=images: sbf.trace(m, x))
        cut = seconds(lambda m=model, x=images, p=plan, g=graph: sbf.extract(m, x, p, g))
        parts.append(f"{name} trace {traced:.2f} s, extract {cut:.2f} s")
    print("timings: " + "; ".join(parts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
