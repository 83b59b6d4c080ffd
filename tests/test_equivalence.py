"""Every network of the zoo: gated and extracted compute the same, and the filters are really gone."""

from __future__ import annotations

import functools
import io
import pickle
import re
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from cases import (
    assert_equal_networks,
    assert_equal_outputs,
    assert_every_layer_is_in_one_list,
    assert_untouched,
    foldable,
    folded,
    leaves,
    other_inputs,
    random_plans,
    run,
    snapshot,
)
from sbf_pruner.errors import PlanError
from sbf_pruner.graph import trace
from sbf_pruner.measurement import measure
from sbf_pruner.modules import Remap, RemappedModule, Zeros
from sbf_pruner.plan import Plan
from sbf_pruner.pruner import Pruner
from sbf_pruner.saving import load, save
from sbf_pruner.surgery import extract
from sbf_pruner.utils import call, real_copy
from shares import mostly_slow
from zoo import ZOO, fresh_inputs

nets = pytest.mark.parametrize("name", ZOO)
half_of_the_nets = pytest.mark.parametrize("name", mostly_slow(ZOO, [*ZOO][::2]))
third_of_the_nets = pytest.mark.parametrize("name", mostly_slow(ZOO, [*ZOO][::3]))


class Case(NamedTuple):
    pruner: Pruner
    model: nn.Module
    inputs: Any
    made: list[tuple[Plan, Plan, nn.Module]]  # as asked, as settled, and the small network


PLANS = 6  # at least one of every kind that `random_plans` makes


def case(name: str, plans: int = PLANS) -> Case:
    """A network with random plans and what was extracted; made once, changed by nobody."""
    return _case(name, plans)


@functools.cache
def _case(name: str, plans: int) -> Case:
    model, inputs = ZOO[name]()
    pruner = Pruner(model, inputs)
    made = []
    for plan in random_plans(pruner.graph, plans):
        pruner.gate(plan)
        made.append((plan, pruner.plan(), pruner.extract()))
    return Case(pruner, model, inputs, made)


def half(pruner_or_graph) -> Plan:
    """Every second filter of every layer."""
    layers = getattr(pruner_or_graph, "graph", pruner_or_graph).layers
    return Plan({name: range(0, layer.filters, 2) for name, layer in layers.items()})


# -- the same function ----------------------------------------------------------------------------------


# Training or not, under how many plans, and which of them are tried.
WAYS = {
    "eval": (False, PLANS, slice(None)),
    "train": (True, PLANS, slice(3, None, 2)),
    "eval often": (False, 40, slice(None)),
    "train often": (True, 40, slice(None)),
}


@nets
@pytest.mark.parametrize("way", mostly_slow(WAYS, ("eval", "train")))
def test_masked_equals_extracted(name, way):
    training, plans, tried = WAYS[way]
    pruner, _, _, made = case(name, plans)
    for number, (plan, settled, small) in list(enumerate(made))[tried]:
        pruner.gate(plan)
        assert pruner.plan() == settled
        try:
            assert_equal_networks(pruner, small, training, seed=number)
        except AssertionError as error:
            raise AssertionError(f"plan {number}, {dict(plan.keep)}: {error}") from error


@nets
@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_masked_equals_extracted_without_gradients(name, without):
    """Torch has quicker ways then, which may read a module's weights instead of calling it."""
    pruner, model, inputs, made = case(name)
    for plan, _, small in made[1:5]:
        pruner.gate(plan)
        with without():
            other = fresh_inputs(inputs)
            wanted, found = (leaves(call(network.eval(), other)) for network in (model, real_copy(small)))
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@half_of_the_nets
def test_norms_can_be_folded_into_the_extracted_layers(name):
    """The remap behind a norm is lost with the norm, and its layer takes over."""
    pruner, model, inputs, made = case(name)
    pruner.gate(Plan.from_masks(pruner.graph.all_filters()))  # gates that another test closed are not folded
    pairs = foldable(model.eval(), inputs)
    for number, (_, _, small) in enumerate(made[1:5] if pairs else []):
        other = fresh_inputs(inputs, seed=number)
        with torch.no_grad():
            wanted, found = (leaves(call(net, other)) for net in (small.eval(), folded(small, pairs)))
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@half_of_the_nets
def test_a_plan_of_all_filters_changes_nothing(name):
    """Bit for bit, where no filter was useless in the first place."""
    model, inputs = ZOO[name]()
    graph = trace(model, inputs)
    everything = Plan({n: range(layer.filters) for n, layer in graph.layers.items()})
    small = extract(model, inputs, everything)
    if Plan.from_masks(graph.settle({})) != everything:
        assert name in ("Split", "Unused", "LiteralWidth")
        return
    other = fresh_inputs(inputs, requires_grad=True)
    for training in (False, True):
        for found, wanted in zip(run(small, other, training), run(model, other, training), strict=True):
            for a, b in zip(found, wanted, strict=True):
                assert torch.equal(a, b)
    if name != "PaddedStream":  # some channels were zero all along, and are gone
        assert [type(m) for m in small.modules()] == [type(m) for m in model.modules()]
        assert small.state_dict().keys() == model.state_dict().keys()


@nets
def test_gates_that_are_open_change_nothing(name):
    model, inputs = ZOO[name]()
    before = leaves(call(model.eval(), inputs))
    pruner = Pruner(model, inputs)
    with pruner.gated():
        for found, wanted in zip(leaves(call(model, inputs)), before, strict=True):
            assert torch.equal(found, wanted)


@third_of_the_nets
def test_a_small_network_can_be_pruned_again(name):
    """One plan after another is one plan; the second time the helpers of the first are seen through."""
    first, model, inputs, made = case(name)
    _, settled, small = made[4]
    small = real_copy(small)
    graph = trace(small, inputs)
    if not graph.layers:
        return
    second = Pruner(small, inputs, graph=graph)
    # A depthwise layer with one channel left looks like any other, but the first network cannot lose it.
    plan = Plan({n: kept for n, kept in random_plans(graph, 3)[2].keep.items() if n in first.graph.layers})
    second.gate(plan)
    smaller = second.extract()
    for training in (False, True):
        assert_equal_networks(second, smaller, training)
    later = Plan({n: kept for n, kept in second.plan().keep.items() if n in first.graph.layers})
    once = extract(model, inputs, settled.then(later), first.graph)
    other = fresh_inputs(inputs)
    found, wanted = (leaves(call(net.eval(), other)) for net in (smaller, once))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
    assert measure(smaller, inputs).params == measure(once, inputs).params
    assert measure(smaller, inputs).macs == measure(once, inputs).macs


# Networks that take maps of one size only: they flatten them, or store something for every pixel.
ONE_SIZE = {
    *("FlattenLinear", "StoredMap", "BareParameter", "Transposed", "OwnHeads", "Mixed", "Warped", "Filled"),
    "InstanceNormRows",
}


@nets
def test_masked_equals_extracted_at_another_size(name):
    pruner, model, inputs, made = case(name)
    inputs = other_inputs(model, inputs)
    assert (inputs is None) == (name in ONE_SIZE)
    for plan, _, small in made[2:6] if inputs is not None else ():
        pruner.gate(plan)
        assert_equal_outputs(model, small, inputs)


CHANNELS_LAST = [
    *("Residual", "Shuffle", "SqueezeExcite", "Dense", "Depthwise", "LayerNorm", "NonLocal", "Unet"),
    "InstanceNormStream",
]


@pytest.mark.parametrize("name", CHANNELS_LAST)
def test_channels_last(name):
    model, inputs = ZOO[name]()
    plain = trace(model, inputs)
    inputs = inputs.to(memory_format=torch.channels_last)
    pruner = Pruner(model.to(memory_format=torch.channels_last), inputs)
    assert pruner.graph.layers.keys() == plain.layers.keys()
    for plan in random_plans(pruner.graph, 4)[1:]:
        pruner.gate(plan)
        small = pruner.extract()
        torch.testing.assert_close(small.eval()(inputs), model.eval()(inputs), rtol=0, atol=1e-10)


# -- the user's model -----------------------------------------------------------------------------------


@half_of_the_nets
def test_the_model_is_untouched(name):
    model, inputs = ZOO[name]()
    modules = list(model.modules())
    for module in modules[1::3]:  # as a user may have left them
        module.eval()
    next(model.parameters()).requires_grad_(False)
    run_before = fresh_inputs(inputs, requires_grad=True)
    sum(tensor.sum() for tensor in leaves(call(model, run_before))).backward()
    before = snapshot(model)
    graph = trace(model, inputs)
    assert_untouched(model, before)
    small = (
        extract(model, inputs, half(graph), graph)
        if graph.connected(graph.settle(half(graph).masks(graph)))
        else None
    )
    assert_untouched(model, before)
    pruner = Pruner(model, inputs)
    pruner.gate(random_plans(graph, 3)[2])
    pruner.extract()
    assert pruner.detach() is model
    assert_untouched(model, before)
    if small is not None:  # and shares no memory with the small one
        mine = {t.untyped_storage().data_ptr() for t in model.state_dict().values()}
        assert not mine & {t.untyped_storage().data_ptr() for t in small.state_dict().values() if t.numel()}


CUTS = {
    "Plain": ({"4": []}, "4"),
    "Residual": ({"5.conv2": [], "5.shortcut.0": []}, "5.conv2, 5.shortcut.0|5.shortcut.0|5.conv2"),
    "Shuffle": ({"6": []}, "6"),
    "Dense": ({"transition.1": []}, "transition.1"),
    "Depthwise": ({"3.expand.0": []}, "3.expand.0"),
    "FlattenLinear": ({"classifier.0": []}, "classifier.0"),
    "MultiOutput": ({"stem.0": []}, "stem.0"),
    "GatedUnit": ({"both.0": [0, 1, 2, 3]}, "both.0"),
}


@pytest.mark.parametrize("name", CUTS)
def test_a_plan_that_cuts_the_network_is_refused(name):
    model, inputs = ZOO[name]()
    keep, culprit = CUTS[name]
    before = snapshot(model)
    with pytest.raises(PlanError, match=rf"the plan disconnects the output from the input: ({culprit}) "):
        extract(model, inputs, Plan(keep))
    assert_untouched(model, before)
    pruner = Pruner(model, inputs)
    pruner.gate(random_plans(pruner.graph, 3)[2])
    gated, held = leaves(call(model.eval(), inputs)), pruner.plan()
    with pytest.raises(PlanError, match=rf"the plan disconnects the output from the input: ({culprit}) "):
        pruner.gate(Plan(keep))
    assert pruner.plan() == held
    for found, wanted in zip(leaves(call(model, inputs)), gated, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(("name", "dead"), [("Plain", {"4": range(6)}), ("GatedUnit", {"both.0": range(4, 8)})])
def test_scores_never_cut_the_network(name, dead):
    """Where they would, the layers concerned keep what connects input and output."""
    model, inputs = ZOO[name]()
    pruner = Pruner(model, inputs)
    with pruner.scoring():
        for layer, filters in dead.items():
            first = pruner.gates.spans[layer].start
            pruner.gates.soft.data[[first + i for i in filters]] = 0.1
    assert pruner.graph.connected(pruner.plan().masks(pruner.graph))
    assert pruner.plan().keep[next(iter(dead))]


# -- what is left ---------------------------------------------------------------------------------------


@nets
def test_parameters_and_macs_never_rise(name):
    _, model, inputs, made = case(name)
    dense = measure(model, inputs)
    for plan, _, small in made[::4]:
        left = measure(small, inputs)
        assert left.params <= dense.params, dict(plan.keep)
        assert left.macs <= dense.macs, dict(plan.keep)


@nets
def test_layers_keep_the_filters_of_the_settled_plan(name):
    """The weight of every layer in the small network is the rows of the large one that the plan names."""
    pruner, model, inputs, made = case(name)
    graph = pruner.graph
    for _, settled, small in made:
        small = real_copy(small)
        call(small, inputs)  # some weights are computed in the call
        modules = dict(small.named_modules())
        for layer, kept in settled.keep.items():
            module = modules[layer]
            module = module.module if isinstance(module, RemappedModule) else module
            if not kept:
                stays = graph.layers[layer].site.module.startswith(f"{layer}.")  # it holds more than the layer
                assert stays or isinstance(module, Zeros), f"{layer} is empty but still a {type(module).__name__}"
                continue
            axis = 1 if "Transpose" in type(module).__name__ else 0
            groups = getattr(module, "groups", 1)
            assert module.weight.shape[axis] * (groups if axis else 1) == len(kept), layer
            if getattr(module, "bias", None) is not None:
                assert torch.equal(module.bias, model.get_submodule(layer).bias[list(kept)]), layer
            for size in ("out_channels", "out_features"):
                assert getattr(module, size, len(kept)) == len(kept), layer


def conv(inputs, outputs, kernel, pixels):
    return inputs * outputs * kernel * kernel * pixels


# Multiply-accumulates of one image with every second filter kept, by hand.
HALVED = {
    "Plain": conv(3, 4, 3, 64) + conv(4, 3, 3, 16) + conv(3, 3, 3, 16) + 3 * 4,
    # The stages' streams keep the even channels; the blocks' inner widths are 2, 3, 3, 3, 2.
    "Residual": conv(3, 3, 3, 64)
    + 2 * conv(3, 2, 3, 64)
    + 2 * conv(3, 3, 3, 64)
    + (conv(3, 3, 3, 16) + conv(3, 4, 3, 16) + conv(3, 4, 1, 16))
    + 2 * conv(4, 3, 3, 16)
    + 2 * conv(4, 2, 3, 16)
    + 4 * 4,
    # Two zero channels before and after turn the stream's channels 0 and 2 into 2 and 4.
    "OptionA": conv(3, 2, 3, 64)
    + 4 * conv(2, 2, 3, 64)
    + (conv(2, 4, 3, 16) + conv(4, 4, 3, 16))
    + 2 * conv(4, 4, 3, 16)
    + 4 * 4,
    "PreActivation": conv(3, 3, 3, 64) + 2 * conv(3, 3, 3, 64) + 2 * conv(3, 2, 3, 64) + 3 * 4,
    "Concat": conv(3, 3, 3, 64)
    + (conv(3, 2, 1, 64) + conv(3, 2, 1, 64) + conv(2, 3, 3, 64) + conv(3, 1, 1, 64))
    + (conv(6, 2, 1, 16) + conv(6, 2, 1, 16) + conv(2, 3, 3, 16) + conv(6, 1, 1, 16))
    + 6 * 4,
    "Dense": conv(3, 2, 3, 64)
    + (conv(2, 3, 1, 64) + conv(3, 2, 3, 64))
    + (conv(4, 3, 1, 64) + conv(3, 2, 3, 64))
    + conv(6, 3, 1, 64)
    + (conv(3, 3, 1, 16) + conv(3, 2, 3, 16))
    + 5 * 4,
    "Depthwise": conv(3, 2, 3, 64)
    + (conv(2, 4, 1, 64) + conv(1, 4, 3, 64) + conv(4, 3, 1, 64))
    + (conv(3, 5, 1, 64) + conv(1, 5, 3, 64) + conv(5, 3, 1, 64))
    + 3 * 4,
    "DepthwiseMultiplier": conv(3, 2, 3, 64)
    + (conv(2, 4, 1, 64) + conv(1, 8, 3, 64) + conv(8, 3, 1, 64))
    + (conv(3, 5, 1, 64) + conv(1, 10, 3, 64) + conv(10, 3, 1, 64))
    + 3 * 4,
    # Of the 3 filters in each of 4 groups 2, 1, 2 and 1 are kept; the fullest group decides, so it is 2 each.
    "Grouped": conv(3, 3, 3, 64)
    + (conv(3, 4, 1, 64) + conv(2, 4, 3, 64) + conv(4, 3, 1, 64))
    + (conv(3, 6, 1, 64) + conv(2, 8, 3, 64) + conv(8, 3, 1, 64))
    + 3 * 4,
    "SqueezeExcite": conv(3, 3, 3, 64)
    + (conv(3, 3, 3, 64) + 3 * 2 + 2 * 3)
    + (conv(3, 4, 3, 64) + 4 * 2 + 2 * 4)
    + 4 * 4,
    "Unet": conv(3, 2, 3, 256)
    + conv(2, 3, 3, 64)
    + conv(3, 4, 3, 16)
    + conv(4, 3, 2, 16)
    + conv(6, 3, 3, 64)
    + conv(5, 3, 3, 256)
    + conv(3, 2, 1, 256),
    "FlattenLinear": conv(3, 2, 3, 64) + conv(2, 3, 3, 16) + 3 * 16 * 5 + 5 * 4 + 4 * 4,
    # The layer norm sees all six channels, three of them zero; the depthwise convolution before it three.
    "LayerNorm": conv(3, 3, 2, 16) + 2 * (conv(1, 3, 3, 16) + (6 * 5 + 5 * 3) * 16) + 3 * 4,
    # Two of four channels in each half of each unit; channels 0, 1, 2 and 5 reach the last convolution.
    "Shuffle": conv(3, 4, 3, 64)
    + 2 * (conv(2, 2, 1, 64) + conv(1, 2, 3, 64) + conv(2, 2, 1, 64))
    + conv(4, 3, 3, 16)
    + 3 * 4,
}


@pytest.mark.parametrize("name", HALVED)
def test_half_of_the_filters_leave_the_work_counted_by_hand(name):
    model, inputs = ZOO[name]()
    small = extract(model, inputs, half(trace(model, inputs)))
    assert measure(small, inputs).macs == inputs.shape[0] * HALVED[name]


@nets
def test_every_layer_is_prunable_or_follows_or_is_left_alone_with_a_reason(name):
    model, inputs = ZOO[name]()
    graph = trace(model, inputs)
    assert_every_layer_is_in_one_list(model, graph)
    assert graph.layers


LEFT_ALONE = {
    "Plain": {"11.fc": r"its filters are the network's outputs"},
    "GroupNorm": {"9": r"aten\.native_group_norm at .* shares its statistics among all channels"},
    "MeanOverChannels": {
        "middle.0": r"aten\.mean at \w+\.py:\d+ reduces over the channels, whose number would change",
        "attend": r"aten\.sigmoid at \w+\.py:\d+ turns a removed channel into a constant",
    },
    "Depthwise": {"3.depthwise.0": "depthwise: its filters follow its input channels"},
    "SqueezeExcite": {
        "first.3.restore": r"aten\.sigmoid at \w+\.py:\d+ turns a removed channel into a constant",
    },
    "InplaceOps": {"scale": r"aten\.sigmoid_ at \w+\.py:\d+ turns a removed channel into a constant"},
    "SharedNorm": {
        "left": r"aten\.native_batch_norm at \w+\.py:\d+ brings a removed channel back as a constant",
    },
    "SharedParameter": {
        "one.0": r"its weight is used at \w+\.py:\d+ too, where no gate can be placed",
        "two.0": "it shares its weight with one.0, and follows it",
    },
    "PlainListModules": {
        "one": "it is also referenced by the attribute steps, which would keep the old module; reference it as a "
        "submodule only",
    },
    "ComputedWeight": {
        "conv": r"its weight is used at \w+\.py:\d+ outside the module, where no gate can be placed",
    },
    "DynamicWeight": {
        "experts": r"its weight is computed from the input at \w+\.py:\d+, and cannot be sliced",
        "stem.0": r"it feeds aten\.convolution at \w+\.py:\d+, whose weight depends on the input",
    },
    "SpectralNorm": {"conv": r"aten\.vdot at \w+\.py:\d+, which computes its weight, mixes its filters"},
    "FunctionalConv": {
        "(model)": r"its module computes more than this layer at \w+\.py:\d+; move the layer into a submodule .*",
    },
    "FiltersMoved": {
        "gated": r"aten\.split at \w+\.py:\d+, in its module, reorders or mixes its channels, so no gate can .*",
        "turned": r"aten\.flip at \w+\.py:\d+, in its module, reorders or mixes its channels, so no gate can .*",
    },
    "Remembered": {
        "stem.3": r"its module computes more than this layer at \w+\.py:\d+; move the layer into a submodule .*",
    },
    "NormsThatMove": {
        "first.0": r"aten\.native_batch_norm at \w+\.py:\d+ brings a removed channel back as a constant",
    },
    "PixelsForChannels": {
        "value": r"aten\.\w*view at \w+\.py:\d+ mixes channels with pixels, differently at every image size",
    },
    "Heads": {"query": r"aten\.bmm at \w+\.py:\d+ is a matrix product per head, and all heads must keep .*"},
    "InplaceSlice": {"left.0": r"aten\.copy_ at \w+\.py:\d+ mixes channels in a way that is not known"},
    "Maxout": {"pairs.0": r"aten\.max at \w+\.py:\d+ reduces over the channels, whose number would change"},
    "SelectiveKernel": {"excite": r"aten\._softmax at \w+\.py:\d+ normalises over the channels"},
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_reasons_for_leaving_a_layer_alone(name):
    model, inputs = ZOO[name]()
    graph = trace(model, inputs)
    for layer, reason in LEFT_ALONE[name].items():
        assert re.fullmatch(reason, graph.unscored[layer])
        with pytest.raises(
            PlanError, match=f"{re.escape(layer)} cannot be pruned: {reason}; leave it out of the plan"
        ):
            extract(model, inputs, Plan({layer: [0]}))


def test_layers_of_one_stage_keep_different_filters():
    model, inputs = ZOO["Residual"]()
    keep = {
        "0": [0, 1],
        "3.conv2": [2, 3],
        "4.conv2": [4],
        "6.conv2": [],
        "7.conv2": [0, 1],
        "5.shortcut.0": [7],
    }
    small = extract(model, inputs, Plan({**keep, "5.conv2": [1, 5]}))
    assert torch.equal(small[3].conv2.weight, model[3].conv2.weight[[2, 3]])
    assert small[3].conv1.weight.shape[1] == 2, "the first block sees the stem's two channels"
    assert small[4].conv1.weight.shape[1] == 4, "the second those and two more"
    assert small[5].conv1.weight.shape[1] == 5
    assert isinstance(small[6].conv1, Zeros), "nothing asks for it any more"
    assert small[7].conv1.weight.shape[1] == 3
    assert small[8].fc.weight.shape[1] == 4, "channels 0, 1, 5 and 7 of the last stage are left"


def test_an_empty_branch_leaves_no_work_behind():
    model, inputs = ZOO["EmptyBranch"]()
    small = extract(model, inputs, Plan({"left.0": [], "right.0": []}))
    assert isinstance(small.left[0], Zeros)
    assert measure(small, inputs).macs == 2 * (conv(3, 6, 3, 64) + 6 * 4)


# -- an ordinary module ---------------------------------------------------------------------------------


@nets
def test_the_result_is_an_ordinary_module(name):
    """It can be copied, pickled, trained, moved to another type, saved and loaded."""
    _, model, inputs, made = case(name)
    _, _, small = made[3]
    small = real_copy(small)
    assert type(small) is type(model)
    other = fresh_inputs(inputs)
    small.eval()
    expected = leaves(call(small, other))
    twins = [real_copy(small)]
    if not any(map(is_parametrized, small.modules())):  # those torch does not pickle
        twins.append(pickle.loads(pickle.dumps(small)))
    for twin in twins:
        for a, b in zip(leaves(call(twin, other)), expected, strict=True):
            assert torch.equal(a, b)
    buffer = io.BytesIO()
    torch.save(small.state_dict(), buffer)
    buffer.seek(0)
    twin = real_copy(small)
    twin.load_state_dict(torch.load(buffer, weights_only=True))
    optimizer = torch.optim.SGD(small.parameters(), 0.1, momentum=0.9)
    _, _ = run(small, fresh_inputs(inputs, requires_grad=True), training=True)
    optimizer.step()
    after = leaves(call(small.eval(), other))
    assert any(not torch.equal(a, b) for a, b in zip(after, expected, strict=True))
    as_float = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.float(), other)
    for a, b in zip(leaves(call(twin.float(), as_float)), expected, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-3)


@third_of_the_nets
def test_saving_and_loading_is_the_identity(name, tmp_path):
    _, _, inputs, made = case(name)
    for number in (1, 2):
        _, _, small = made[number]
        save(small, tmp_path / str(number))
        again = load(tmp_path / str(number), lambda: ZOO[name]()[0].float())
        assert {n: p.shape for n, p in again.named_parameters()} == {
            n: p.shape for n, p in small.named_parameters()
        }
        for key, tensor in small.state_dict().items():
            assert torch.equal(again.state_dict()[key], tensor), key
        other = fresh_inputs(inputs)
        for a, b in zip(leaves(call(again.eval(), other)), leaves(call(small.eval(), other)), strict=True):
            assert torch.equal(a, b)


EXPORTED = [
    *("Residual", "OptionA", "Shuffle", "Depthwise", "SqueezeExcite", "EmptyBranch", "MultiOutput"),
    "Transformer",
]


def check_export(name):
    _, _, inputs, made = case(name)
    for _, _, small in (made[1], made[3]):
        args, kwargs = (
            ((), inputs) if isinstance(inputs, dict) else (inputs if isinstance(inputs, tuple) else (inputs,), {})
        )
        program = torch.export.export(real_copy(small).eval(), args, kwargs, strict=False)
        found, wanted = leaves(program.module()(*args, **kwargs)), leaves(call(small.eval(), inputs))
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", EXPORTED)
def test_the_result_can_be_exported(name):
    check_export(name)


@pytest.mark.slow
@nets
def test_all_results_can_be_exported(name):
    check_export(name)


def test_no_helper_module_stands_where_none_is_needed():
    """In a chain, layouts meet without remaps."""
    for name in ("Plain", "FlattenLinear", "Depthwise", "Concat"):
        model, inputs = ZOO[name]()
        small = extract(model, inputs, half(trace(model, inputs)))
        assert not [m for m in small.modules() if isinstance(m, (Remap, RemappedModule, Zeros))], name
