"""Where the time of a step goes: every kernel the device ran, by kind.

A call that runs some steps enters; milliseconds and kernels of one step leave, for each kind and for the costliest
kernels.  What holds: the kinds add up to all that the device did; what is not recognised counts as "other".
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

# The first that is found in a kernel's name counts. The compiler names its own by what they are and what they hold.
KINDS = {
    "reductions": r"^triton_(red|per)_",
    "element by element": r"^triton_poi_",
    "weight gradients, ours": r"^_(kernel|add_up)$",
    "weight gradients, the library's": r"wgrad",
    "convolutions": r"conv|fprop|dgrad|xmma|cutlass|cudnn|gemm|nvjet|triton_tem",
    "optimiser": r"multi_tensor|foreach|sgd|adam",
    "sums, copies and the like": r"reduce|elementwise|copy|cat|fill|mem(cpy|set)|index|gather",
}
OTHER = "other"
SHOWN = 12  # kernels by name


def kind_of(name: str) -> str:
    """The kind of a kernel.

    >>> kind_of("triton_red_fused_convolution_native_batch_norm_3"), kind_of("sm90_xmma_fprop_implicit_gemm")
    ('reductions', 'convolutions')
    """
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), OTHER)


def dissect(run: Callable[[], Any], steps: int, device: torch.device) -> dict[str, Any]:
    """What a run of so many steps kept the device busy with, per step."""
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as seen:
        run()
    kinds: dict[str, dict[str, float]] = {}
    named: dict[str, float] = {}
    for event in seen.key_averages():
        spent = (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e3 / steps
        if not spent or (on_gpu and event.device_type != DeviceType.CUDA):  # what the host did
            continue
        kind = kinds.setdefault(kind_of(event.key), {"ms": 0.0, "kernels": 0.0})
        kind["ms"] += spent
        kind["kernels"] += event.count / steps
        named[event.key] = spent
    costliest = sorted(named, key=lambda name: -named[name])[:SHOWN]
    return {
        "kinds": dict(sorted(kinds.items(), key=lambda each: -each[1]["ms"])),
        "costliest": {name[:120]: named[name] for name in costliest},
    }
