"""Finds the last end of a page from which every block table can resume, and compares it with what each query sees,
token by token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from kvcache import LayerGroup
from kvcache.layer_groups import TableGroup, layer_tables
from kvcache.pool.pages_below import last_end
from kvcache.replica.resume import Found, FromBelow, resume

SIZE = 4
WINDOW = LayerGroup("window", (1,), 6)
GROUPS = {
    "full": (),
    "full and window": (LayerGroup("full", (0,)), WINDOW),
    "chunks and window": (LayerGroup("chunked", (0,), 8), WINDOW),
}


def first_seen(group: LayerGroup, token: int) -> int:
    """Returns the first page that the query at this token sees."""
    if group.kind == "full":
        return 0
    if group.kind == "chunked":
        return token // group.window * group.window // SIZE
    return max(0, token - group.window + 1) // SIZE


def by_hand(there: np.ndarray, groups: Sequence[TableGroup], first: int, ends: np.ndarray | None) -> int:
    """Returns the largest number of pages after `first` from which every table can resume. Each query is examined.
    `there` says for each table which pages it has, from page `first` on. Every table has all earlier pages.
    """
    best = 0
    for end in range(1, there.shape[1] + 1):
        whole = all(
            there[table, page - first]
            for group, tables in groups
            for table in range(tables.start, tables.stop)
            for page in range(max(first, first_seen(group, (first + end) * SIZE)), first + end)
        )
        if whole and (ends is None or ends[end - 1]):
            best = end
    return best


@pytest.mark.parametrize("name", GROUPS)
def test_the_last_end_agrees_with_a_check_of_each_query_for_random_pages(name: str) -> None:
    rng, found = np.random.default_rng(0), set[int]()
    groups = layer_tables(GROUPS[name], 2).groups
    for _ in range(400):
        there = rng.random((groups[-1].tables.stop, 8)) < 0.8
        ends = None if rng.random() < 0.5 else rng.random(11) < 0.5  # Array elements after the last page do not count.
        said = None if ends is None else ends.tolist()
        first = int(rng.integers(0, 4))
        expected = by_hand(there, groups, first, ends)
        assert resume(there, groups, SIZE, first, ends) == expected
        assert ends is None or ends.tolist() == said
        assert resume(there, groups, SIZE) == by_hand(there, groups, 0, None)
        found.add(expected)
    assert len(found) > 5


def test_the_last_end_is_zero_if_there_is_none() -> None:
    assert last_end(np.zeros(3, np.bool_)) == 0
    assert last_end(np.zeros(0, np.bool_)) == 0
    assert last_end(np.array([True, True, False])) == 2


def test_columns_that_a_request_already_had_do_not_count_as_found() -> None:
    assert Found(first=3, end=8, pages=(), columns=(), reached=9).num_columns == 5
    assert Found(first=3, end=3, pages=(), columns=(), reached=3).num_columns == 0


def test_pages_that_only_a_lower_tier_has_are_named_column_by_column() -> None:
    every = np.arange(6, dtype=np.uint64).reshape(2, 3, 1)
    lacking = np.array([[True, False, True], [False, True, True]])
    wanted = FromBelow(3, 3, every, lacking, (), (), np.zeros(0, np.int32))
    assert wanted.digests.ravel().tolist() == [0, 4, 2, 5]
    assert wanted.tables.tolist() == [0, 1, 0, 1]
