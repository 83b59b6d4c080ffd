"""Surgery: what is sliced is the right part, and the rest of a module stays as it was."""

from __future__ import annotations

import functools
import pickle
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.ao.quantization import fuse_modules
from torch.nn.utils import prune

from cases import foldable, folded, random_plans
from sbf_pruner.errors import PlanError, PruningError
from sbf_pruner.graph import network_cost, trace
from sbf_pruner.measurement import measure
from sbf_pruner.models import resolve
from sbf_pruner.modules import Remap, RemappedModule, Zeros
from sbf_pruner.plan import Plan
from sbf_pruner.pruner import Pruner
from sbf_pruner.surgery import extract
from sbf_pruner.utils import real_copy
from zoo import ZOO, conv_bn, randomise

IMAGE = torch.rand(2, 3, 8, 8)


def test_weights_are_rows_and_columns_of_the_old_ones():
    model, inputs = ZOO["Plain"]()
    small = extract(model, inputs, Plan({"0": [1, 5], "4": [0, 2, 3], "7": [4]}))
    assert torch.equal(small[0].weight, model[0].weight[[1, 5]])
    assert torch.equal(small[4].weight, model[4].weight[[0, 2, 3]][:, [1, 5]])
    assert torch.equal(small[4].bias, model[4].bias[[0, 2, 3]])
    for name in ("weight", "bias", "running_mean", "running_var"):
        assert torch.equal(getattr(small[5], name), getattr(model[5], name)[[0, 2, 3]])
    assert torch.equal(small[11].fc.weight, model[11].fc.weight[:, [4]])
    assert torch.equal(small[11].fc.bias, model[11].fc.bias)


def test_a_network_cut_in_inference_mode_can_be_trained():
    model, inputs = ZOO["Plain"]()
    with torch.inference_mode():
        small = extract(model, inputs, Plan({"4": [0, 2, 3]}))
    small(inputs).sum().backward()
    assert small[4].weight.grad.shape[0] == 3


def test_flattened_maps_take_their_pixels_along():
    model, inputs = ZOO["FlattenLinear"]()
    small = extract(model, inputs, Plan({"features.4": [1, 3]}))
    columns = [c * 16 + p for c in (1, 3) for p in range(16)]
    assert torch.equal(small.classifier[0].weight, model.classifier[0].weight[:, columns])


def test_grouped_weights_are_sliced_group_by_group():
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 6, 1, groups=2), nn.Conv2d(6, 3, 1))
    small = extract(model, IMAGE, Plan({"0": [0, 3, 5, 6], "1": [2, 3]}))
    expected = torch.cat([model[1].weight[[2]][:, [0, 3]], model[1].weight[[3]][:, [1, 2]]])
    assert torch.equal(small[1].weight, expected)
    assert (small[1].in_channels, small[1].out_channels, small[1].groups) == (4, 2, 2)


def test_a_group_without_input_vanishes():
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 6, 1, groups=2), nn.Conv2d(6, 3, 1))
    small = extract(model, IMAGE, Plan({"0": [4, 7]}))
    assert (small[1].in_channels, small[1].out_channels, small[1].groups) == (2, 3, 1)
    assert torch.equal(small[1].weight, model[1].weight[3:][:, [0, 3]])


def test_transposed_convolutions_have_inputs_first():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ConvTranspose2d(4, 6, 2, 2), nn.Conv2d(6, 2, 1))
    small = extract(model, IMAGE, Plan({"0": [1, 2], "1": [0, 5]}))
    assert torch.equal(small[1].weight, model[1].weight[[1, 2]][:, [0, 5]])
    assert torch.equal(small[1].bias, model[1].bias[[0, 5]])
    assert (small[1].in_channels, small[1].out_channels) == (2, 2)


def test_sizes_say_what_is_really_there():
    model, inputs = ZOO["Residual"]()
    small = extract(model, inputs, Plan({"3.conv1": [0, 2], "5.conv1": [1], "0": [0, 1]}))
    for module in small.modules():
        if isinstance(module, nn.Conv2d):
            assert module.weight.shape[:2] == (module.out_channels, module.in_channels // module.groups)
        elif isinstance(module, nn.BatchNorm2d):
            assert module.weight.shape == (module.num_features,)
        elif isinstance(module, nn.Linear):
            assert module.weight.shape == (module.out_features, module.in_features)


@pytest.mark.filterwarnings("error")
def test_sizes_of_a_norm_that_holds_nothing_say_so_too():
    norms = nn.InstanceNorm2d(8), nn.BatchNorm2d(6, affine=False, track_running_stats=False)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), norms[0], nn.Conv2d(8, 6, 1), norms[1], nn.Conv2d(6, 4, 1))
    small = extract(model, IMAGE, Plan({"0": [0, 5], "2": [1, 2, 4]}))
    assert (small[1].num_features, small[3].num_features) == (2, 3)
    assert small(IMAGE).shape == (2, 4, 8, 8)


class Attended(nn.Module):
    """A group norm that holds nothing, called as a function if one is given."""

    def __init__(self, function=None):
        super().__init__()
        self.stem, self.attend, self.out = nn.Conv2d(3, 12, 1), nn.Conv2d(12, 12, 1), nn.Conv2d(12, 4, 1)
        self.norm, self.function = nn.GroupNorm(6, 12, affine=False), function
        self.scale, self.shift = nn.Parameter(torch.rand(12)), nn.Parameter(torch.rand(12))

    def forward(self, x):
        x = self.stem(x)
        y = self.attend(x)
        return self.out(x * torch.sigmoid(self.norm(y) if self.function is None else self.function(self, y)))


def test_the_groups_of_a_norm_without_weights_go_with_its_channels():
    small = extract(Attended(), IMAGE, Plan({"stem": [0, 2, 4]}))
    assert (small.norm.num_groups, small.norm.num_channels, small.sbf_fixed_sizes) == (3, 6, ())


@pytest.mark.parametrize(
    "function",
    [lambda net, y: F.group_norm(y, 6), lambda net, y: F.group_norm(y, 6, net.scale, net.shift)],
)
def test_a_number_of_groups_in_the_forward_is_respected(function):
    """It would fit the six channels that are left, too: by ones, and not by twos."""
    model = Attended(function).double().eval()
    pruner = Pruner(model, IMAGE.double())
    pruner.gate(Plan({"stem": [0, 2, 4]}))
    small = pruner.extract().eval()
    assert small.sbf_fixed_sizes and small.stem.out_channels == 3
    torch.testing.assert_close(small(IMAGE.double()), model(IMAGE.double()), rtol=0, atol=1e-12)


def test_a_norm_that_holds_nothing_keeps_its_size_where_it_serves_two():
    norm = nn.InstanceNorm2d(8)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), norm, nn.Conv2d(8, 8, 1), norm, nn.Conv2d(8, 4, 1))
    for kept, size in (([0, 5], 8), ([1, 2, 4], 3)):
        assert extract(model, IMAGE, Plan({"0": kept, "2": [1, 2, 4]}))[1].num_features == size


def test_frozen_parameters_stay_frozen_and_modes_stay():
    model, inputs = ZOO["Plain"]()
    model[4].weight.requires_grad_(False)
    model[5].eval()
    small = extract(model, inputs, Plan({"4": [1]}))
    assert not small[4].weight.requires_grad
    assert small[4].bias.requires_grad
    assert not small[5].training
    assert small[1].training


def test_memory_format_is_kept():
    model, inputs = ZOO["Plain"]()
    small = extract(model.to(memory_format=torch.channels_last), inputs, Plan({"0": [0, 1, 2], "4": [0, 1]}))
    assert small[4].weight.is_contiguous(memory_format=torch.channels_last)


def test_shared_parameters_stay_shared():
    model, inputs = ZOO["SharedParameter"]()
    small = extract(model, inputs, Plan({"stem.0": [0, 1]}))
    assert len({id(m.weight) for m in small.modules() if isinstance(m, nn.Conv2d)}) == 3


def test_modules_registered_twice_stay_one():
    model, inputs = ZOO["RegisteredTwice"]()
    small = extract(model, inputs, Plan({"conv": [0, 1]}))
    assert small.conv is small.again[0]
    assert small.norm is small.again[1]


def test_forward_hooks_of_the_user_come_along():
    model, inputs = ZOO["Plain"]()
    seen = []
    model[4].register_forward_hook(lambda module, args, result: seen.append(result.shape[1]))
    small = extract(model, inputs, Plan({"4": [0, 2]}))
    seen.clear()
    small(inputs)
    assert seen == [2]


def test_a_number_of_channels_in_the_forward_is_respected():
    model, inputs = ZOO["HardcodedView"]()
    small = extract(model, inputs, Plan({"middle.0": [1, 4]}))
    assert small.middle[0].out_channels == 2, "the filters are gone all the same"
    assert small.fc.in_features in (8, 32)
    assert [m for m in small.modules() if isinstance(m, Remap)]


class Widths(nn.Module):
    def __init__(self, function, outputs=8):
        super().__init__()
        self.stem, self.function = conv_bn(3, 8), function
        self.out = nn.Conv2d(outputs, 2, 1)

    def forward(self, x):
        x = self.stem(x)
        x = self.function(x)
        return self.out(x)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x / x.shape[1],
        lambda x: torch.add(x, x, alpha=x.shape[1]),
        lambda x: x * x.new_full((1,), x.shape[1] ** -0.5),
        lambda x: x * torch.full((1, 1, 1, 1), 1 / x.shape[1]),
        lambda x: x / torch.tensor(x.shape[1], dtype=x.dtype, device=x.device),
        lambda x: x / torch.as_tensor([x.shape[1]], device=x.device),
        lambda x: x / torch.asarray(float(x.shape[1]), device=x.device),
        lambda x: x * x.new_tensor([1.0, 1 / x.shape[1]]).sum(),
        lambda x: x / x.new([x.shape[1]]),
        lambda x: x / torch.tensor(float(x.shape[1])).sqrt().item(),
        lambda x: x * torch.arange(9.0, device=x.device)[[x.shape[1]]],
        lambda x: F.avg_pool2d(x, 2, divisor_override=x.shape[1]),
        lambda x: x + torch.empty(1, dtype=x.dtype).fill_(x.shape[1]),
        lambda x: torch.stack([a := F.relu(x), b := F.relu(-x), F.relu(a if x.shape[1] == 8 else b)]).sum(0),
        lambda x: x.roll(x.shape[1] // 2, 1),
        lambda x: F.channel_shuffle(x, 2),
        lambda x: torch.cat([x[:, x.shape[1] // 4 :], x[:, : x.shape[1] // 4]], 1),
        lambda x: x.view(x.shape[0], 8, 64).view(x.shape),
        lambda x: F.pad(x, (0, 0, 0, 0, 8 - x.shape[1], 0)),
        lambda x: x if x.shape[1] > 4 else 2 * x,
    ],
)
def test_a_function_that_depends_on_the_width_is_kept_by_keeping_the_width(function):
    model = Widths(function).double().eval()
    inputs = IMAGE.double()
    graph = trace(model, inputs)
    for kept in ([1, 4], [0, 1, 2, 5], [6], [0, 2, 3, 4, 5, 6, 7]):
        gated = model.stem[1].weight.detach().clone(), model.stem[1].bias.detach().clone()
        small = extract(model, inputs, Plan({"stem.0": kept}), graph).eval()
        gone = [i for i in range(8) if i not in kept]
        with torch.no_grad():
            model.stem[1].weight[gone] = 0
            model.stem[1].bias[gone] = 0
            torch.testing.assert_close(small(inputs), model(inputs), rtol=0, atol=1e-12)
            model.stem[1].weight.copy_(gated[0])
            model.stem[1].bias.copy_(gated[1])
        assert small.stem[0].out_channels == len(kept)


def test_a_last_step_that_depends_on_a_width_is_seen():
    class Net(Widths):
        def forward(self, x):
            width = self.stem(x).shape[1]
            out = super().forward(x)
            return out if width == 8 else 2 * out

    model = Net(F.relu).double().eval()
    pruner = Pruner(model, IMAGE.double())
    pruner.gate(Plan({"stem.0": [1, 4]}))
    torch.testing.assert_close(pruner.extract().eval()(IMAGE.double()), model(IMAGE.double()), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(6, 5, 3),
        nn.Conv2d(6, 5, 3, 2, 1),
        nn.Conv2d(6, 5, (1, 3), (2, 1), (0, 2), (1, 2)),
        nn.Conv2d(6, 5, 3, padding=1, padding_mode="circular"),
        nn.Conv2d(6, 5, 3, padding="same"),
        nn.ConvTranspose2d(6, 5, 3, 2, 1, 1),
        nn.Conv2d(6, 5, 1, groups=1),
    ],
    ids=str,
)
def test_an_empty_layer_leaves_zeros_of_its_shape(layer):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.layer, self.out = nn.Conv2d(3, 6, 1), layer, nn.Conv2d(5, 2, 1)
            self.around = nn.Conv2d(6, 2, 1)

        def forward(self, x):
            x = self.stem(x)
            return self.out(self.layer(x)).mean((2, 3)) + self.around(x).mean((2, 3))

    model = Net()
    small = extract(model, IMAGE, Plan({"layer": []}))
    assert isinstance(small.layer, Zeros)
    for side in (8, 11):
        x = torch.rand(2, 3, side, side)
        found, before = small.layer(small.stem(x)), model.layer(model.stem(x))
        assert found.shape[2:] == before.shape[2:]
        assert not found.any()


def test_a_layer_that_is_the_whole_model_is_left_alone():
    with pytest.raises(PlanError, match="its filters are the network's outputs"):
        extract(nn.Conv2d(3, 4, 1), IMAGE, Plan({"(model)": [0]}))


def test_what_is_put_in_goes_to_the_device_of_its_neighbour():
    model, inputs = ZOO["Residual"]()
    model.elsewhere = nn.Parameter(torch.empty(3, device="meta"))  # the first of all, on another device
    small = extract(model, inputs, Plan({"3.conv2": [0, 1], "4.conv2": [2, 3]}))
    remaps = [m for m in small.modules() if isinstance(m, Remap)]
    assert remaps and all(held.device.type == "cpu" for remap in remaps for held in remap.buffers())
    assert all(p.device.type == ("meta" if n == "elsewhere" else "cpu") for n, p in small.named_parameters())
    assert small.eval()(inputs).isfinite().all()


def test_pruning_again_unwraps_what_the_first_time_put_in():
    model, inputs = ZOO["Residual"]()
    first = Plan({"3.conv2": [0, 1], "4.conv2": [2, 3], "0": [0, 4]})
    small = extract(model, inputs, first)
    assert any(isinstance(m, RemappedModule) for m in small.modules())
    assert set(trace(small, inputs).layers) == set(trace(model, inputs).layers)
    again = extract(small, inputs, Plan({"3.conv2": [], "4.conv2": [1]}))
    assert not any(isinstance(m.module, RemappedModule) for m in again.modules() if isinstance(m, RemappedModule))
    once = extract(model, inputs, Plan({"3.conv2": [], "4.conv2": [3], "0": [0, 4]}))
    torch.testing.assert_close(again.eval()(inputs), once.eval()(inputs), rtol=0, atol=1e-12)
    assert sum(p.numel() for p in again.parameters()) == sum(p.numel() for p in once.parameters())


def largest_difference(one, other, inputs):
    with torch.no_grad():
        return float((one.eval()(inputs) - other.eval()(inputs)).abs().max())


def test_a_network_that_folds_its_own_norms_computes_the_same():
    model, inputs = ZOO["CrossStage"]()
    graph = trace(model, inputs)
    plans = random_plans(graph, 6)
    for plan in plans:
        small = extract(model, inputs, plan, graph)
        fused = real_copy(small).eval().fuse()
        assert not any(isinstance(module, nn.BatchNorm2d) for module in fused.modules())
        for size in (8, 12):
            assert largest_difference(fused, small, torch.randn(3, 3, size, size).double()) < 1e-10
    small = extract(model, inputs, plans[3], graph)
    fused = real_copy(small).eval().fuse()
    for network in (small, fused):  # folded after a second cut, and before it
        again = trace(network, inputs)
        for plan in random_plans(again, 3)[1:]:
            smaller = extract(network, inputs, plan, again, prove=True).eval()
            if network is small:
                assert largest_difference(real_copy(smaller).fuse(), smaller, inputs) < 1e-10


class Branch(nn.Module):
    """A residual branch whose convolutions have biases in front of their norms."""

    def __init__(self, width):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x):
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


def test_norms_behind_biases_can_be_folded_too():
    torch.manual_seed(0)
    model = nn.Sequential(*conv_bn(3, 8), nn.ReLU(), Branch(8), Branch(8), nn.Conv2d(8, 4, 1))
    model, inputs = randomise(model.double()).eval(), IMAGE.double()
    graph, pairs = trace(model, inputs), foldable(model, inputs)
    assert len(pairs) == 5
    for plan in random_plans(graph, 5)[2:]:
        small = extract(model, inputs, plan, graph, prove=True).eval()
        assert largest_difference(folded(small, pairs), small, inputs) < 1e-10
    again = extract(small, inputs, random_plans(trace(small, inputs), 3)[-1], prove=True).eval()
    assert largest_difference(folded(again, pairs), again, inputs) < 1e-10


def test_a_folded_resnet_computes_the_same_and_has_no_more_to_compute():
    model = resolve("resnet20").double().eval()
    randomise(model)
    inputs = torch.rand(1, 3, 32, 32).double()
    graph, pairs = trace(model, inputs), foldable(model, inputs)
    plan = random_plans(graph, 3)[-1]
    small = extract(model, inputs, plan, graph).eval()
    fused = folded(small, pairs)
    assert len(pairs) == 19 and not any(isinstance(m, nn.BatchNorm2d) for m in fused.modules())
    for size in (32, 40):
        assert largest_difference(fused, small, torch.rand(2, 3, size, size).double()) < 1e-10
    counted, expected = measure(small, inputs), network_cost(graph, plan.masks(graph))
    assert (counted.params, counted.macs) == (expected.params, expected.macs)
    assert measure(fused, inputs).macs == counted.macs and measure(fused, inputs).params < counted.params


def test_torch_fuses_the_modules_that_stand_free_and_refuses_the_others():
    model, inputs = ZOO["Residual"]()
    small = extract(model, inputs, Plan({"3.conv2": [0, 1], "4.conv2": [2, 3]})).eval()
    fused, refused = real_copy(small), []
    for layer, norm in foldable(model.eval(), inputs):
        try:
            fuse_modules(fused, [layer, norm], inplace=True)
        except (AssertionError, NotImplementedError) as error:
            assert "RemappedModule" in str(error)
            refused.append(layer)
    assert refused == ["3.conv2", "4.conv2"]
    assert len([m for m in fused.modules() if isinstance(m, nn.BatchNorm2d)]) == 2
    assert largest_difference(fused, small, inputs) < 1e-10


def test_lines_that_fix_sizes_are_named(caplog):
    model, inputs = ZOO["HardcodedHalf"]()
    graph = trace(model, inputs)
    half = Plan({name: range(1, layer.filters) for name, layer in graph.layers.items()})
    with caplog.at_level("INFO", logger="sbf_pruner"):
        small = extract(model, inputs, half, graph)
    assert all(re.fullmatch(r"\w+\.py:\d+ \(aten\.\w+\)", line) for line in small.sbf_fixed_sizes)
    assert small.sbf_fixed_sizes and small.sbf_fixed_sizes[0] in caplog.text
    assert extract(*ZOO["Plain"](), Plan({"0": [1, 2]})).sbf_fixed_sizes == ()


def test_the_dry_run_goes_as_the_recording_went(monkeypatch):
    """With numbers, on a GPU, the operators would have other names, and no layout would ever agree."""
    model, inputs = ZOO["HardcodedView"]()
    graph = trace(model, inputs)
    assert graph.trace.on_meta

    def never(*_):
        pytest.fail("ran with numbers")

    monkeypatch.setattr("sbf_pruner.graph.tracer.real_copy", never)
    assert extract(model, inputs, Plan({"middle.0": [1, 4]}), graph).sbf_fixed_sizes


def test_a_stage_that_keeps_the_same_filters_has_a_narrower_stream():
    """The shortcut between two stages writes its width down, and that binds nothing but itself."""
    torch.manual_seed(0)
    model, images = resolve("resnet20").double(), torch.rand(2, 3, 16, 16, dtype=torch.float64)
    pruner = Pruner(model, images)
    pruner.gate(Plan({name: tuple(range(layer.filters // 2)) for name, layer in pruner.graph.layers.items()}))
    small = pruner.extract()
    remapped = [name for name, module in small.named_modules() if isinstance(module, Remap)]
    assert {name.rpartition(".")[0] for name in remapped} == {"layer2.0.shortcut", "layer3.0.shortcut"}
    assert small.layer1[2].conv2.out_channels == small.layer2[0].conv1.in_channels == 8
    with pruner.gated():
        expected = model.eval()(images)
    torch.testing.assert_close(small.eval()(images), expected, rtol=1e-12, atol=1e-12)


class SamePadding(nn.Conv2d):
    """Pads what its stride asks for, as TensorFlow does: another number for maps of another size."""

    def forward(self, x):
        missing = [max((-(-n // 2) - 1) * 2 + 3 - n, 0) for n in x.shape[2:]]
        pads = [n for total in reversed(missing) for n in (total // 2, total - total // 2)]
        return F.conv2d(F.pad(x, pads), self.weight, self.bias, self.stride)


def test_an_empty_layer_that_pads_by_itself_keeps_its_shape_for_other_maps():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.same, self.around = nn.Conv2d(3, 6, 1), SamePadding(6, 5, 3, 2), nn.Conv2d(6, 5, 1, 2)
            self.out = nn.Conv2d(5, 2, 1)

        def forward(self, x):
            x = self.stem(x)
            return self.out(self.same(x) + self.around(x))

    model = Net().double()
    pruner = Pruner(model, IMAGE.double())
    pruner.gate(Plan({"same": []}))
    small = pruner.extract()
    assert small.same.weight.shape[0] == 1
    for side in (8, 9, 11):
        x = torch.rand(2, 3, side, side, dtype=torch.float64)
        torch.testing.assert_close(small(x), model(x), rtol=0, atol=1e-12)


class Spread(nn.BatchNorm2d):
    """A norm that makes every map as large as it was when the network was traced."""

    def forward(self, x):
        return F.adaptive_avg_pool2d(super().forward(x), 8)


def test_an_empty_norm_that_pools_by_itself_keeps_its_shape_for_other_maps():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.out = nn.Conv2d(3, 4, 1), Spread(4), nn.Conv2d(7, 2, 1)

        def forward(self, x):
            return self.out(torch.cat([F.adaptive_avg_pool2d(x, 8), self.norm(self.conv(x))], 1))

    small = extract(Net(), IMAGE, Plan({"conv": []}))
    assert small(torch.rand(2, 3, 12, 12)).shape == (2, 2, 8, 8)


class ReluConv(nn.Conv2d):
    def forward(self, x):
        return super().forward(F.relu(x, inplace=True))


@pytest.mark.parametrize("kept", [[0, 1, 2, 3, 4, 5], [1, 4], [3], []], ids=len)
def test_what_a_module_writes_over_its_input_is_seen_behind_it(kept):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.conv = nn.Conv2d(3, 6, 1), ReluConv(6, 6, 3, padding=1)
            self.out = nn.Conv2d(6, 2, 1)

        def forward(self, x):
            x = self.stem(x) * 1
            return self.out(self.conv(x) + x)  # which is a ReLU's output by now

    model = Net().double()
    pruner = Pruner(model, IMAGE.double())
    for stem in ([0, 2, 5], [2], [0, 1, 2, 3, 4, 5]):
        pruner.gate(Plan({"stem": stem, "conv": kept}))
        x = torch.rand(2, 3, 8, 8, dtype=torch.float64)
        torch.testing.assert_close(pruner.extract()(x), model(x), rtol=0, atol=1e-12)


def test_weights_masked_by_torch_are_scored_by_what_is_trained():
    model = nn.Sequential(nn.Conv2d(3, 6, 1), nn.ReLU(), nn.Conv2d(6, 2, 1))
    prune.random_unstructured(model[0], "weight", 0.5)
    pruner = Pruner(model, IMAGE)
    assert pruner.graph.layers["0"].weight == "0.weight_orig"
    pruner.gate(Plan({"0": [1, 4]}))
    torch.testing.assert_close(pruner.extract()(IMAGE), model(IMAGE))


class Box:
    def __init__(self, held):
        self.held = held


class Boxed(nn.Module):
    """A block that is called from where a change of its attribute is not seen."""

    def __init__(self, box):
        super().__init__()
        self.stem, self.conv, self.out = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 6, 1), nn.Conv2d(6, 2, 1)
        self.box = box(self.conv)

    def forward(self, x):
        x = F.relu(self.stem(x))
        call = self.box
        while isinstance(call, Box):
            call = call.held
        return self.out(x + call(x))


@pytest.mark.parametrize(
    "box",
    [
        lambda conv: Box(conv),
        lambda conv: functools.partial(nn.Module.__call__, conv),
        lambda conv: Box(functools.partial(lambda held, x: held["conv"](x), {"conv": conv})),
        lambda conv: conv.__call__,
    ],
    ids=["object", "partial", "partial in an object", "method"],
)
def test_a_module_that_something_else_holds_is_left_alone(box):
    graph = trace(Boxed(box), IMAGE)
    assert graph.skipped["conv"].startswith("it is also referenced by the attribute box, which would keep the old")
    assert "stem" in graph.layers


def test_a_module_held_where_nobody_looks_is_found_when_it_is_cut():
    """Shapes alone would not tell: as many channels, but others."""
    model = Boxed(lambda conv: Box(Box(Box(Box(Box(conv))))))
    with pytest.raises(PruningError, match=r"^conv is also referenced outside the module tree, so replacing"):
        extract(model, IMAGE, Plan({"stem": [5], "conv": [3]}))


class Computed(nn.Module):
    """A convolution whose weight is computed from a matrix with one row per filter."""

    def __init__(self, function, inputs, outputs):
        super().__init__()
        self.matrix, self.function = nn.Parameter(torch.randn(outputs, inputs * 9)), function

    def forward(self, x):
        return F.conv2d(x, self.function(self.matrix).view(-1, x.shape[1], 3, 3), padding=1)


@pytest.mark.parametrize(
    ("function", "operator"),
    [
        (lambda m: F.normalize(m, dim=0), "linalg_vector_norm"),
        (lambda m: m / m.abs().sum(0, keepdim=True), "sum"),
        (lambda m: m.softmax(0), "_softmax"),
        (lambda m: m + m @ torch.ones(54, 54, dtype=m.dtype), ""),
        (lambda m: m / m.abs().sum(1, keepdim=True), ""),
        (lambda m: m.softmax(1), ""),
        (lambda m: m / m.abs().sum(), ""),
    ],
)
def test_filters_that_are_normalised_by_each_other_are_left_alone(function, operator):
    model = nn.Sequential(nn.Conv2d(3, 6, 1), Computed(function, 6, 5), nn.ReLU(), nn.Conv2d(5, 2, 1)).double()
    pruner = Pruner(model, IMAGE.double())
    if operator:
        reason = pruner.graph.skipped["1"]
        assert re.fullmatch(
            rf"aten\.{operator} at test_extract\.py:\d+, which computes its weight, mixes .*", reason
        )
    for kept in ([0, 2], [4], [0, 1, 2, 3, 4]):
        pruner.gate(Plan(dict.fromkeys(pruner.graph.layers, kept)))
        x = torch.rand(2, 3, 8, 8, dtype=torch.float64)
        torch.testing.assert_close(pruner.extract()(x), model(x), rtol=0, atol=1e-12)


class Rows(nn.Module):
    """Pixels as rows of a transformer, some of them perhaps padding."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 1)
        layer = nn.TransformerEncoderLayer(8, 2, 10, batch_first=True)
        self.rows = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True)
        self.out = nn.Linear(8, 4)

    def forward(self, x, absent=None):
        return self.out(self.rows(self.conv(x).flatten(2).transpose(1, 2), src_key_padding_mask=absent))


@pytest.mark.parametrize("plan", [{"rows.layers.0.linear2": [0, 3, 5]}, {"rows.layers.1.linear2": []}])
def test_a_transformer_calls_the_layers_that_are_not_their_weights_any_more(plan):
    model, x = Rows().double().eval(), IMAGE.double()
    absent = torch.arange(64).expand(2, 64) >= 60
    small = extract(model, x, Plan(plan)).eval()
    expected = small(x, absent)
    for twin in (small, real_copy(small), pickle.loads(pickle.dumps(small))):
        with torch.no_grad():
            torch.testing.assert_close(twin(x, absent), expected, rtol=0, atol=1e-10)
            torch.testing.assert_close(twin(x), small(x), rtol=0, atol=1e-10)
    with torch.no_grad():
        program = torch.export.export(small, (x,)).module()
        for compiled in (program, torch.compile(small, backend="eager")):
            torch.testing.assert_close(compiled(x), small(x), rtol=0, atol=1e-10)


def test_a_transformer_whose_layers_are_their_weights_keeps_its_quicker_way():
    model, x = Rows().double().eval(), IMAGE.double()
    small = extract(model, x, Plan({f"rows.layers.{i}.linear1": [0, 3, 5] for i in (0, 1)})).eval()
    assert small.rows.use_nested_tensor and all(layer.activation_relu_or_gelu for layer in small.rows.layers)
    expected = small(x)
    with torch.no_grad():
        torch.testing.assert_close(small(x), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("pick", [lambda x, table: x[:, table], lambda x, table: x.index_select(1, table)])
def test_a_table_that_leaves_channels_out(pick):
    class Picked(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.out, self.table = (
                nn.Conv2d(3, 8, 1),
                nn.Conv2d(3, 4, 1),
                nn.Buffer(torch.tensor([7, 2, 5])),
            )

        def forward(self, x):
            return self.out(pick(F.relu(self.conv(x)), self.table))

    model, x = Picked().double(), IMAGE.double()
    pruner = Pruner(model, x)
    pruner.gate(Plan({"conv": [0, 2, 4, 7]}))
    assert pruner.plan().keep["conv"] == (2, 7)
    torch.testing.assert_close(pruner.extract()(x), model(x), rtol=0, atol=1e-12)


RECURRENT = {
    "GRU": lambda: nn.GRU(5, 4, batch_first=True),
    "LSTM": lambda: nn.LSTM(5, 4, num_layers=2, bidirectional=True, batch_first=True),
    "projected": lambda: nn.LSTM(5, 4, proj_size=3, batch_first=True),
    "RNN": lambda: nn.RNN(5, 4, nonlinearity="relu", bias=False, batch_first=True),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_a_recurrent_layer_reads_what_is_left(name):
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.rnn = nn.Conv2d(1, 5, 3), RECURRENT[name]()

        def forward(self, x):
            return self.rnn(self.conv(x).mean(2).transpose(1, 2))[0]

    model, image = Reader().double(), torch.rand(2, 1, 8, 8, dtype=torch.double)
    small = extract(model, image, Plan({"conv": [0, 3]}), prove=True)
    assert small.rnn.input_size == 2 and small.rnn.weight_ih_l0.shape[1] == 2 and small.sbf_fixed_sizes == ()


@pytest.mark.parametrize("clamped", [False, True])
def test_what_is_added_to_the_input_is_an_output(clamped):
    class Denoiser(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Conv2d(1, 5, 3, padding=1), nn.Conv2d(5, 1, 3, padding=1)

        def forward(self, x):
            clean = x - self.last(self.first(x).relu())
            return clean.clamp(0, 1) if clamped else clean

    graph = trace(Denoiser(), torch.rand(2, 1, 8, 8))
    assert list(graph.layers) == ["first"]
    assert graph.skipped["last"] == "its output, plus the network's input or a stored tensor, is a network output"
