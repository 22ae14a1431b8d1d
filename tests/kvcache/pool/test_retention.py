from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache import InvalidRequestError, InvariantError, RangeRetention, Retention
from kvcache.pool.idle_order import MOST_ORDERS, IdleOrder, OrderLog
from kvcache.pool.quotas import SlabQuotas, TenantQuotas
from kvcache.pool.retention import (
    BY_HINT,
    BY_QUOTA,
    LEVEL_OF,
    NEUTRAL,
    SHARED,
    HintedOrder,
    PageHints,
    merge_codes,
    page_hints,
)

POOL = 30
LAST, FIRST = Retention(session_continues=True), Retention(session_continues=False)


def pages(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def said(order: HintedOrder, hint: Retention | None, *ids: int) -> None:
    """A request that used these pages ends, and says `hint` of them."""
    order.hint(pages(*ids), hint and page_hints(hint, len(ids), 1))
    order.append(pages(*ids))


def order_of(share: float = 1.0, **options: object) -> HintedOrder:
    order = HintedOrder(POOL, IdleOrder(POOL, OrderLog(POOL, MOST_ORDERS)), **options)  # pyright: ignore[reportArgumentType] - passed on
    order.share = share
    return order


# ---- what a hint means


def test_there_is_room_for_an_order_of_each_kind() -> None:
    assert SHARED + 2 <= MOST_ORDERS


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
    ],
)
def test_session_and_priority_give_one_level(hint: Retention, level: int) -> None:
    assert LEVEL_OF[page_hints(hint, 3, 4).codes].tolist() == [level] * 3


@pytest.mark.parametrize(
    ("seconds", "kind"),
    [(0.1, 1), (1, 1), (4, 1), (4.1, 2), (16, 2), (17, 3), (64, 3), (65, 4), (1024, 5), (1025, 6), (4097, 6), (1e6, 6)],
)
def test_times_to_live_of_about_one_length_are_of_one_kind(seconds: float, kind: int) -> None:
    """Each is four times as long as the one before it, so that no page waits long behind one that lives longer."""
    (code,) = page_hints(Retention(session_continues=True, ttl_s=seconds), 1, 1).codes.tolist()
    assert (code // 5, LEVEL_OF[code]) == (kind, 4)
    assert code < SHARED


def test_who_watches_is_told_why_each_page_went() -> None:
    order = order_of()
    order.explains = True
    said(order, FIRST, 1)
    said(order, None, 2)
    said(order, LAST, 3)
    assert order.pop(3).tolist() == [1, 2, 3]
    assert order.reasons is not None
    assert order.reasons.tolist() == [BY_HINT, 0, 0]
    quotas = TenantQuotas(POOL, 0.1, {})
    with_quota = order_of(quotas=quotas)
    with_quota.explains = True
    owned(with_quota, quotas, "a", 1, 2, 3, 4)  # three of 30 pages are its own
    said(with_quota, FIRST, 5)
    assert with_quota.pop(2).tolist() == [1, 5]
    assert with_quota.reasons is not None
    assert with_quota.reasons.tolist() == [BY_QUOTA, BY_HINT]


def test_a_range_speaks_for_the_pages_that_lie_in_it() -> None:
    hint = Retention(
        session_continues=False,
        ranges=(RangeRetention(0, 11, priority=100), RangeRetention(17, priority=75, ttl_s=3.0)),
    )
    hints = page_hints(hint, 7, 4)
    # Page 2 holds token 11, page 4 token 16: neither lies in a range.
    assert LEVEL_OF[hints.codes].tolist() == [4, 4, 0, 0, 0, 3, 3]
    assert hints.lives is not None
    assert hints.lives.tolist() == [math.inf] * 5 + [3.0, 3.0]
    assert page_hints(LAST, 3, 4).lives is None
    without_a_time = page_hints(Retention(ranges=(RangeRetention(5, 16, priority=100),)), 5, 4)
    assert without_a_time.lives is None
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
        (lambda: RangeRetention(3, 3), "from token 3 to 3 has no tokens"),
        (lambda: RangeRetention(-1), "from token -1"),
        (lambda: RangeRetention(0, 3, ttl_s=-2.0), "ttl_s is -2.0"),
    ],
)
def test_a_hint_out_of_range_is_refused(made: object, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        made()  # pyright: ignore[reportCallIssue] - the table's functions


def test_the_latest_word_counts_but_a_page_of_many_sessions_is_not_put_first() -> None:
    first, last = page_hints(FIRST, 1, 1).codes, page_hints(LAST, 1, 1).codes
    none = np.full(1, NEUTRAL, np.uint8)
    assert merge_codes(none, first).tolist() == first.tolist()
    assert merge_codes(last, first).tolist() == first.tolist()  # the session that went on has ended
    assert merge_codes(first, first).tolist() == [SHARED]  # used, though a session before it had ended
    assert merge_codes(np.array([SHARED], np.uint8), first).tolist() == [SHARED]
    assert merge_codes(np.array([SHARED], np.uint8), last).tolist() == last.tolist()
    assert merge_codes(first, None).tolist() == [SHARED]
    assert merge_codes(last, None).tolist() == last.tolist()


# ---- the order


def test_without_a_share_it_is_plain_lru_whatever_is_said() -> None:
    order = order_of(0.0)
    said(order, LAST, 1, 2)
    said(order, FIRST, 3, 4)
    said(order, None, 5)
    order.check()
    assert order.pop(5).tolist() == [1, 2, 3, 4, 5]


def test_those_that_go_first_go_first_and_the_others_by_their_lead() -> None:
    order = order_of()
    said(order, LAST, 1, 2)
    said(order, Retention(priority=75), 3)
    said(order, None, 4, 5)
    said(order, Retention(priority=25), 6)
    said(order, FIRST, 7, 8)
    order.check()
    assert order.pop(3).tolist() == [7, 8, 6]
    assert order.pop(2).tolist() == [4, 5]
    order.check()
    assert order.pop(3).tolist() == [3, 1, 2]
    assert order.count == 0


def test_a_hint_decays_and_never_pins() -> None:
    order = order_of()
    said(order, LAST, 1)
    for _ in range(4 * POOL - 2):
        said(order, None, 2)
        order.remove(pages(2))
    said(order, None, 3)
    assert order.pop(1).tolist() == [3]  # still ahead, by a hair
    said(order, None, 3)
    said(order, None, 4)
    assert order.pop(3).tolist() == [3, 1, 4]


def test_only_the_share_follows_hints() -> None:
    order = order_of(0.5)
    said(order, None, *range(1, 11))
    said(order, FIRST, *range(11, 21))  # the newer half: LRU
    assert order.pop(10).tolist() == [*range(1, 11)]
    order.check()


def test_what_follows_hints_is_settled_by_those_who_come() -> None:
    order = order_of(0.5)
    order.append(pages(1, 2, 3, 4))
    order.remove(pages(1, 2))
    before = order.positions()[[3, 4]].tolist()
    order.append(pages())
    assert order.positions()[[3, 4]].tolist() == before


def test_a_hint_is_worth_nothing_after_its_time() -> None:
    now = [0.0]
    order = order_of(clock=lambda: now[0])
    said(order, Retention(session_continues=True, ttl_s=5.0), 1)
    said(order, Retention(session_continues=True, ttl_s=100.0), 2)
    said(order, None, 3, 4)
    assert order.pop(1).tolist() == [3]
    now[0] = 6.0
    assert order.pop(2).tolist() == [1, 4]
    now[0] = 101.0
    said(order, None, 5)
    assert order.pop(2).tolist() == [2, 5]


def test_a_hint_to_go_first_is_worth_nothing_after_its_time_either() -> None:
    now = [0.0]
    order = order_of(clock=lambda: now[0])
    for hint, page in ((FIRST, 1), (None, 2), (FIRST, 3), (None, 4)):
        said(order, hint and Retention(session_continues=False, ttl_s=5.0), page)
    now[0] = 6.0
    assert order.pop(4).tolist() == [1, 2, 3, 4]


def test_a_page_that_moves_takes_its_hint_and_its_time_along() -> None:
    now = [0.0]
    order = order_of(clock=lambda: now[0])
    stays, ends = Retention(session_continues=True, ttl_s=100.0), Retention(session_continues=True, ttl_s=5.0)
    order.hint(pages(1, 2), page_hints(stays, 2, 1))
    order.hint(pages(3), page_hints(ends, 1, 1))
    order.moved(pages(1, 3), pages(11, 13))
    assert order.codes[[1, 3]].tolist() == [NEUTRAL] * 2
    order.append(pages(13, 11, 2))
    said(order, None, 4)
    now[0] = 6.0
    assert order.pop(4).tolist() == [13, 4, 11, 2]


def test_times_of_several_hints_end_one_by_one() -> None:
    now = [0.0]
    order = order_of(clock=lambda: now[0])
    said(order, Retention(session_continues=True, ttl_s=100.0), 1)
    said(order, Retention(session_continues=True, ttl_s=5.0), 2)
    now[0] = 3.0
    said(order, Retention(session_continues=True, ttl_s=5.0), 3)
    said(order, None, 4)
    now[0] = 6.0
    assert order.pop(2).tolist() == [2, 4]
    order.check()


def test_an_evicted_page_takes_no_hint_along() -> None:
    order = order_of()
    said(order, LAST, 1)
    assert order.pop(1).tolist() == [1]
    said(order, None, 1)
    said(order, None, 2)
    assert order.pop(1).tolist() == [1]


class SlowOrder:
    """The contract as lists: `recent` oldest first, `older` with the place at which each page came there."""

    def __init__(self) -> None:
        self.recent: list[int] = []
        self.older: list[tuple[int, int, int]] = []  # place, level, page
        self.levels: dict[int, int] = {}
        self.places = 0

    def append(self, new: list[int], share: float) -> None:
        self.recent += new
        keep = int((1.0 - share) * (len(self.recent) + len(self.older)))
        while new and len(self.recent) > keep:
            page = self.recent.pop(0)
            self.older.append((self.places, self.levels[page], page))
            self.places += 1

    def remove(self, gone: list[int]) -> None:
        self.recent = [page for page in self.recent if page not in gone]
        self.older = [one for one in self.older if one[2] not in gone]

    def pop(self) -> int:
        if not self.older:
            return self.recent.pop(0)
        one = min(self.older, key=lambda one: (one[0] + (one[1] - 2) * 2 * POOL, one[1]))
        self.older.remove(one)
        return one[2]

    def known(self) -> list[int]:
        return self.recent + [page for _, _, page in self.older]


def same_move(order: HintedOrder, slow: SlowOrder, move: str, names: list[int], level: int, share: float) -> None:
    known = slow.known()
    if move == "append":
        new = [name for name in names if name not in known]
        order.share = share
        order.codes[new] = level  # as if by `hint`
        slow.levels.update(dict.fromkeys(new, level))
        order.append(pages(*new))
        slow.append(new, share)
    elif move == "remove":
        gone = [name for name in names if name in known]
        order.remove(pages(*gone))
        slow.remove(gone)
    else:
        count = min(len(names), len(known))
        assert order.pop(count).tolist() == [slow.pop() for _ in range(count)]
    order.check()
    assert sorted(order.pages().tolist()) == sorted(slow.known())
    assert order.count == len(slow.known())


MOVES = ["append", "append", "remove", "pop"]
SHARES = [0.0, 0.3, 0.95, 1.0]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(MOVES),
            st.lists(st.integers(1, POOL), unique=True, max_size=8),
            st.integers(0, 4),
            st.sampled_from(SHARES),
        ),
        max_size=60,
    )
)
def test_any_sequence_equals_the_slow_order(moves: list[tuple[str, list[int], int, float]]) -> None:
    order, slow = order_of(), SlowOrder()
    for move in moves:
        same_move(order, slow, *move)


def test_long_sequences_equal_the_slow_order() -> None:
    """Long enough for every lead to be overtaken."""
    rng, order, slow = random.Random(0), order_of(), SlowOrder()
    for _ in range(3000):
        names = rng.sample(range(1, POOL + 1), rng.randint(0, 8))
        same_move(order, slow, rng.choice(MOVES), names, rng.randint(0, 4), rng.choice(SHARES))


def test_whatever_the_hints_say_it_holds_what_lru_holds_in_a_pool_smaller_by_the_share() -> None:
    rng, share = np.random.default_rng(1), 0.25
    order, lru, free = order_of(share), list[int](), [*range(1, POOL + 1)]
    for _ in range(3000):
        page = int(rng.integers(1, POOL + 1))
        if page in free:  # a miss: another page is evicted where none is free
            free.remove(page)
            if not free:
                free += order.pop(1).tolist()
        else:
            order.remove(pages(page))
        lru = [*[other for other in lru if other != page], page]
        order.hint(pages(page), PageHints(rng.integers(0, 5, 1).astype(np.uint8), None))
        order.append(pages(page))
        assert set(lru[-int((1 - share) * order.count) :]) <= set(order.pages().tolist())


def test_broken_books_are_named() -> None:
    order = order_of()
    said(order, LAST, 1, 2)
    with pytest.raises(InvariantError, match="3 pages asked for, 2 are there"):
        order.pop(3)
    order.codes[1] = NEUTRAL
    with pytest.raises(InvariantError, match="another kind"):
        order.check()
    order = order_of()
    said(order, LAST, 1, 2)
    order.count = 3
    with pytest.raises(InvariantError, match="2 pages, 3 counted"):
        order.check()


# ---- quotas


def owned(order: HintedOrder, quotas: TenantQuotas, salt: str | None, *ids: int) -> None:
    quotas.own(pages(*ids), salt)
    order.append(pages(*ids))


def test_a_tenants_pages_above_its_quota_go_first() -> None:
    quotas = TenantQuotas(POOL, 0.1, {"big": 0.2})
    order = order_of(0.0, quotas=quotas)
    owned(order, quotas, None, 1, 2, 3, 4, 5, 6)
    owned(order, quotas, "small", 10, 11, 12, 13, 14)
    owned(order, quotas, "big", 20, 21, 22, 23, 24, 25, 26)
    order.check()
    assert order.pop(3).tolist() == [10, 11, 20]  # above 3 pages, and above 6; nobody's pages have no quota
    order.check()
    assert order.pop(8).tolist() == [1, 2, 3, 4, 5, 6, 12, 13]
    order.check()


def test_pages_in_use_count_for_no_quota() -> None:
    gone: list[int] = []
    quotas = TenantQuotas(POOL, 0.1, {})
    order = order_of(1.0, quotas=quotas, on_surplus=lambda left: gone.extend(left.tolist()))
    owned(order, quotas, "a", 1, 2, 3, 4, 5)
    owned(order, quotas, "b", 6)
    order.remove(pages(1, 2))
    assert order.pop(1).tolist() == [3]  # by age: "a" has three left
    owned(order, quotas, "a", 1, 2)
    assert order.pop(1).tolist() == [4]
    assert gone == [4]
    order.check()


def test_of_a_tenants_pages_and_slabs_those_go_that_are_older_than_its_first_of_the_other_kind() -> None:
    quotas = TenantQuotas(POOL, 0.0, {})
    slabs = SlabQuotas(quotas, 4)
    quotas.own(pages(1, 2, 3), "a")
    slabs.own(pages(2), "a")
    quotas.append(pages(1, 2))
    slabs.append(pages(2))
    quotas.append(pages(3))
    assert slabs.pop_surplus(10).size == 0
    assert quotas.pop_surplus(10).tolist() == [1, 2]
    assert quotas.pop_surplus(10).size == 0
    assert slabs.pop_surplus(10).tolist() == [2]
    assert quotas.pop_surplus(10).tolist() == [3]


def test_more_tenants_than_there_are_places_share_one_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcache.pool.quotas.MOST_TENANTS", 3)
    quotas = TenantQuotas(POOL, 0.1, {})
    order = order_of(0.0, quotas=quotas)
    owned(order, quotas, None, 30)
    for number, salt in enumerate("abcd", 1):
        owned(order, quotas, salt, number, 10 + number)
        order.check()
    assert order.pop(1).tolist() == [3]  # "c" and "d" have four together
    order.remove(pages(1, 11))
    owned(order, quotas, "e", 5, 6, 7, 8)  # takes the place of "a", which has none left
    order.check()
    assert order.pop(1).tolist() == [5]
    owned(order, quotas, "a", 1, 11)  # one of the others now
    order.check()
    assert order.pop(2).tolist() == [13, 4]


def test_broken_quota_books_are_named() -> None:
    quotas = TenantQuotas(POOL, 0.1, {})
    order = order_of(0.0, quotas=quotas)
    owned(order, quotas, "a", 1, 2)
    quotas.own(pages(2), "b")
    with pytest.raises(InvariantError, match="tenant 'a' are wrong"):
        order.check()
    quotas.own(pages(2), None)
    with pytest.raises(InvariantError, match="1 idle pages have a tenant, 2 are counted"):
        order.check()


def test_after_an_interrupt_hints_count_as_before_and_pages_not_known_are_the_youngest() -> None:
    order = order_of(1.0)
    said(order, LAST, 1, 2)
    said(order, FIRST, 3, 4)
    said(order, None, 5, 6)
    before = order_of(1.0)
    said(before, LAST, 1, 2)
    said(before, FIRST, 3, 4)
    said(before, None, 5, 6)
    before.append(pages(9))
    order.remove(pages(2, 4))
    order.count = 17  # as an interrupt may leave it
    order.remove = None  # type: ignore[assignment] - nothing is taken out one by one
    order.mend(np.array([1, 3, 5, 6, 9]))
    del order.remove
    order.check()
    before.remove(pages(2, 4))
    assert order.pop(5).tolist() == before.pop(5).tolist()
    order.mend(np.zeros(0, np.intp))
    order.check()
    assert order.count == 0
