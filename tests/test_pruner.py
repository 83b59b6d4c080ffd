"""Scores on a user's model: neutral at 1, frozen where they should be, and gone without a trace."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.fusion import fuse_conv_bn_eval

from sbf_pruner import Budget, Constraints, Plan, Pruner, PruningError, Scores, measure, trace
from sbf_pruner.models import resolve
from sbf_pruner.scores import LeafGates

IN_ONE_PIECE = not torch.__version__.startswith("2.11.")  # which stops at every gate
IMAGES = torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def network() -> nn.Module:
    torch.manual_seed(0)
    return resolve("resnet20")


def half(pruner: Pruner) -> Plan:
    return Plan({name: range(0, layer.filters, 2) for name, layer in pruner.graph.layers.items()})


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(before: dict[str, torch.Tensor], model: nn.Module) -> bool:
    now = model.state_dict()
    return list(before) == list(now) and all(torch.equal(before[k], now[k]) for k in before)


def score_steps(pruner: Pruner, count: int = 3) -> None:
    for _ in range(count):
        loss = pruner.model(IMAGES).square().mean() + pruner.penalty()
        loss.backward()
        pruner.step()


@pytest.mark.parametrize("training", [False, True])
def test_attaching_changes_no_bit(training: bool) -> None:
    model = network().train(training)
    twin = copy.deepcopy(model)
    expected = twin(IMAGES)
    before = state(model)
    pruner = Pruner(model, IMAGES)
    assert type(model) is type(twin)
    assert same(before, model)
    pruner.gates.mode = "soft"  # every score is multiplied in, and is 1
    assert torch.equal(model(IMAGES), expected)


def test_detaching_restores_the_model() -> None:
    model = network().eval()
    expected = model(IMAGES)
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    pruner = Pruner(model, IMAGES)
    pruner.gate(half(pruner))
    assert not torch.equal(model(IMAGES), expected)
    assert pruner.detach() is model
    assert torch.equal(model(IMAGES), expected)
    assert hooks == [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    with pytest.raises(PruningError, match="detached"), pruner.scoring():
        pass


def test_a_network_whose_blocks_cannot_be_found_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(graph: object) -> None:
        raise PruningError("no way back")

    model = network()
    monkeypatch.setattr("sbf_pruner.pruner.residual_blocks", lost)
    with pytest.raises(PruningError, match="no way back"):
        Pruner(model, IMAGES, scores=Scores(blocks=True))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    Pruner(model, IMAGES)


def test_a_phase_that_cannot_land_is_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network().train()
    pruner = Pruner(model, IMAGES, scores=Scores(lr=1e-2, penalty=1e-2))
    before, held = state(model), pruner.plan()

    def nowhere(*given: object) -> None:
        raise PruningError("nothing fits")

    with pytest.raises(PruningError, match="nothing fits"), monkeypatch.context() as patch:
        patch.setattr(type(pruner.selector), "choose", nowhere)
        with pruner.scoring(tune=lambda: model(IMAGES)):
            score_steps(pruner)
    assert same(before, model), "the statistics that were taken anew are gone"
    assert pruner.plan() == held and pruner.gates.mode == "hard" and not pruner.projection.in_phase
    assert all(parameter.requires_grad for parameter in model.parameters())
    with pruner.scoring():
        score_steps(pruner)


def test_scoring_freezes_weights_and_statistics_even_if_the_model_is_put_in_training_mode() -> None:
    model = network().train()
    pruner = Pruner(model, IMAGES, scores=Scores(lr=1e-2, penalty=1e-2))
    before = state(model)
    with pruner.scoring():
        model.train()
        assert not any(p.requires_grad for p in model.parameters())
        score_steps(pruner)
        assert all(p.grad is None for p in model.parameters())
    assert same(before, model)
    assert all(p.requires_grad for p in model.parameters())
    assert all(m.training for m in model.modules())
    scores = torch.cat(list(pruner.scores().values()))
    assert not torch.equal(scores, torch.ones_like(scores))


@pytest.mark.parametrize("to_none", [True, False])
def test_an_optimiser_that_steps_in_a_score_phase_finds_nothing_to_move(to_none: bool) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.1)
    model(IMAGES).square().mean().backward()
    optimizer.step()  # and its gradients stay where they are
    before, pruner = state(model), Pruner(model, IMAGES)
    with pruner.scoring():
        for _ in range(2):
            (model(IMAGES).square().mean() + pruner.penalty()).backward()
            pruner.step()
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
    assert same(before, model)


def test_weights_that_take_the_places_of_others_in_a_score_phase_are_trained_after_it() -> None:
    model = network()
    model.fc.requires_grad_(False)
    pruner = Pruner(model, IMAGES)
    with pruner.scoring():
        model.load_state_dict(network().state_dict(), assign=True)
        assert not any(p.requires_grad for p in model.parameters())
    assert {name for name, p in model.named_parameters() if not p.requires_grad} == {"fc.weight", "fc.bias"}


def test_gated_phases_leave_scores_alone_and_train_only_open_filters() -> None:
    model = network().train()
    pruner = Pruner(model, IMAGES)
    pruner.gate(half(pruner))
    scores = torch.cat(list(pruner.scores().values()))
    weight = model.layer1[0].conv1.weight.detach().clone()
    with pruner.gated():
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(IMAGES).square().mean().backward()
        optimizer.step()
    assert torch.equal(scores, torch.cat(list(pruner.scores().values())))
    moved = (model.layer1[0].conv1.weight != weight).flatten(1).any(1)
    assert moved.tolist() == [i % 2 == 0 for i in range(16)]


def joint_steps(pruner: Pruner, optimizer: torch.optim.Optimizer, count: int = 3) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        (pruner.model(IMAGES).square().mean() + pruner.penalty()).backward()
        optimizer.step()
        pruner.step()


def test_a_joint_phase_moves_weights_statistics_and_scores_and_then_sets_the_gates() -> None:
    model = network().train()
    pruner = Pruner(model, IMAGES, scores=Scores(lr=3e-3, penalty=1e-2))
    before = state(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with pruner.scoring(joint=True):
        joint_steps(pruner, optimizer)
        assert pruner.gates.mode == "soft" and all(m.training for m in model.modules())
    now = state(model)
    assert all(not torch.equal(before[name], now[name]) for name in before)
    scores = torch.cat(list(pruner.scores().values()))
    kept = torch.cat([torch.isin(torch.arange(len(s)), torch.tensor(pruner.plan().keep[n])) for n, s in
                      pruner.scores().items()])  # fmt: skip
    assert pruner.gates.mode == "hard" and 0 < kept.sum() < len(kept)
    assert (scores[kept] >= 0.5).all()  # those below may have lost their readers too
    torch.testing.assert_close(pruner.extract().eval()(IMAGES), model.eval()(IMAGES), rtol=1e-4, atol=1e-4)


def test_a_joint_step_is_the_gradient_of_the_loss_with_the_penalty() -> None:
    """Free logits and plain steps: both move along the gradient of one function, written out here."""
    net = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(1176, 2)).double()
    images, twin = IMAGES.double(), copy.deepcopy(net)
    pruner = Pruner(net, images, scores=Scores(penalty=0.3, projection="free", balance="none"))
    scores = torch.full((6,), 0.8, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        pruner.gates.soft.fill_(0.8)
    pruner.gates.soft.requires_grad_()
    pruner.gates.mode = "soft"
    (net(images).square().mean() + pruner.penalty()).backward()
    maps = twin[2](twin[1](twin[0](images)) * scores[:, None, None])
    (twin[4](maps.flatten(1)).square().mean() + 0.3 * scores.abs().sum()).backward()
    torch.testing.assert_close(pruner.gates.soft.grad, scores.grad)
    for found, expected in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)


def test_an_exception_in_a_score_phase_leaves_a_usable_model() -> None:
    model = network().train()
    pruner = Pruner(model, IMAGES)
    pruner.gate(half(pruner))
    plan, before = pruner.plan(), state(model)
    with pytest.raises(RuntimeError, match="oh"), pruner.scoring():
        score_steps(pruner, 1)
        raise RuntimeError("oh")
    assert pruner.plan() == plan
    assert same(before, model)
    assert all(p.requires_grad for p in model.parameters())
    assert all(m.training for m in model.modules())
    with pruner.scoring():
        score_steps(pruner, 1)


def test_a_loss_that_is_not_finite_moves_no_score_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    pruner = Pruner(model, IMAGES, scores=Scores(lr=1e-3, penalty=1e-2, projection="free"))
    with pruner.scoring():
        (model(IMAGES * torch.nan).mean() + pruner.penalty()).backward()
        pruner.step()
        assert all((scores == 1).all() for scores in pruner.scores().values())
        score_steps(pruner, 2)
    assert all((scores < 1).any() and scores.isfinite().all() for scores in pruner.scores().values())
    (record,) = caplog.records
    assert record.getMessage().startswith("1 of the steps of this score phase moved no score")
    with pruner.scoring():
        score_steps(pruner, 1)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("projection", ["factored", "literal", "free"])
def test_a_gradient_too_large_to_square_is_skipped_and_told(
    projection: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """In Adam's second moment it would be infinite, and no score would ever move again."""
    pruner = Pruner(network(), IMAGES, scores=Scores(lr=1e-2, penalty=1.0, projection=projection))
    with pruner.scoring():
        (1e30 * pruner.penalty()).backward()
        pruner.step()
        score_steps(pruner, 2)
    assert all((scores < 1).all() for scores in pruner.scores().values())
    assert "1 of the steps of this score phase moved no score" in caplog.text
    with pytest.raises(PruningError, match=r"^penalty: must be at most 1e\+10, got 1e\+30$"):
        Pruner(network(), IMAGES, scores=Scores(penalty=1e30))


def test_a_score_phase_can_be_saved_in_its_middle_and_gone_on_with() -> None:
    def run(stop: bool) -> Pruner:
        model = network()
        pruner = Pruner(model, IMAGES, scores=Scores(lr=1e-3, penalty=1e-2))
        with pruner.scoring():
            score_steps(pruner, 2)
        if not stop:
            with pruner.scoring():
                score_steps(pruner, 4)
            return pruner
        with pruner.scoring():
            score_steps(pruner, 2)
            saved = copy.deepcopy(pruner.state_dict())
        again = Pruner(network(), IMAGES, scores=Scores(lr=1e-3, penalty=1e-2))
        again.load_state_dict(saved)
        with again.scoring():
            score_steps(again, 2)
        return again

    straight, resumed = run(False), run(True)
    assert torch.equal(straight.gates.soft, resumed.gates.soft)
    assert straight.plan() == resumed.plan()


@pytest.mark.parametrize(
    ("saved", "loaded", "message"),
    [
        (
            {},
            {"constraints": Constraints(ignore=["conv1"])},
            "has 16 filters to prune in conv1 where the model has 0; load it",
        ),
        (
            {"constraints": Constraints(ignore=["conv1"])},
            {},
            "has 0 filters to prune in conv1 where the model has 16",
        ),
        (
            {},
            {"scores": Scores(blocks=True)},
            "the state was saved with blocks=False; create the pruner with blocks=False",
        ),
        ({"scores": Scores(blocks=True)}, {}, "the state was saved with blocks=True"),
        (
            {},
            {"scores": Scores(projection="free")},
            "holds nothing for 'logits' where .* it was saved from",
        ),
        ({"scores": Scores(projection="free")}, {}, "holds nothing for 'base'"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(
    saved: dict[str, object], loaded: dict[str, object], message: str
) -> None:
    state = Pruner(network(), IMAGES, **saved).state_dict()  # type: ignore[arg-type]
    pruner = Pruner(network(), IMAGES, **loaded)  # type: ignore[arg-type]
    with pruner.scoring():
        score_steps(pruner, 1)
    before = pruner.scores()
    for held, why in ((state, message), (network().state_dict(), "this is not the state of a pruner")):
        with pytest.raises(PruningError, match=why):
            pruner.load_state_dict(held)
    assert all(torch.equal(before[name], scores) for name, scores in pruner.scores().items())


def test_a_state_of_another_network_is_refused() -> None:
    state = Pruner(network(), IMAGES, scores=Scores(projection="free")).state_dict()
    pruner = Pruner(nn.Sequential(nn.Conv2d(3, 9, 3), nn.Conv2d(9, 2, 3)), IMAGES, scores=Scores(projection="free"))
    with pytest.raises(PruningError, match="the saved state has 0 filters to prune in 0 where the model has 9"):
        pruner.load_state_dict(state)


def test_a_deep_copy_has_gates_of_its_own() -> None:
    model = network().eval()
    pruner = Pruner(model, IMAGES)
    pruner.gate(half(pruner))
    twin = copy.deepcopy(model)
    expected = twin(IMAGES)
    assert torch.equal(expected, model(IMAGES))
    pruner.gate(Plan({}))
    assert torch.equal(twin(IMAGES), expected)
    assert not torch.equal(model(IMAGES), expected)


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_a_model_that_is_cast_is_scored_and_cut_in_its_new_type(kind: torch.dtype) -> None:
    model = network()
    pruner = Pruner(model, IMAGES[:1], scores=Scores(lr=1e-3))
    images = IMAGES.to(kind)
    model.to(kind).eval()
    with pruner.scoring():
        (model(images).float().square().mean() + pruner.penalty()).backward()
        pruner.step()
    pruner.gate(half(pruner))
    small = pruner.extract()
    assert {p.dtype for p in small.parameters()} == {kind} and small.sbf_inputs.dtype == kind
    tolerance = 1e-10 if kind == torch.float64 else 0.05
    torch.testing.assert_close(small(images), model(images), rtol=tolerance, atol=tolerance)


class Buffered(nn.Module):
    """Keeps a buffer of the size of its last input, as detectors keep anchors."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)
        self.register_buffer("anchors", torch.empty(0), persistent=False)

    def forward(self, x):
        x = self.last(self.conv(x))
        if self.anchors.shape != x.shape[2:]:
            self.anchors = torch.ones(x.shape[2:])
        return x * self.anchors


def test_a_buffer_of_another_image_size_is_made_anew_by_one_run() -> None:
    model, images = Buffered().eval(), torch.rand(1, 3, 8, 8)
    with pytest.raises(PruningError, match=r"anchors was 8x8 .* and is 0 now; run the model once on the example"):
        Pruner(model, images)
    model(images)
    pruner = Pruner(model, images)
    pruner.gate(half(pruner))
    model(torch.rand(1, 3, 16, 12))
    with pytest.raises(
        PruningError, match=r"anchors was 8x8 .* 16x12 now; run the model once on the example inputs"
    ):
        pruner.extract()
    expected = model(images)
    torch.testing.assert_close(pruner.extract()(images), expected)


def test_a_model_that_changed_shape_is_told_so_where_it_did() -> None:
    model = network()
    pruner = Pruner(model, IMAGES)
    model.fc = nn.Linear(64, 3)
    sentence = "fc.weight was 10x64 when the model was traced and is 3x64 now; create a new pruner"
    with pytest.raises(PruningError, match=sentence):
        pruner.extract()
    with pytest.raises(PruningError, match=sentence), pruner.scoring():
        pass
    del model.fc
    with pytest.raises(PruningError, match=r"fc.weight was 10x64 when the model was traced and is gone"):
        pruner.extract()


def test_a_gate_that_went_with_its_module_is_missed_and_a_new_pruner_takes_over() -> None:
    model = network()
    pruner = Pruner(model, IMAGES)
    pruner.gate(half(pruner))
    nn.SyncBatchNorm.convert_sync_batchnorm(model)  # what is inside is exchanged in place
    with (
        pytest.raises(PruningError, match="bn1 was replaced after the pruner was created"),
        pruner.gated(),
    ):
        pass
    state = pruner.state_dict()
    again = Pruner(pruner.detach(), IMAGES)
    again.load_state_dict(state)
    assert again.plan() == pruner.plan()
    torch.testing.assert_close(again.extract().eval()(IMAGES), model.eval()(IMAGES), rtol=1e-4, atol=1e-4)


def fold_conv1(model: nn.Module) -> None:
    model.conv1 = fuse_conv_bn_eval(model.conv1.eval(), model.bn1.eval())
    del model.bn1


LOSSES = {
    "was replaced": lambda model: setattr(model, "bn1", nn.BatchNorm2d(16)),
    "was removed": fold_conv1,
    "lost its hooks": lambda model: model.bn1._forward_hooks.clear(),
    "lost its weight": lambda model: prune.identity(model.bn1, "weight"),
}


@pytest.mark.parametrize("change", LOSSES)
def test_a_gate_that_is_lost_is_missed_in_every_phase_and_by_extract(change: str) -> None:
    model = network()
    pruner = Pruner(model, IMAGES)
    pruner.gate(half(pruner))
    LOSSES[change](model)
    for phase in (pruner.scoring, pruner.gated):
        with pytest.raises(PruningError, match=f"bn1 {change} after the pruner was created"), phase():
            pass
    with pytest.raises(PruningError, match=f"bn1 {change} after .* load the state_dict"):
        pruner.extract()


def test_gates_are_saved_with_the_pruner_and_not_with_the_model() -> None:
    model = network().eval()
    pruner = Pruner(model, IMAGES)
    pruner.gate(half(pruner))
    loaded = network().eval()
    loaded.load_state_dict(model.state_dict())
    assert not torch.allclose(loaded(IMAGES), model(IMAGES))
    again = Pruner(loaded, IMAGES)
    again.load_state_dict(pruner.state_dict())
    assert torch.equal(loaded(IMAGES), model(IMAGES))


class Anchored(nn.Module):
    """Keeps a grid for the size of its last images, which cannot be made without numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.out = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)
        self.grid, self.stride = torch.zeros(0), torch.tensor([2.0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.out(self.bn(self.conv(x)).relu()).flatten(2)
        if self.grid.shape[-1] != x.shape[-1]:
            self.grid = torch.arange(x.shape[-1]) * self.stride[0].item()
        return x + self.grid


def test_what_is_kept_for_images_of_another_size_is_no_obstacle(caplog: pytest.LogCaptureFixture) -> None:
    model = Anchored().eval()
    model(IMAGES)
    pruner = Pruner(model, IMAGES, scores=Scores(speed=1.0), budget=Budget(macs=0.6))
    model(torch.rand(1, 3, 24, 24))
    with pruner.scoring():
        score_steps(pruner, 1)
        model(torch.rand(1, 3, 20, 20))
    small = pruner.extract()
    assert not caplog.messages
    for size in (16, 20):
        images = torch.rand(2, 3, size, size)
        torch.testing.assert_close(small(images), model(images))


def test_scores_that_would_cut_the_network_keep_the_best_filter() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(720, 2)
    )
    pruner = Pruner(net, IMAGES, scores=Scores(penalty=1e3, lr=10.0, projection="free"))
    with pruner.scoring():
        score_steps(pruner, 5)
    widths = pruner.plan().widths()
    assert widths["0"] >= 1 and widths["2"] >= 1
    assert pruner.extract()(IMAGES).shape == (4, 2)


def test_folded_gates_give_the_same_gradients_as_hooks() -> None:
    model = network().train()
    pruner = Pruner(model, IMAGES)
    pruner.gate(half(pruner))
    model(IMAGES).square().mean().backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    with LeafGates(model, pruner.gates) as folded:
        model(IMAGES).square().mean().backward()
        folded.weight_gradients()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=0)
    with pruner.scoring():
        model(IMAGES).square().mean().backward()
        assert pruner.gates.soft.grad is not None
        by_hooks = pruner.gates.soft.grad.clone()
        with LeafGates(model, pruner.gates) as folded:
            model(IMAGES).square().mean().backward()
            torch.testing.assert_close(folded.score_gradients(), by_hooks, rtol=1e-6, atol=1e-8)
    model.zero_grad()
    with pruner.scoring(joint=True):
        with torch.no_grad():
            pruner.gates.soft.uniform_(0.5, 1)
        model(IMAGES).square().mean().backward()
        expected = [p.grad.clone() for p in (*model.parameters(), pruner.gates.soft) if p.grad is not None]
        model.zero_grad()
        with LeafGates(model, pruner.gates) as folded:
            model(IMAGES).square().mean().backward()
            scores = folded.both_gradients()
        for found, gradient in zip([*(p.grad for p in model.parameters()), scores], expected, strict=True):
            torch.testing.assert_close(found, gradient, rtol=1e-6, atol=1e-8)


def test_binary_gates_pass_their_gradient_on_to_the_scores_behind_them() -> None:
    torch.manual_seed(0)
    model = network()
    pruner = Pruner(model, IMAGES, scores=Scores(binary=True, projection="free", speed=0.4, penalty=0.0))
    seen = []
    with pruner.scoring():
        for _ in range(16):
            soft, scores = pruner.gates.soft, torch.cat(list(pruner.scores().values()))
            assert torch.equal(soft.detach(), (scores >= 0.5).to(soft.dtype))
            seen.append(scores)
            # Pushed down, then pulled up again: gates that are closed hear their gradient too.
            (soft.sum() * (1.0 if len(seen) < 3 else -1.0) + 0 * model(IMAGES).sum()).backward()
            pruner.step()
    scores = torch.stack([*seen, torch.cat(list(pruner.scores().values()))])
    assert (scores[0] == 1).all() and (scores[1] < 1).all() and (scores[2] < 0.5).all()
    assert (scores[-1] > 0.5).all() and pruner.gates.soft.min() == 1
    again = Pruner(network(), IMAGES, scores=Scores(binary=True, projection="free", speed=0.4))
    again.load_state_dict(pruner.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(again.scores().values(), pruner.scores().values(), strict=True))
    assert torch.equal(again.gates.soft, pruner.gates.soft)


def test_a_gated_model_compiles_whole_and_follows_its_gates() -> None:
    model = network().eval()
    pruner = Pruner(model, IMAGES)
    pruner.gate(half(pruner))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=IN_ONE_PIECE)
    torch.testing.assert_close(compiled(IMAGES), model(IMAGES))
    odd = {name: np.arange(layer.filters) % 3 > 0 for name, layer in pruner.graph.layers.items()}
    pruner.gate(Plan.from_masks(odd))
    torch.testing.assert_close(compiled(IMAGES), model(IMAGES))


def test_a_look_at_the_gates_leaves_a_score_phase_as_it_was() -> None:
    model = network()
    pruner = Pruner(model, IMAGES)
    pruner.gate(half(pruner))
    with pruner.scoring():
        soft = model(IMAGES)
        with pruner.gated():
            assert not torch.equal(model(IMAGES), soft)
        assert torch.equal(model(IMAGES), soft) and soft.requires_grad


def test_a_module_to_ignore_stands_for_its_layers() -> None:
    model = network()
    pruner = Pruner(model, IMAGES, constraints=Constraints(ignore=[model.layer1, "conv1"]))
    named = Pruner(network(), IMAGES, constraints=Constraints(ignore=["layer1.*", "conv1"]))
    assert list(pruner.graph.layers) == list(named.graph.layers) and pruner.filters == named.filters
    with pytest.raises(PruningError, match="a recipe cannot hold a value of type"):
        Constraints(ignore=model.layer1).to_dict()


def test_ignored_layers_are_not_scored() -> None:
    pruner = Pruner(network(), IMAGES, constraints=Constraints(ignore=["layer1.*", "conv1"]))
    assert not any(name.startswith("layer1.") for name in pruner.graph.layers)
    assert pruner.graph.skipped["conv1"] == "ignored as asked (conv1)"
    assert "conv1" not in pruner.plan().keep


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scores": "factored"}, "expected an sbf.Scores"),
        ({"constraints": Constraints(ignore=["layer9.*"])}, "no layer is called 'layer9"),
        ({"constraints": Constraints(couple=["conv?"])}, "two are needed"),
    ],
)
def test_bad_arguments_are_refused_and_leave_the_model_alone(arguments: dict[str, object], message: str) -> None:
    model = network()
    with pytest.raises(PruningError, match=message):
        Pruner(model, IMAGES, **arguments)  # type: ignore[arg-type]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_model_takes_one_pruner_and_a_step_belongs_into_a_phase() -> None:
    model = network()
    pruner = Pruner(model, IMAGES)
    for taken in (model, copy.deepcopy(model)):
        with pytest.raises(PruningError, match=r"or is a copy of a model that had one; detach\(\) that pruner"):
            Pruner(taken, IMAGES)
    with pytest.raises(PruningError, match="scoring"):
        pruner.step()
    with pytest.raises(PruningError, match="backward"), pruner.scoring():
        pruner.step()


def test_a_score_phase_holds_no_other_and_nothing_is_extracted_in_it() -> None:
    model = network()
    pruner = Pruner(model, IMAGES, scores=Scores(speed=0.1))
    with pruner.scoring():
        with pytest.raises(PruningError, match="a score phase is already under way"), pruner.scoring():
            pass
        with pytest.raises(PruningError, match=r"call extract\(\) after .* whose end sets the gates"):
            pruner.extract()
        score_steps(pruner, 1)  # it goes on
    assert all(p.requires_grad for p in pruner.extract().parameters())


def test_attaching_to_a_resnet50_costs_less_than_its_weights() -> None:
    def bottleneck_weights() -> list[torch.Tensor]:
        shapes = [(64, 3, 7, 7)]
        width = 64
        for planes, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
            for block in range(blocks):
                shapes += [(planes, width, 1, 1), (planes, planes, 3, 3), (4 * planes, planes, 1, 1)]
                if block == 0:
                    shapes.append((4 * planes, width, 1, 1))
                width = 4 * planes
        return [torch.zeros(shape) for shape in shapes]

    from sbf_pruner.scores import FactoredProjection, LiteralProjection

    weights = bottleneck_weights()
    filters = [len(w) for w in weights]
    own = sum(w.numel() * w.element_size() for w in weights)
    held = [v for v in vars(FactoredProjection(weights, filters)).values() if isinstance(v, torch.Tensor)]
    assert sum(t.numel() * t.element_size() for t in held) < 2 * own
    with pytest.raises(PruningError, match=r"19,459,026,944 entries, 77\.8 GB"):
        LiteralProjection(weights, filters)


@pytest.mark.parametrize("frozen", [True, False])
def test_norms_are_frozen_in_score_phases_unless_asked_otherwise(frozen: bool) -> None:
    model = network()
    pruner = Pruner(model, IMAGES, scores=Scores(freeze_norms=frozen))
    norm = next(m for m in model.modules() if isinstance(m, nn.BatchNorm2d))
    before = norm.running_mean.clone()
    with pruner.scoring():
        (model.train()(IMAGES).square().mean() + pruner.penalty()).backward()
        pruner.step()
    assert torch.equal(norm.running_mean, before) == frozen


def test_a_block_that_does_nothing_goes_as_one() -> None:
    torch.manual_seed(0)
    model = resolve("resnet20").eval()
    images = torch.rand(4, 3, 16, 16)
    with torch.no_grad():
        idle = model.layer2[1]
        idle.bn2.weight.zero_()
        target = model(images)
    pruner = Pruner(model, images, scores=Scores(blocks=True, speed=0.05, penalty=1e-3, balance="none"))
    assert len(pruner.blocks.layers) == 9
    for _ in range(2):
        with pruner.scoring():
            for _ in range(8):
                ((model(images) - target).square().mean() * 100 + pruner.penalty()).backward()
                pruner.step()
    factors = dict(zip(pruner.blocks.layers, pruner.blocks.logits.tolist(), strict=True))
    assert min(factors, key=factors.get) == "layer2.1.conv2" and factors["layer2.1.conv2"] < -0.5
    assert pruner.plan().keep["layer2.1.conv2"] == ()
    state = pruner.state_dict()
    pruner.detach()
    again = Pruner(model, images, scores=Scores(blocks=True, speed=0.05))
    again.load_state_dict(state)
    assert torch.equal(again.blocks.logits, pruner.blocks.logits)


def test_the_gate_opens_at_the_threshold_itself() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
    pruner = Pruner(net, IMAGES)
    with pruner.scoring(), torch.no_grad():
        pruner.gates.soft.copy_(torch.tensor([0.0, 0.4999, 0.5, 1.3]))
    assert pruner.plan().keep["0"] == (2, 3)


def test_a_sigmoid_gives_scores_below_two() -> None:
    model = network()
    pruner = Pruner(model, IMAGES, scores=Scores(activation="sigmoid", projection="free", lr=1.0, penalty=1.0))
    with pruner.scoring():
        for _ in range(3):
            (model(IMAGES).mean() + pruner.penalty()).backward()
            pruner.step()
    scores = torch.cat(list(pruner.scores().values()))
    assert (scores > 0).all() and (scores < 1).all()


def replica_of(model: nn.Module, factor: float) -> nn.Module:
    """What `nn.DataParallel` makes for a pass on another device, whose numbers are told apart by a factor."""
    copies = {module: module._replicate_for_data_parallel() for module in model.modules()}
    for module, made in copies.items():
        made._modules = {name: copies[inner] for name, inner in module._modules.items() if inner is not None}
        made._parameters = {name: None for name, t in module._parameters.items() if t is None}
        made.__dict__ |= {name: t.detach() * factor for name, t in module._parameters.items() if t is not None}
    return copies[model]


@pytest.mark.parametrize("norm", [True, False])
def test_a_replica_is_gated_with_tensors_of_its_own(norm: bool) -> None:
    torch.manual_seed(0)
    twice = nn.Conv2d(8, 8, 1, bias=False)
    middle = [twice, nn.BatchNorm2d(8)] if norm else [twice]
    model = nn.Sequential(nn.Conv2d(3, 8, 3), *middle, nn.ReLU(), *middle, nn.Conv2d(8, 4, 1)).double().eval()
    pruner, images = Pruner(model, IMAGES.double()), IMAGES.double()
    pruner.gate(Plan({name: range(5) for name in pruner.filters}))
    replica = replica_of(model, 1.5)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter *= 1.5
    torch.testing.assert_close(replica(images), other(images), rtol=0, atol=0)
    torch.testing.assert_close(replica(images), other(images), rtol=0, atol=0)  # its tensors are back in place


def test_gates_find_their_channels_where_the_batch_is_left_out() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 14, 3), nn.ReLU(), nn.Conv2d(14, 4, 3)).double()
    images = IMAGES.double()  # the first layer's maps have as many rows as channels
    pruner = Pruner(model, images)
    pruner.gate(Plan({"0": range(5)}))
    torch.testing.assert_close(model(images[0]), model(images)[0])
    torch.testing.assert_close(pruner.extract()(images[0]), model(images)[0])


CALLS = {
    "gate": lambda pruner: pruner.gate(half(pruner)),
    "land": lambda pruner: pruner.land(),
    "rank": lambda pruner: pruner.rank({name: np.ones(count) for name, count in pruner.filters.items()}),
    "load_state_dict": lambda pruner: pruner.load_state_dict(pruner.state_dict()),
    "extract": lambda pruner: pruner.extract(),
    "detach": lambda pruner: pruner.detach(),
}


def test_what_sets_the_gates_is_refused_while_scores_are_learned() -> None:
    pruner = Pruner(network(), IMAGES, budget=Budget(macs=0.5))
    with pruner.scoring():
        for name, call in CALLS.items():
            with pytest.raises(PruningError, match=rf"call {name}\(\) after the `with pruner.scoring\(\):`"):
                call(pruner)
            assert pruner.model(IMAGES).requires_grad, "the scores still hear of the task"
    for call in CALLS.values():
        call(pruner)


def test_an_earlier_backward_can_be_forgotten() -> None:
    pruner = Pruner(network(), IMAGES)
    with pruner.scoring():
        pruner.model(IMAGES).sum().backward()
        assert pruner.gates.soft.grad is not None
        pruner.zero_grad()
        with pytest.raises(PruningError, match="found no gradient"):
            pruner.step()


def test_layers_are_not_ignored_in_a_graph_that_is_there() -> None:
    model = network()
    graph = trace(model, IMAGES)
    with pytest.raises(PruningError, match="ignore has no effect on graph"):
        Pruner(model, IMAGES, graph=graph, constraints=Constraints(ignore=["conv1"]))


def test_a_phase_that_cannot_end_leaves_the_model_to_its_user(monkeypatch: pytest.MonkeyPatch) -> None:
    pruner = Pruner(network(), IMAGES)

    def broken() -> None:
        raise RuntimeError("no end")

    monkeypatch.setattr(pruner.projection, "end_phase", broken)
    with pytest.raises(RuntimeError, match="no end"), pruner.scoring():
        pass
    assert all(parameter.requires_grad for parameter in pruner.model.parameters())
    assert pruner.gates.mode == "hard" and not pruner.gates.soft.requires_grad
    assert not any("forward" in module.__dict__ for module in pruner.model.modules())


def scored_for(budget: Budget | None, caplog: pytest.LogCaptureFixture, **more: Any) -> Pruner:
    """A network after one score phase, and what was logged."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    pruner = Pruner(net, torch.rand(1, 3, 8, 8), budget=budget, scores=Scores(**more))
    caplog.clear()
    with pruner.scoring():
        for _ in range(5):
            (net(torch.rand(2, 3, 8, 8)).square().mean() + pruner.penalty()).backward()
            pruner.step()
    return pruner


def test_a_budget_met_by_scores_that_hardly_moved_is_told(caplog: pytest.LogCaptureFixture) -> None:
    half = Budget(macs=0.5)
    scored_for(half, caplog)
    assert "no score has moved further than" in caplog.text and "set speed" in caplog.text
    for budget, more in ((half, {"speed": 0.3}), (None, {})):
        scored_for(budget, caplog, **more)
        assert not caplog.text


def test_with_a_budget_filters_are_weighed_by_what_they_cost_of_it(caplog: pytest.LogCaptureFixture) -> None:
    assert scored_for(Budget(macs=0.5), caplog).regularizer.mix is not None
    assert scored_for(None, caplog).regularizer.mix is None
    assert scored_for(Budget(macs=0.5), caplog, balance="area").regularizer.mix is None


def test_what_breaks_the_budget_is_told_as_it_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    net, images = resolve("resnet20"), torch.rand(1, 3, 32, 32)
    pruner = Pruner(net, images, budget=Budget(macs=0.5), scores=Scores(speed=0.1))
    pruner.extract()  # nothing has landed yet
    assert "(100.0%), and the budget is" in caplog.text and "macs (50.0%); call land() first" in caplog.text
    caplog.clear()
    pruner.rank({name: np.arange(float(count)) for name, count in pruner.filters.items()})
    pruner.extract()
    assert not caplog.text
    pruner.gate(Plan({name: range(count) for name, count in pruner.filters.items()}))
    pruner.progress = 0.5
    pruner.extract()
    assert "(pruner.progress is 50%); call land() first" in caplog.text
    caplog.clear()
    pruner.land()  # as far as was asked for, not as far as the limits had closed in
    assert pruner.missed() is None and measure(pruner.extract(), images).macs <= 0.5 * measure(net, images).macs
    assert not caplog.text
