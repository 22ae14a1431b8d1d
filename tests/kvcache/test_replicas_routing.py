from __future__ import annotations

import math

import pytest

from kvcache import InvalidParamsError, Routing
from kvcache.router import Router

EVERYWHERE = [True] * 4


def test_ties_go_to_the_replica_with_the_fewest_claims_and_then_to_the_lowest_index() -> None:
    router = Router(3, Routing())
    assert router.recommend([4, 4, 4], [0, 0, 0], EVERYWHERE[:3]) == 0
    assert router.recommend([4, 4, 4], [2, 1, 1], EVERYWHERE[:3]) == 1


def test_missing_pages_are_weighed_against_recent_load() -> None:
    router = Router(2, Routing(load_weight=0.5, load_decay=0.98))
    assert router.recommend([10, 4], [0, 0], [True, True]) == 1
    for _ in range(4):
        router.admitted(1, 5)
    # The load of replica 0 is 10. The load of replica 1 is 4 plus half of the nearly 20 pages that were computed there.
    assert router.recommend([10, 4], [0, 0], [True, True]) == 0
    for _ in range(200):
        router.admitted(0, 0)
    assert router.recommend([10, 4], [0, 0], [True, True]) == 1  # The router forgets old load.


def test_a_shared_head_alone_does_not_draw_everything_to_one_replica() -> None:
    router, counts = Router(4, Routing()), [0] * 4
    cached = [1, 0, 0, 0]
    for _ in range(200):
        place = router.recommend([10 - hit for hit in cached], [0] * 4, EVERYWHERE)
        router.admitted(place, 10 - cached[place])
        counts[place] += 1
    assert max(counts) < 70


def test_a_replica_where_the_request_fits_comes_before_one_that_costs_less() -> None:
    router = Router(3, Routing())
    assert router.recommend([1, 9, 8], [0, 0, 0], [False, True, True]) == 2
    assert router.recommend([1, 9, 8], [0, 0, 0], [False, False, False]) == 0


def test_the_old_routing_rules_count_claims_or_take_turns() -> None:
    router = Router(3, Routing(rule="least-loaded"))
    assert router.without_looking([2, 1, 1]) == 1
    router = Router(3, Routing(rule="round-robin"))
    turns = []
    for _ in range(4):
        # A recommendation does not advance the round robin.
        assert router.without_looking([0, 0, 0]) == router.without_looking([5, 0, 0])
        turns.append(router.without_looking([0, 0, 0]))
        router.admitted(turns[-1], 1)
    assert turns == [0, 1, 2, 0]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rule": "random"}, "rule is 'random': one of prefix, least-loaded, round-robin"),
        ({"load_weight": -0.1}, "load_weight is -0.1"),
        ({"load_weight": math.nan}, "load_weight is nan"),
        ({"load_decay": 1.0}, "load_decay is 1.0"),
        ({"load_decay": -0.5}, "load_decay is -0.5"),
    ],
)
def test_impossible_routing_settings_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidParamsError, match=message):
        Routing(**values)  # pyright: ignore[reportArgumentType] - wrong on purpose
