import copy

import pytest
import torch
from torch import nn

from sbf_pruner.errors import DataError, PruningError
from sbf_pruner.measurement import Measurement, accuracy, latency, measure, saved_activations


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.depthwise = nn.Conv2d(8, 8, 3, groups=8, bias=False)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(4, 5)

    def forward(self, x):
        return self.head(self.pool(self.up(self.depthwise(self.body(x)))).flatten(1))


MACS = {
    "body": 8 * 3 * 9 * 64,
    "body.0": 8 * 3 * 9 * 64,
    "depthwise": 8 * 9 * 36,
    "up": 8 * 4 * 4 * 36,
    "head": 20,
}


def state_of(model):
    return (
        {name: value.clone() for name, value in model.state_dict().items()},
        [module.training for module in model.modules()],
        [None if p.grad is None else p.grad.clone() for p in model.parameters()],
    )


def assert_untouched(model, before):
    tensors, modes, grads = before
    torch.testing.assert_close(dict(model.state_dict()), tensors, rtol=0, atol=0)
    assert [module.training for module in model.modules()] == modes
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        assert parameter.grad is grad is None or torch.equal(parameter.grad, grad)


def test_counts_equal_those_worked_out_by_hand():
    model = Small()
    found = measure(model, torch.zeros(1, 3, 8, 8))
    params = (8 * 3 * 9 + 8) + 16 + 8 * 9 + (8 * 4 * 4 + 4) + 25
    assert found == Measurement(
        params=params,
        macs=8 * 3 * 9 * 64 + 8 * 9 * 36 + 8 * 4 * 4 * 36 + 20,
        bytes=4 * (params + 16) + 8,
        by_module=MACS,
    )
    assert measure(model, torch.zeros(3, 3, 8, 8)).macs == 3 * found.macs


def test_the_first_stage_of_resnet56_counts_as_published():
    stage = nn.Sequential(*[nn.Conv2d(16, 16, 3, padding=1, bias=False) for _ in range(18)])
    assert measure(stage, torch.zeros(1, 16, 32, 32)).macs == 18 * 16 * 16 * 9 * 1024


def test_the_model_comes_out_as_it_went_in():
    model = Small()
    model.body[1].eval()
    model(torch.randn(4, 3, 8, 8)).sum().backward()
    before = state_of(model)
    measure(model, torch.randn(2, 3, 8, 8))
    assert_untouched(model, before)


def test_shared_parameters_count_once():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    found = measure(nn.Sequential(first, second), torch.zeros(1, 4))
    assert (found.params, found.macs) == (16 + 4 + 4, 32)


class Inquisitive(nn.Module):
    """Looks at a value, which a meta tensor does not have."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.inner(x) if x.sum().item() == 0 else x


def test_a_model_that_looks_at_values_is_counted_on_a_real_copy():
    model = Inquisitive(Small())
    before = state_of(model)
    found = measure(model, torch.zeros(1, 3, 8, 8))
    assert found.macs == measure(model.inner, torch.zeros(1, 3, 8, 8)).macs
    assert {name.removeprefix("inner."): n for name, n in found.by_module.items() if name != "inner"} == MACS
    assert_untouched(model, before)


@pytest.mark.parametrize(
    ("layer", "x", "macs"),
    [
        (nn.LSTM(4, 8), torch.zeros(5, 2, 4), 5 * 2 * 32 * (4 + 8)),
        (
            nn.TransformerEncoderLayer(16, 2, 32, batch_first=True),
            torch.zeros(2, 5, 16),
            10 * 16 * (48 + 16 + 64) + 2 * 2 * 2 * 5 * 5 * 8,
        ),
    ],
)
@pytest.mark.parametrize("wrap", [nn.Sequential, Inquisitive])
def test_fused_operators_are_counted_on_meta_and_on_real_copies_alike(layer, x, macs, wrap):
    fast = torch.backends.mha.get_fastpath_enabled()
    assert measure(wrap(layer), x).macs == macs
    assert torch.backends.mha.get_fastpath_enabled() == fast
    assert torch.backends.mkldnn.enabled


def test_inputs_may_be_positional_or_keywords():
    model = nn.Bilinear(3, 4, 2)
    x, y = torch.zeros(1, 3), torch.zeros(1, 4)
    assert measure(model, (x, y)) == measure(model, {"input1": x, "input2": y})


def test_a_compiled_model_is_counted_by_what_it_wraps():
    model = Small()
    assert measure(torch.compile(model), torch.zeros(1, 3, 8, 8)) == measure(model, torch.zeros(1, 3, 8, 8))


def test_inputs_that_do_not_fit_are_refused_with_the_cause():
    with pytest.raises(PruningError, match=r"Small does not run on the example inputs \(RuntimeError: .*tuple"):
        measure(Small(), torch.zeros(1, 4, 8, 8))


def test_latency_takes_turns_and_restores_the_modes():
    order: list[str] = []

    class Logged(nn.Linear):
        def forward(self, x):
            assert not self.training and not torch.is_grad_enabled()
            order.append(self.tag)
            return super().forward(x)

    models = {}
    for name, width in (("dense", 512), ("compact", 8)):
        models[name] = Logged(512, width)
        models[name].tag = name
    threads = torch.get_num_threads()
    found = latency(models, torch.zeros(64, 512), pairs=4, threads=1)
    assert list(found) == ["dense", "compact"] and torch.get_num_threads() == threads
    assert all(entry.n == 4 and entry.median > 0 and entry.iqr >= 0 for entry in found.values())
    assert found["compact"].median < found["dense"].median
    assert all(model.training for model in models.values())
    runs = [name for i, name in enumerate(order) if i == 0 or order[i - 1] != name]
    # Each is warmed up; then pairs, every second one in the opposite order of the one before.
    assert runs[:2] == ["dense", "compact"]
    assert len(runs) <= 2 + 2 * 4 and {runs.count("dense"), runs.count("compact")} <= {3, 4, 5}


def test_accuracy_is_a_percentage_in_evaluation_mode():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.9)).train()
    model[0].eval()
    before = state_of(model)
    batches = [(torch.eye(3), torch.tensor([0, 1, 2])), (torch.eye(3)[:2], torch.tensor([2, 1]))]
    assert accuracy(model, batches) == 80.0
    assert_untouched(model, before)
    with pytest.raises(DataError, match="at least one"):
        accuracy(model, [])


def test_accuracy_restores_the_modes_after_a_failure():
    model = nn.Linear(3, 3).train()
    with pytest.raises(RuntimeError):
        accuracy(model, [(torch.zeros(1, 4), torch.zeros(1))])
    assert model.training


def test_saved_activations_count_storages_once_and_no_parameters():
    x = torch.randn(4, 8)
    linear, twice = nn.Linear(8, 16), nn.Linear(8, 16)
    assert saved_activations(lambda: linear(x)) == x.nbytes
    # The second layer saves the same input; views of it keep no further storage.
    assert saved_activations(lambda: linear(x).sum() + twice(x[:2]).sum()) == x.nbytes
    assert saved_activations(lambda: linear(x).relu()) == x.nbytes + 4 * 16 * 4
    assert saved_activations(lambda: copy.deepcopy(linear)(x).detach()) == x.nbytes
    with torch.no_grad():
        assert saved_activations(lambda: linear(x)) == 0


def test_multiplying_a_map_by_scores_keeps_one_more_map():
    conv, scores = nn.Conv2d(3, 8, 3, padding=1), torch.ones(8, 1, 1, requires_grad=True)
    x = torch.randn(2, 3, 16, 16)
    plain = saved_activations(lambda: conv(x))
    # The scores themselves are saved too: 8 floats, which are no nn.Parameter here.
    assert saved_activations(lambda: conv(x) * scores) == plain + 2 * 8 * 16 * 16 * 4 + 8 * 4
