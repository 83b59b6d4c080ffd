"""The sentences a user meets when something is wrong: cause, place, remedy."""

from __future__ import annotations

import re
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from clocks import clock_of
from sbf_pruner import Constraints, Scores
from sbf_pruner.budget import Budget
from sbf_pruner.compare import run_frontier
from sbf_pruner.errors import PlanError, PruningError, RunError, TraceError
from sbf_pruner.graph import trace
from sbf_pruner.measurement import measure
from sbf_pruner.plan import Plan
from sbf_pruner.pruner import Pruner
from sbf_pruner.saving import save
from sbf_pruner.surgery import extract
from sbf_pruner.training import RunFolder, load_recipe
from zoo import REFUSED, ZOO, Head, conv_bn

IMAGE = torch.rand(2, 3, 8, 8)


def says(kind, sentence):
    """Expect exactly this sentence; `{line}` stands for a line number."""
    pattern = re.escape(sentence).replace(re.escape("{line}"), r"\d+")
    return pytest.raises(kind, match=f"^{pattern}$")


def plain():
    model, inputs = ZOO["Plain"]()
    return model, inputs


# -- models ------------------------------------------------------------------------------------------------


def test_no_convolution():
    with says(
        PruningError,
        "there is no convolution in the model, so there are no filters to prune; give a convolutional network",
    ):
        trace(*REFUSED["NoConv"]())


def test_not_a_model():
    with says(PruningError, "a model is an nn.Module, not function; pass the network itself"):
        trace(says, IMAGE)


@pytest.mark.parametrize("takes", [trace, Pruner, measure, lambda model, x: extract(model, x, Plan({}))])
def test_a_class_or_a_number_in_the_place_of_a_model(takes):
    with says(PruningError, "a model is an nn.Module, not int; pass the network itself"):
        takes(3, IMAGE)
    with says(PruningError, "a model is an nn.Module instance, not a class; create one first: ReadsItsLayer(...)"):
        takes(ReadsItsLayer, IMAGE)


def test_compiled():
    model = torch.compile(nn.Sequential(nn.Conv2d(3, 4, 1)))
    with says(PruningError, "the model is already compiled; prune the original one and compile the result"):
        trace(model, IMAGE)


def test_wrapped():
    with says(
        PruningError,
        "the model is wrapped in DataParallel; give what is inside it (model.module), and train the weights "
        "through the wrapper as before",
    ):
        trace(nn.DataParallel(nn.Sequential(nn.Conv2d(3, 4, 1))), IMAGE)


def test_untraceable():
    with says(
        TraceError,
        "at refused.py:{line} a tensor was not computed by torch operators from the inputs (NumPy, or a list made "
        "from values?), so its dependencies cannot be traced; keep that step in torch",
    ):
        trace(*REFUSED["Untraceable"]())


def test_wrong_inputs():
    model, _ = plain()
    with says(
        TraceError,
        "the model cannot run on the example inputs (Given groups=1, weight of size [8, 3, 3, 3], expected "
        "input[2, 1, 8, 8] to have 3 channels, but got 1 channels instead); give inputs like those it is "
        "trained on",
    ):
        trace(model, torch.zeros(2, 1, 8, 8, dtype=torch.float64))


def test_a_dict_that_the_model_takes_itself():
    class Batched(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.out = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)

        def forward(self, batch):
            return self.out(self.conv(batch["rgb"]))

    batch = {"rgb": IMAGE}
    with says(
        TraceError,
        "the model cannot run on the example inputs (test_a_dict_that_the_model_takes_itself.<locals>.Batched."
        "forward() got an unexpected keyword argument 'rgb'); give a dict of its keyword arguments or, if it takes "
        "a dict itself, a tuple with it: (batch,)",
    ):
        trace(Batched(), batch)
    assert list(trace(Batched(), (batch,)).layers) == ["conv"]


def test_a_line_that_fails():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x):
            return self.conv(x).view(7, -1)

    with says(
        TraceError,
        "the model cannot run on the example inputs: at test_messages.py:{line} (`return "
        "self.conv(x).view(7, -1)`) RuntimeError: shape '[7, -1]' is invalid for input of size 512; give inputs "
        "like those it is trained on, or repair that line",
    ):
        trace(Broken(), IMAGE)


def test_no_tensor_comes_out():
    class Silent(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x):
            self.conv(x)

    with says(TraceError, "the model returns no tensor; return a tensor, or a tuple or dict of them"):
        trace(Silent(), IMAGE)


@pytest.mark.parametrize("norm", [nn.LazyBatchNorm2d(), nn.LazyBatchNorm2d(affine=False), nn.LazyConv2d(4, 1)])
def test_a_lazy_module_that_has_not_run(norm):
    kind = type(norm).__name__
    with says(PruningError, f"1 ({kind}) has no weights yet; run the model once on inputs, then prune it"):
        trace(nn.Sequential(nn.Conv2d(3, 4, 1), norm, nn.Conv2d(4, 2, 1)), IMAGE)


def test_scripted():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), torch.jit.script(nn.ReLU()), nn.Conv2d(4, 2, 1))
    with says(
        PruningError,
        "1 is scripted and cannot be pruned; prune the module before scripting it, then compile or export it",
    ):
        trace(model, IMAGE)


class Caller:
    """An object that knows a function."""

    def __init__(self, function):
        self.function = function

    def __call__(self, *given):
        return self.function(*given)


class Held(nn.Module):
    """A model that holds something, and what it does."""

    def __init__(self, function):
        super().__init__()
        self.conv, self.out = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)
        self.held = function(self)

    def forward(self, x):
        return self.out(self.held(x) if callable(self.held) else self.conv(x))


def test_a_function_bound_to_the_one_model():
    with says(
        TraceError,
        "at test_messages.py:{line} a function in a copy of the model still uses conv.weight of the original, to "
        "which it is bound by an object or a global name; make it a method",
    ):
        trace(Held(lambda model: Caller(lambda x: model.conv(x))), IMAGE)


def test_a_model_that_cannot_be_copied():
    with says(
        TraceError,
        "the model cannot be copied (cannot pickle '_thread.lock' object); keep objects that cannot be copied "
        "outside the model",
    ):
        trace(Held(lambda _: threading.Lock()), IMAGE)


def test_inputs_in_an_object():
    with says(
        TraceError,
        "the example inputs contain a SimpleNamespace, which is not searched for tensors; make the inputs of "
        "the model tensors, or tuples, lists and dicts of them",
    ):
        trace(nn.Conv2d(3, 4, 1), SimpleNamespace(image=IMAGE))


def test_a_line_of_training_that_counts_on_a_width():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.out = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)

        def forward(self, x):
            x = self.conv(x)
            if self.training:
                x = x * torch.rand(1, 4, 1, 1)
            return self.out(x)

    with says(
        PruningError,
        "in training mode the network cannot run with fewer channels: at test_messages.py:{line} (`x = x * "
        "torch.rand(1, 4, 1, 1)`) RuntimeError: The size of tensor a (3) must match the size of tensor b (4) at "
        "non-singleton dimension 1; make that line use the number of channels of its input, or leave the layers "
        "that feed it out of the plan",
    ):
        extract(Noisy(), IMAGE, Plan({"conv": [0, 1, 2]}))


@pytest.mark.parametrize("mode", ["training", "evaluation"])
def test_a_number_of_one_mode_that_depends_on_a_width(mode):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.out, self.more = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1), nn.Conv2d(4, 2, 1)

        def forward(self, x):
            x = self.conv(x)
            more = self.more(x)
            if self.training == (mode == "training"):
                x = x * (x.shape[1] / 4)
            return (self.out(x), more) if self.training or mode == "training" else self.out(x)

    with says(
        PruningError,
        f"in {mode} mode the network computes something else with fewer channels, at test_messages.py:{{line}} "
        "(aten.mul); make that line independent of the number of channels, or leave the layers that feed it out of "
        "the plan",
    ):
        extract(Scaled(), IMAGE, Plan({"conv": [0, 1, 2]}))


def test_a_hook_that_was_added_since():
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1))
    pruner = Pruner(net, IMAGE)
    pruner.gate(Plan({"0": [0, 1]}))
    net[0].register_forward_hook(lambda module, given, result: result.exp())
    with says(
        PruningError,
        "the model runs aten.exp at test_messages.py:{line}, which it did not when it was traced; remove what "
        "was added since (a hook?), or create a new pruner and load the scores into it with load_state_dict()",
    ):
        pruner.extract()


def test_nothing_can_be_pruned():
    with says(PruningError, "no layer of the model can be pruned (0: its filters are the network's outputs)"):
        Pruner(nn.Sequential(nn.Conv2d(3, 4, 1)), IMAGE)


def test_unknown_name_to_ignore():
    with says(PruningError, "ignore: no layer is called 'stem.*'; known: 0, 4, 7"):
        trace(*plain(), ignore=["stem.*"])
    with says(PruningError, "ignore: no layer is called 'stem'; known: 0, 4, 7"):
        trace(*plain(), ignore="stem")
    assert list(trace(*plain(), ignore="4").layers) == ["0", "7"]


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"max_removed": {"stem.*": 0.5}}, "max_removed: no layer is called 'stem.*'; known: 0, 4, 7"),
        ({"round_to": {"44": 2}}, "round_to: no layer is called '44'; did you mean '4'?"),
        (
            {"min_filters": {"0": 2, "4": 1, "*": 3}},
            "min_filters: '0' never applies, because later patterns match all its layers and the last match wins; "
            "move it after them",
        ),
        ({"min_filters": {"4": -1}}, "min_filters.4: must be at least 0, got -1"),
        ({"min_filters": {"4": 0.5}}, "min_filters.4: expected int, got float (0.5)"),
        ({"max_removed": {"4": 2}}, "max_removed.4: must be at most 1, got 2.0"),
        ({"round_to": {"4": 0}}, "round_to.4: must be at least 1, got 0"),
        ({"round_to": {4: 2}}, "a key of round_to: expected str, got int (4)"),
        ({"round_to": 0}, "round_to: must be at least 1, got 0"),
    ],
    ids=str,
)
def test_limits_for_layers_that_are_not_there(asked, sentence):
    with says(PruningError, sentence):
        Pruner(*plain(), constraints=Constraints(**asked))


def test_a_limit_for_a_layer_that_is_left_alone():
    with says(
        PruningError,
        "max_removed: '4' matches no layer that can be pruned (4: ignored as asked (4)); leave it out",
    ):
        Pruner(*plain(), constraints=Constraints(ignore=["4"], max_removed={"4": 0.5}))


# -- a latency target --------------------------------------------------------------------------------------


def test_a_time_without_a_clock():
    with says(
        PruningError,
        "a latency target needs the measured times of the layers; measure them with `sbf latency --out` and give "
        "the file (clock=, or latency.table in a recipe)",
    ):
        Pruner(*plain(), budget=Budget(latency=0.5))


def test_a_table_that_is_not_there(tmp_path):
    with says(PruningError, f"latency.table: {tmp_path}/t.json does not exist; make it with `sbf latency --out`"):
        Pruner(*plain(), budget=Budget(latency=0.5), clock=tmp_path / "t.json")


def test_a_table_of_another_network(tmp_path):
    clock_of(trace(*plain())).write(tmp_path / "t.json")
    with says(
        PruningError,
        f"latency.table: {tmp_path}/t.json was measured for another network, or other images; measure again with "
        "`sbf latency`",
    ):
        Pruner(*ZOO["Residual"](), budget=Budget(latency=0.5), clock=tmp_path / "t.json")


def test_a_time_no_network_takes():
    model, inputs = plain()
    with says(
        PruningError,
        "the target of 1,000 ms (0.0039%) cannot be met: the smallest possible network takes 11,600,000 ms "
        "(44.5%); raise the target, or allow more layers to be pruned",
    ):
        Pruner(model, inputs, budget=Budget(latency=1e6), clock=clock_of(trace(model, inputs)))


@pytest.mark.parametrize("text", ["latency=5", "latency=5kB", "latency=fast", "latency=5k"])
def test_a_time_has_a_unit(text):
    with says(
        PruningError,
        f"target {text!r}: write a fraction such as latency=0.5 or latency=50%, or a number such as latency=5ms",
    ):
        Budget.parse([text])


def test_a_time_too_short():
    with says(PruningError, "target 'latency=1us': no network runs in a microsecond; give a longer time"):
        Budget.parse(["latency=1us"])


def test_no_branches_to_keep_whole():
    with says(
        PruningError,
        'couple: "blocks" needs residual blocks that can be pruned, and the model has none; leave it out',
    ):
        Pruner(*plain(), constraints=Constraints(couple="blocks"))


# -- numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"threshold": float("nan")}, "threshold: expected a finite number, got nan"),
        ({"threshold": 0}, "threshold: must be above 0, got 0.0"),
        ({"threshold": 1.5}, "threshold: must be at most 1, got 1.5"),
        ({"lr": -1.0}, "lr: must be above 0, got -1.0"),
        ({"lr": True}, "lr: expected float, got bool (True)"),
        ({"penalty": -1.0}, "penalty: must be at least 0, got -1.0"),
        ({"speed": "fast"}, "speed: expected float, got str ('fast')"),
        ({"balance": "aera"}, "balance: 'aera' is not one of auto, area, side, none, cost; did you mean 'area'?"),
        ({"leak": -0.1}, "leak: must be at least 0, got -0.1"),
        ({"eps": float("inf")}, "eps: expected a finite number, got inf"),
    ],
)
def test_settings_of_scores_out_of_bounds(given, sentence):
    with says(PruningError, sentence):
        Scores(**given)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"budget": {"macs": 0.5}}, "budget: expected an sbf.Budget, got dict; write sbf.Budget(macs=0.5)"),
        ({"budget": 0.5}, "budget: expected an sbf.Budget, got float; write sbf.Budget(macs=0.5)"),
        ({"scores": {"lr": 0.1}}, "scores: expected an sbf.Scores, got dict; write sbf.Scores(lr=0.1)"),
        (
            {"constraints": 8},
            "constraints: expected an sbf.Constraints, got int; write sbf.Constraints(round_to=8)",
        ),
    ],
)
def test_arguments_of_another_type_leave_the_model_alone(given, sentence):
    model, inputs = plain()
    with says(PruningError, sentence):
        Pruner(model, inputs, **given)
    Pruner(model, inputs)


# -- plans -------------------------------------------------------------------------------------------------


def test_unknown_layer():
    model, inputs = ZOO["Residual"]()
    with says(
        PlanError,
        "the plan names a layer the network does not have: '3.conv9'; did you mean '3.conv2'?",
    ):
        extract(model, inputs, Plan({"3.conv9": [0]}))


def test_index_out_of_range():
    with says(
        PlanError,
        "the plan keeps filter 8 of 0, which has 8 (0 to 7); was it made for another network?",
    ):
        extract(*plain(), Plan({"0": [1, 8]}))


def test_index_twice():
    with says(PlanError, "the plan lists filter 3 of conv twice; list each kept filter once"):
        Plan({"conv": [1, 3, 3]})


def test_negative_index():
    with says(PlanError, "the plan keeps filter -1 of conv; filters are counted from 0"):
        Plan({"conv": [-1, 3]})


def test_not_numbers():
    with says(PlanError, "the plan's entry for conv is not a list of filter numbers"):
        Plan({"conv": None})
    with says(PlanError, "the plan's entry for conv is not a list of filter numbers"):
        Plan({"conv": [float("inf")]})
    with says(PlanError, "the plan's entry for conv holds something that is not a filter number"):
        Plan({"conv": [0.5]})


def test_what_is_no_plan():
    hint = "write sbf.Plan({'conv': [0, 2]}), with the filters that each layer keeps"
    with says(PlanError, f"a plan is an sbf.Plan, not NoneType; {hint}"):
        extract(*plain(), None)
    with says(PlanError, f"a plan is an sbf.Plan, not dict; {hint}"):
        extract(*plain(), {"0": [0]})
    with says(PlanError, f"a plan is an sbf.Plan, not dict; {hint}"):
        Pruner(*plain()).gate({"0": [0]})
    with says(PlanError, f"a plan is made of a dict, not of NoneType; {hint}"):
        Plan(None)


@pytest.mark.parametrize("mask", [[True, False], np.array([True, False]), torch.tensor([True, False])])
def test_a_mask_in_the_place_of_filter_numbers(mask):
    with says(
        PlanError,
        "the plan's entry for conv holds True or False, not filter numbers; make a plan of masks with "
        "sbf.Plan.from_masks",
    ):
        Plan({"conv": mask})
    assert Plan.from_masks({"conv": mask}) == Plan({"conv": [0]})


def test_a_layer_that_is_left_alone():
    with says(
        PlanError,
        "11.fc cannot be pruned: its filters are the network's outputs; leave it out of the plan",
    ):
        extract(*plain(), Plan({"11.fc": [0]}))


def test_cut():
    with says(
        PlanError,
        "the plan disconnects the output from the input: 4 would keep no filter, and there is no shortcut "
        "around; keep at least one filter there",
    ):
        extract(*plain(), Plan({"4": []}))


def test_cut_although_no_layer_is_empty():
    model, inputs = ZOO["GatedUnit"]()
    with says(
        PlanError,
        "the plan disconnects the output from the input: both.0 would keep only filters that reach no output, "
        "and there is no shortcut around; keep others there",
    ):
        extract(model, inputs, Plan({"both.0": [0, 1, 2, 3]}))


def test_nothing_to_divide_by():
    model, inputs = ZOO["Divided"]()
    where = re.fullmatch(r"(aten\.div at \w+\.py:\d+) has no value .*", trace(model, inputs).skipped["below"])
    with says(
        PlanError,
        f"the plan makes an input of {where.group(1)} zero, where it has no value: inner would keep no filter, and "
        "there is no shortcut around; keep at least one filter there",
    ):
        extract(model, inputs, Plan({"inner": []}))


def test_not_json():
    with says(PlanError, "the plan is not JSON (line 1: Expecting value); write it anew"):
        Plan.from_json("no plan")


def test_a_file_that_is_no_text(tmp_path):
    path = tmp_path / "plan.json"
    path.write_bytes(b"\xff\xfe\x00")
    with says(PlanError, f"{path} is not a plan, because it is not a text file; name the JSON file of a plan"):
        Plan.load(path)


def test_another_file():
    with says(PlanError, "this is no plan: expected an object with format 'sbf-pruner plan 1' and 'keep'"):
        Plan.from_json('{"keep": {}}')


@pytest.mark.parametrize("place", ["held", "held/deeper"])
def test_a_file_in_the_place_of_a_folder(place, tmp_path):
    (tmp_path / "held").write_text("mine")
    with says(
        RunError,
        f"{tmp_path / place}/model.safetensors cannot be written, because {tmp_path}/held is a file; name a folder",
    ):
        save(plain()[0], tmp_path / place)
    assert (tmp_path / "held").read_text() == "mine"


def test_no_model_to_save(tmp_path):
    with says(PruningError, "a model is an nn.Module, not dict; pass the network itself"):
        save(dict(plain()[0].state_dict()), tmp_path / "held")
    assert not (tmp_path / "held").exists()


# -- surgery -----------------------------------------------------------------------------------------------


class ReadsItsLayer(nn.Module):
    """Looks at a layer that is not there any more."""

    def __init__(self):
        super().__init__()
        self.stem, self.branch, self.head = conv_bn(3, 6), conv_bn(6, 6), Head(6)

    def forward(self, x):
        x = self.stem(x)
        branch = self.branch(x)
        return self.head(x + branch / self.branch[0].out_channels)


def test_a_network_that_cannot_do_without_a_layer():
    with says(
        PruningError,
        "the network cannot run with fewer channels at test_messages.py:{line} (aten.div), even if that "
        "operator keeps all its channels; exclude the layers that feed it (ignore)",
    ):
        extract(ReadsItsLayer(), IMAGE, Plan({"branch.0": []}))


# -- pruner ------------------------------------------------------------------------------------------------


def test_two_pruners():
    model, inputs = plain()
    Pruner(model, inputs)
    with says(
        PruningError,
        "the model already has a pruner, or is a copy of a model that had one; detach() that pruner first, or, if "
        "it no longer exists, remove its gates with sbf_pruner.utils.remove_pruner_hooks(model)",
    ):
        Pruner(model, inputs)


def test_unknown_projection():
    model, inputs = plain()
    with pytest.raises(PruningError, match=r"^projection: 'factor' is not one of .*; did you mean 'factored'\?$"):
        Pruner(model, inputs, scores=Scores(projection="factor"))


def test_a_step_outside_a_phase():
    pruner = Pruner(*plain())
    with says(PruningError, "step() belongs inside `with pruner.scoring():`"):
        pruner.step()


def test_a_pruner_that_was_detached():
    model, inputs = plain()
    pruner = Pruner(model, inputs)
    pruner.detach()
    with says(PruningError, "this pruner was detached; make a new one"):
        pruner.gate(Plan({}))


# -- frontier ----------------------------------------------------------------------------------------------


def began(path, epochs, *overrides):
    """A run of so many epochs, without what a run of this version keeps when its cycles end."""
    folder = RunFolder(path)
    folder.begin(load_recipe("digits", overrides))
    for _ in range(epochs):
        folder.append({})
    return folder


def test_a_frontier_of_a_run_without_cycles(tmp_path):
    folder = began(tmp_path / "run", 35, "phases.cycles=0")
    with says(
        RunError,
        f"the run in {folder.path} has no cycles (phases.cycles = 0, phases.score = 1), so it has no scores to "
        "choose by; name one that has",
    ):
        run_frontier(folder.path)


def test_a_frontier_of_a_run_in_its_cycles(tmp_path):
    folder = began(tmp_path / "run", 12)
    with says(
        RunError,
        f"the run in {folder.path} has reached epoch 12, but its scores are ready after 25; continue it "
        "(sbf run ... --resume)",
    ):
        run_frontier(folder.path)


def test_a_frontier_of_an_older_run(tmp_path):
    folder = began(tmp_path / "run", 40)
    with says(
        RunError,
        f"the run in {folder.path} has no checkpoints/scored.safetensors: it was made by an older version, or "
        "moved without this file; put the file back, or begin a run in another folder (--run)",
    ):
        run_frontier(folder.path)


# -- things that are often mistaken for others ---------------------------------------------------------------------


def small_net():
    return nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.ReLU(), nn.Conv2d(8, 4, 3))


def test_layers_are_ignored_by_their_names():
    model = small_net()
    with says(PruningError, "ignore: give modules, or names or patterns of layers such as 'layer4.*', not int"):
        trace(model, IMAGE, ignore=[0])
    with says(PruningError, "ignore: the Conv2d given is not a module of the model"):
        trace(model, IMAGE, ignore=[nn.Conv2d(3, 4, 1)])


def test_scores_are_given_by_layer():
    pruner = Pruner(small_net(), IMAGE, budget=Budget(macs=0.5))
    with says(PruningError, "scores must be a dict {layer name: one number per filter}, not list"):
        pruner.rank([1.0] * 8)


def test_a_parameter_that_came_after_the_trace():
    model = small_net()
    pruner = Pruner(model, IMAGE)
    pruner.gate(Plan({"0": [0, 1]}))
    model[0].bias = nn.Parameter(torch.zeros(8))
    with says(PruningError, "0.bias did not exist when the model was traced; create a new pruner"):
        pruner.extract()


def test_a_gated_model_is_not_what_one_wants_to_save(tmp_path):
    model = small_net()
    pruner = Pruner(model, IMAGE)
    with says(PruningError, "the model is gated and still has all its filters; save what pruner.extract() gives"):
        save(model, tmp_path)
    save(pruner.extract(), tmp_path)
