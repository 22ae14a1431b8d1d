from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache import InvariantError
from kvcache.retention import CHUNK, IdleOrder


def pages(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def test_oldest_first_whatever_left_the_middle() -> None:
    order = IdleOrder(10)
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
        st.tuples(st.sampled_from(["append", "remove", "pop"]), st.lists(st.integers(1, 30), unique=True)), max_size=60
    )
)
def test_any_sequence_equals_a_list(moves: list[tuple[str, list[int]]]) -> None:
    order, known = IdleOrder(30), list[int]()
    for move, names in moves:
        if move == "append":
            new = [name for name in names if name not in known]
            order.append(pages(*new))
            known += new
        elif move == "remove":
            gone = [name for name in names if name in known]
            order.remove(pages(*gone))
            known = [name for name in known if name not in gone]
        else:
            count = min(len(names), len(known))
            assert order.pop(count).tolist() == known[:count]
            known = known[count:]
        order.check()
        assert order.pages().tolist() == known


def test_the_log_never_runs_out_and_keeps_its_order() -> None:
    order = IdleOrder(4)
    order.append(pages(1, 2, 3, 4))
    for _ in range(3 * CHUNK):
        order.remove(pages(2))
        order.append(pages(2))
    assert order.pages().tolist() == [1, 3, 4, 2]
    order.check()


def test_chunks_thin_out_and_are_merged_in_order() -> None:
    rng, count = np.random.default_rng(0), 5 * CHUNK
    order, known = IdleOrder(count), np.arange(1, count + 1, dtype=np.int32)
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


def test_more_than_there_is_and_broken_books_are_named() -> None:
    order = IdleOrder(4)
    order.append(pages(1, 2))
    with pytest.raises(InvariantError, match="3 pages asked for, 2 are there"):
        order.pop(3)
    order = IdleOrder(4)
    order.append(pages(1, 2))
    order.count = 3
    with pytest.raises(InvariantError, match="count 3"):
        order.check()
