"""Breaks each invariant by hand. `check()` must then name this invariant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvcache import InvariantError, PagedKVCacheManager, TextContext
from kvcache.replica.replica import Replica


def busy(manager: PagedKVCacheManager) -> Replica:
    """Fills a manager with two running requests that share two pages, with idle pages, with the pages of an open
    import, and with fresh pages.
    """
    prompts = {"gone": range(50, 59), "idle": range(70, 79), "one": range(10), "two": range(10), "solo": range(30, 40)}
    for name, tokens in prompts.items():
        context = TextContext(tokens, 64, name)
        manager.external_claim(name)
        assert manager.maybe_reserve(context)
        context.update(1)
        manager.step([context])
    table = manager.block_table("gone")
    manager.release("gone")
    manager.release("idle")
    receiver = TextContext([*range(50, 59), 1], 64, "in")
    manager.external_claim("in")
    assert manager.import_block_table(receiver, table) is not None
    return manager._replicas.each[0]


def set_entry(array: Any, at: Any, value: int) -> None:
    array[at] = value


BREAKS: dict[str, tuple[Callable[[PagedKVCacheManager, Replica], Any], str]] = {
    "a holder too many": (lambda m, r: set_entry(r.pool.holders, 1, 9), "page 1 has 9 holders"),
    "a writer too many": (lambda m, r: set_entry(r.pool.writers, 20, 1), "page 20 has 1 writers, but 0"),
    "a writer too few": (
        lambda m, r: set_entry(r.pool.writers, r.imports.each[0].parts[0].dst_pages, 0),
        "has 0 writers, but 1",
    ),
    "writers counted wrongly": (lambda m, r: setattr(r.pool, "_writing", 0), "have 1 writers, but 0 are counted"),
    "a page lost": (lambda m, r: setattr(r.pool, "_fresh_count", r.pool._fresh_count - 1), "in 0 of the states"),
    "a page twice fresh": (lambda m, r: set_entry(r.pool._fresh, 0, r.pool._fresh[1]), "of the states"),
    "a held page in the idle order": (
        lambda m, r: r.pool.idle.append(r.rows.pages(r.rows.row_of["one"])[:1]),
        "in 2 of",
    ),
    "the null page in use": (lambda m, r: r.pool.idle.append(np.zeros(1, np.int32)), "null page|in 2 of|not published"),
    "an idle page not published": (
        lambda m, r: r.pool.index.withdraw(r.pool.idle.pages()[:1].copy()),
        "is idle, but not published",
    ),
    "a fresh page published": (
        lambda m, r: r.pool.index.publish(r.pool._fresh[:1].copy(), np.full((1, 4), 7, np.uint64)),
        "is fresh, but published",
    ),
    "a published page not in the index": (lambda m, r: set_entry(r.pool.index._digests, (1, 0), 5), "finds page 0"),
    "a committed page not published": (
        lambda m, r: r.pool.index.withdraw(r.rows.pages(r.rows.row_of["one"])[:1].copy()),
        "committed pages are published",
    ),
    "committed past the pages": (lambda m, r: set_entry(r.rows.committed, r.rows.row_of["one"], 9), "9 committed"),
    "a published page not committed": (
        lambda m, r: set_entry(r.rows.committed, r.rows.row_of["solo"], 1),
        "after its 1",
    ),
    "a row names a page twice": (
        lambda m, r: set_entry(r.rows.pages(r.rows.row_of["one"]), 1, r.rows.pages(r.rows.row_of["one"])[0]),
        "twice",
    ),
    "a row names no page": (lambda m, r: set_entry(r.rows.table, (0, r.rows.row_of["one"], 2), 99), "not within 1 to"),
    "entries past the end": (
        lambda m, r: set_entry(r.rows.table, (0, r.rows.row_of["one"], 9), 4),
        "page numbers after its last page",
    ),
    "a free row that names pages": (lambda m, r: set_entry(r.rows.table, (0, 7, 0), 4), "row 7 is free"),
    "a row of another request": (
        lambda m, r: set_entry(r.rows.request_ids, r.rows.row_of["one"], "x"),
        "belongs to 'x'",
    ),
    "a claim without a row": (lambda m, r: m._claims.places.update(ghost=3), "'ghost': is claimed at place"),
    "a claim of another row": (lambda m, r: set_entry(m._claims.places, "one", 77), "'one': is claimed at place 77"),
    "idle stamps lost": (lambda m, r: set_entry(r.pool.idle._stamp, slice(None), -1), "of the states|idle order"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_each_broken_invariant_is_named(make: Any, name: str) -> None:
    manager = make(24, page_size=4, checks=False)
    replica = busy(manager)
    manager.check()
    action, message = BREAKS[name]
    action(manager, replica)
    with pytest.raises(InvariantError, match=message):
        manager.check()
    manager.check = lambda: None  # The manager is inconsistent now, so the check of the fixture would fail, too.


def test_runtime_checks_run_around_each_call(make: Any) -> None:
    manager = make(24, page_size=4, checks=True)
    replica = busy(manager)
    replica.pool.holders[24] = 1
    with pytest.raises(InvariantError, match="page 24"):
        manager.external_claim("late")
    assert not manager.contains("late")
    replica.pool.holders[24] = 0
