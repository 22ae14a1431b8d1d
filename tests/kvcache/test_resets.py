"""After `reset_prefix_cache`, nobody finds a page or state of before, whoever holds it, and none is published later.

Requests, leases and imports of before go on with their own pages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvcache import PagedKVCacheManager, TextContext
from tests.kvcache.build import proven
from tests.kvcache.contents_oracle import KINDS

PAGE = 4
PROMPT = [*range(41)]  # ten full pages and a token

Make = Callable[..., PagedKVCacheManager]


def made(make: Make, kind: str, **options: Any) -> PagedKVCacheManager:
    return make(64, layers=2, params=dict(KINDS[kind]), **options)


def admitted(manager: PagedKVCacheManager, tokens: list[int], name: str, chunk: int = 0) -> TextContext:
    """Claims a request and reserves its pages. With `chunk`, only so many tokens run next."""
    context = TextContext(tokens, 200, name)
    manager.external_claim(name)
    if chunk:
        context.set_token_indices(active_idx=chunk)
    assert manager.maybe_reserve(context)
    return context


def run(manager: PagedKVCacheManager, context: TextContext, *, step: bool = True) -> None:
    """Runs what is active. A model with recurrent states writes them."""
    manager.fetch([context])
    for states in manager.states:
        page = states.pages_at([context.request_id], [context.start_idx])
        states.advance(page, [context.active_idx])
    context.update(7)
    if step:
        manager.step([context])


def go_on(manager: PagedKVCacheManager, context: TextContext, steps: int = 12) -> None:
    """Runs several more steps, which fill pages."""
    for _ in range(steps):
        assert manager.maybe_reserve(context)
        run(manager, context)


def hit(manager: PagedKVCacheManager, tokens: list[int] = PROMPT) -> int:
    """Returns how many tokens a new request with this prompt would skip, on the device or below."""
    probe = TextContext(tokens, 200, "probe")
    with manager.claim(probe):
        assert manager.maybe_reserve(probe)
        return probe.start_idx


def published(manager: PagedKVCacheManager) -> int:
    replicas = manager._replicas
    pools = [one.pool for one in replicas.each] + [one.pool for one in replicas.states]
    pools += [tiers.host.pool for tiers in replicas._all_tiers]
    return sum(int(pool.index.published.sum()) for pool in pools)


@pytest.mark.parametrize("host_slots", [0, 32])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("moment", ["mid-prompt", "reserved", "fetched", "running", "leased", "released under a lease"])
def test_nothing_of_before_is_found_whoever_holds_it(make: Make, kind: str, moment: str, host_slots: int) -> None:
    manager = made(make, kind, host_slots=host_slots)
    run(manager, other := admitted(manager, [*range(100, 141)], "other"))
    manager.release("other")
    context = admitted(manager, PROMPT, "before", chunk=22 if moment == "mid-prompt" else 0)
    if moment == "fetched":
        run(manager, context, step=False)
    elif moment != "reserved":
        run(manager, context)
    leases = [manager.lease("before")] if "lease" in moment else []
    if moment == "released under a lease":
        manager.release("before")
    manager.reset_prefix_cache()
    assert published(manager) == 0
    assert hit(manager) == hit(manager, other.tokens.tolist()) == 0
    before = published(manager)
    if moment == "fetched":
        manager.step([context])
    for lease in leases:
        manager.end_lease(lease)
    if moment != "released under a lease":
        if moment in ("mid-prompt", "reserved"):
            assert manager.maybe_reserve(context)
            run(manager, context)
        go_on(manager, context)
        assert published(manager) == before, "the request of before has published"
        manager.release("before")
    assert published(manager) == before
    manager.check()
    first = hit(manager, PROMPT + [9] * 20)
    run(manager, again := admitted(manager, PROMPT, "again"))
    manager.release(again.request_id)
    assert hit(manager) > 0, "what was computed after the reset is cached"
    assert first == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_claim_without_pages_and_a_new_claim_of_a_request_use_the_cache_as_ever(make: Make, kind: str) -> None:
    manager = made(make, kind)
    waiting = TextContext(PROMPT, 200, "waiting")
    manager.external_claim("waiting")
    run(manager, before := admitted(manager, PROMPT, "before"))
    manager.reset_prefix_cache()
    assert manager.maybe_reserve(waiting)
    assert waiting.start_idx == 0
    run(manager, waiting)
    manager.release("waiting")
    assert hit(manager) > 0
    manager.release("before")
    before.reset()
    manager.external_claim("before")
    assert manager.maybe_reserve(before)
    assert before.start_idx > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_fork_of_a_request_of_before_publishes_nothing(make: Make, kind: str) -> None:
    manager = made(make, kind)
    run(manager, parent := admitted(manager, PROMPT[:40], "parent"))
    manager.reset_prefix_cache()
    child = parent.fork("child")
    assert manager.fork(parent, child)
    manager.release("parent")
    go_on(manager, child)
    assert published(manager) == 0
    grandchild = child.fork("grandchild")
    assert manager.fork(child, grandchild)
    manager.release("child")
    go_on(manager, grandchild)
    assert published(manager) == 0
    manager.release("grandchild")
    assert hit(manager, [*PROMPT[:40], 7, 7, 7, 7]) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_of_a_request_of_before_can_still_be_handed_over(make: Make, kind: str) -> None:
    source, reader = made(make, kind), made(make, kind)
    run(source, context := admitted(source, PROMPT, "r"))
    source.reset_prefix_cache()
    go_on(source, context)
    lease = source.lease("r")
    table = source.block_table("r")
    assert len(table.digests) == 32 * (table.num_tokens // PAGE)
    theirs = TextContext(context.tokens, 200, "r")
    reader.external_claim("r")
    pending = reader.import_block_table(theirs, table)
    assert pending is not None
    reader.commit_import(theirs, pending, proven(reader, pending))
    go_on(reader, theirs)
    source.end_lease(lease)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("end", ["commit", "cancel"])
def test_an_import_that_began_before_a_reset_publishes_nothing(make: Make, kind: str, end: str) -> None:
    source, reader = made(make, kind), made(make, kind)
    run(source, context := admitted(source, PROMPT, "r"))
    theirs = TextContext(context.tokens, 200, "r")
    reader.external_claim("r")
    pending = reader.import_block_table(theirs, source.block_table("r"))
    assert pending is not None
    proof = proven(reader, pending)
    reader.reset_prefix_cache()
    if end == "commit":
        reader.commit_import(theirs, pending, proof)
        go_on(reader, theirs)
    else:
        reader.cancel_import(pending)
        theirs.reset()
        assert reader.maybe_reserve(theirs)
        assert theirs.start_idx == 0
    assert published(reader) == 0
    reader.release("r")
    assert hit(reader) == 0


def test_pages_that_no_request_waits_for_are_not_published_after_a_reset(make: Make) -> None:
    source, reader = made(make, "full"), made(make, "full")
    run(source, context := admitted(source, PROMPT, "r"))
    theirs = TextContext(context.tokens, 200, "r")
    wanted = reader.contents.digests(theirs)
    lent = source.contents.lease("r", 0, wanted, 100)
    assert lent is not None
    pending = reader.contents.import_pages(theirs, 0, lent[1])
    assert pending is not None
    free = reader.num_free_blocks
    proof = proven(reader, pending)
    reader.reset_prefix_cache()
    reader.contents.commit_pages(pending, proof)
    assert published(reader) == 0
    assert reader.num_free_blocks == free + 10
    assert reader.contents.cached(0, wanted) == 0
    again = reader.contents.import_pages(theirs, 0, lent[1])
    assert again is not None
    reader.contents.commit_pages(again, proven(reader, again))
    assert reader.contents.cached(0, wanted) == 40


@pytest.mark.parametrize("kind", ["full", "window", "state"])
def test_lent_pages_are_not_lent_again_after_a_reset(make: Make, kind: str) -> None:
    manager = made(make, kind)
    run(manager, context := admitted(manager, PROMPT, "r"))
    wanted = manager.contents.digests(context)
    lent = manager.contents.lease("reader", 0, wanted, 100)
    assert lent is not None
    manager.reset_prefix_cache()
    assert manager.contents.cached(0, wanted) == 0
    assert manager.contents.lease("reader 2", 0, wanted, 100) is None
    manager.release("r")
    manager.end_lease(lent[0])
    assert published(manager) == 0
    assert manager.num_free_blocks == 64


def test_pages_that_a_step_in_flight_reads_are_forgotten_too(make: Make) -> None:
    manager = made(make, "full")
    run(manager, context := admitted(manager, PROMPT, "r"))
    assert manager.maybe_reserve(context)
    step = manager.fetch_ahead([context])
    manager.release("r")  # the step may still read the pages
    manager.reset_prefix_cache()
    assert hit(manager) == 0
    manager.end_step(step)
    assert hit(manager) == 0


def test_a_batch_of_requests_of_before_publishes_nothing_and_keeps_its_quick_step(make: Make) -> None:
    manager = made(make, "full")
    contexts = [admitted(manager, [*range(at, at + 10)], str(at)) for at in (0, 100, 200)]
    batch = manager.batch(contexts)
    for at in range(12):
        if at == 3:
            manager.reset_prefix_cache()
        assert manager.reserve_batch(batch).all()
        manager.fetch(batch)
        batch.update([at, at, at])
        manager.step(batch)
    assert published(manager) == 0
    manager.check()


def test_hints_and_quotas_forget_pages_in_use_with_the_cache(make: Make) -> None:
    manager = make(16, params={"tenant_quotas": {"a": 0.25}, "tenant_quota": 0.5})
    for salt in ("a", "b"):
        context = TextContext(PROMPT, 200, salt, cache_salt=salt)
        manager.external_claim(salt)
        if not manager.maybe_reserve(context):
            continue
        run(manager, context)
        manager.reset_prefix_cache()
        manager.release(salt)
        manager.check()
        assert manager.num_free_blocks == 16
    assert published(manager) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_that_has_not_run_yet_keeps_the_cached_pages_that_it_found(make: Make, kind: str) -> None:
    manager = made(make, kind)
    run(manager, first := admitted(manager, PROMPT, "first"))
    manager.release(first.request_id)
    context = admitted(manager, PROMPT, "second")
    assert context.start_idx > 0
    manager.reset_prefix_cache()
    before = manager.num_free_blocks
    lease = manager.lease("second")
    run(manager, context)
    table = manager.block_table("second")
    manager.release("second")
    assert manager.num_free_blocks == before, "the lease keeps all pages of the table"
    assert table.num_tokens == 41
    manager.end_lease(lease)


@pytest.mark.parametrize("host_slots", [0, 32])
@pytest.mark.parametrize("kind", KINDS)
def test_a_request_of_before_goes_on_as_if_caching_were_off(make: Make, kind: str, host_slots: int) -> None:
    tokens = [*range(60)]
    caching, plain = made(make, kind, host_slots=host_slots), made(make, kind, caching=False)
    contexts = [admitted(manager, tokens, "before", chunk=14) for manager in (caching, plain)]
    for manager, context in zip((caching, plain), contexts, strict=True):
        run(manager, context)
    caching.reset_prefix_cache()
    run(caching, other := admitted(caching, tokens, "after"))  # all of the prompt is cached now
    caching.release(other.request_id)
    seen: list[list[object]] = [[], []]
    for _ in range(40):
        for manager, context, its in zip((caching, plain), contexts, seen, strict=True):
            end = min(context.end_idx, context.start_idx + 9)
            if context.active_idx > end:
                context.set_token_indices(active_idx=end)
            assert manager.maybe_reserve(context)
            its.append((context.start_idx, context.active_idx, manager.num_free_blocks))
            run(manager, context)
            its.append(manager.num_free_blocks)
        assert seen[0] == seen[1]
