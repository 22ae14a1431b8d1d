"""Measured times decide whether a prefix is pulled or computed. The tests replay measured prompts, and add noise and
slow links.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import NamedTuple

import pytest

from scheduler_adapters.pull_or_compute import PullOrCompute, TimeByTokens

# The milliseconds that benchmarks.prefix_peers has measured: to pull the beginning of a prompt, and to compute a
# prompt. The keys are numbers of tokens.
PULLED = {64: 5.2, 128: 5.4, 256: 6.5, 512: 7.3, 1024: 9.0, 2048: 14.0, 3072: 14.5}
COMPUTED = {8: 10.0, 72: 12.9, 136: 15.9, 264: 26.4, 520: 45.3, 1032: 86.0, 2056: 211.9, 3080: 367.3}
REST = 8
TRIED_AGAIN, TRIED_ANYWAY = 32, 128


class Prompt(NamedTuple):
    """A prompt, and the milliseconds that each way takes. One way pulls the beginning of the prompt and computes the
    rest. The other way computes the whole prompt. The times were measured with two prefill processes and the small
    Llama of `benchmarks.prefix_peers`, on one host, or on two hosts with a link of this rate. The machine was busy with
    other work.
    """

    cached: int
    tokens: int
    rest: int
    pull_ms: float
    behind_ms: float
    whole_ms: float

    def took_ms(self, *, pulls: bool) -> float:
        return self.pull_ms + self.behind_ms if pulls else self.whole_ms


TIMES = {
    where: [Prompt(*row) for row in rows]
    for where, rows in json.loads(Path(__file__).with_name("prefix_times.json").read_text()).items()
}


def replayed(prompts: list[Prompt]) -> list[bool]:
    """Returns for each prompt whether its beginning is pulled. The choice knows the times of all earlier prompts.
    Between two of these prompts, a prompt that no source has is computed.
    """
    choice, others = PullOrCompute(), random.Random(0)
    unknown = [one for one in prompts if not one.cached]
    pulled: list[bool] = []
    for one in prompts:
        other = others.choice(unknown)
        choice.compute.add(other.tokens + other.rest, other.whole_ms / 1e3)
        pulled.append(choice.pays(one.cached, one.tokens, one.rest))
        if pulled[-1]:
            choice.pull.add(one.tokens, one.pull_ms / 1e3)
            choice.compute.add(one.rest, one.behind_ms / 1e3, one.cached + one.tokens)
        else:
            choice.compute.add(one.tokens + one.rest, one.whole_ms / 1e3, one.cached)
    return pulled


class Prompts:
    """The prompts of a simulated service. The first process computes the beginning of each prompt. The next process
    pulls the beginning or computes it again.
    """

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.choice = PullOrCompute()
        self.slower = 1.0  # the link

    def noisy(self, milliseconds: float) -> float:
        """Adds noise to a time. Usually the time changes by up to 10 %. Sometimes it is three times as long."""
        return milliseconds / 1e3 * self.random.uniform(0.9, 1.1) * (3 if self.random.random() < 0.06 else 1)

    def next(self, tokens: int) -> bool:
        """Returns whether the beginning of the next prompt, which has this many tokens, was pulled."""
        self.choice.compute.add(tokens + REST, self.noisy(COMPUTED[tokens + REST]))
        pulls = self.choice.pays(0, tokens, REST)
        if pulls:
            self.choice.pull.add(tokens, self.noisy(self.slower * PULLED[tokens]))
        computes, cached = (REST, tokens) if pulls else (tokens + REST, 0)
        self.choice.compute.add(computes, self.noisy(COMPUTED[computes]), cached)
        return pulls

    def right(self, tokens: int, *, pulls: bool) -> bool:
        """Returns whether a prompt took at most 5 % longer in the chosen way than in the other way."""
        pulling, computing = self.slower * PULLED[tokens] + COMPUTED[REST], COMPUTED[tokens + REST]
        return pulling <= 1.05 * computing if pulls else computing <= 1.05 * pulling

    def wrong_of(self, lengths: list[int]) -> int:
        return sum(not self.right(tokens, pulls=self.next(tokens)) for tokens in lengths)

    def shuffled(self, each: int) -> list[int]:
        return self.random.sample([tokens for tokens in PULLED for _ in range(each)], each * len(PULLED))


def times() -> TimeByTokens:
    return PullOrCompute().compute


def measured(took: dict[int, float], *, rounds: int = 1) -> TimeByTokens:
    made = PullOrCompute().pull
    for _ in range(rounds):
        for tokens, seconds in took.items():
            made.add(tokens, seconds)
    return made


def test_before_any_measurement_there_is_no_estimate() -> None:
    assert times().seconds(100) is None
    assert PullOrCompute().pays(0, 100, 1)


def test_computing_grows_faster_than_its_tokens_and_tokens_behind_cached_ones_cost_more() -> None:
    def took(cached: int, tokens: int) -> float:
        return 0.004 + 4e-5 * tokens + 2e-8 * tokens * (cached + tokens / 2) + 3e-6 * cached

    known = times()
    for cached, tokens in ((0, 8), (0, 72), (0, 264), (0, 1032), (0, 3080), (1000, 8), (3000, 8)):
        known.add(tokens, took(cached, tokens), cached)
    for cached, tokens in ((0, 40), (0, 600), (0, 2000), (3000, 72), (1000, 1000), (8000, 8)):
        assert known.seconds(tokens, cached) == pytest.approx(took(cached, tokens), rel=1e-3), (cached, tokens)
    before = known.misjudged_s
    known.add(72, 2 * took(0, 72))
    assert known.misjudged_s - before == pytest.approx(took(0, 72), rel=1e-3)


def test_one_measured_length_predicts_near_lengths_and_two_predict_all() -> None:
    one = measured({100: 0.01})
    assert one.seconds(120) == pytest.approx(0.012)
    assert (one.seconds(300), one.seconds(40)) == (None, None)
    line = measured({1000: 0.03, 2000: 0.05})
    assert line.seconds(3000) == pytest.approx(0.07)
    assert line.seconds(500) == pytest.approx(0.02)
    steep = measured({1000: 0.1, 3000: 0.5})
    assert 0 < (steep.seconds(10) or 0) < 0.002
    falling = measured({100: 0.3, 1000: 0.1})
    assert 0 < (falling.seconds(10) or 0) <= (falling.seconds(10_000) or 0)


def test_times_that_vary_much_are_averaged_and_one_that_is_far_off_is_not_followed() -> None:
    known = measured({100: 0.01, 1000: 0.02}, rounds=2)
    for number in range(24):
        known.add(100, 0.01 * 3 ** (number % 2))
        known.add(1000, 0.02 * 3 ** (number % 2))
    assert 0.015 < (known.seconds(100) or 0) < 0.03
    before = known.seconds(100)
    known.add(100, 1.0)
    assert known.seconds(100) == pytest.approx(before, rel=0.3)


def test_a_chance_deviation_does_not_change_the_estimate() -> None:
    known = measured({100: 0.01, 1000: 0.02}, rounds=5)
    for _ in range(2):
        known.add(100, 0.2)
        assert known.seconds(1000) == pytest.approx(0.02, rel=0.05)
    known.add(1000, 0.02)
    assert known.seconds(1000) == pytest.approx(0.02, rel=0.05)


def test_a_change_at_one_length_applies_to_all_and_a_quick_time_is_believed_at_once() -> None:
    known = measured({100: 0.01, 1000: 0.02}, rounds=5)
    for _ in range(3):
        known.add(100, 0.2)
    assert (known.seconds(1000) or 0) > 0.2
    for _ in range(20):
        known.add(100, 0.2)
    assert (known.seconds(1000) or 0) > 0.2
    known.add(100, 0.01)
    assert (known.seconds(1000) or 1) < 0.03


def test_a_change_that_concerns_only_one_length_is_learned() -> None:
    known = measured({100: 0.01, 1000: 0.02, 3000: 0.05}, rounds=5)
    for _ in range(12):
        for tokens, seconds in ((100, 0.01), (1000, 0.03), (3000, 0.07)):
            known.add(tokens, seconds)
    assert known.seconds(2000) == pytest.approx(0.05, rel=0.1)
    assert known.seconds(100) == pytest.approx(0.01, rel=0.1)


@pytest.mark.parametrize("seed", range(8))
def test_the_choice_is_right_for_the_measured_prompts(seed: int) -> None:
    """All prompts count, even the first prompts, which are pulled only to measure a pull."""
    prompts = Prompts(seed)
    lengths = prompts.shuffled(each=30)
    assert prompts.wrong_of(lengths) <= 0.05 * len(lengths)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("length", "slower"), [(256, 60.0), (3072, 60.0), (256, 6.0)])
def test_a_link_that_slows_is_noticed_at_one_length_and_recovers(seed: int, length: int, slower: float) -> None:
    prompts = Prompts(seed)
    prompts.wrong_of(prompts.shuffled(each=10))
    prompts.slower = slower
    pulled = [prompts.next(length) for _ in range(12)]
    assert sum(pulled) <= 6
    assert not any(pulled[-4:])
    prompts.wrong_of(prompts.shuffled(each=10))
    prompts.slower = 1.0
    pulled_since = [prompts.next(length) for _ in range(TRIED_ANYWAY + 8)]
    assert all(pulled_since[-4:])
    if slower < 10.0:  # If the link was less than ten times slower, a trial costs little.
        assert pulled_since.index(True) <= TRIED_AGAIN
    assert prompts.wrong_of(prompts.shuffled(each=20)) <= 0.05 * 20 * len(PULLED)


@pytest.mark.parametrize("where", TIMES)
def test_measured_prompts_take_at_most_a_tenth_longer_than_by_the_better_fixed_rule(where: str) -> None:
    """Only hindsight shows which of the two fixed rules is better. The times come from a busy machine, so many times
    are three times as long as usual.
    """
    prompts = TIMES[where]
    fixed = min(sum(one.took_ms(pulls=pulls) for one in prompts) for pulls in (True, False))
    chosen = sum(one.took_ms(pulls=pulls) for one, pulls in zip(prompts, replayed(prompts), strict=True))
    assert chosen <= 1.1 * fixed


def test_the_slower_way_is_tried_now_and_then() -> None:
    choice = PullOrCompute()
    for tokens in (100, 1000, 3000):
        choice.pull.add(tokens, 0.03 + 1e-5 * tokens)
        choice.compute.add(tokens, 0.001 + 1e-4 * tokens)
    # The crossover is at 333 tokens. Both ways compute the rest of the prompt, so the latency of a computation does not
    # count.
    crossover = 0.03 / 9e-5
    right = [choice.pays(0, tokens, 8) == (tokens > crossover) for tokens in range(1, 1000, 7)]
    assert sum(right) / len(right) >= 0.95
    choice.pays(0, 100, 200)
    tries = [choice.pays(0, 100, 200) for _ in range(20 * TRIED_AGAIN)]
    assert sum(tries) == 20
    assert choice.taken_s["pull"] == pytest.approx(0.131)
    assert set(choice.misjudged_s) == {"pull", "compute"}


def both(pull_s: float, compute_s: float, latency_s: float = 0.001) -> PullOrCompute:
    """Returns an estimate that has measured a pull and a computation, each with this time for a thousand tokens."""
    made = PullOrCompute()
    for tokens in (100, 1000, 4000):
        made.pull.add(tokens, latency_s + pull_s * tokens / 1e3)
        made.compute.add(tokens, latency_s + compute_s * tokens / 1e3)
    return made


@pytest.mark.parametrize(("pull_s", "share"), [(0.1, 0.5), (0.3, 0.25), (0.1 / 3, 0.75)])
def test_a_pull_from_the_end_meets_the_computation_where_both_arrive_at_once(pull_s: float, share: float) -> None:
    made = both(pull_s, 0.1)
    assert made.meets(0, 3200, 16) == pytest.approx(3200 * share, abs=16)
    assert made.meets(800, 3200 + 800, 16) == pytest.approx(3200 * share, abs=16)
    assert made.meets(0, 3200, 16) % 16 == 0


def test_the_last_pages_are_computed_if_a_question_takes_longer() -> None:
    made = both(0.01, 0.1, latency_s=0.02)
    assert made.meets(0, 3200, 16) > 2000
    assert made.meets(3100, 3200, 16) > 0
    slow = both(0.01, 0.1)
    slow.pull = measured({tokens: 0.05 + 1e-5 * tokens for tokens in (100, 1000, 4000)})
    assert slow.meets(3000, 3200, 16) == 0
    assert slow.meets(3200, 3200, 16) == slow.meets(3201, 3200, 16) == slow.meets(0, 15, 16) == 0


@pytest.mark.parametrize(
    ("pull_s", "compute_s", "splits"), [(0.1, 0.1, True), (0.1, 0.3, True), (0.1, 3.0, False), (3.0, 0.1, False)]
)
def test_a_prompt_is_split_if_neither_way_is_far_quicker(pull_s: float, compute_s: float, splits: bool) -> None:
    assert both(pull_s, compute_s).splits(0, 3200, 8, 16) == splits


def test_nothing_is_split_before_both_times_are_known() -> None:
    known = both(0.1, 0.1)
    for made in (PullOrCompute(), PullOrCompute(), PullOrCompute()):
        assert not made.splits(0, 3200, 8, 16)
        made.pull = known.pull
        assert not made.splits(0, 3200, 8, 16)
        assert made.meets(0, 3200, 16) == 0
    assert PullOrCompute().pulled_within(1.0, 3200, 16) == 3200


def test_a_stretch_is_as_long_as_its_time_allows() -> None:
    made = both(0.1, 0.1)
    assert made.pulled_within(1.0, 3200, 16) == 3200
    assert made.pulled_within(0.16, 3200, 16) == pytest.approx(1600, abs=32)
    assert made.pulled_within(0.16, 3200, 16) % 16 == 0
    assert made.pulled_within(1e-6, 3200, 16) == 16
