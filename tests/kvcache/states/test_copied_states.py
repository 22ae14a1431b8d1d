"""If a prompt is cached on another replica, its pages are copied from there together with the state after them.

KV and states are compared whenever a request reads them.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvcache import LayerGroup, Routing
from tests.kvcache.served import SIZE
from tests.kvcache.states.served_states import ServedStates

PROMPT = [*range(1, 42)]  # ten full pages of 4 tokens, and one more token
WAYS = [True, False]
WINDOWS = LayerGroup("full", (0,)), LayerGroup("window", (1,), 6)


def of(slabs: bool, *, host: bool = False, dp: int = 2, **options: Any) -> ServedStates:
    """Returns a manager with two replicas that copy from each other. With `slabs` the states share memory with the
    pages. Without `slabs` they have separate memory. With `host` there is a host tier.
    """
    told = {"routing": Routing(copy_pages=True), **options.pop("params", {})}
    if not host:
        told |= {"enable_kvcache_swapping_to_host": False, "host_kvcache_swap_space_gb": None, "tier_state_share": 0.5}
    return ServedStates(slabs=slabs, dp=dp, params=told, **options)


def copied(it: ServedStates) -> tuple[int, int, int]:
    """Returns three counts: the pages copied so far, the states copied so far, and the requests that have continued
    from a state.
    """
    metrics = it.manager.metrics
    it.manager.check()
    return metrics.d2d_blocks_copied, metrics.d2d_states_copied, metrics.state_hits


@pytest.mark.parametrize("slabs", WAYS)
def test_a_request_resumes_from_pages_and_the_state_copied_from_another_replica(slabs: bool) -> None:
    it = of(slabs)
    it.serve(PROMPT, replica=1)
    assert it.serve(PROMPT, replica=0) == 40
    assert copied(it) == (10, 1, 1)
    assert it.serve(PROMPT, replica=0) == 40  # The replica now has both the pages and the state.
    assert copied(it) == (10, 1, 2)
    assert it.compared == 3  # The third state is the one after the prompt's first chunk.
    assert it.serve([*PROMPT[:40], 9, 9, 9], replica=1) == 40


@pytest.mark.parametrize("slabs", WAYS)
def test_no_page_after_the_last_state_of_any_replica_is_copied(slabs: bool) -> None:
    it = of(slabs, every=4)
    it.serve(PROMPT, replica=1)
    # The two prompts share seven pages. The last kept state in them is after four pages.
    other = [*PROMPT[:30], *range(200, 216)]
    assert it.serve(other, replica=0) == 16
    assert copied(it) == (4, 1, 1)


@pytest.mark.parametrize("slabs", WAYS)
def test_only_the_pages_or_only_the_state_is_copied_if_the_other_is_already_cached(slabs: bool) -> None:
    it = of(slabs)
    it.serve(PROMPT, replica=1)
    it.serve(PROMPT, replica=0)
    forget_pages(it, 0, slice(4, 7))
    assert it.serve(PROMPT, replica=0) == 40
    assert copied(it) == (10 + 3, 1, 2)
    it.manager.states[0].forget_copies()
    assert it.serve(PROMPT, replica=0) == 40
    assert copied(it) == (10 + 3, 2, 3)


def forget_pages(it: ServedStates, replica: int, which: slice) -> None:
    """Removes some idle pages of the prompt from a replica."""
    pool = it.manager._replicas.each[replica].pool
    pages = pool.index.match(it.hasher(context := it.waiting(PROMPT)).digests(context.tokens, 0, 10))[which]
    pool.idle.remove(pages)
    pool.index.withdraw(pages)
    pool._push_fresh(pages)
    it.manager.check()


@pytest.mark.parametrize("slabs", WAYS)
def test_the_state_comes_from_one_replica_and_pages_from_another(slabs: bool) -> None:
    it = of(slabs, dp=3)
    it.serve(PROMPT, replica=1)
    it.serve(PROMPT, replica=2)
    it.manager.states[1].forget_copies()
    forget_pages(it, 2, slice(0, 5))
    assert it.serve(PROMPT, replica=0) == 40
    assert copied(it) == (10 + 10, 1 + 1, 2)


@pytest.mark.parametrize("slabs", WAYS)
def test_only_the_last_pages_of_a_window_are_copied_with_the_state(slabs: bool) -> None:
    it = of(slabs, layers=2, params={"groups": WINDOWS})
    it.serve(PROMPT, replica=1)
    assert it.serve(PROMPT, replica=0) == 40
    assert copied(it) == (10 + 2, 1, 1)


def test_without_a_slab_for_the_state_pages_are_copied_up_to_the_last_state_of_this_replica() -> None:
    it = of(slabs=True, pages=60, every=4)
    it.serve(PROMPT[:18], replica=0)  # Replica 0 keeps a state after four pages.
    it.serve(PROMPT, replica=1)
    forget_pages(it, 0, slice(1, 3))
    pool = it.manager._replicas.each[0].pool
    running = it.claim(range(500, 500 + SIZE * (pool.free_count - 2 * pool.beside - 11)))
    assert it.manager.maybe_reserve(running)
    late = it.claim(PROMPT)
    # The request needs all 11 free pages for its tokens, so no page is left for the slab of a state.
    assert pool.free_count == 11
    assert it.manager.maybe_reserve(late)
    assert late.start_idx == 16
    # Replica 1 had copied four pages from replica 0. Replica 0 has now copied its two lost pages back.
    assert copied(it) == (4 + 2, 1, 2)


def test_without_a_free_state_page_pages_are_copied_up_to_the_last_state_of_this_replica() -> None:
    it = of(slabs=False)
    it.serve(PROMPT, replica=1)
    leases = list[Any]()
    for at in range(4):  # The requests are released, but leases still hold their states.
        context = it.claim([300 + at, 1, 2])
        assert it.manager.maybe_reserve(context)
        it.run(context)
        leases.append(it.manager.lease(context.request_id))
        it.manager.release(context.request_id)
    waiting = [it.claim([400 + at, 1]) for at in range(3)]
    late = it.claim(PROMPT)
    assert not it.manager.states[0].pool.has_room
    assert it.manager.maybe_reserve(late)
    assert late.start_idx == 0
    assert copied(it) == (0, 0, 0)
    for lease in leases:
        it.manager.end_lease(lease)
    for context in (late, *waiting):
        it.manager.release(context.request_id)
    assert it.serve(PROMPT, replica=0) == 40
    assert copied(it) == (10, 1, 1)


@pytest.mark.parametrize("slabs", WAYS)
def test_a_request_that_does_not_fit_copies_nothing(slabs: bool) -> None:
    it = of(slabs, pages=30)
    it.serve(PROMPT, replica=1)
    replica = it.manager._replicas.each[0]
    running = it.claim(range(500, 500 + 4 * (replica.pool.free_count - 2 * replica.pool.beside - 8)))
    assert it.manager.maybe_reserve(running)
    late = it.claim(PROMPT)
    before = replica.pool.free_count, replica.pool.index.generation, it.manager.states[0].generation
    assert not it.manager.maybe_reserve(late)
    assert (replica.pool.free_count, replica.pool.index.generation, it.manager.states[0].generation) == before
    assert copied(it) == (0, 0, 0)
    it.manager.release(running.request_id)
    assert it.manager.maybe_reserve(late)
    assert late.start_idx == 40
    assert copied(it) == (10, 1, 1)


@pytest.mark.parametrize("slabs", WAYS)
def test_pages_are_loaded_from_the_host_if_it_has_them_and_copied_from_the_other_replica_otherwise(slabs: bool) -> None:
    it = of(slabs, host=True)
    it.serve(PROMPT, replica=1)
    it.manager.flush_tiers()
    assert it.serve(PROMPT, replica=0) == 40
    # The replicas share host memory, so replica 0 loads the state from there.
    assert copied(it) == (10, 0, 1)
    assert it.manager.metrics.h2d_states_copied == 1
    it.manager.states[0].forget_copies()
    it.state_tiers.reset()
    assert it.serve(PROMPT, replica=0) == 40
    assert copied(it) == (10, 1, 2)
    it.manager.flush_tiers()
    # States that come from another replica are saved to the host again.
    assert it.state_tiers.host.pool.index.published.any()


@pytest.mark.few(1)
@pytest.mark.parametrize("slabs", WAYS)
def test_random_requests_on_two_replicas_always_read_the_states_of_their_tokens(slabs: bool) -> None:
    it, rng = of(slabs, pages=40, every=2, layers=2, params={"groups": WINDOWS}), random.Random(3)
    for _ in range(120):
        start = rng.choice(((1, 2, 3), (4, 5, 6), (7, 8, 9))) * rng.randint(1, 14)
        it.serve([*start, rng.randint(10, 99)], replica=rng.randint(0, 1), chunk=rng.choice((5, 16, 256)))
    pages, states, hits = copied(it)
    assert min(pages, states, hits, it.manager.metrics.state_evictions) > 10
