"""Recording: the operators that ran, what each belongs to, and what cannot be followed."""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.fx
import torch.nn.functional as F
from torch import nn

from cases import assert_every_layer_is_in_one_list
from sbf_pruner.errors import PruningError, TraceError
from sbf_pruner.graph import STALE, record, trace
from sbf_pruner.pruner import Pruner
from zoo import REFUSED, ZOO


class Forward(nn.Module):
    """A convolution and a function of it."""

    def __init__(self, function):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(self.conv, *args, **kwargs)


IMAGE = torch.rand(2, 3, 6, 6)


def names(function, inputs=IMAGE):
    return [op.name for op in record(Forward(function), inputs).ops]


def test_operators_in_the_order_they_ran():
    assert names(lambda conv, x: F.relu(conv(x)).mean((2, 3))) == ["aten.convolution", "aten.relu", "aten.mean"]


def test_weights_are_known_by_name():
    (op,) = record(Forward(lambda conv, x: conv(x)), IMAGE).ops
    assert [v.name for v in op.inputs] == ["", "conv.weight", "conv.bias"]
    assert [v.kind for v in op.inputs] == ["input", "state", "state"]


def test_functional_calls_know_their_weights_too():
    (op,) = record(Forward(lambda conv, x: F.conv2d(x, conv.weight)), IMAGE).ops
    assert op.inputs[1].name == "conv.weight"


def test_a_shared_weight_has_one_name():
    model = nn.Sequential(nn.Conv2d(3, 3, 1, bias=False), nn.Conv2d(3, 3, 1, bias=False))
    model[1].weight = model[0].weight
    assert [op.inputs[1].name for op in record(model, IMAGE).ops] == ["0.weight", "0.weight"]


def test_module_calls_know_what_went_in_and_out():
    found = record(ZOO["Residual"]()[0], torch.rand(1, 3, 8, 8, dtype=torch.float64))
    (call,) = found.calls["3.conv1"]
    op = found.ops[call.first]
    assert op.name == "aten.convolution"
    assert call.inputs == op.inputs[:1]
    assert call.outputs == op.outputs
    assert call.within("3") is not None
    assert call.within("4") is None
    assert len(record(ZOO["SharedModule"]()[0], torch.rand(1, 3, 8, 8, dtype=torch.float64)).calls["twice.0"]) == 2


def test_operators_know_their_line():
    (conv, relu) = record(Forward(lambda conv, x: F.relu(conv(x))), IMAGE).ops
    assert conv.where == relu.where
    assert conv.where.startswith("test_tracer.py:")


def test_where_no_line_is_the_users_it_is_the_one_that_asked():
    graph = trace(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sigmoid(), nn.Conv2d(4, 2, 1)), torch.rand(1, 3, 8, 8))
    assert re.fullmatch(r"aten.sigmoid at test_tracer.py:\d+ turns a removed channel .*", graph.skipped["0"])


@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.parametrize("last", [False, True])
def test_an_instance_norm_is_one_operator_over_the_users_channels(images, last):
    norm = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
    x = torch.rand(images, 3, 6, 6).to(memory_format=torch.channels_last if last else torch.contiguous_format)
    found = record(nn.Sequential(nn.Conv2d(3, 4, 1), norm, nn.ReLU()), x)
    assert [op.name for op in found.ops] == ["aten.convolution", "aten.instance_norm", "aten.relu"]
    op = found.ops[1]
    assert op.args[0] is found.ops[0].outputs[0] and op.outputs[0] is found.ops[2].inputs[0]
    assert [value.name for value in op.args[1:5]] == ["1.weight", "1.bias", "1.running_mean", "1.running_var"]
    assert [(call.first, call.last) for call in found.calls["1"]] == [(1, 2)]


class Doubled(nn.InstanceNorm2d):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("norm, x", [(Doubled(4, affine=True), IMAGE), (nn.InstanceNorm2d(4), IMAGE[0])])
def test_an_instance_norm_that_does_more_is_recorded_as_it_runs(norm, x):
    ran = [op.name for op in record(nn.Sequential(nn.Conv2d(3, 4, 1), norm), x).ops]
    assert "aten.native_batch_norm" in ran and "aten.instance_norm" not in ran


def test_in_place_operators_give_a_new_value():
    def function(conv, x):
        x = conv(x)
        x.relu_()
        x += 1
        return x

    ops = record(Forward(function), IMAGE).ops
    assert [op.name for op in ops] == ["aten.convolution", "aten.relu_", "aten.add_"]
    assert ops[1].inputs == ops[0].outputs
    assert ops[2].inputs == ops[1].outputs
    assert len({id(v) for op in ops for v in op.outputs}) == 3


def test_a_view_of_memory_that_was_written_since_is_not_trusted():
    def function(conv, x):
        x = conv(x)
        part = x[:, :2]
        x.mul_(2)
        return part + 1

    assert STALE in names(function)


def test_the_real_network_runs_where_numbers_decide():
    def function(conv, x):
        x = conv(x)
        return x if x.mean().item() > 1e9 else F.relu(x)

    assert names(function)[-1] == "aten.relu"


@pytest.mark.parametrize(
    "function",
    [
        lambda conv, x: conv(x) + torch.tensor([7], device=x.device),
        lambda conv, x: conv(x) + torch.as_tensor(np.array([7]), device=x.device),
        lambda conv, x: conv(x) + x.new_tensor(data=[7], dtype=torch.int64),
        lambda conv, x: conv(x)[:, [3, 1]],
        lambda conv, x: conv(x) + torch.frombuffer(np.array([7]), dtype=torch.int64)[0],
    ],
)
def test_numbers_that_the_forward_writes_into_tensors_are_known_without_running_it(function):
    found = record(Forward(function), IMAGE)
    assert found.on_meta
    literals = [v.data for op in found.ops for v in op.inputs if v.kind == "constant"]
    assert literals and all(data is not None for data in literals)


def test_where_they_are_not_the_real_network_runs():
    found = record(Forward(lambda conv, x: conv(x) + x.new([7])), IMAGE)
    assert not found.on_meta
    assert [v.data.item() for op in found.ops for v in op.inputs if v.kind == "constant"] == [7]


@pytest.mark.parametrize("renamed", [lambda x: x.as_subclass(torch.Tensor), nn.Parameter])
def test_a_tensor_by_another_name_is_the_same_tensor(renamed):
    found = record(Forward(lambda conv, x: conv(x) + renamed(conv(x))), IMAGE)
    first, second, add = found.ops
    assert add.inputs == (first.outputs[0], second.outputs[0])


def test_evaluation_mode_is_recorded_and_the_mode_left_alone():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Dropout(0.5), nn.BatchNorm2d(4)).train()
    ops = [op.name for op in record(model, IMAGE).ops]
    assert "aten.native_dropout" not in ops
    assert model.training
    assert model[2].num_batches_tracked == 0


@dataclasses.dataclass
class Result:
    logits: torch.Tensor
    extra: dict


class Slotted:
    __slots__ = ("itself", "x")

    def __init__(self, x):
        self.x, self.itself = x, self  # which must not go on for ever


@pytest.mark.parametrize(
    ("function", "count"),
    [
        (lambda conv, x: conv(x), 1),
        (lambda conv, x: (conv(x), x), 2),
        (lambda conv, x: {"a": conv(x), "b": [x, None]}, 2),
        (lambda conv, x: Result(conv(x), {"more": (x, 3)}), 2),
        (lambda conv, x: {"a": x, "b": SimpleNamespace(deep=[conv(x)], more=Slotted(x))}, 3),
    ],
)
def test_outputs_are_found_in_any_nest(function, count):
    assert len(record(Forward(function), IMAGE).outputs) == count


@pytest.mark.parametrize(
    "inputs",
    [IMAGE, (IMAGE,), {"x": IMAGE}, ([IMAGE, 1],), {"x": {"deep": (IMAGE,)}}],
    ids=["tensor", "tuple", "dict", "list", "nested"],
)
def test_inputs_of_any_nest(inputs):
    def function(conv, x):
        while not isinstance(x, torch.Tensor):
            x = next(iter(x.values())) if isinstance(x, dict) else x[0]
        return conv(x)

    found = record(Forward(function), inputs)
    assert len(found.inputs) == 1
    assert found.ops[0].inputs[0] is found.inputs[0]


def test_numpy_is_named_with_its_line():
    model, inputs = REFUSED["Untraceable"]()
    with pytest.raises(TraceError, match=r"^at \w+\.py:\d+ a tensor was not computed by torch operators"):
        trace(model, inputs)


def test_a_network_without_convolutions_is_refused():
    with pytest.raises(PruningError, match=r"^there is no convolution in the model"):
        trace(*REFUSED["NoConv"]())


def test_the_copy_that_runs_shares_no_memory_with_the_model():
    model = Forward(lambda conv, x: conv.weight.data.add_(1).sum() + conv(x))
    before = model.conv.weight.clone()
    record(model, IMAGE)
    assert torch.equal(model.conv.weight, before)


def test_inputs_are_not_written():
    image = IMAGE.clone()
    record(Forward(lambda conv, x: conv(x.mul_(0)) if x.sum().item() else conv(x)), image)
    assert torch.equal(image, IMAGE)


# -- graph --------------------------------------------------------------------------------------------------


def test_gates_stand_after_the_norm_or_at_the_layer():
    graph = trace(*ZOO["NoNorm"]())
    assert [(s.module, s.kind, s.layer) for s in graph.sites] == [
        ("0", "map", "0"), ("2", "map", "2"), ("4", "map", "4"),
    ]  # fmt: skip
    graph = trace(*ZOO["Plain"]())
    assert [(s.module, s.kind, s.layer, s.parameters) for s in graph.sites] == [
        (norm, "affine", conv, ("weight", "bias")) for norm, conv in (("1", "0"), ("5", "4"), ("8", "7"))
    ]


def test_norms_on_a_stream_follow():
    graph = trace(*ZOO["PreActivation"]())
    followers = {s.module: s.kind for s in graph.sites if not s.layer}
    assert followers == {"1.bn1": "affine", "2.bn1": "affine", "3": "affine"}
    graph = trace(*ZOO["DepthwiseNoNorm"]())
    assert [(s.module, s.kind, s.parameters) for s in graph.sites if not s.layer] == [("2", "bias", ("bias",))]


def test_a_gate_is_folded_into_a_norm_whose_module_keeps_zeros():
    """Else it stands behind the module, and a norm that no layer has for its own gets none."""
    graph = trace(*ZOO["NormsWithMore"]())
    assert {s.module: s.kind for s in graph.sites} == {
        "first.1": "map", "second.1": "map", "third.1": "affine", "fourth.1": "map",
    }  # fmt: skip
    graph = trace(*ZOO["NormsThatMove"]())
    assert [s.module for s in graph.sites if not s.layer] == []


def test_a_gate_stands_where_the_channels_leave_a_module():
    graph = trace(*ZOO["ChannelsElsewhere"]())
    assert {s.module: s.dim for s in graph.sites} == {"stem.0": 1, "stem.3": 1, "patches": 2, "mix": 2}
    graph = trace(*ZOO["RowsAndTokens"]())
    assert {s.module: s.dim for s in graph.sites} == {"stem.0": 1, "shared": -1}


def test_a_layer_that_holds_its_norm_is_gated_there():
    graph = trace(*ZOO["NormInside"]())
    assert {layer.site.module for layer in graph.layers.values()} == {
        "stem.norm", "block.0.norm", "block.1.norm", "again.norm",
    }  # fmt: skip


class Mirrored(nn.Conv2d):
    def forward(self, x):
        return super().forward(x).flip(1).flip(1)


class Counting(nn.Conv2d):
    """Looks at its filters together, and tells nobody."""

    def forward(self, x):
        y = super().forward(x)
        self.seen = y.softmax(1).amax()
        return y.relu()


class Remembering(nn.Conv2d):
    def forward(self, x):
        self.raw = super().forward(x)
        return self.raw.relu()


@pytest.mark.parametrize("kind", [Mirrored, Counting])
def test_what_a_module_does_by_the_way_does_no_harm(kind):
    model = nn.Sequential(kind(3, 8, 1), nn.Conv2d(8, 4, 1))
    assert "0" in trace(model, IMAGE).layers


def test_a_layer_whose_inside_is_read_elsewhere_is_left_alone():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.out = Remembering(3, 8, 1), nn.Conv2d(16, 4, 1)

        def forward(self, x):
            y = self.conv(x)
            return self.out(torch.cat([y, self.conv.raw], 1))

    reason = trace(Net(), IMAGE).skipped["conv"]
    assert re.fullmatch(
        r"its module computes more than this layer at .*; move the layer into a submodule .*", reason
    )


def test_a_follower_closes_when_all_that_feeds_it_is_gone():
    graph = trace(*ZOO["PreActivation"]())
    (first,) = (s for s in graph.sites if s.module == "1.bn1")
    (last,) = (s for s in graph.sites if s.module == "3")
    masks = graph.all_filters()
    for name in ("0", "1.conv2", "2.conv2"):
        masks[name][2] = False
    masks["0"][4] = False
    flow = graph.flow(masks)
    assert first.open(flow).astype(int).tolist() == [1, 1, 0, 1, 0, 1]
    assert last.open(flow).astype(int).tolist() == [1, 1, 0, 1, 1, 1]


def test_channels_that_are_zero_in_the_network_itself_stay_as_they_are():
    """A norm makes constants of padded channels; that is the user's function, not a removed filter."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ConstantPad3d((0, 0, 0, 0, 1, 1), 0.0), nn.BatchNorm2d(6))
    model = nn.Sequential(model, nn.ReLU(), nn.Conv2d(6, 2, 1))
    graph = trace(model, IMAGE)
    (follower,) = (s for s in graph.sites if not s.layer)
    masks = graph.all_filters()
    masks["0.0"][1] = False
    assert follower.open(graph.flow({})).all()
    assert follower.open(graph.flow(masks)).astype(int).tolist() == [1, 1, 0, 1, 1, 1]


def test_settling_drops_what_nothing_feeds_or_needs():
    graph = trace(*ZOO["Residual"]())
    settled = graph.settle({**graph.all_filters(), "4.conv1": graph.all_filters()["4.conv1"] & False})
    assert not settled["4.conv2"].any(), "no input is left"
    settled = graph.settle({**graph.all_filters(), "6.conv2": graph.all_filters()["6.conv2"] & False})
    assert not settled["6.conv1"].any(), "nothing needs it"
    assert settled["7.conv1"].all()


def test_layers_know_their_maps():
    graph = trace(*ZOO["Residual"]())
    layer = graph.layers["5.conv1"]
    assert (layer.filters, layer.kind, layer.weight, layer.map_size) == (6, "Conv2d", "5.conv1.weight", (8, 8))
    assert graph.layers["6.conv1"].map_size == (4, 4)
    assert trace(*ZOO["FlattenLinear"]()).layers["classifier.0"].map_size == ()


def test_ignored_layers_are_left_alone():
    model, inputs = ZOO["Residual"]()
    graph = trace(model, inputs, ignore=["4.*", "0"])
    assert not {"0", "4.conv1", "4.conv2"} & set(graph.layers)
    assert graph.skipped["4.conv1"] == "ignored as asked (4.*)"


def test_a_layer_that_does_not_run_is_named():
    """A head for training alone that does not fit the example inputs, say."""
    net = Heads(lambda net, x: net.head(net.stem(x)))
    assert trace(net, IMAGE).skipped["spare"] == "it does not run on the example inputs"


class Merging(nn.Module):
    """For evaluation, layers one after the other and beside each other are merged into one, as in SPAN."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(6, 8, 1, bias=False), nn.Conv2d(8, 5, 3, bias=False)
        self.beside, self.merged = nn.Conv2d(6, 5, 1, bias=False), nn.Conv2d(6, 5, 3, padding=1, bias=False)

    def forward(self, x):
        if self.training:
            return self.second(self.first(F.pad(x, (1, 1, 1, 1)))) + self.beside(x)
        weight = F.conv2d(self.second.weight.data, self.first.weight.data.transpose(0, 1))
        self.merged.weight.data = weight + F.pad(self.beside.weight.data, (1, 1, 1, 1))
        return self.merged(x)


def two_weights(net, x):
    return net.head(net.stem(x)) + F.conv2d(x, net.one.weight + net.other.weight)


def tied(net, x):
    net.other.weight = net.one.weight
    return net.head(net.stem(x)) + net.one(x) + net.other(x)


# What else can become of the layers `one` and `other`: weights of which no operator makes a layer, or another one.
UNUSUAL = {
    "merged": lambda net, x: net.head(net.stem(x)) + net.last(net.merging(net.stem(x))),
    "never run": lambda net, x: net.head(net.stem(x)),
    "added up": two_weights,
    "tied": tied,
    "a number of its own": lambda net, x: net.head(net.stem(x)) * net.one.weight.mean(),
    "transposed": lambda net, x: net.head(net.stem(x)) + F.conv_transpose2d(x, net.one.weight.transpose(0, 1)),
    "without a batch": lambda net, x: net.head(net.stem(x)) + torch.stack([F.conv2d(y, net.one.weight) for y in x]),
    "linear": lambda net, x: (
        net.head(net.stem(x)) + F.linear(x.movedim(1, 3), net.one.weight[:, :, 0, 0]).movedim(3, 1)
    ),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_layers_that_are_used_in_unusual_ways_are_in_one_list(name):
    net = Heads(UNUSUAL[name])
    net.one, net.other = (nn.Conv2d(3, 2, 1, bias=False) for _ in range(2))
    net.merging, net.last = Merging(), nn.Conv2d(5, 2, 1)
    graph = trace(net, IMAGE)
    assert_every_layer_is_in_one_list(net, graph)
    assert "stem" in graph.layers or name == "merged"


def test_a_weight_that_the_forward_assigns_is_a_computed_one():
    """Its filters cannot be cut: they are computed anew in every call."""
    net = nn.Sequential(nn.Conv2d(3, 6, 1), Merging(), nn.Conv2d(5, 2, 1))
    skipped = trace(net, IMAGE).skipped
    line = r"test_tracer\.py:\d+"
    assert re.fullmatch(
        rf"aten\.convolution at {line}, which computes its weight, mixes its filters", skipped["1.merged"]
    )
    for name in ("1.second", "1.beside"):
        assert re.fullmatch(rf"no layer uses its weight; it is read by aten\.\w+ at {line}", skipped[name])


class Heads(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.stem, self.body = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 5, 1)
        self.head, self.spare, self.function = nn.Conv2d(6, 2, 1), nn.Conv2d(5, 2, 1), function

    def forward(self, x):
        return self.function(self, x)


def test_layers_that_feed_another_head_in_training_are_left_alone():
    """What runs in training instead of something else cannot be cut with it; the layers before it can."""

    def function(net, x):
        x = F.relu(net.body(F.relu(net.stem(x))))
        return net.spare(x) if net.training else x.mean((1, 2, 3))

    graph = trace(Heads(function), IMAGE)
    assert set(graph.layers) == {"stem"}
    assert re.fullmatch(
        r"it feeds test_tracer\.py:\d+ in training mode only, and the graph follows evaluation mode",
        graph.skipped["body"],
    )


def by_mode(in_training, in_evaluation):
    """The stem, and one of two functions of it before the head."""
    return Heads(lambda net, x: net.head((in_training if net.training else in_evaluation)(F.relu(net.stem(x)))))


HANDED_ON = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropped channels": lambda x: F.dropout2d(x, 0.3),
    "stochastic depth": lambda x: x.div(0.9) * x.new_empty((2, 1, 1, 1)).bernoulli_(0.9),
    "by hand": lambda x: x * (torch.rand_like(x) > 0.2) / 0.8,
    "drop block": lambda x: x * (mask := 1 - F.max_pool2d(torch.rand_like(x).round(), 3, 1, 1)) * 72 / mask.sum(),
    "another function": lambda x: F.leaky_relu(x, 0.3),
    "decided by chance": lambda x: x if torch.rand(()) < 0.5 else x.flip(1),
}
ANOTHER = {
    "zero lost": torch.sigmoid,
    "moved": lambda x: x.flip(1),
    "noise": lambda x: x + torch.randn_like(x),
    "a weight of each channel": lambda x: x * torch.arange(x.shape[1], device=x.device).view(1, -1, 1, 1),
    "made on the CPU": lambda x: x + torch.ones(1, 6, 1, 1),
}


@pytest.mark.parametrize("name", HANDED_ON)
def test_what_hands_channels_on_in_training_does_no_harm(name):
    net = by_mode(HANDED_ON[name], lambda x: x)
    state = torch.get_rng_state()
    graph = trace(net, IMAGE)
    assert "stem" in graph.layers
    assert not graph.trace.training
    assert torch.equal(torch.get_rng_state(), state), "a trace draws no random numbers of the user's"


@pytest.mark.parametrize("name", ANOTHER)
@pytest.mark.parametrize("turned", [False, True])
def test_layers_that_feed_another_function_in_training_are_left_alone(name, turned):
    net = by_mode(ANOTHER[name], lambda x: x)
    if turned:
        net = by_mode(lambda x: x, ANOTHER[name])
    assert re.fullmatch(
        r"it feeds test_tracer\.py:\d+ in training mode only, .*", trace(net, IMAGE).skipped["stem"]
    )


def test_both_layers_that_feed_a_third_one_in_turns_are_left_alone():
    def function(net, x):
        x = F.relu(net.stem(x))
        return net.spare(F.relu(net.body(x) if net.training else net.other(x)))

    net = Heads(function)
    net.other = nn.Conv2d(6, 5, 1)
    assert not trace(net, IMAGE).layers


def test_further_outputs_of_training_keep_their_channels():
    def function(net, x):
        features = F.relu(net.body(F.relu(net.stem(x))))
        return (net.spare(features), features.mean((2, 3))) if net.training else net.spare(features)

    graph = trace(Heads(function), IMAGE)
    assert graph.skipped["body"] == "its filters are the network's outputs"
    assert set(graph.layers) == {"stem"}


def test_a_further_output_where_the_modes_differ_otherwise():
    def function(net, x):
        x = F.relu(net.stem(x))
        features = net.body(x)
        return features if net.training else net.spare(features).softmax(1)

    skipped = trace(Heads(function), IMAGE).skipped
    assert skipped["body"].startswith("it feeds the network's outputs in training mode only, ")


def test_what_is_kept_from_a_first_call_is_not_recorded():
    model, inputs = ZOO["KeepsFromTheFirstCall"]()
    assert not any(op.name == "aten.arange" for op in record(model, inputs).ops)


def test_a_norm_that_counts_its_batches_in_training_is_not_recorded_so():
    """A count has no channels, and nothing that is pruned depends on it."""

    class Counting(nn.BatchNorm2d):
        def forward(self, x):
            if self.training:
                self.num_batches_tracked.add_(1)
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training)

    graph = trace(nn.Sequential(nn.Conv2d(3, 6, 1), Counting(6), nn.ReLU(), nn.Conv2d(6, 2, 1)), IMAGE)
    assert set(graph.layers) == {"0"}
    assert not any("add_" in op.name for op in graph.trace.ops)


def test_a_head_that_is_used_twice_gives_the_outputs():
    graph = trace(Heads(lambda net, x: net.head(net.stem(x)) + net.head(net.stem(-x))), IMAGE)
    assert graph.skipped["head"] == "its filters are the network's outputs"
    assert "stem" in graph.layers


def test_a_failure_within_torch_is_not_looked_for_in_our_files():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(3, 2))
    for call in (Pruner, trace):
        with pytest.raises(PruningError, match=r"^the model cannot run on the example inputs \(.*mat2 shapes"):
            call(net, torch.rand(1, 3, 8, 8))


def test_an_attribute_that_is_called_like_a_table_of_hooks_need_be_none() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    net.feature_hooks = []  # type: ignore[assignment]
    assert list(trace(net, torch.rand(1, 3, 8, 8)).layers) == ["0"]
    assert list(trace(torch.fx.symbolic_trace(net), torch.rand(1, 3, 8, 8)).layers) == ["0"]


def test_a_trace_on_real_tensors_draws_no_random_numbers_of_the_users():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x):
            if float(x.sum()) > 1e9:  # cannot be traced on meta tensors
                return x
            return self.conv(x) * torch.tensor([2.0])

    state = torch.get_rng_state()
    model = Scaled()
    torch.set_rng_state(state)
    trace(model, torch.ones(1, 3, 4, 4))
    assert torch.equal(torch.get_rng_state(), state)
