from __future__ import annotations

from kvcache.routing import Router


def test_ties_go_to_the_fewest_claimed_then_the_lowest() -> None:
    router = Router(3)
    assert router.recommend([4, 4, 4], [0, 0, 0]) == 0
    assert router.recommend([4, 4, 4], [2, 1, 1]) == 1


def test_missing_pages_are_weighed_against_recent_load() -> None:
    router = Router(2)
    assert router.recommend([10, 4], [0, 0]) == 1
    for _ in range(4):
        router.admitted(1, 5)
    assert router.recommend([10, 4], [0, 0]) == 0  # 4 + half of nearly 20 pages computed there
    for _ in range(200):
        router.admitted(0, 0)
    assert router.recommend([10, 4], [0, 0]) == 1  # old load is forgotten


def test_a_shared_head_alone_does_not_draw_everything_to_one_replica() -> None:
    router, counts = Router(4), [0] * 4
    cached = [1, 0, 0, 0]
    for _ in range(200):
        place = router.recommend([10 - hit for hit in cached], [0] * 4)
        router.admitted(place, 10 - cached[place])
        counts[place] += 1
    assert max(counts) < 70
