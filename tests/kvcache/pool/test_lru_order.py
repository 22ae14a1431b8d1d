from __future__ import annotations

from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache import InvariantError
from kvcache.pool.lru_order import CHUNK, LruOrder, OrderLog
from tests.kvcache.random_model.interrupts import interrupted


def pages(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def test_the_oldest_page_is_evicted_first_whatever_has_left_the_middle() -> None:
    order = LruOrder(10)
    order.append(pages(4, 3, 2))
    order.append(pages(9, 8))
    order.remove(pages(3, 9))
    assert order.count == 3
    assert order.pop(2).tolist() == [4, 2]
    order.append(pages(4))
    assert order.pages().tolist() == [8, 4]
    assert order.pop(2).tolist() == [8, 4]
    assert order.pop(0).tolist() == []


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["append", "remove", "pop", "pop_one"]), st.lists(st.integers(1, 30), unique=True)),
        max_size=60,
    )
)
def test_any_sequence_equals_a_list(moves: list[tuple[str, list[int]]]) -> None:
    order, known = LruOrder(30), list[int]()
    for move, names in moves:
        if move == "append":
            new = [name for name in names if name not in known]
            order.append(pages(*new))
            known += new
        elif move == "remove":
            gone = [name for name in names if name in known]
            order.remove(pages(*gone))
            known = [name for name in known if name not in gone]
        elif move == "pop":
            count = min(len(names), len(known))
            assert order.pop(count).tolist() == known[:count]
            known = known[count:]
        elif known:
            assert order.pop_one() == known.pop(0)
        order.check()
        assert order.pages().tolist() == known


def test_one_by_one_they_leave_in_order_however_many_left_from_between() -> None:
    rng, count = np.random.default_rng(0), 3 * CHUNK
    order = LruOrder(count)
    order.append(known := rng.permutation(np.arange(1, count + 1, dtype=np.int32)))
    for share in (0.5, 0.95, 0.999):
        gone = rng.random(len(known)) < share
        order.remove(known[gone])
        known = known[~gone]
        assert [order.pop_one() for _ in range(len(known) // 2)] == known[: len(known) // 2].tolist()
        known = known[len(known) // 2 :]
        order.check()
        assert np.array_equal(order.pages(), known)
        order.append(back := np.setdiff1d(np.arange(1, count + 1, dtype=np.int32), known))
        known = np.concatenate((known, back))
    assert [order.pop_one() for _ in known] == known.tolist()
    with pytest.raises(InvariantError, match="1 pages were asked for, but it holds 0"):
        order.pop_one()


def test_the_oldest_page_is_found_behind_those_that_left_together() -> None:
    order = LruOrder(2 * CHUNK)
    every = np.arange(1, CHUNK + 2, dtype=np.int32)
    order.append(every)
    order.remove(every[:-1])
    assert order.oldest(1).tolist() == [CHUNK + 1]
    order.check()


def test_the_newest_chunk_is_filled_when_older_ones_are_given_up() -> None:
    order = LruOrder(2 * CHUNK)
    every = np.arange(1, CHUNK + 2, dtype=np.int32)
    order.append(every)
    order.remove(every[:-1])
    order.append(every[:-2])
    assert len(order.chunks) == 1
    assert order.by_age
    order.check()


def test_a_page_at_the_very_first_place_has_a_position() -> None:
    order = LruOrder(4)
    order.append(pages(1, 2, 3, 4))
    order._spare.append(order._spare.pop(0))  # The order now opens chunk 0 next.
    for _ in range(2 * CHUNK):
        if not order._stamp[2]:
            break
        order.remove(pages(2))
        order.append(pages(2))
    assert order._stamp[2] == 0
    order.remove(pages(1))
    order.append(pages(1))
    assert np.argsort(order.positions(np.arange(1, 5))).tolist() == [2, 3, 1, 0]


def test_the_log_never_runs_out_and_keeps_its_order() -> None:
    order = LruOrder(4)
    order.append(pages(1, 2, 3, 4))
    for _ in range(3 * CHUNK):
        order.remove(pages(2))
        order.append(pages(2))
    assert order.pages().tolist() == [1, 3, 4, 2]
    order.check()


def test_chunks_thin_out_and_are_merged_in_order() -> None:
    rng, count = np.random.default_rng(0), 5 * CHUNK
    order, known = LruOrder(count), np.arange(1, count + 1, dtype=np.int32)
    order.append(known)
    for _ in range(60):
        gone = rng.random(len(known)) < rng.choice([0.01, 0.2, 0.7])
        left = known[gone]
        order.remove(left)
        order.append(left)
        known = np.concatenate((known[~gone], left))
        if rng.random() < 0.3:
            taken = order.pop(int(rng.integers(0, 3 * CHUNK)))
            assert taken.tolist() == known[: len(taken)].tolist()
            order.append(taken)
            known = np.concatenate((known[len(taken) :], taken))
        order.check()
        assert np.array_equal(order.pages(), known)
        some = known[rng.random(len(known)) < 0.01]
        mixed = rng.permutation(some).astype(np.intp)
        assert mixed[np.argsort(order.positions(mixed))].tolist() == some.tolist()


def test_two_chunks_that_fill_one_just_are_merged() -> None:
    order = LruOrder(2 * CHUNK)
    order.append(np.arange(1, 2 * CHUNK + 1))
    order.remove(np.arange(1, 2 * CHUNK, 2))
    assert order.squeeze()
    assert len(order.chunks) == 1
    assert np.array_equal(order.pages(), np.arange(2, 2 * CHUNK + 1, 2))
    order.check()
    assert not order.squeeze()


def test_taking_more_pages_than_there_are_and_inconsistencies_are_named() -> None:
    order = LruOrder(4)
    order.append(pages(1, 2))
    with pytest.raises(InvariantError, match="3 pages were asked for, but it holds 2"):
        order.pop(3)
    order = LruOrder(4)
    order.append(pages(1, 2))
    order.count = 3
    with pytest.raises(InvariantError, match="count 3"):
        order.check()


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["append", "remove", "pop"]),
            st.integers(0, 2),
            st.lists(st.integers(1, 30), unique=True),
        ),
        max_size=60,
    )
)
def test_orders_of_one_log_are_as_many_lists(moves: list[tuple[str, int, list[int]]]) -> None:
    log = OrderLog(30, 3)
    orders = [LruOrder(30, log) for _ in range(3)]
    known: list[list[int]] = [[], [], []]
    for move, at, names in moves:
        if move == "append":
            new = [name for name in names if not any(name in mine for mine in known)]
            orders[at].append(pages(*new))
            known[at] += new
        elif move == "remove":
            gone = [name for name in names if name in known[at]]
            orders[at].remove(pages(*gone))
            known[at] = [name for name in known[at] if name not in gone]
        else:
            count = min(len(names), len(known[at]))
            assert orders[at].oldest(count + 1).tolist() == known[at][: count + 1]
            assert orders[at].pop(count).tolist() == known[at][:count]
            known[at] = known[at][count:]
        orders[at].check()
        assert [order.pages().tolist() for order in orders] == known


def test_an_order_gets_the_room_that_another_order_of_its_log_wastes() -> None:
    """A second order that shares the log needs a chunk. Sparse chunks of the first order are merged."""
    rng, count = np.random.default_rng(0), 6 * CHUNK
    log = OrderLog(count, 2)
    first, second = LruOrder(count, log), LruOrder(count, log)
    first.append(everything := rng.permutation(np.arange(1, count + 1, dtype=np.int32)))
    known, other = everything, np.zeros(0, np.int32)
    for _ in range(40):
        gone = rng.random(len(known)) < rng.choice([0.1, 0.6])
        left = known[gone]
        first.remove(left)
        second.append(left)
        other, known = np.concatenate((other, left)), known[~gone]
        back = rng.random(len(other)) < rng.choice([0.1, 0.6])
        second.remove(other[back])
        first.append(other[back])
        known, other = np.concatenate((known, other[back])), other[~back]
        first.check()
        assert np.array_equal(first.pages(), known)
        assert np.array_equal(second.pages(), other)
    assert first.oldest(5).tolist() == known[:5].tolist()


def test_an_order_that_is_cleared_in_any_state_can_be_filled_again() -> None:
    order = LruOrder(20)
    order.append(pages(5, 3, 9))
    order.count, order._head = 17, CHUNK  # an interrupt may leave these
    order.clear()
    order.check()
    assert order.count == 0
    order.append(pages(7, 5))
    order.check()
    assert [order.pop_one(), order.pop_one()] == [7, 5]


def test_an_order_whose_making_is_interrupted_stops_no_other_of_its_log() -> None:
    log = OrderLog(20, 40)
    order = LruOrder(20, log)
    order.append(pages(5, 3, 9))
    half_made = 0
    for at in count(1):
        _, _, done = interrupted(lambda: LruOrder(20, log), at, KeyboardInterrupt)
        order.clear()
        order.append(pages(3, 5, 9))
        order.check()
        if not done:
            break
        half_made += 1
    assert half_made > 30
    assert sorted(order.pop(3).tolist()) == [3, 5, 9]
