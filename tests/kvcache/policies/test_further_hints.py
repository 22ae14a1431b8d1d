"""Hints and quotas with several block tables: they apply to every page that a prefix needs."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from kvcache import LayerGroup, PagedKVCacheManager, RangeRetention, Retention, TextContext
from tests.kvcache.build import manager_of
from tests.kvcache.policies.test_hints import FIRST, LAST, trusting

WINDOW = LayerGroup("full", (0,)), LayerGroup("window", (1,), 6)  # A window of 6 tokens takes 2 pages of 4 tokens.
# The full group has two tables, because it has two layers.
FULL = LayerGroup("full", (0, 1)), LayerGroup("window", (2,), 6)


def make(pages: int, groups: tuple[LayerGroup, ...] = WINDOW, **params: Any) -> PagedKVCacheManager:
    layers = sum(len(group.layers) for group in groups)
    return manager_of(pages, page_size=4, layers=layers, checks=False, params={"groups": groups, **params})


def prompt(name: int, pages: int) -> list[int]:
    return [*[name] * (4 * pages), 0]


def serve(manager: PagedKVCacheManager, tokens: list[int], retention: Retention | None = None, **options: Any) -> int:
    """Runs a request in chunks of 8 tokens, so that its windows move. Returns the number of tokens that it found
    cached.
    """
    context = TextContext(tokens, len(tokens) + 1, retention=retention, **options)
    with manager.claim(context):
        assert manager.maybe_reserve(context)
        found = context.start_idx
        while context.start_idx < context.end_idx - 1 or context.end_idx == len(tokens):
            context.set_token_indices(active_idx=min(context.end_idx, context.start_idx + 8))
            assert manager.maybe_reserve(context)
            manager.fetch([context])
            context.update(0)
            manager.step([context])
        manager.check()
    manager.check()
    return found


def found(manager: PagedKVCacheManager, tokens: list[int]) -> int:
    """Returns how many of the prompt's pages are cached in all tables. The call changes no state."""
    return manager._replicas.each[0].find(TextContext(tokens, 999)).end


@pytest.mark.parametrize("groups", [WINDOW, FULL])
def test_a_hint_holds_for_each_tables_pages_that_the_prefix_needs(groups: tuple[LayerGroup, ...]) -> None:
    manager = trusting(make(100, groups))
    for name in range(8):
        serve(manager, prompt(name, 4), FIRST if name % 2 else LAST)
    for name in range(100, 109):
        serve(manager, prompt(name, 4))
    assert [found(manager, prompt(name, 4)) for name in range(8)] == [4, 0] * 4


@pytest.mark.parametrize("others", [FIRST, None])
@pytest.mark.parametrize("pages", [3, 5])
def test_the_hint_of_a_range_applies_to_window_pages_at_its_end_that_were_given_back(
    others: Retention | None, pages: int
) -> None:
    manager = trusting(make(60))
    head = prompt(1, 5)[:-1]
    system = Retention(session_continues=False, ranges=(RangeRetention(0, 4 * pages, priority=100),))
    serve(manager, [*head, *prompt(2, 6)], system)
    for name in range(100, 112):
        serve(manager, prompt(name, 4), others)
    assert found(manager, [*head, *prompt(3, 2)]) == pages
    assert found(manager, [*head, *prompt(2, 6)]) == pages


ROUNDS = 60


def rounds(manager: PagedKVCacheManager, first: Retention | None, last: Retention | None, often: int) -> int:
    """Runs a few prompts again and again, with prompts between them that occur only once. Returns the number of tokens
    that were found.
    """
    hits = 0
    for number in range(ROUNDS):
        hits += serve(manager, prompt(number % often, 3), last)
        for once in range(2):
            serve(manager, prompt(10_000 + 2 * number + once, 3), first)
    return hits


@pytest.mark.parametrize("groups", [WINDOW, FULL])
def test_right_hints_earn_a_share_and_wrong_ones_lose_it(groups: tuple[LayerGroup, ...]) -> None:
    tables = 2 if groups is WINDOW else 3
    plain = rounds(make(60 * tables, groups), None, None, 8)
    manager = make(60 * tables, groups)
    # Each of 8 prompts has 3 pages in each table and recurs after 72 pages in each table. Plain LRU therefore finds
    # none of them.
    assert plain == 0
    assert rounds(manager, FIRST, LAST, 8) > 0.75 * ROUNDS * 12
    assert manager.hint_share > 0.5
    fits = make(60 * tables, groups)
    wanted = rounds(fits, None, None, 4)
    misled = make(60 * tables, groups)
    assert wanted == (ROUNDS - 4) * 12
    assert rounds(misled, LAST, FIRST, 4) > 0.95 * wanted
    assert misled.hint_share <= 0.2  # The share of hints is as small as at the beginning.


def test_the_baselines_cover_only_the_pages_of_the_first_table() -> None:
    manager = make(60)
    for name in range(7):
        serve(manager, prompt(name, 4))
    serve(manager, prompt(0, 4), LAST)
    replica = manager._replicas.each[0]
    kept = replica.hints._baselines[0]._ids
    assert replica.tables.width() == 2.0
    hashers = [replica.hasher(None, TextContext(prompt(name, 4), 99)) for name in range(7)]
    digests = [one.digests(np.array(prompt(name, 4)), 0, 4) for name, one in enumerate(hashers)]
    words = {int(word) for mine in digests for word in mine[:, 0]}
    assert set(kept) == words


def test_only_pages_after_the_prompt_and_partly_filled_ones_are_in_no_baseline() -> None:
    manager = make(60, (LayerGroup("window", (0,), 6),))
    hints = manager._replicas.each[0].hints
    for length, chunk, unfindable in ((40, 8, 0), (5, 5, 1), (8, 8, 2)):
        context = TextContext(range(length), 64)
        context.set_token_indices(active_idx=chunk)
        manager.external_claim(context.request_id)
        assert manager.maybe_reserve(context)
        assert hints._unfindable() == unfindable


def test_the_quota_of_a_tenant_counts_its_pages_in_all_tables() -> None:
    manager = make(66, tenant_quota=0.25)
    for name in range(4):  # Each prompt has 4 pages in the full table, and its window still has 4 pages at the end.
        serve(manager, prompt(name, 4), cache_salt="a")
    serve(manager, prompt(50, 4), cache_salt="b")
    replica = manager._replicas.each[0]
    quotas = replica.hints._quotas
    assert quotas is not None
    assert {salt: quotas._orders[owner].count for salt, owner in quotas._ids.items()} == {"a": 32, "b": 8}
    # The five prompts take 42 more pages without a tenant. 26 pages are free, and "a" gives up the 16 pages above its
    # quota.
    for name in range(60, 65):
        serve(manager, prompt(name, 4))
    assert {salt: quotas._orders[owner].count for salt, owner in quotas._ids.items()} == {"a": 16, "b": 8}
    assert replica.pool.evictions == 16
    context = TextContext(prompt(50, 4), 99, cache_salt="b")
    assert replica.find(context).end == 4


def test_pages_that_a_decoding_request_gives_back_belong_to_its_tenant() -> None:
    manager = make(100, tenant_quota=0.5)
    contexts = [TextContext(prompt(name, 1 + name), 64, f"r{name}", cache_salt=f"t{name}") for name in range(3)]
    for context in contexts:
        manager.external_claim(context.request_id, 0)
        assert manager.maybe_reserve(context)
    batch = manager.batch(contexts)
    for _ in range(28):
        assert manager.reserve_batch(batch).all()
        manager.fetch(batch)
        batch.update([1, 2, 3])
        manager.step(batch)
        manager.check()
    replica = manager._replicas.each[0]
    quotas, idle = replica.hints._quotas, replica.pool.idle
    assert quotas is not None
    gone = {f"t{name}": int(replica.rows.firsts[1, replica.rows.row_of[f"r{name}"]]) for name in range(3)}
    assert idle.count == sum(gone.values())
    assert len(set(gone.values())) == 3
    assert {salt: quotas._orders[owner].count for salt, owner in quotas._ids.items()} == gone


def test_random_hints_and_quotas_leave_a_consistent_state() -> None:
    rng = random.Random(3)
    manager = make(70, FULL, tenant_quota=0.3, tenant_quotas={"b": 0.1})
    for _ in range(150):
        end = rng.randint(1, 40)
        ranges = (RangeRetention(0, end, priority=rng.choice([0, 50, 100])),) if rng.random() < 0.5 else ()
        hint = Retention(session_continues=rng.choice([None, True, False]), ranges=ranges)
        tokens = [*prompt(rng.randint(0, 2), rng.randint(1, 3)), *prompt(rng.randint(3, 9), rng.randint(1, 3))]
        serve(manager, tokens, rng.choice([None, hint]), cache_salt=rng.choice([None, "a", "b"]))
    assert manager.metrics.evictions > 100
