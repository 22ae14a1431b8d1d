"""Choices between pulling a prefix, computing it, and doing both. The benchmark says which choices were right, which
cannot be judged, and what wrong choices cost.
"""

import pytest

from benchmarks.prefix_peers import Heard, Judged, Round, Way, judged_of, rows_of, shares


def one(outcome: str, chosen_ms: float, length: int = 64, **given_ms: float) -> Round:
    """Returns a round. One of its requests chose the way in which it was served. The ways of its other requests were
    given.
    """
    times = {way: [ms / 1e3] for way, ms in given_ms.items()}
    times.setdefault(outcome, []).append(chosen_ms / 1e3)
    return Round(length, Heard(chosen_ms / 1e3, length), outcome, times)


def test_a_choice_is_judged_by_the_medians_of_all_ways_whichever_was_taken() -> None:
    rounds = [
        one("pulled", 9, computed=20, pulled=11, split=15),
        one("computed", 21, computed=22, pulled=10, split=16),
        one("split", 14, computed=21, pulled=10, split=15),
    ]
    judged = judged_of(rounds)
    assert judged is not None
    assert judged.chosen == ["pulled", "computed", "split"]
    assert {way: found.median for way, found in judged.ways.items()} == {
        "pulled": pytest.approx(10),
        "computed": pytest.approx(21),
        "split": pytest.approx(15),
    }
    row = shares([judged])
    assert (row["right"], row["judged"]) == (0.333, 3)
    assert (row["right_apart"], row["apart"], row["right_clear"], row["clear"]) == (0.333, 3, 0.333, 3)
    assert (row["regret_ms"], row["regret_total_ms"]) == (5.33, 16.0)
    assert (row["regret_if_pulled_ms"], row["regret_if_computed_ms"]) == (0.0, 11.0)


def test_ways_that_differ_by_less_than_their_noise_count_apart_and_their_regret_in_full() -> None:
    near = Judged(["pulled", "pulled"], {"pulled": Way(12.0, 1.0), "computed": Way(10.0, 1.0)})
    small = Judged(["pulled"], {"pulled": Way(10.5, 0.1), "computed": Way(10.0, 0.1)})
    clear = Judged(["pulled", "computed"], {"pulled": Way(10.0, 1.0), "computed": Way(30.0, 1.0)})
    row = shares([near, small, clear])
    assert (row["right"], row["judged"]) == (0.2, 5)
    assert (row["right_apart"], row["apart"]) == (0.333, 3)
    assert (row["right_clear"], row["clear"]) == (0.5, 2)
    assert row["regret_total_ms"] == 2 * 2.0 + 0.5 + 20.0


def test_a_choice_is_right_if_no_way_is_clearly_quicker_and_one_is_clearly_slower() -> None:
    ways = {"pulled": Way(11.0, 1.0), "split": Way(10.0, 1.0), "computed": Way(30.0, 1.0)}
    row = shares([Judged(["pulled", "split", "computed"], ways)])
    assert (row["right"], row["apart"], row["right_apart"], row["right_clear"]) == (0.333, 3, 0.667, 0.667)
    near = shares([Judged(["pulled"], {**ways, "computed": Way(11.5, 1.0)})])
    assert (near["apart"], near["clear"], near["regret_ms"]) == (0, 0, 1.0)


def test_a_length_that_was_never_pulled_is_not_judged() -> None:
    alone = one("nobody asked", 19, computed=20)
    assert judged_of([alone, alone]) is None
    assert "right" not in rows_of("2 + 1", [alone, alone])[-1]
