"""A row counts each token of a prompt once: either as a token that ran or as a token that was found."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from kvcache import LayerGroup
from kvcache.layer_groups import layer_tables
from kvcache.replica.rows import NEVER, AllRows, BlockRows, PromptCounter, rows_at
from tests.kvcache.random_model.run import Model


def counter() -> PromptCounter:
    """Returns the counter of four rows, none of which has a request."""
    rows = BlockRows(AllRows(1, 4, 4), 0, 64, layer_tables((), 1).groups, pinned=False)
    rows.prompt[:], rows.counted[:] = -1, 0
    return PromptCounter(rows)


def run(count: PromptCounter, row: int, start: int, end: int) -> None:
    count.run(count.prompts(np.array([row]), np.array([start]), np.array([end])))


def test_a_prompt_token_that_ran_is_not_counted_again_when_it_is_found() -> None:
    count = counter()
    count.admit(1, 12)
    run(count, 1, 0, 8)
    assert (count.ran, count.found, count.open) == (8, 0, {1})
    count.hit(1, 0, 8)  # The request was set back to its first token.
    assert (count.ran, count.found) == (8, 0)
    count.hit(1, 4, 10)
    assert (count.ran, count.found) == (8, 2)
    run(count, 1, 0, 12)
    assert (count.ran, count.found, count.open) == (10, 2, set())


@pytest.mark.parametrize("seed", range(20))
def test_whatever_a_request_does_each_token_of_its_prompt_is_counted_once(seed: int) -> None:
    """A token is counted when it runs or is found, whichever comes first.

    Tokens after the prompt and tokens of other rows are not counted.
    """
    rng, count = random.Random(seed), counter()
    prompt = rng.randint(1, 20)
    by_hand: dict[int, str] = {}
    for step in itertools.count():
        start = rng.randint(0, min(20, len(by_hand)))
        end = rng.randint(start, 25)
        if step % 2:
            count.admit(2, prompt)
            count.hit(2, start, end)
        else:
            count.admit(2, prompt)
            run(count, 2, start, end)
        # Each token before `start` was counted earlier, because a request never runs ahead of its cached tokens.
        for token in range(end):
            by_hand.setdefault(token, "found" if step % 2 else "ran")
        mine = [by_hand[token] for token in range(prompt) if token in by_hand]
        assert (count.ran, count.found) == (mine.count("ran"), mine.count("found"))
        if len(mine) == prompt and step > 6:
            break
    assert not count.open


def test_tokens_that_a_step_reports_and_tokens_of_an_import_leave_the_open_prompts() -> None:
    count = counter()
    for row in (0, 1, 2):
        count.admit(row, 12)
    run(count, 0, 0, 12)
    count.ran_elsewhere(1, 12)
    assert (count.ran, count.found, count.open) == (12, 0, {2})


def test_rows_that_are_cleared_in_any_state_are_as_new() -> None:
    groups = layer_tables((LayerGroup("full", (0, 1)), LayerGroup("window", (2,), 6)), 3).groups
    rows, new = (BlockRows(AllRows(1, 2, 4), 0, 20, groups, pinned=False) for _ in range(2))
    row = rows.claim("a")
    rows.table[:, row] = 3
    rows.table[0, 1 - row, 0] = 12  # an interrupted release has forgotten the request that had this page
    rows.ends[:], rows.firsts[1, row], rows.prompt[:], rows.counted[row], rows.cached[row] = 4, 1, 9, 5, 5
    rows.commit(row, 1)
    rows.measure(row)
    rows.make_private()
    rows.changed[:] = False
    rows.clear()
    assert rows.changed.all()
    rows.changed[:] = False
    of_new = vars(new)
    for name, value in vars(rows).items():
        if isinstance(value, np.ndarray):
            assert np.array_equal(value, of_new[name]), name
    assert (rows.free, rows.row_of, rows.request_ids, rows.private) == (new.free, {}, [None, None], set())


def test_rows_at_positions_of_a_slice_and_of_an_array() -> None:
    at = np.array([0, 2])
    for rows, wanted in ((slice(3, 9), [3, 5]), (slice(0, 9), [0, 2]), (np.array([7, 1, 4]), [7, 4])):
        assert rows_at(rows, at).tolist() == wanted


def test_a_batch_without_requests_never_needs_a_page() -> None:
    every, none = AllRows(1, 4, 4), np.zeros(0, np.int64)
    assert every.slack(slice(0, 0), none) == every.due(slice(0, 0), none) == NEVER > 1 << 40


def test_a_row_has_no_room_for_more_tokens_than_max_seq_len_although_its_last_page_has() -> None:
    every = AllRows(1, 3, 4)
    rows = BlockRows(every, 0, 10, layer_tables((), 1).groups, pinned=False)
    rows.grow(0, 2)
    assert every.capacity.tolist() == [8, 0, 0]
    rows.grow(0, 3)
    for _ in range(3):
        rows.append(np.array([1]), np.array([[7]], np.int32))
    rows.num_pages[2] = 3
    rows.measure(2)
    assert every.capacity.tolist() == [10, 10, 10]


@pytest.mark.parametrize(
    "features",
    [
        ("batches", "forks", "preemption"),
        ("batches", "forks", "preemption", "imports", "leases", "lends"),
        ("batches", "forks", "preemption", "imports", "window", "chunk", "leases"),
        ("batches", "states in slabs", "preemption", "window"),
        ("host", "interrupts", "batches", "window", "renames"),
    ],
    ids=" ".join,
)
def test_a_copy_of_the_tables_that_takes_changed_rows_is_up_to_date_after_each_call(features: tuple[str, ...]) -> None:
    """The tables on a GPU are such copies. Each call copies only the rows that have changed."""
    model = Model.of(7, features)
    every = [replica.rows for replica in model.manager._replicas.each]
    copies = [rows.table.copy() for rows in every]
    for _ in range(200):
        model.move()
        for copy, rows in zip(copies, every, strict=True):
            copy[:, rows.changed] = rows.table[:, rows.changed]
            rows.changed[:] = False
            assert (copy == rows.table).all()
    assert model.seen["run"] > 10
