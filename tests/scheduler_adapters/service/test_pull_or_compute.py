"""Which way is quicker, by what either took: prompts that were measured come again, with noise and slow links."""

from __future__ import annotations

import random
from bisect import bisect

import pytest

from scheduler_adapters.service.pull_or_compute import PullOrCompute, TimeByTokens

# Milliseconds that real processes took to pull the head of a prompt, and to compute a prompt (benchmarks.prefix_peers).
PULLED = {64: 5.2, 128: 5.4, 256: 6.5, 512: 7.3, 1024: 9.0, 2048: 14.0, 3072: 14.5}
COMPUTED = {8: 10.0, 72: 12.9, 136: 15.9, 264: 26.4, 520: 45.3, 1032: 86.0, 2056: 211.9, 3080: 367.3}
REST = 8
TRIED_AGAIN = 32


class Prompts:
    """Prompts of a service: each head is computed where it comes first, and pulled or computed where it comes next."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.choice = PullOrCompute()
        self.slower = 1.0  # the link

    def noisy(self, milliseconds: float) -> float:
        """Mostly 10 % more or less, now and then three times as long."""
        return milliseconds / 1e3 * self.random.uniform(0.9, 1.1) * (3 if self.random.random() < 0.06 else 1)

    def next(self, tokens: int) -> bool:
        """Whether the next prompt with a head of so many tokens was pulled."""
        self.choice.compute.add(tokens + REST, self.noisy(COMPUTED[tokens + REST]))
        pulls = self.choice.pays(tokens, REST)
        if pulls:
            self.choice.pull.add(tokens, self.noisy(self.slower * PULLED[tokens]))
        computes = REST if pulls else tokens + REST
        self.choice.compute.add(computes, self.noisy(COMPUTED[computes]))
        return pulls

    def right(self, tokens: int, *, pulls: bool) -> bool:
        """Whether a prompt took at most 5 % more than it would have the other way."""
        pulling, computing = self.slower * PULLED[tokens] + COMPUTED[REST], COMPUTED[tokens + REST]
        return pulling <= 1.05 * computing if pulls else computing <= 1.05 * pulling

    def wrong_of(self, lengths: list[int]) -> int:
        return sum(not self.right(tokens, pulls=self.next(tokens)) for tokens in lengths)

    def shuffled(self, each: int) -> list[int]:
        return self.random.sample([tokens for tokens in PULLED for _ in range(each)], each * len(PULLED))


def measured(times: dict[int, float], *, rounds: int = 1) -> TimeByTokens:
    made = TimeByTokens()
    for _ in range(rounds):
        for tokens, seconds in times.items():
            made.add(tokens, seconds)
    return made


def between(times: dict[int, float], tokens: int) -> float:
    at = sorted(times)
    low, high = at[bisect(at, tokens) - 1], at[bisect(at, tokens)]
    return times[low] + (times[high] - times[low]) * (tokens - low) / (high - low)


def test_nothing_is_known_before_anything_was_measured() -> None:
    assert TimeByTokens().seconds(100) is None
    assert PullOrCompute().pays(100, 1)


def test_no_line_is_needed_to_know_what_a_length_takes() -> None:
    """Computing grows faster than its tokens: each length is known by those next to it."""
    curve = {tokens: 0.004 + 4e-5 * tokens + 2e-8 * tokens**2 for tokens in (8, 72, 264, 1032, 3080)}
    known = measured(curve)
    for tokens in (*curve, 40, 600, 2000):
        expected = curve.get(tokens) or between(curve, tokens)
        assert known.seconds(tokens) == pytest.approx(expected), tokens
    before = known.misjudged_s
    known.add(72, 2 * curve[72])
    assert known.misjudged_s - before == pytest.approx(curve[72])


def test_one_length_tells_of_lengths_near_it_and_two_of_all_and_no_time_is_negative() -> None:
    one = measured({100: 0.01})
    assert one.seconds(120) == pytest.approx(0.012)
    assert (one.seconds(300), one.seconds(40)) == (None, None)
    line = measured({1000: 0.03, 2000: 0.05})
    assert line.seconds(3000) == pytest.approx(0.07)
    assert line.seconds(500) == pytest.approx(0.02)
    steep = measured({1000: 0.1, 3000: 0.5})
    assert steep.seconds(10) == pytest.approx(0.001)  # its share of 1,000 tokens: no latency is below 0
    falling = measured({100: 0.3, 1000: 0.1})
    assert (falling.seconds(10_000), falling.seconds(10)) == (pytest.approx(0.1), pytest.approx(0.1))


def test_a_time_by_chance_is_no_news() -> None:
    known = measured({100: 0.01, 1000: 0.02}, rounds=5)
    for _ in range(2):
        known.add(100, 0.2)
        assert known.seconds(1000) == pytest.approx(0.02)
    known.add(1000, 0.02)
    assert known.seconds(100) == pytest.approx(0.01)


def test_a_change_at_one_length_is_one_at_all_lengths_and_a_quick_time_is_believed_at_once() -> None:
    known = measured({100: 0.01, 1000: 0.02}, rounds=5)
    for _ in range(3):
        known.add(100, 0.2)
    assert known.seconds(1000) == pytest.approx(0.4)
    for _ in range(100):
        known.add(100, 0.2)
    assert known.seconds(1000) == pytest.approx(0.4)
    known.add(100, 0.01)
    assert known.seconds(1000) == pytest.approx(0.02)


def test_a_length_that_changes_alone_is_learned() -> None:
    known = measured({100: 0.01, 1000: 0.02, 3000: 0.05}, rounds=5)
    for _ in range(10):
        for tokens, seconds in ((100, 0.01), (1000, 0.04), (3000, 0.05)):
            known.add(tokens, seconds)
    assert known.seconds(1000) == pytest.approx(0.04)
    assert known.seconds(100) == pytest.approx(0.01)


@pytest.mark.parametrize("seed", range(8))
def test_the_choice_is_right_for_what_was_measured(seed: int) -> None:
    """The first prompts, which are pulled to learn, count as well."""
    prompts = Prompts(seed)
    lengths = prompts.shuffled(each=30)
    assert prompts.wrong_of(lengths) <= 0.05 * len(lengths)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("length", [256, 3072])
def test_a_link_that_slows_twenty_times_is_noticed_at_one_length_and_recovers(seed: int, length: int) -> None:
    prompts = Prompts(seed)
    prompts.wrong_of(prompts.shuffled(each=10))
    prompts.slower = 20.0 * 3  # also 3,072 tokens are computed in less by now
    pulled = [prompts.next(length) for _ in range(12)]
    assert sum(pulled) <= 5
    assert not any(pulled[-6:])
    tried = sum(prompts.next(tokens) for tokens in prompts.shuffled(each=32))
    assert tried <= 7 + 1 + 3  # 1 of 32, and where chance makes one look quick
    prompts.slower = 1.0
    since = next(number for number in range(2 * TRIED_AGAIN) if prompts.next(length))
    assert since < TRIED_AGAIN
    assert prompts.wrong_of(prompts.shuffled(each=20)) <= 0.05 * 20 * len(PULLED)


def test_a_way_that_is_slower_is_tried_now_and_then() -> None:
    choice = PullOrCompute()
    for tokens in (100, 1000, 3000):
        choice.pull.add(tokens, 0.03 + 1e-5 * tokens)
        choice.compute.add(tokens, 0.001 + 1e-4 * tokens)
    crossover = 0.03 / 9e-5  # 333 tokens: what is behind them takes computing's latency in any case
    right = [choice.pays(tokens, 8) == (tokens > crossover) for tokens in range(1, 1000, 7)]
    assert sum(right) / len(right) >= 0.95
    tries = [choice.pays(10, 8) for _ in range(10 * TRIED_AGAIN)]
    assert sum(tries) == 10
    assert choice.taken_s["pull"] == pytest.approx(0.131)
    assert set(choice.misjudged_s) == {"pull", "compute"}
