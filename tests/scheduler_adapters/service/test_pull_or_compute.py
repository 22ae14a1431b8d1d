"""Which way is quicker, by what either took: lines whose answer is known."""

from __future__ import annotations

import random

import pytest

from scheduler_adapters.service.pull_or_compute import PullOrCompute, TimeByTokens


def measured(latency_s: float, rate_s: float, tokens: list[int], noise: float = 0.0, seed: int = 1) -> TimeByTokens:
    rng, line = random.Random(seed), TimeByTokens()
    for count in tokens:
        line.add(count, (latency_s + rate_s * count) * rng.uniform(1 - noise, 1 + noise))
    return line


def test_nothing_is_known_before_anything_was_measured() -> None:
    assert TimeByTokens().seconds(100) is None
    assert PullOrCompute().pays(100, 1)


def test_latency_and_rate_are_found_and_the_error_is_the_noise() -> None:
    exact = measured(0.02, 1e-4, [100, 900, 300, 5000])
    assert exact.seconds(2000) == pytest.approx(0.22)
    rng = random.Random(2)
    noisy = measured(0.02, 1e-4, [rng.randrange(100, 5000) for _ in range(500)], noise=0.2)
    assert noisy.seconds(2000) == pytest.approx(0.22, rel=0.2)
    assert 0.08 < noisy.misjudged_s / noisy.taken_s < 0.16  # the mean of up to 20 % up or down is 10 %


def test_one_length_tells_of_lengths_near_it_and_times_are_never_negative() -> None:
    one = measured(0.0, 1e-4, [100] * 5)
    assert one.seconds(120) == pytest.approx(0.012)
    assert (one.seconds(300), one.seconds(40)) == (None, None)
    falling = TimeByTokens()
    for count, seconds in ((100, 0.3), (1000, 0.1)):
        falling.add(count, seconds)
    assert falling.seconds(10_000) == pytest.approx(0.2, rel=0.05)
    steep = TimeByTokens()
    for count, seconds in ((1000, 0.1), (2000, 0.4)):
        steep.add(count, seconds)
    estimate = steep.seconds(10)
    assert estimate is not None
    assert estimate > 0


def test_what_was_measured_last_counts() -> None:
    line = measured(0.0, 1e-3, [100, 900] * 20)
    for _ in range(100):
        line.add(500, 0.005)
    assert line.seconds(500) == pytest.approx(0.005, rel=0.3)


def test_the_crossover_is_where_the_lines_cross_and_a_slow_way_is_tried_now_and_then() -> None:
    choice = PullOrCompute()
    for tokens in (100, 1000, 3000):
        choice.pull.add(tokens, 0.03 + 1e-5 * tokens)
        choice.compute.add(tokens, 0.001 + 1e-4 * tokens)
    crossover = 0.03 / 9e-5  # 333 tokens: what is behind them takes computing's latency in any case
    assert next(tokens for tokens in range(300, 2000, 10) if choice.pays(tokens, 8)) == 340
    right = [choice.pays(tokens, 8) == (tokens > crossover) for tokens in range(1, 1000, 7)]
    assert sum(right) / len(right) >= 0.95
    tries = [choice.pays(10, 8) for _ in range(320)]
    assert sum(tries) == 10
    assert choice.taken_s["pull"] == pytest.approx(0.131)
    assert set(choice.misjudged_s) == {"pull", "compute"}
