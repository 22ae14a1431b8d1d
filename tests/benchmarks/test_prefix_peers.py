"""Choices between pulling and computing: which were right, which cannot be judged, and what they cost."""

import pytest

from benchmarks.prefix_peers import Heard, Judged, Pair, judged_of, rows_of, shares


def pair(computed_ms: float, second_ms: float, outcome: str, pulled_ms: float, length: int = 64) -> Pair:
    heard = Heard(computed_ms / 1e3, 0)
    return Pair(length, (heard, heard), Heard(second_ms / 1e3, length), outcome, Heard(pulled_ms / 1e3, length))


def test_a_choice_is_judged_by_the_medians_of_both_ways_whichever_was_taken() -> None:
    judged = judged_of([pair(20, 9, "pulled", 11), pair(22, 21, "computed", 10), pair(21, 20, "computed", 10)])
    assert judged is not None
    assert (judged.pulling, judged.computing) == (pytest.approx(10), pytest.approx(21))
    assert judged.right == [True, False, False]
    assert judged.is_clear
    row = shares([judged])
    assert (row["right"], row["right_clear"], row["judged"], row["clear"]) == (0.333, 0.333, 3, 3)
    assert (row["regret_ms"], row["regret_total_ms"]) == (7.33, 22.0)
    assert (row["regret_if_pulled_ms"], row["regret_if_computed_ms"]) == (0.0, 11.0)


def test_ways_that_differ_by_less_than_their_noise_count_apart_and_their_regret_in_full() -> None:
    near, clear = Judged([True, True], 12.0, 10.0, 3.0), Judged([True, False], 10.0, 30.0, 3.0)
    row = shares([near, clear])
    assert (row["right"], row["judged"], row["right_clear"], row["clear"]) == (0.25, 4, 0.5, 2)
    assert row["regret_total_ms"] == 2 * 2.0 + 20.0


def test_a_length_that_nobody_pulled_is_not_judged() -> None:
    one = pair(20, 19, "nobody asked", 0)._replace(pulled=None)
    assert judged_of([one, one]) is None
    assert "right" not in rows_of("2 + 1", [one, one])[-1]
