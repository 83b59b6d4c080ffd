"""Advice: only where something is wrong, and then the cause that the figures show."""

from __future__ import annotations

from typing import Any

import pytest

from sbf_pruner.compare import LAYERS, MOVES, REST, Part, advise, fixed_share, verdict
from sbf_pruner.compare.bench_advice import _REMEDIES
from sbf_pruner.training import settings

QUIET = {"load": 0.1, "cores": 2}


def record(low: float, median: float, high: float, **given: Any) -> dict[str, Any]:
    """A made-up measurement; nothing was timed."""
    return {
        "device": "cpu",
        "runtime": "eager",
        "batch": 1,
        "speedup": {"low": low, "median": median, "high": high},
        "dense_ms": {"median": 10.0},
        "compact_ms": {"median": 10.0 / median},
        "difference": 1e-7,
        "page_faults": {"dense": 0.0, "compact": 0.0},
        **given,
    }


def sides(layers: float = 1.0, moves: float = 0.0, rest: float = 1.0) -> dict[str, list[Part]]:
    """A dense pass of 4 ms in one layer and 2 ms in the rest, at twice the MACs, beside the given compact one."""
    dense = [Part("body.0", LAYERS, 4.0, 8_000_000, (16, 32)), Part("relu", REST, 2.0)]
    compact = [Part("body.0", LAYERS, layers, 4_000_000, (16, 13)), Part("relu", REST, rest)]
    return {"dense": dense, "compact": [*compact, *[Part("index", MOVES, moves)] * bool(moves)]}


@pytest.mark.parametrize(
    ("spread", "expected"),
    [
        ((1.6, 1.7, 1.8), ""),
        ((1.35, 1.42, 1.5), ""),
        ((1.35, 1.41, 1.5), "little gained"),
        ((0.99, 1.2, 1.3), "no faster"),
        ((0.7, 0.8, 0.99), "slower"),
        ((0.7, 0.8, 1.0), "no faster"),
    ],
)
def test_verdicts(spread: tuple[float, float, float], expected: str) -> None:
    assert verdict(record(*spread), 2.0) == expected
    assert verdict(record(*spread), 1.0) == ""  # nothing was promised


def test_there_is_nothing_to_say_where_all_is_well() -> None:
    assert advise([record(1.8, 1.9, 2.0)], {1: sides(layers=9.0, moves=9.0)}, 2.0, QUIET) == []


def test_each_cause_is_named_where_it_is_one_with_what_helps() -> None:
    weak = [record(0.7, 0.8, 0.9)]
    assert advise(weak, {1: sides(layers=5.0)}, 2.0, QUIET) == [
        "slower, although there are 2.00 times fewer MACs: eager, batch 1 (0.80x)",
        "batch 1, operator by operator on the CPU: of 6 ms the MACs do not explain 3",
        "  100 %: layers too narrow to be quick: 0.8 GMAC/s against 2 when dense, 1 of 1 with a width that is no "
        "multiple of 4; worst body.0 (16x32 to 16x13: 4 to 5 ms)",
        "what helps: whole branches removed instead of some filters of each (scores.blocks=true), or filters "
        "kept in multiples (constraints.round_to=8)",
    ]
    cause, helps = advise(weak, {1: sides(layers=2.0, moves=3.0)}, 2.0, QUIET)[2:]
    assert cause == "  100 %: 1 channel remaps, where layers that meet keep different filters"
    assert helps == "what helps: the same filters kept in all layers that meet (constraints.couple)"
    cause, helps = advise(weak, {1: sides(layers=2.0, rest=2.0)}, 2.0, QUIET)[2:]
    assert cause.startswith("  100 %: additions, activations and pooling")
    assert helps == (
        "what helps: the same channels removed in all layers of a stream (constraints.couple), or fewer blocks"
    )


def test_the_larger_cause_comes_first_and_small_ones_are_left_out() -> None:
    weak = [record(0.7, 0.8, 0.9)]
    moves, layers = advise(weak, {1: sides(layers=3.0, moves=2.0, rest=1.1)}, 2.0, QUIET)[2:-1]
    assert moves.startswith("  65 %: 1 channel remaps") and layers.startswith("  32 %: layers")


def test_causes_are_those_of_the_batch_that_gained_little() -> None:
    both = [record(0.7, 0.8, 0.9), record(1.8, 1.9, 2.0, batch=64)]
    found = advise(both, {1: sides(layers=5.0), 64: sides(moves=5.0)}, 2.0, QUIET)
    assert not any("64" in said for said in found)
    assert advise(both, {}, 2.0, QUIET)[:1] == found[:1]


def test_a_pass_that_does_not_grow_with_the_batch_is_all_start() -> None:
    small, large = record(0.9, 1.0, 1.1), record(1.8, 1.9, 2.0, batch=64)
    small["compact_ms"], large["compact_ms"] = {"median": 2.0}, {"median": 8.3}
    assert fixed_share(small, large) == pytest.approx(0.95)
    found = advise([small, large], {}, 2.0, QUIET)
    assert found[1:] == [
        "operator launch overhead, independent of the batch size: 95 % of eager, batch 1 (1.00x)",
        "what helps: larger batches, fewer blocks, or a runtime that fuses operators (compile, onnxruntime)",
    ]
    large["compact_ms"] = {"median": 128.0}
    assert fixed_share(small, large) == 0.0
    large["compact_ms"] = {"median": 1.0}  # a larger batch that took less: noise, not a negative slope
    assert fixed_share(small, large) == 1.0
    # Another device's figures say nothing.
    assert not any("start" in said for said in advise([small, {**large, "device": "cuda"}], {}, 2.0, QUIET))


def test_a_busy_machine_wrong_outputs_and_page_faults_are_said_first() -> None:
    odd = record(1.8, 1.9, 2.0, difference=0.5, page_faults={"dense": 16000.0, "compact": 9000.0})
    busy, wrong, faults = advise([odd], {}, 2.0, {"load": 2.8, "cores": 2})
    assert busy.startswith("the machine was busy before anything was timed (load 2.8 on 2 cores)")
    assert wrong == "eager, batch 1 (1.90x): the outputs are off by 5e-01 of the largest; do not use it"
    assert faults.startswith("eager, batch 1: 16,000 page faults in a dense pass") and "MALLOC_MMAP" in faults
    assert len(advise([{**odd, "difference": float("nan")}], {}, 2.0, {"load": None, "cores": 2})) == 2


def test_the_settings_that_help_are_settings_of_a_recipe() -> None:
    named = {
        word.strip("(),").partition("=")[0] for text in _REMEDIES.values() for word in text.split() if "." in word
    }
    assert named == {"scores.blocks", "constraints.round_to", "constraints.couple"} <= set(settings())
