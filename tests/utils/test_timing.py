"""The clock: who runs when, what the median's interval promises, and what happens at the edges."""

from __future__ import annotations

import random
import statistics

import pytest
import torch

from sbf_pruner.errors import PruningError
from sbf_pruner.utils import Interval, median_interval, median_ratio, time_interleaved, timing, torch_threads


def logged(rounds: int, names: str = "ab", seed: int = 0) -> list[str]:
    """Who ran in every timed round, as text; warm-up left out."""
    ran: list[str] = []
    calls = {name: (lambda name=name: ran.append(name)) for name in names}
    time_interleaved(calls, rounds, sample=0, seed=seed)
    ran = ran[2 * len(names) :]  # two passes of each before
    return ["".join(ran[i : i + len(names)]) for i in range(0, len(ran), len(names))]


def test_every_second_round_is_the_one_before_turned_round() -> None:
    for names in ("ab", "abcd"):
        orders = logged(20, names)
        assert all(sorted(order) == list(names) for order in orders)
        assert all(later == earlier[::-1] for earlier, later in zip(orders[::2], orders[1::2], strict=True))
        assert len(set(orders[::2])) > 1  # and the first of each two is drawn
    assert logged(7) == logged(20)[:7]
    assert logged(20, seed=1) != logged(20)


def test_a_sample_holds_as_many_passes_as_fill_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    counts = {"quick": 0, "slow": 0}

    def passing(name: str, seconds: float) -> None:
        nonlocal now
        now += seconds
        counts[name] += 1

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)
    calls = {"quick": lambda: passing("quick", 0.001), "slow": lambda: passing("slow", 0.5)}
    found = time_interleaved(calls, 3, sample=0.01)
    assert found == {"quick": pytest.approx([0.001] * 3), "slow": pytest.approx([0.5] * 3)}
    assert counts == {"quick": 4 + 3 * 10, "slow": 4 + 3}


def test_a_call_that_takes_no_time_is_timed_too() -> None:
    found = time_interleaved({"nothing": lambda: None}, 2, sample=1e-5)
    assert len(found["nothing"]) == 2 and min(found["nothing"]) >= 0


def test_no_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        time_interleaved({"nothing": lambda: None}, 0)


def test_on_a_gpu_the_clock_waits_for_all_that_was_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: order.append(f"wait {device}"))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: order.append("clock") or float(len(order)))
    time_interleaved({"a": lambda: order.append("run")}, 1, sample=0, device="cuda:0")
    # Two passes to warm up, then one that is timed.
    assert order[-5:] == ["wait cuda:0", "clock", "run", "wait cuda:0", "clock"]


def test_drift_cancels_in_the_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    now, speed = 0.0, 1.0

    def run(seconds: float) -> None:
        nonlocal now, speed
        speed *= 1.05  # the machine becomes slower and slower
        now += seconds * speed

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)
    found = time_interleaved({"dense": lambda: run(2.0), "compact": lambda: run(1.0)}, 40, sample=0)
    assert found["dense"][-1] > 20 * found["dense"][0]
    assert median_ratio(found["dense"], found["compact"]).median == pytest.approx(2.0, rel=0.06)


@pytest.mark.parametrize(
    ("n", "rank", "confidence"),
    [(1, 0, 0.0), (2, 0, 0.5), (5, 0, 0.9375), (6, 0, 0.96875), (8, 0, 0.9921875), (9, 1, 0.9609375)],
)
def test_the_interval_of_a_few_values(n: int, rank: int, confidence: float) -> None:
    values = [float(v) for v in range(n)]
    found = median_interval(random.Random(0).sample(values, n))
    assert found == Interval(statistics.median(values), values[rank], values[n - 1 - rank], confidence, n)


def test_the_interval_of_a_hundred_values_is_the_one_in_the_tables() -> None:
    found = median_interval([float(v) for v in range(1, 101)])
    assert (found.low, found.median, found.high) == (40.0, 50.5, 61.0)
    assert found.confidence == pytest.approx(0.9648, abs=1e-4)
    assert median_interval([1.0] * 5000).confidence >= 0.95


def test_nothing_has_no_median() -> None:
    with pytest.raises(ValueError, match="no median of an empty list"):
        median_interval([])


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    drawn = random.Random(1)
    held = 0
    for _ in range(1000):
        found = median_interval([drawn.expovariate(1.0) for _ in range(30)])
        held += found.low <= 0.6931 <= found.high
    assert held / 1000 == pytest.approx(0.957, abs=0.02)  # binomial, 30 throws: 95.7 %


def test_one_outlier_changes_nothing() -> None:
    calm = median_ratio([2.0] * 30, [1.0] * 30)
    assert median_ratio([2.0] * 29 + [900.0], [1.0] * 30) == calm
    with pytest.raises(ValueError):
        median_ratio([1.0, 2.0], [1.0])


def test_threads_come_back() -> None:
    before = torch.get_num_threads()
    with pytest.raises(KeyError), torch_threads(before + 1):
        assert torch.get_num_threads() == before + 1
        raise KeyError
    assert torch.get_num_threads() == before
    with torch_threads(None):
        assert torch.get_num_threads() == before


def test_more_threads_than_a_process_can_have_are_refused() -> None:
    before = torch.get_num_threads()
    with pytest.raises(PruningError, match="100000 threads are too many"), torch_threads(100_000):
        pytest.fail("not reached")
    assert torch.get_num_threads() == before
