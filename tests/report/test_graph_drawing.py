"""The picture of a channel graph: what is drawn, that nothing overlaps, and that the files are whole."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ElementTree

import pytest
import torch

from sbf_pruner.models import resolve
from sbf_pruner.report import FOLLOWER, GATE, JOINT, LAYER, SKIPPED, draw, inspect_model, layout_graph, to_boxes
from sbf_pruner.report.graph_drawing import _size
from zoo import ZOO


def seen(name):
    return inspect_model(*ZOO[name]())


@pytest.fixture(scope="module")
def resnet():
    return inspect_model(resolve("resnet56"), torch.zeros(1, 3, 32, 32))


@pytest.mark.parametrize("name", ZOO)
def test_every_network_can_be_drawn(name):
    found = seen(name)
    boxes = to_boxes(found)
    drawn = {box.label for box in boxes if box.kind == LAYER}
    assert drawn >= {layer["name"] for layer in found.facts["layers"]}
    for place, box in enumerate(boxes):
        assert all(source in boxes[:place] for source in box.sources), box
    ElementTree.fromstring(draw(found, ".svg"))


def test_a_residual_net_is_drawn_in_columns_without_overlap(resnet):
    boxes = to_boxes(resnet)
    assert sum(box.kind == JOINT for box in boxes) == 27
    picture = layout_graph(boxes, _size)
    assert 0.5 < picture.width / picture.height < 2.5, "near the shape of a screen"
    assert len(picture.cells) == len(boxes)
    frames = [(c.x - c.width / 2, c.y, c.x + c.width / 2, c.y + c.height) for c in picture.cells]
    for a, b in itertools.combinations(frames, 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
    for left, top, right, bottom in frames:
        assert 0 <= left < right <= picture.width and 0 <= top < bottom <= picture.height


def test_kinds_of_box():
    kinds = {box.label: box.kind for box in to_boxes(seen("Depthwise"))}
    assert kinds["3.depthwise.0"] == FOLLOWER and kinds["3.expand.0"] == LAYER
    assert GATE in kinds.values()
    last = [box for box in to_boxes(seen("Plain")) if box.kind == SKIPPED]
    assert any("left alone: its filters are the network's outputs" in line for line in last[-1].tip)


def test_a_dense_block_is_drawn_as_a_chain():
    joints = [box for box in to_boxes(seen("Dense")) if box.label == "concat"]
    assert len(joints) > 1 and all(len(box.sources) == 2 for box in joints)


def test_files_are_small_and_stand_alone(resnet):
    for ending in (".svg", ".html"):
        text = draw(resnet, ending)
        assert len(text.encode()) < 200_000
        links = re.findall(r"""(?:src|href)=["']([^"']+)|url\(([^)]+)\)|@import""", text)
        assert links == [], "nothing is fetched"
        assert "prefers-color-scheme" in text
    assert "<script" not in draw(resnet, ".svg")


def test_names_from_a_model_are_escaped():
    net = torch.nn.Sequential()
    net.add_module("<b>&", torch.nn.Conv2d(3, 4, 1))
    net.add_module("last", torch.nn.Conv2d(4, 2, 1))
    found = inspect_model(net, torch.zeros(1, 3, 8, 8))
    for ending in (".svg", ".html"):
        text = draw(found, ending)
        assert "<b>" not in text and "&lt;b&gt;&amp;" in text
