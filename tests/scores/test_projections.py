import copy
from math import prod

import pytest
import torch

from sbf_pruner.errors import PruningError
from sbf_pruner.scores import (
    PROJECTIONS,
    FactoredProjection,
    FreeProjection,
    LiteralProjection,
    leaky_exponential,
    literal_bytes,
    pack_signs,
    sign_dot,
    unpack_signs,
)

# An ordinary convolution, a transposed one (filters in dimension 1), a linear layer, a 1d convolution.
SHAPES = [(6, 3, 3, 3), (4, 10, 2, 2), (7, 5), (3, 2, 5)]
FILTERS = [6, 10, 7, 3]
TOTAL = sum(FILTERS)


def make_weights(seed=0, dtype=torch.float64, zeros=True):
    generator = torch.Generator().manual_seed(seed)
    weights = [0.2 * torch.randn(shape, generator=generator, dtype=dtype) for shape in SHAPES]
    if zeros:
        weights[0][1, 2] = 0
        weights[3][0] = 0
    return weights


def change(weights, seed):
    """What training does between phases: some signs flip, some weights become or stop being zero."""
    generator = torch.Generator().manual_seed(seed)
    changed = [w + 0.15 * torch.randn(w.shape, generator=generator, dtype=w.dtype) for w in weights]
    changed[1] = changed[1].flip(0)
    changed[2][seed % 7] = 0
    assert any((a.sign() != b.sign()).any() for a, b in zip(weights, changed, strict=True))
    return changed


def loss_of(logits, step):
    """A gradient that is random from step to step and depends on the scores, as a mini-batch's does."""
    generator = torch.Generator().manual_seed(step)
    noise = torch.randn(TOTAL, generator=generator, dtype=torch.float64).to(logits)
    target = torch.linspace(-1, 2, TOTAL, dtype=logits.dtype)
    scores = leaky_exponential(logits)
    return ((scores - target) ** 2).sum() + (noise * scores).sum() + 0.3 * (logits.roll(1) * scores).sum()


def train(projection, first, last, *, eps=1e-12, lr=2e-3, optimiser=None, gradient=1.0):
    optimiser = optimiser or torch.optim.Adam(projection.parameters, lr=lr, eps=eps)
    for step in range(first, last):
        optimiser.zero_grad()
        (gradient * loss_of(projection.logits(), step)).backward()
        optimiser.step()
    return optimiser


def run_phases(projection, weights, phases=3, steps=60, **options):
    """The logits at the end of each phase and, weights changed, at the start of the next."""
    seen = []
    for phase in range(phases):
        projection.begin_phase(weights)
        seen.append(projection.logits().detach().clone())
        train(projection, phase * steps, (phase + 1) * steps, **options)
        projection.end_phase()
        seen.append(projection.logits().detach().clone())
        weights = change(weights, phase + 1)
    return torch.stack(seen)


def test_one_speed_for_all_layers_in_both_forms():
    """A learning rate divided by the layer's l1 norm, phase by phase: every logit moves alike at first."""

    def run(form, weights, speed=2e-2):
        projection, seen = form(weights, FILTERS, even=True), []
        for phase in range(3):
            projection.begin_phase(weights)
            start = projection.logits().detach().clone()
            optimiser = torch.optim.Adam(projection.groups(speed), eps=1e-13)
            train(projection, 60 * phase, 60 * phase + 1, optimiser=optimiser)
            moved = (projection.logits().detach() - start).abs()
            assert torch.allclose(moved, torch.full_like(moved, speed), rtol=1e-5)
            train(projection, 60 * phase + 1, 60 * phase + 60, optimiser=optimiser)
            projection.end_phase()
            seen.append(projection.logits().detach().clone())
            weights = change(weights, phase + 1)
        return torch.stack(seen)

    weights = make_weights(zeros=False)
    literal, factored = (run(form, weights) for form in (LiteralProjection, FactoredProjection))
    assert literal.abs().max() > 0.3
    torch.testing.assert_close(factored, literal, rtol=0, atol=1e-6)


@pytest.mark.parametrize("form", PROJECTIONS)
def test_every_logit_starts_at_exactly_zero(form):
    projection = PROJECTIONS[form](make_weights(), FILTERS)
    assert torch.equal(projection.logits(), torch.zeros(TOTAL, dtype=torch.float64))
    projection.begin_phase(make_weights())
    assert torch.equal(projection.logits(), torch.zeros(TOTAL, dtype=torch.float64))


def test_the_literal_form_is_equation_1():
    weights = make_weights()
    projection = LiteralProjection(weights, FILTERS)
    assert [tuple(w.shape) for w in projection.parameters] == [
        (prod(s), f) for s, f in zip(SHAPES, FILTERS, strict=True)
    ]
    projection.begin_phase(weights)
    with torch.no_grad():
        for matrix in projection.parameters:
            matrix.normal_()
    expected = [w.reshape(1, -1) @ m for w, m in zip(weights, projection.parameters, strict=True)]
    torch.testing.assert_close(projection.logits(), torch.cat(expected, 1)[0])


def test_factored_and_literal_follow_one_trajectory():
    literal = run_phases(LiteralProjection(make_weights(), FILTERS), make_weights())
    factored = run_phases(FactoredProjection(make_weights(), FILTERS), make_weights())
    assert literal[-1].abs().max() > 0.3 and literal[-1].abs().min() > 1e-4  # something did move, everywhere
    assert (literal[2] - literal[1]).abs().max() > 1e-2  # and the new weights move the logits by themselves
    torch.testing.assert_close(factored, literal, rtol=0, atol=1e-6)


def test_at_adams_own_eps_the_mean_magnitude_is_the_right_scale():
    # With gradients of 1e-4 eps is felt: the literal layer itself strays from its eps -> 0 trajectory.
    weights = [w.float() for w in make_weights()]
    options = {"phases": 1, "steps": 100, "gradient": 1e-4}
    literal = run_phases(LiteralProjection(weights, FILTERS), weights, eps=1e-8, **options)
    ideal = run_phases(LiteralProjection(weights, FILTERS), weights, eps=1e-13, **options)
    factored = run_phases(FactoredProjection(weights, FILTERS), weights, eps=1e-8, **options)
    assert factored.dtype == torch.float32
    assert (factored - literal).abs().max() < 0.25 * (ideal - literal).abs().max()


def test_a_layer_of_zeros_stays_where_it_is():
    weights = make_weights()
    weights[2].zero_()
    projection = FactoredProjection(weights, FILTERS)
    logits = run_phases(projection, weights, phases=1)
    assert torch.equal(logits[1][16:23], torch.zeros(7, dtype=torch.float64))
    assert (logits[1][:16] != 0).all()


@pytest.mark.parametrize("left", [1e-9, 0.0])
def test_with_one_speed_a_layer_that_decayed_to_nothing_moves_as_fast_as_any_other(left):
    weights = make_weights(zeros=False)
    weights[2] *= left
    projection = FactoredProjection(weights, FILTERS, even=True)
    for phase in (1, 2, 3):
        projection.begin_phase(weights)
        optimiser = torch.optim.Adam(projection.groups(1e-2), eps=1e-8)
        for _ in range(50):
            optimiser.zero_grad()
            (1e-3 * leaky_exponential(projection.logits()).sum()).backward()  # a penalty, and no loss against it
            optimiser.step()
        projection.end_phase()
        logits = projection.logits().detach()
        torch.testing.assert_close(logits, logits[:1].expand(TOTAL), rtol=1e-4, atol=0)
        assert logits[0] < -0.4 * phase


@pytest.mark.parametrize("form", PROJECTIONS)
@pytest.mark.parametrize("cut", [20, 25, 40])
def test_a_load_in_the_middle_of_a_phase_goes_on_exactly(form, cut):
    weights, later = make_weights(), change(make_weights(), 1)

    def build():
        return PROJECTIONS[form](weights, FILTERS)

    def second_half(projection, optimiser):
        train(projection, cut, 40, optimiser=optimiser)
        projection.end_phase()
        projection.begin_phase(change(later, 2))
        train(projection, 40, 60)
        return projection.logits()

    straight = build()
    run_phases(straight, weights, phases=1, steps=20)
    straight.begin_phase(later)
    optimiser = train(straight, 20, cut)
    # Adam's own snapshot shares its tensors; ours does not.
    saved, saved_optimiser = straight.state_dict(), copy.deepcopy(optimiser.state_dict())
    assert all(isinstance(value, torch.Tensor | int) for value in saved.values())
    resumed = build()
    identities = [id(p) for p in resumed.parameters]
    resumed.load_state_dict(saved)
    assert resumed.in_phase and [id(p) for p in resumed.parameters] == identities
    fresh = torch.optim.Adam(resumed.parameters, 2e-3, eps=1e-12)
    fresh.load_state_dict(saved_optimiser)
    assert torch.equal(resumed.logits(), straight.logits())
    assert torch.equal(second_half(resumed, fresh), second_half(straight, optimiser))


def test_a_snapshot_does_not_move_with_what_it_was_taken_of():
    projection = FactoredProjection(make_weights(), FILTERS)
    projection.begin_phase(make_weights())
    train(projection, 0, 5)
    saved = projection.state_dict()
    kept = saved["t"].clone()
    train(projection, 5, 10)
    assert torch.equal(saved["t"], kept) and not torch.equal(projection.state_dict()["t"], kept)


def test_a_snapshot_of_another_network_or_form_is_refused_and_changes_nothing():
    projection = FactoredProjection(make_weights(), FILTERS)
    projection.begin_phase(make_weights())
    train(projection, 0, 5)
    before = projection.logits()
    other = FactoredProjection(make_weights()[:2], FILTERS[:2]).state_dict()
    for state in (other, FreeProjection(make_weights(), FILTERS).state_dict()):
        with pytest.raises(PruningError, match=r"saved projection holds .* load it into the network"):
            projection.load_state_dict(state)
    assert torch.equal(projection.logits(), before) and projection.in_phase


def test_buffers_keep_their_identity_so_that_a_captured_step_stays_valid():
    projection = FactoredProjection(make_weights(), FILTERS)
    compiled = torch.compile(projection.logits, backend="aot_eager", fullgraph=True)
    addresses = None
    weights = make_weights()
    for phase in range(3):
        projection.begin_phase(weights)
        train(projection, phase * 10, phase * 10 + 10)
        torch.testing.assert_close(compiled(), projection.logits(), rtol=0, atol=1e-15)
        (gradient,) = torch.autograd.grad(compiled().sum(), projection.parameters)
        (expected,) = torch.autograd.grad(projection.logits().sum(), projection.parameters)
        torch.testing.assert_close(gradient, expected)
        now = [slot.data_ptr() for slot in projection._tensors().values()]
        assert addresses in (None, now)
        addresses = now
        projection.end_phase()
        weights = change(weights, phase + 1)


def test_a_phase_that_moved_nothing_is_not_stored():
    projection = FactoredProjection(make_weights(), FILTERS)
    projection.begin_phase(make_weights())
    projection.end_phase()
    assert len(projection.state_dict()["past_t"]) == 0


def test_phases_with_the_same_signs_share_their_storage():
    weights = make_weights()
    projection, reference = FactoredProjection(weights, FILTERS), LiteralProjection(weights, FILTERS)
    for phase in range(3):
        scaled = [w * (1 + phase) for w in weights]
        for form in (projection, reference):
            form.begin_phase(scaled)
            train(form, 10 * phase, 10 * phase + 10)
            form.end_phase()
    state = projection.state_dict()
    assert len(state["past_t"]) == len(state["past_signs"]) == 1
    torch.testing.assert_close(projection.logits(), reference.logits(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("count", [1, 3, 4, 5, 1000])
def test_packed_signs_survive_and_take_two_bits(count):
    values = torch.randn(count, generator=torch.Generator().manual_seed(count))
    values[::3] = 0
    packed = pack_signs(values)
    assert packed.dtype == torch.uint8 and len(packed) == (count + 3) // 4
    assert torch.equal(unpack_signs(packed, torch.float32)[:count], values.sign())


def test_inner_products_do_not_depend_on_the_chunk():
    values = torch.randn(103, dtype=torch.float64)
    other = torch.randn(103, dtype=torch.float64)
    for chunk in (1, 5, 26, 1000):
        torch.testing.assert_close(sign_dot(pack_signs(other), values, chunk), (other.sign() * values).sum())


def test_half_precision_weights_have_float32_logits():
    weights = [w.bfloat16() for w in make_weights()]
    projection = FactoredProjection(weights, FILTERS)
    projection.begin_phase(weights)
    assert projection.logits().dtype == torch.float32
    torch.testing.assert_close(projection.state_dict()["l1"][0], weights[0].float().abs().sum())


def test_channels_last_weights_are_the_same_weights():
    weights, later = make_weights(), change(make_weights(), 1)
    plain = FactoredProjection(weights, FILTERS)
    other = FactoredProjection(weights, FILTERS)
    for form, formats in (
        (plain, [torch.contiguous_format] * 2),
        (other, [torch.channels_last, torch.contiguous_format]),
    ):
        for w, memory_format in zip((weights, later), formats, strict=True):
            form.begin_phase([t.to(memory_format=memory_format) if t.ndim == 4 else t for t in w])
            train(form, 0, 5)
            form.end_phase()
    torch.testing.assert_close(plain.logits(), other.logits(), rtol=0, atol=1e-12)


def test_free_logits_keep_their_value_and_have_one_speed():
    projection = FreeProjection(make_weights(), FILTERS)
    projection.begin_phase(make_weights())
    train(projection, 0, 1, lr=0.01)
    projection.end_phase()
    expected = torch.full((sum(FILTERS),), 0.01, dtype=torch.float64)
    torch.testing.assert_close(projection.logits().detach().abs(), expected)
    before = projection.logits().detach().clone()
    projection.begin_phase(change(make_weights(), 1))
    assert torch.equal(projection.logits(), before)


def resnet50_shapes():
    shapes, width = [(64, 3, 7, 7)], 64
    for planes, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += [(planes, width, 1, 1), (planes, planes, 3, 3), (4 * planes, planes, 1, 1)]
            shapes += [(4 * planes, width, 1, 1)] if block == 0 else []
            width = 4 * planes
    return shapes


def test_resnet50s_literal_layer_is_refused_with_the_figures_and_the_remedy():
    weights = [torch.empty(shape, device="meta") for shape in resnet50_shapes()]
    filters = [shape[0] for shape in resnet50_shapes()]
    assert len(weights) == 53 and sum(w.numel() for w in weights) == 23_454_912
    assert literal_bytes(weights, filters) == 4 * 19_459_026_944
    with pytest.raises(PruningError) as refusal:
        LiteralProjection(weights, filters, limit_bytes=140 * 10**9)
    for part in ("19,459,026,944 entries", "77.8 GB", "311.3 GB", "140.0 GB", 'projection="factored"'):
        assert part in str(refusal.value)


def test_the_limit_is_the_memory_of_the_device_unless_given(monkeypatch):
    weights = make_weights(dtype=torch.float32)
    needed = 4 * literal_bytes(weights, FILTERS)
    assert literal_bytes(weights, FILTERS, limit_bytes=needed) == needed // 4
    with pytest.raises(PruningError):
        literal_bytes(weights, FILTERS, limit_bytes=needed - 1)
    monkeypatch.setattr("sbf_pruner.scores.projections.available_memory", lambda device: needed - 1)
    with pytest.raises(PruningError, match="cpu has"):
        LiteralProjection(weights, FILTERS)
    LiteralProjection(weights, FILTERS, limit_bytes=needed)


@pytest.mark.parametrize("form", PROJECTIONS)
def test_misuse_is_refused(form):
    with pytest.raises(PruningError, match="at least one layer"):
        PROJECTIONS[form]([], [])
    with pytest.raises(PruningError, match="4 weights and 3 filter counts"):
        PROJECTIONS[form](make_weights(), FILTERS[:3])
    projection = PROJECTIONS[form](make_weights(), FILTERS)
    projection.begin_phase(make_weights())
    with pytest.raises(PruningError, match="already under way"):
        projection.begin_phase(make_weights())


@pytest.mark.parametrize("form", ["factored", "literal"])
def test_weights_of_another_size_are_refused(form):
    projection = PROJECTIONS[form](make_weights(), FILTERS)
    with pytest.raises(PruningError, match="make a new one"):
        projection.begin_phase([w[:1] for w in make_weights()])
    assert not projection.in_phase


@pytest.mark.parametrize("form", PROJECTIONS)
@pytest.mark.parametrize(
    "way",
    [
        *("eager", "aot_eager"),
        pytest.param("inductor", marks=pytest.mark.slow),
        pytest.param("captured", marks=pytest.mark.gpu),
    ],
)
def test_scores_of_untrained_logits_have_the_logits_gradient(form, way):
    """The slope of the activation at 0, where every logit starts, is 1."""
    device = "cuda" if way == "captured" else "cpu"
    projection = PROJECTIONS[form]([w.to(device) for w in make_weights()], FILTERS)
    projection.begin_phase([w.to(device) for w in make_weights()])
    signs = torch.arange(TOTAL, device=device) % 2 * 2.0 - 1

    def scores():
        return leaky_exponential(projection.logits())

    def gradients(of):
        return torch.autograd.grad((of() * signs).sum(), projection.parameters)

    if way in ("aot_eager", "inductor"):
        found = gradients(torch.compile(scores, backend=way, fullgraph=True))
    elif way == "captured":
        side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(side):
            gradients(scores)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            found = gradients(scores)
        graph.replay()
    else:
        found = gradients(scores)
    for gradient, expected in zip(found, gradients(projection.logits), strict=True):
        assert expected.any()
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("form", PROJECTIONS)
def test_one_captured_step_serves_every_phase(form):
    weights = [w.cuda() for w in make_weights()]
    captured, eager = PROJECTIONS[form](weights, FILTERS), PROJECTIONS[form](weights, FILTERS)
    target = torch.linspace(-1, 2, TOTAL, dtype=torch.float64, device="cuda")

    def adam(projection):
        # Capturable for both: its step counter is a float32 tensor, which alone shifts a trajectory by 1e-5.
        return torch.optim.Adam(projection.parameters, lr=2e-3, eps=1e-12, capturable=True)

    def take_step(logits_of, optimiser):
        optimiser.zero_grad(set_to_none=False)
        ((leaky_exponential(logits_of()) - target) ** 2).sum().backward()
        optimiser.step()

    compiled, optimiser = torch.compile(captured.logits, fullgraph=True), adam(captured)
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    captured.begin_phase(weights)
    with torch.cuda.stream(side):
        for _ in range(3):
            take_step(compiled, optimiser)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        take_step(compiled, optimiser)
    captured.load_state_dict(PROJECTIONS[form](weights, FILTERS).state_dict())  # back to the start, in place

    for phase in range(3):
        captured.begin_phase(weights)
        eager.begin_phase(weights)
        for state in optimiser.state.values():
            for value in state.values():
                value.zero_()
        fresh = adam(eager)
        for _ in range(20):
            graph.replay()
            take_step(eager.logits, fresh)
        assert eager.logits().abs().min() > 0
        torch.testing.assert_close(captured.logits(), eager.logits(), rtol=0, atol=1e-10)
        captured.end_phase()
        eager.end_phase()
        weights = [w.cuda() for w in change([w.cpu() for w in weights], phase + 1)]
