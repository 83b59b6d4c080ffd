"""Networks of torchvision and timm, one for each difficulty: the extracted one is the gated one.

`benchmarks/coverage.py` does the same for all of them; here are those that take a second or less.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

MISSING = [name for name in ("torchvision", "timm") if importlib.util.find_spec(name) is None]
if MISSING:
    pytest.skip(f"needs pip install --no-deps {' '.join(MISSING)}", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import coverage  # noqa: E402
import zoos  # noqa: E402

from cases import assert_every_layer_is_in_one_list  # noqa: E402
from sbf_pruner import trace  # noqa: E402
from shares import mostly_slow  # noqa: E402

# Networks, and the share of their convolutions' filters that can be pruned at least.
FAST = {
    "torchvision:resnet18": 0.99,  # additions
    "torchvision:squeezenet1_1": 0.7,  # concatenations; a quarter of the filters are the network's outputs
    "torchvision:shufflenet_v2_x0_5": 0.9,  # chunks and a shuffle
    "torchvision:mobilenet_v3_small": 0.9,  # depthwise, squeeze and excite
    "timm:convnext_atto": 0.9,  # layer norms, layer scale, hidden units of linear layers
    "timm:resnest14d": 0.8,  # groups, split attention
    "timm:resnet32ts": 0.9,  # norms of its own, with the activation inside
}


QUICK = ("torchvision:shufflenet_v2_x0_5", "timm:resnest14d")


@pytest.mark.parametrize("name", mostly_slow(FAST, QUICK))
def test_a_network_of_the_zoos_is_cut_exactly(name: str) -> None:
    row = coverage.work(name)
    assert row["ok"], row.get("error_text") or row["error"]
    assert row["filters_prunable"] >= FAST[name], row["reasons"]
    assert all(plan["change"] > 1e-6 for plan in row["plans"].values()), "a plan that changes nothing shows nothing"
    assert row["macs_left"] < 1


@pytest.mark.parametrize("name", ["googlenet", "mobilenet_v3_small", "shufflenet_v2_x0_5"])
def test_every_layer_of_a_network_is_in_one_list(name: str) -> None:
    """The auxiliary heads of GoogLeNet, too, which run in training mode alone."""
    options = {"init_weights": False} if name == "googlenet" else {}
    model = zoos.torchvision().models.get_model(name, weights=None, **options)
    graph = trace(model, torch.zeros(2, 3, 64, 64))
    assert_every_layer_is_in_one_list(model, graph)
    assert bool(graph.followers) == (name != "googlenet")


def test_the_list_covers_what_it_promises() -> None:
    names = zoos.names()
    assert len(names) == len(set(names))
    assert sum(n.startswith("timm:") for n in names) >= 60
    known = zoos.timm().list_models()
    assert {*zoos.TIMM} <= {*known}
    assert {*zoos.FAMILIES} == {zoos.family(n) for n in names} - {""}
