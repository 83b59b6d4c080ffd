"""How long a file of weights is, before it is written."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cases import random_plans
from sbf_pruner.budget import FileSize, saved_bytes
from sbf_pruner.graph import cost_of, lay_out, trace
from sbf_pruner.measurement import Latency
from sbf_pruner.saving import MODEL, save
from sbf_pruner.surgery import extract
from sbf_pruner.training.recording import _size
from sbf_pruner.utils import files
from shares import mostly_slow
from zoo import ZOO

FREE = [
    *("Plain", "Residual", "OptionA", "Concat", "Dense", "Split"),
    *("Depthwise", "Grouped", "SharedParameter", "SharedModule", "RegisteredTwice", "Unused"),
]


@pytest.mark.parametrize("name", FREE)
def test_no_file_is_longer_than_said_and_none_much_shorter(name, tmp_path):
    model, inputs = ZOO[name]()
    graph = trace(model, inputs)
    stored = FileSize(model, inputs, graph)
    for plan in random_plans(graph, 6)[1:]:
        laid = lay_out(graph, plan.masks(graph))
        said = stored.bytes(laid, cost_of(graph, laid).size)
        small = extract(model, inputs, plan, graph)
        save(small, tmp_path)
        file = (tmp_path / MODEL).stat().st_size
        assert file <= said <= file + 16 * len(model.state_dict()), plan
        assert file == saved_bytes(small, inputs, small.sbf_plans[0])


@pytest.mark.parametrize("name", mostly_slow(FREE, FREE[::3]))
def test_a_summary_tells_the_exact_bytes_of_files_that_it_does_not_write(name, tmp_path, monkeypatch):
    model, inputs = ZOO[name]()
    middle = extract(model, inputs, random_plans(trace(model, inputs), 6)[3])
    again = extract(middle, inputs, random_plans(trace(middle, inputs), 6)[2])
    networks = [model, middle, again, again.to(memory_format=torch.channels_last)]
    for place, network in enumerate(networks):
        save(network, tmp_path / str(place))
    monkeypatch.setattr(files, "save_file", lambda *given, **named: pytest.fail("a file is written"))
    time = Latency(1.0, 0.1, 3)
    found = [_size(network, inputs, time)["file_bytes"] for network in networks]
    assert found == [(tmp_path / str(place) / MODEL).stat().st_size for place in range(4)]


def test_a_network_that_was_pruned_before_tells_of_both_plans(tmp_path):
    model, inputs = ZOO["Plain"]()
    middle = extract(model, inputs, random_plans(trace(model, inputs), 6)[3])
    graph = trace(middle, inputs)
    plan = random_plans(graph, 6)[2]
    laid = lay_out(graph, plan.masks(graph))
    said = FileSize(middle, inputs, graph).bytes(laid, cost_of(graph, laid).size)
    save(extract(middle, inputs, plan, graph), tmp_path)
    assert said - 16 * len(middle.state_dict()) <= (tmp_path / MODEL).stat().st_size <= said


def test_with_all_filters_it_is_the_file_of_the_dense_network(tmp_path):
    """Not that of a network from which a plan took nothing: parts are of what the summary calls dense."""
    model, inputs = ZOO["Residual"]()
    graph = trace(model, inputs)
    save(model, tmp_path)
    laid = lay_out(graph, {name: np.ones(layer.filters, bool) for name, layer in graph.layers.items()})
    stored = FileSize(model, inputs, graph)
    assert stored.bytes(laid, cost_of(graph, laid).size) == stored.dense == (tmp_path / MODEL).stat().st_size
