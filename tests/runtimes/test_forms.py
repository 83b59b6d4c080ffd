"""Forms of a network compute what it computes, and are what they claim to be."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import torch
from torch import nn

import sbf_pruner as sbf
from cases import leaves, random_plans, snapshot
from sbf_pruner.errors import PruningError
from sbf_pruner.models import resolve
from sbf_pruner.runtimes import BRANCHES, CapturedNetwork, Form, choose, groups, min_times, table
from sbf_pruner.utils import call
from shares import mostly_slow
from zoo import ZOO, Block, fresh_inputs, randomise

FORMS = [
    Form("zeros", 4, shortcuts=True),
    Form("gather"),
    Form("add", 3, 2, channels_last=True, in_place=True),
    Form("convolution", 4, in_place=True),
    Form("mixed", 2, shortcuts=True, channels_last=True),
]
QUICK = [
    *("Residual", "OptionA", "EmptyBranch", "DepthwiseMultiplier", "SharedModule", "FlattenLinear"),
]


def assert_forms_equal(small, inputs, forms=FORMS):
    """Every form gives what the small network gives, for another batch than the one it was captured with."""
    small.eval()
    captured = CapturedNetwork(small, inputs)
    given = fresh_inputs(inputs, batch=3, seed=2)
    kept = [tensor.clone() for tensor in leaves(given)]
    with torch.no_grad():
        wanted = leaves(call(small, given))
    for form in forms:
        found = leaves(call(captured.form(form), given))
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            scale = max(1.0, float(other.abs().max()))
            torch.testing.assert_close(one, other, rtol=0, atol=1e-10 * scale, msg=lambda m: f"{form}: {m}")  # noqa: B023
    for tensor, before in zip(leaves(given), kept, strict=True):
        assert torch.equal(tensor, before)  # writing in place never reaches what the caller holds


@cache
def deployable():
    _, small, image = halved()
    return CapturedNetwork(small, image)


def operators(graph):
    return Counter(str(node.target) for node in graph.graph.nodes if node.op == "call_function")


@pytest.mark.parametrize("name", QUICK)
def test_every_form_computes_what_the_compact_network_does(name):
    model, inputs = ZOO[name]()
    graph = sbf.trace(model, inputs)
    plan = random_plans(graph, count=4, seed=3)[3]  # with a layer that has vanished
    assert_forms_equal(sbf.extract(model, inputs, plan, graph), inputs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_every_form_of_every_network_under_many_plans(name):
    model, inputs = ZOO[name]()
    graph = sbf.trace(model, inputs)
    for plan in random_plans(graph, count=8, seed=7):
        assert_forms_equal(sbf.extract(model, inputs, plan, graph), inputs)


@cache
def halved(name="resnet20", every=2, size=8):
    """A network in double precision, with statistics as training leaves them, and half of it gone at random."""
    model = randomise(resolve(name).double()).eval()
    image = torch.rand(1, 3, size, size, dtype=torch.float64)
    graph = sbf.trace(model, image)
    generator = torch.Generator().manual_seed(0)
    keep = {}
    for layer_name, layer in graph.layers.items():
        order = torch.randperm(layer.filters, generator=generator)
        keep[layer_name] = sorted(order[: max(1, layer.filters // every + 1)].tolist())
    return model, sbf.extract(model, image, sbf.Plan(keep), graph).eval(), image


@pytest.mark.parametrize("name", mostly_slow(["runs:resnet8", "resnet20", "resnet56"], ["runs:resnet8"]))
def test_a_resnet_in_every_form(name):
    _, small, image = halved(name)
    before = snapshot(small)
    forms = [Form(branches, 16, 8, shortcuts=True) for branches in BRANCHES]
    forms += [Form(branches, channels_last=True, in_place=True) for branches in BRANCHES]
    assert_forms_equal(small, image, forms)
    for name, tensor in snapshot(small)["tensors"].items():
        assert torch.equal(tensor, before["tensors"][name])  # the canonical network is not touched


def test_filters_of_zeros_leave_nothing_but_layers_activations_and_additions():
    form = deployable().form(Form("zeros", shortcuts=True))
    assert set(operators(form)) == {
        *("aten.conv2d.default", "aten.relu.default", "aten.add.Tensor", "aten.linear.default"),
        *("aten.adaptive_avg_pool2d.default", "aten.flatten.using_ints"),
    }
    assert operators(form)["aten.conv2d.default"] == 19 + 2  # two shortcuts that skip pixels


def test_norms_are_folded_and_channels_that_go_nowhere_are_not_moved():
    found = operators(deployable().graph)
    assert "aten._native_batch_norm_legit_no_training.default" not in found
    assert found["sbf_pruner.remap.default"] and not any("index" in name for name in found)


def test_additions_at_their_places_and_gathers_are_what_they_say():
    assert operators(deployable().form(Form("add")))["aten.index_add.default"] >= 7
    assert "aten.index_add_.default" in operators(deployable().form(Form("add", in_place=True)))
    assert operators(deployable().form(Form("gather")))["aten.index_select.default"] >= 7
    assert operators(deployable().form(Form("convolution")))["aten.conv2d.default"] >= 19 + 7


def test_a_way_that_is_not_known_is_refused():
    with pytest.raises(PruningError, match=r"branches: unknown value 'zero'; did you mean 'zeros'\?"):
        Form("zero")


@pytest.mark.parametrize(("unit", "small_widths"), [(4, 0), (8, 0), (16, 9)])
def test_widths_become_multiples(unit, small_widths):
    form = deployable().form(Form("zeros", unit, small_widths, shortcuts=True))
    held = [node for node in form.graph.nodes if str(node.target) == "aten.conv2d.default"]
    widths = [form.get_parameter(str(node.args[1].target)).shape[:2] for node in held]
    assert all(w % unit == 0 or w <= small_widths or w == 3 for pair in widths for w in pair)
    assert {group.width % unit for group in groups(form) if group.width > small_widths} <= {0}


def test_a_dense_network_goes_the_same_way():
    model, _, image = halved()
    assert_forms_equal(model, image, [Form(shortcuts=True, in_place=True, channels_last=True)])


def test_a_branch_that_has_vanished_is_not_added():
    torch.manual_seed(1)
    model = randomise(nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), Block(6, 5, 6), nn.Conv2d(6, 4, 1)).double())
    image = torch.rand(2, 3, 8, 8, dtype=torch.float64)
    graph = sbf.trace(model, image)
    gone = [name for name in graph.layers if name.startswith("1.")]
    small = sbf.extract(model, image, sbf.Plan(dict.fromkeys(gone, ())), graph)
    found = operators(CapturedNetwork(small, image).form(Form()))
    assert "aten.add.Tensor" not in found and "aten.new_zeros.default" not in found
    assert found["aten.conv2d.default"] == 2
    assert_forms_equal(small, image)


def test_what_is_one_number_per_channel_is_added_as_such():
    class Shifted(nn.Module):
        """A branch without input that still has a norm: it adds the same to every pixel."""

        def __init__(self):
            super().__init__()
            self.first, self.norm, self.last = nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5), nn.Conv2d(5, 2, 1)

        def forward(self, x):
            x = self.first(x)
            return self.last(torch.relu(x + self.norm(torch.zeros_like(x))))

    model = randomise(Shifted().double()).eval()
    image = torch.rand(2, 3, 6, 6, dtype=torch.float64)
    found = operators(CapturedNetwork(model, image).form(Form()))
    assert "aten._native_batch_norm_legit_no_training.default" not in found and found["aten.add.Tensor"] == 1
    assert_forms_equal(model, image)


def test_a_layer_of_one_filter_beside_a_parameter_of_its_own():
    model, inputs = ZOO["BareParameter"]()
    graph = sbf.trace(model, inputs)
    one = random_plans(graph, count=2)[1]
    assert set(one.widths().values()) == {1}
    assert_forms_equal(sbf.extract(model, inputs, one, graph), inputs)


# -- choice ------------------------------------------------------------------------------------------------


def test_the_fastest_is_chosen_from_the_times(monkeypatch):
    _, small, image = halved()
    forms = [Form("zeros", 4), Form("gather"), Form("add")]
    monkeypatch.setattr(
        table, "min_times", lambda passes, seconds: dict(zip(passes, (3e-3, 1e-3, 1e-3), strict=True))
    )
    chosen = choose(small, image, "eager", batch=2, threads=1, forms=forms)
    assert chosen.form == Form("gather")  # the first of two that are as fast
    assert chosen.milliseconds == {"zeros, unit 4": 3.0, "gather, unit 1": 1.0, "add, unit 1": 1.0}
    assert chosen.why == "the fastest of 3 forms in eager, batch 2, 1 thread"
    torch.testing.assert_close(chosen.network(image), small(image), rtol=0, atol=1e-10)
    assert chosen.to_dict()["form"]["branches"] == "gather"


def test_those_far_behind_drop_out():
    calls = Counter()

    def timed(name, seconds):
        def run():
            calls[name] += 1
            table.time.sleep(seconds)

        return run

    least = min_times(
        {"slow": timed("slow", 0.03), "quick": timed("quick", 0.001), "same": timed("same", 0.001)}, 0.3
    )
    assert min(least, key=least.__getitem__) != "slow" and least["slow"] >= 0.03
    assert calls["slow"] < calls["quick"]


def test_a_network_with_nothing_to_choose_is_not_timed():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 1)).eval()
    chosen = choose(model, torch.rand(1, 3, 8, 8), "onnxruntime", forms=[Form("zeros"), Form("add"), Form(unit=4)])
    assert chosen.why == "the only form it has" and not chosen.milliseconds


def test_a_network_that_cannot_be_rewritten_stays_as_it_is():
    class Odd(nn.Module):
        def forward(self, x):
            return x * (2 if x.sum() > 0 else 3)

    chosen = choose(Odd(), torch.rand(2, 3), "eager")
    assert chosen.form is None and isinstance(chosen.network, Odd)
    assert chosen.why.startswith("not rewritten: Odd cannot be exported")


def test_an_unknown_runtime_is_named():
    with pytest.raises(PruningError, match="no runtime is called 'onnx'; known: onnxruntime, eager, compile, size"):
        choose(nn.Conv2d(3, 4, 1), torch.rand(1, 3, 4, 4), "onnx")
