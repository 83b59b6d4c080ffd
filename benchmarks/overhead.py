"""What scores and gates cost: ratios to the dense network, all in one run on the CPU.

ResNet-20, batch 128.  Each round times a dense training step, a score step, a gated weight step, a dense
forward and a forward with all scores at 1, in turns, so that drift hits all alike; the ratio is the median
over rounds of the ratio within a round.

The memory allocator is told not to hand memory back to the system between steps: otherwise page faults that
have nothing to do with gates come and go with the pattern of small allocations, and change a step by 5 to 10%.
"""

from __future__ import annotations

import os
import statistics
import sys

import torch
from torch import nn

from saving import save_result
from sbf_pruner import Plan, Pruner
from sbf_pruner.measurement import saved_activations
from sbf_pruner.models import resolve
from sbf_pruner.utils import median_ratio, time_interleaved

STEADY = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**35), "MALLOC_TOP_PAD_": str(2**28)}
LIMITS = {"score_step": 0.90, "gated_step": 1.05, "forward_scores_at_1": 1.03, "saved_activations": 1.0}


def main(rounds: int = 40) -> int:
    torch.manual_seed(0)
    images, labels = torch.rand(128, 3, 32, 32), torch.randint(0, 10, (128,))
    dense, scored, gated = (resolve("resnet20") for _ in range(3))
    scorer, gater = Pruner(scored, images[:1]), Pruner(gated, images[:1])
    half = {name: tuple(range(0, layer.filters, 2)) for name, layer in gater.graph.layers.items()}
    gater.gate(Plan(half))
    criterion = nn.CrossEntropyLoss()
    optimizers = {m: torch.optim.SGD(m.parameters(), 1e-4, 0.9, weight_decay=5e-4) for m in (dense, gated)}

    def weight_step(model: nn.Module) -> None:
        optimizers[model].zero_grad()
        criterion(model(images), labels).backward()
        optimizers[model].step()

    def score_step() -> None:
        (criterion(scored(images), labels) + scorer.penalty()).backward()
        scorer.step()

    @torch.no_grad()
    def forward(model: nn.Module) -> None:
        model(images)

    def score_saved() -> int:
        return saved_activations(lambda: criterion(scored(images), labels) + scorer.penalty())

    idle = resolve("resnet20").eval()
    plain = resolve("resnet20").eval()
    at_one = Pruner(idle, images[:1])
    at_one.gates.mode = "soft"  # every score is multiplied in, and every score is 1
    with scorer.scoring():
        timed = {
            "dense_step": lambda: weight_step(dense),
            "score_step": score_step,
            "gated_step": lambda: weight_step(gated),
            "forward": lambda: forward(plain),
            "forward_scores_at_1": lambda: forward(idle),
        }
        seconds = time_interleaved(timed, rounds, sample=0)
        saved = score_saved() / saved_activations(lambda: criterion(dense(images), labels))
    base = {"score_step": "dense_step", "gated_step": "dense_step", "forward_scores_at_1": "forward"}
    ratios = {n: median_ratio(seconds[n], seconds[b]) for n, b in base.items()}
    figures = {n: ratio.median for n, ratio in ratios.items()} | {"saved_activations": saved}
    spread = {n: [ratio.low, ratio.high] for n, ratio in ratios.items()}
    milliseconds = {n: 1e3 * statistics.median(s) for n, s in seconds.items()}
    save_result(
        "overhead",
        {
            "ratios": figures,
            "intervals": spread,
            "limits": LIMITS,
            "median_ms": milliseconds,
            "rounds": rounds,
            "allocator": STEADY,
        },
    )
    for name, figure in figures.items():
        print(f"{name:22} {figure:6.3f} of dense, at most {LIMITS[name]:.2f}")
    return 0 if all(figures[n] <= limit + 1e-9 for n, limit in LIMITS.items()) else 1


if __name__ == "__main__":
    if not os.environ.keys() >= STEADY.keys():  # glibc reads them when a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **STEADY})
    sys.exit(main())
