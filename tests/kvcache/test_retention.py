"""Tests the code that represents the hint of a page."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from kvcache import InvalidRequestError, RangeRetention, Retention
from kvcache.retention import LEVEL_OF, NEUTRAL, SHARED, merge_codes, page_hints

LAST, FIRST = Retention(session_continues=True), Retention(session_continues=False)


@pytest.mark.parametrize(
    ("hint", "level"),
    [
        (Retention(), 2),
        (LAST, 4),
        (FIRST, 0),
        (Retention(priority=0), 0),
        (Retention(priority=30), 1),
        (Retention(priority=12), 0),
        (Retention(priority=13), 1),
        (Retention(priority=37), 1),
        (Retention(priority=38), 2),
        (Retention(priority=60), 2),
        (Retention(priority=62), 2),
        (Retention(priority=63), 3),
        (Retention(priority=87), 3),
        (Retention(priority=88), 4),
        (Retention(priority=75), 3),
        (Retention(priority=100), 4),
        (Retention(session_continues=True, priority=0), 2),
        (Retention(session_continues=False, priority=75), 1),
        (Retention(session_continues=True, priority=100), 4),
        (Retention(session_continues=False, priority=0), 0),
    ],
)
def test_session_and_priority_give_one_level(hint: Retention, level: int) -> None:
    assert LEVEL_OF[page_hints(hint, 3, 4).codes].tolist() == [level] * 3


@pytest.mark.parametrize(
    ("seconds", "kind"),
    [(0.1, 1), (1, 1), (4, 1), (4.1, 2), (16, 2), (17, 3), (64, 3), (65, 4), (1024, 5), (1025, 6), (4097, 6), (1e6, 6)],
)
def test_similar_times_to_live_are_of_one_class(seconds: float, kind: int) -> None:
    """The times to live of a class are at most four times those of the previous class. A page therefore never waits
    long behind a page with a much longer life.
    """
    (code,) = page_hints(Retention(session_continues=True, ttl_s=seconds), 1, 1).codes.tolist()
    assert (code // 5, LEVEL_OF[code]) == (kind, 4)
    assert code < SHARED


def test_a_range_gives_its_hint_only_to_pages_that_lie_completely_in_it() -> None:
    hint = Retention(
        session_continues=False,
        ranges=(RangeRetention(0, 11, priority=100), RangeRetention(17, priority=75, ttl_s=3.0)),
    )
    hints = page_hints(hint, 7, 4)
    # Page 2 holds token 11, and page 4 holds token 16. Neither page lies in a range.
    assert LEVEL_OF[hints.codes].tolist() == [4, 4, 0, 0, 0, 3, 3]
    assert hints.lives.tolist() == [math.inf] * 5 + [3.0, 3.0]
    codes, lives = hints.of(np.array([6, 0]))
    assert (LEVEL_OF[codes].tolist(), lives.tolist()) == ([3, 4], [3.0, math.inf])
    assert page_hints(LAST, 3, 4).lives.tolist() == [math.inf] * 3
    without_a_time = page_hints(Retention(ranges=(RangeRetention(5, 16, priority=100),)), 5, 4)
    assert without_a_time.lives.tolist() == [math.inf] * 5
    assert LEVEL_OF[without_a_time.codes].tolist() == [2, 2, 4, 4, 2]
    assert page_hints(Retention(ranges=(RangeRetention(100, 200),)), 3, 4).codes.tolist() == [NEUTRAL] * 3
    assert LEVEL_OF[page_hints(Retention(ranges=(RangeRetention(5, 6, priority=0),)), 3, 4).codes].tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: Retention(priority=101), "priority is 101: an integer from 0 to 100"),
        (lambda: Retention(priority=-1), "priority is -1"),
        (lambda: Retention(ttl_s=0.0), "ttl_s is 0.0"),
        (lambda: Retention(ttl_s=math.inf), "ttl_s is inf"),
        (lambda: Retention(session_continues="no"), "session_continues is 'no'"),  # pyright: ignore[reportArgumentType]
        (lambda: Retention(ranges=(FIRST,)), "retention: ranges is Retention"),  # pyright: ignore[reportArgumentType]
        (lambda: RangeRetention(3, 3), "from token 3 to 3 has no tokens"),
        (lambda: RangeRetention(-1), "from token -1"),
        (lambda: RangeRetention("1"), "from token '1' to None"),  # pyright: ignore[reportArgumentType]
        (lambda: RangeRetention(0, 2.5), "from token 0 to 2.5"),  # pyright: ignore[reportArgumentType]
        (lambda: RangeRetention(0, 3, ttl_s=-2.0), "ttl_s is -2.0"),
    ],
)
def test_a_hint_out_of_range_is_refused(made: object, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        made()  # pyright: ignore[reportCallIssue] - the table's functions


def test_a_neutral_hint_is_the_default_and_takes_no_bytes() -> None:
    for neutral in (Retention(priority=50), Retention(None, 50, None, ())):
        assert msgspec.json.encode(neutral) == b"{}"
    assert msgspec.json.encode(RangeRetention(3, priority=50)) == b'{"start":3}'


def test_ranges_in_a_list_become_a_tuple() -> None:
    ranges = [RangeRetention(0, 3)]
    hint = Retention(ranges=ranges)  # pyright: ignore[reportArgumentType]
    ranges.clear()
    assert hint.ranges == (RangeRetention(0, 3),)


def test_the_latest_hint_counts_but_a_page_of_several_sessions_is_not_put_first() -> None:
    first, last = page_hints(FIRST, 1, 1).codes, page_hints(LAST, 1, 1).codes
    none = np.full(1, NEUTRAL, np.uint8)
    assert merge_codes(none, first).tolist() == first.tolist()
    assert merge_codes(last, first).tolist() == first.tolist()  # The continued session has ended.
    # Two requests have used the page, and the sessions of both have ended. The page counts as shared, so it is not
    # evicted first.
    assert merge_codes(first, first).tolist() == [SHARED]
    assert merge_codes(np.array([SHARED], np.uint8), first).tolist() == [SHARED]
    assert merge_codes(np.array([SHARED], np.uint8), last).tolist() == last.tolist()
    assert merge_codes(first, none).tolist() == none.tolist()
    assert merge_codes(first, None).tolist() == [SHARED]
    assert merge_codes(last, None).tolist() == last.tolist()
