"""Whole detectors of torchvision and ultralytics: what is cut finds what the gated one finds, and can be fused."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import sbf_pruner as sbf
from cases import assert_close, leaves, random_plans
from sbf_pruner.utils import real_copy
from zoo import randomise

if importlib.util.find_spec("torchvision") is None:
    pytest.skip("needs pip install --no-deps torchvision", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import zoos

from shares import mostly_slow

SMALL = {"min_size": 96, "max_size": 128}
DETECTORS: dict[str, dict[str, Any]] = {
    "ssdlite320_mobilenet_v3_large": {},
    "retinanet_resnet50_fpn": {**SMALL, "score_thresh": 0.01},
    "fcos_resnet50_fpn": {**SMALL, "score_thresh": 0.01},
    "ssd300_vgg16": {},
}


def suppressed(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Half of the boxes, the best first: the real operator is not in every build."""
    return scores.argsort(descending=True, stable=True)[: (len(scores) + 1) // 2]


@pytest.fixture
def detection(monkeypatch: pytest.MonkeyPatch) -> Any:
    zoos.torchvision()
    from torchvision.models import detection
    from torchvision.ops import boxes

    monkeypatch.setattr(boxes, "_assert_has_ops", lambda: None)
    monkeypatch.setattr(torch.ops.torchvision, "nms", suppressed)
    return detection


@pytest.mark.parametrize("name", mostly_slow(DETECTORS, ["ssdlite320_mobilenet_v3_large"]))
def test_a_detector_that_was_cut_finds_the_same(name: str, detection: Any) -> None:
    build = getattr(detection, name)
    model = build(weights=None, weights_backbone=None, num_classes=5, **DETECTORS[name]).double().eval()
    images = ([torch.rand(3, 96, 96, dtype=torch.float64)],)
    graph, chance = sbf.trace(model, images), random.Random(0)
    keep = {n: chance.sample(range(layer.filters), -(-2 * layer.filters // 3)) for n, layer in graph.layers.items()}
    pruner = sbf.Pruner(model, images)
    pruner.gate(sbf.Plan(keep))
    small = pruner.extract()
    with torch.no_grad():
        (expected,), (found,) = model(*images), small(*images)
    assert len(expected["boxes"])
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-9)
    counts = [sum(p.numel() for p in each.parameters()) for each in (small, model)]
    assert counts[0] < 0.8 * counts[1]


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The networks of ultralytics, which would write its settings into the home folder and look for updates."""
    if importlib.util.find_spec("ultralytics") is None:
        pytest.skip("needs pip install --no-deps ultralytics, and what it imports")
    monkeypatch.setenv("YOLO_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("YOLO_OFFLINE", "true")
    zoos.torchvision()
    from ultralytics.nn import tasks

    return tasks


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["yolov8n", "yolo11n", "yolov8n-seg", "yolo11n-seg"])
def test_a_yolo_that_was_cut_can_be_fused(name: str, dtype: torch.dtype, tasks: Any) -> None:
    torch.manual_seed(0)
    kind = tasks.SegmentationModel if name.endswith("seg") else tasks.DetectionModel
    model = randomise(kind(f"{name}.yaml", verbose=False)).to(dtype).eval()
    images = torch.rand(1, 3, 64, 64, dtype=dtype)
    graph = sbf.trace(model, images)
    for plan in random_plans(graph, 10):
        small = sbf.extract(model, images, plan, graph)
        fused = real_copy(small).fuse(verbose=False)
        assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in fused.modules())
        for size in (64, 96):
            others = torch.rand(2, 3, size, size, dtype=dtype)
            with torch.no_grad():
                for found, expected in zip(leaves(fused(others)), leaves(small(others)), strict=True):
                    assert_close(found, expected, name, 1e-5 if dtype == torch.float32 else 1e-10)
