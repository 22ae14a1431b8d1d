"""Hints and quotas also apply to the copies of states that a prefix needs. The states may share memory with pages or
have separate memory.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kvcache import KVCacheParams, PagedKVCacheManager, RangeRetention, Retention, TextContext
from kvcache.params import StateShape
from kvcache.policies.hinted_order import HintedOrder
from kvcache.states.state_memory import page_bytes, state_layouts
from tests.kvcache.build import as_long_as
from tests.kvcache.policies.hinted_idle import trust
from tests.kvcache.policies.test_hints import evidence, recover
from tests.kvcache.random_model.matrix import SHAPES

LAST, FIRST = Retention(session_continues=True), Retention(session_continues=False)
SIZE = 4


def made(pages: int, copies: int, shape: StateShape = SHAPES[1], rows: int = 2, **params: Any) -> PagedKVCacheManager:
    """Returns a manager with `pages` pages, and with room for `copies` cached states in addition to the states of its
    requests.
    """
    made = KVCacheParams(
        torch.int64, 1, 2, enable_prefix_caching=True, page_size=SIZE, states=shape, state_copies=copies, **params
    )
    memory = pages * SIZE * made.bytes_per_token(1) + (rows + copies + 1) * page_bytes(state_layouts(shape, 1))
    return PagedKVCacheManager(made, rows, 4096, 1, ["cpu"], available_cache_memory=memory)


def shared(pages: int, slab_pages: int = 4, rows: int = 2, **params: Any) -> PagedKVCacheManager:
    """Returns a manager with `pages` pages, in which a state takes `slab_pages` pages."""
    made = KVCacheParams(
        torch.int64, 1, 2, enable_prefix_caching=True, page_size=SIZE, states=SHAPES[slab_pages], **params
    )
    memory = pages * SIZE * made.bytes_per_token(1)
    return PagedKVCacheManager(made, rows, 4096, 1, ["cpu"], available_cache_memory=memory)


def run(manager: PagedKVCacheManager, contexts: Sequence[TextContext], token: int = 0) -> None:
    """Runs a step of these requests, and reports that each state page is the state after all tokens that have run."""
    (states,) = manager.states
    manager.fetch(contexts)
    names = [context.request_id for context in contexts]
    pages = states.pages_at(names, [context.start_idx for context in contexts])
    states.advance(pages, [context.active_idx for context in contexts])
    for context in contexts:
        context.update(token)
    manager.step(contexts)


def serve(
    manager: PagedKVCacheManager, tokens: list[int], said: Retention | None = None, more: int = 0, **options: Any
) -> int:
    """Runs one request until it has 1 + `more` new tokens. Returns the number of tokens that it found cached."""
    context = TextContext(tokens, len(tokens) + more + 1, retention=said, **options)
    with manager.claim(context):
        assert manager.maybe_reserve(context)
        found = context.start_idx
        for _ in as_long_as(lambda: context.end_idx <= len(tokens) + more):
            assert manager.maybe_reserve(context)
            run(manager, [context])
    manager.check()
    return found


def prompt(name: int, pages: int = 2) -> list[int]:
    return [*[name] * (SIZE * pages), 0]


def trusting(manager: PagedKVCacheManager) -> PagedKVCacheManager:
    """Makes all idle content follow hints, as after a period of right hints."""
    serve(manager, prompt(10_000), LAST)
    for replica in manager._replicas.each:
        trust(replica.hints, 0.95)
    manager.reset_prefix_cache()
    return manager


def found(manager: PagedKVCacheManager, tokens: list[int], **options: Any) -> int:
    """Returns the number of pages of the prompt that a request would find. The call changes no state."""
    return manager._replicas.each[0].find(TextContext(tokens, 4096, **options)).end


def copies_of(manager: PagedKVCacheManager, tokens: list[int], **options: Any) -> list[int]:
    """Returns the numbers of the prompt's pages after which there is a copy of the state. The call changes no state."""
    replica = manager._replicas.each[0]
    last = len(tokens) // SIZE
    digests = replica.hasher(None, TextContext(tokens, 4096, **options)).digests(tokens, 0, last)  # pyright: ignore[reportArgumentType]
    return (manager.states[0].pool.index.find(digests).nonzero()[0] + 1).tolist()


@pytest.mark.parametrize("said", [LAST, Retention(priority=100), None])
def test_a_hinted_prefix_is_found_after_a_flood_with_its_state(said: Retention | None) -> None:
    manager = trusting(made(400, 10))
    serve(manager, prompt(1), said)
    # There are enough pages for all of these prompts, but there is room for only ten copies of states.
    for name in range(100, 140):
        serve(manager, prompt(name))
    assert found(manager, prompt(1)) == (0 if said is None else 2)
    assert serve(manager, prompt(1)) == (0 if said is None else 8)


def test_content_that_a_hint_puts_first_is_evicted_first() -> None:
    manager = trusting(made(400, 10))
    for name in range(6):
        serve(manager, prompt(name), FIRST if name % 2 else None)
    for name in range(100, 108):
        serve(manager, prompt(name))
    assert [found(manager, prompt(name)) for name in range(6)] == [2, 0] * 3


def test_a_hint_to_stay_applies_only_to_the_newest_state_copies() -> None:
    """A copy is made after every page. The hint to stay applies to three of the copies: those at the end of the answer,
    of the prompt and of the hint's range.
    """
    manager = trusting(made(400, 14, state_every_pages=1))
    tokens = prompt(1, 8)
    said = Retention(session_continues=True, ranges=(RangeRetention(0, 3 * SIZE + 2, priority=100),))
    serve(manager, tokens, said, more=10)
    whole = [*tokens, *[0] * 11]
    assert copies_of(manager, whole) == [*range(1, 11)]
    for name in range(100, 130):
        serve(manager, prompt(name))
    assert copies_of(manager, whole) == [3, 8, 10]


def test_a_hint_to_go_first_applies_to_all_state_copies() -> None:
    manager = trusting(made(400, 9, state_every_pages=1))
    serve(manager, prompt(1, 6), FIRST)
    serve(manager, prompt(2, 2))
    for name in range(100, 104):
        serve(manager, prompt(name))
        if name == 102:
            assert copies_of(manager, prompt(1, 6)) == [5, 6]
    assert copies_of(manager, prompt(1, 6)) == []
    assert copies_of(manager, prompt(2, 2)) == [1, 2]


@pytest.mark.parametrize("again", [None, FIRST])
def test_a_state_copy_that_is_used_again_is_not_put_first_by_a_hint_any_more(again: Retention | None) -> None:
    manager = trusting(made(400, 6))
    serve(manager, prompt(1), FIRST)
    for name in range(100, 104):
        serve(manager, prompt(name))
    if again is None:
        assert serve(manager, [*prompt(1)[:8], *prompt(2)]) == 8
    else:
        assert serve(manager, prompt(1), again) == 8
    for name in range(110, 114):
        serve(manager, prompt(name))
    assert found(manager, prompt(1)) == 2


def one_by_one(manager: PagedKVCacheManager) -> None:
    """Makes the copies of a step's requests one after another instead of all at once. The manager does this itself for
    two requests with the same tokens.
    """
    manager.states[0].keep_passing = lambda names, *_: range(len(names))  # type: ignore[method-assign]


@pytest.mark.parametrize("together", [True, False])
def test_a_state_copy_does_not_inherit_the_hint_of_the_copy_that_it_replaces(*, together: bool) -> None:
    """The child has a hint and resumes from a passing copy of its parent. The parent then replaces this copy with its
    next copy. The child's hint must not apply to the next copy.
    """
    manager = trusting(made(400, 8, rows=3))
    if not together:
        one_by_one(manager)
    order = manager.states[0].pool.idle
    assert isinstance(order, HintedOrder)
    parent = TextContext(prompt(1, 1)[:3], 99)
    manager.external_claim(parent.request_id)
    for _ in as_long_as(lambda: parent.end_idx < 5):
        assert manager.maybe_reserve(parent)
        run(manager, [parent])
    child = parent.fork()
    child.retention = LAST
    assert manager.fork(parent, child)
    manager.release(child.request_id)
    (copy,) = manager.states[0].pool.index.published.nonzero()[0].tolist()
    assert order.codes[copy] == 4
    for _ in as_long_as(lambda: parent.end_idx < 13):
        assert manager.maybe_reserve(parent)
        run(manager, [parent])
    assert not order.codes[manager.states[0].pool.index.published.nonzero()[0]].tolist().count(4)
    manager.release(parent.request_id)
    manager.check()


@pytest.mark.parametrize("together", [True, False])
def test_a_hint_does_not_wear_off_however_many_copies_other_requests_make(*, together: bool) -> None:
    """A request replaces its own last copy with each new copy. It therefore evicts no other content, however many
    copies it makes.
    """
    manager = trusting(made(400, 8))
    if not together:
        one_by_one(manager)
    serve(manager, prompt(1), LAST)
    for name in range(2):
        serve(manager, prompt(100 + name), more=1000)
    for name in range(110, 124):
        serve(manager, prompt(name))
    assert found(manager, prompt(1)) == 2


def test_without_hints_and_quotas_copies_are_in_the_plain_order() -> None:
    manager = made(40, 4)
    serve(manager, prompt(1))
    assert type(manager.states[0].pool.idle).__name__ == "LruOrder"


def test_a_tenant_above_its_quota_gives_up_its_own_copies() -> None:
    manager = made(400, 18, tenant_quota=0.2)  # The quota is four of 20 state pages.
    for name in range(4):
        serve(manager, prompt(name))
    for name in range(100, 130):
        serve(manager, prompt(name), cache_salt="small")
    assert [found(manager, prompt(name)) for name in range(4)] == [2] * 4
    theirs = [found(manager, prompt(name), cache_salt="small") for name in range(100, 130)]
    # A copy above the quota can still be found until other content needs its room.
    assert theirs == [0] * 15 + [2] * 15
    for name in range(200, 211):
        serve(manager, prompt(name))
    theirs = [found(manager, prompt(name), cache_salt="small") for name in range(100, 130)]
    assert theirs == [0] * 26 + [2] * 4
    assert [found(manager, prompt(name)) for name in (*range(4), *range(200, 211))] == [2] * 15


@pytest.mark.parametrize("params", [{}, {"tenant_quota": 0.5}])
def test_after_an_interrupt_a_tenant_has_the_state_copies_that_it_had(params: dict[str, Any]) -> None:
    manager = made(400, 10, **params)  # The quota is half of 12 state pages.
    for name in range(5):
        serve(manager, prompt(name), cache_salt="a")
    recover(manager)
    for name in range(5, 10):
        serve(manager, prompt(name), cache_salt="b")
    assert [found(manager, prompt(name), cache_salt="a") for name in range(5)] == [2] * 5


def test_copies_of_a_tenant_are_as_old_as_their_last_use() -> None:
    """New copies of a request belong to its tenant. They make no other copy of the tenant younger."""
    manager = made(400, 10, tenant_quota=0.9, state_every_pages=1)
    serve(manager, prompt(1, 6), cache_salt="a")
    serve(manager, prompt(2))
    assert serve(manager, prompt(1, 6), cache_salt="a") == 24
    for name in range(100, 104):
        serve(manager, prompt(name))
    assert copies_of(manager, prompt(2)) == [1, 2]
    assert copies_of(manager, prompt(1, 6), cache_salt="a") == [6]


# ---- one memory for pages and states


@pytest.mark.parametrize("said", [LAST, Retention(priority=100), None])
def test_in_one_memory_a_hinted_prefix_is_found_after_a_flood(said: Retention | None) -> None:
    manager = trusting(shared(60))
    serve(manager, prompt(1), said)
    for name in range(100, 120):  # Each prompt takes six pages. Four of the six pages hold the copy of its state.
        serve(manager, prompt(name))
    assert found(manager, prompt(1)) == (0 if said is None else 2)


def test_in_one_memory_a_hint_to_go_first_applies_to_pages_and_their_state_copy() -> None:
    manager = trusting(shared(80))
    for name in range(8):
        serve(manager, prompt(name), FIRST if name % 2 else LAST)
    for name in range(100, 110):
        serve(manager, prompt(name))
    assert [copies_of(manager, prompt(name)) for name in range(8)] == [[2], []] * 4
    assert [found(manager, prompt(name)) for name in range(8)] == [2, 0] * 4


@pytest.mark.parametrize("long", [False, True])
def test_in_one_memory_a_hint_that_keeps_pages_keeps_them_from_slabs_too(*, long: bool) -> None:
    """With long prompts, requests need room for pages. With short prompts, they need room for slabs."""
    manager = trusting(shared(100))
    serve(manager, prompt(1, 20), LAST)
    for name in range(100, 130):
        serve(manager, prompt(name, 12 if long else 1))
    assert found(manager, prompt(1, 20)) == 20


def test_in_one_memory_an_expired_hint_keeps_no_state_copy() -> None:
    manager = trusting(shared(60))
    now = [0.0]
    for order in (manager._replicas.each[0].pool.idle, manager.states[0].pool.idle):
        assert isinstance(order, HintedOrder)
        order._clock = lambda: now[0]
    for name in (1, 2):
        serve(manager, prompt(name), Retention(session_continues=True, ttl_s=50.0 * name))
    now[0] = 60.0
    for name in range(100, 112):
        serve(manager, prompt(name))
    assert [copies_of(manager, prompt(name)) for name in (1, 2)] == [[], [2]]


@pytest.mark.parametrize("slab_pages", [1, 4])
def test_in_one_memory_a_state_copy_counts_towards_the_quota_as_the_pages_of_its_slab(slab_pages: int) -> None:
    manager = shared(90, slab_pages, tenant_quota=0.15)  # 13 pages
    for name in range(3):
        serve(manager, prompt(name))
    for name in range(100, 130):
        serve(manager, prompt(name), cache_salt="small")
    assert [found(manager, prompt(name)) for name in range(3)] == [2] * 3
    quotas = manager._replicas.each[0].hints._quotas  # pyright: ignore[reportAttributeAccessIssue]
    assert quotas is not None
    mine, more = quotas._ids["small"], 200
    for _ in as_long_as(lambda: quotas._surplus(mine) > 0):
        serve(manager, prompt(more := more + 1))
    assert more < 230
    most = 13 // (2 + manager.slab_pages)
    kept = [found(manager, prompt(name), cache_salt="small") for name in range(100, 130)]
    assert kept == [0] * (30 - most) + [2] * most
    assert [found(manager, prompt(name)) for name in (*range(3), *range(201, more + 1))] == [2] * (3 + more - 200)


HALF = 72  # The number of prompts in each half of the rounds.


def rounds(manager: PagedKVCacheManager, first: Retention | None, last: Retention | None) -> list[int]:
    """Runs a few prompts again and again, with prompts between them that occur only once. Returns the number of tokens
    found in each half of the rounds.
    """
    halves = []
    for half in range(2):
        hits = 0
        for number in range(HALF):
            hits += serve(manager, prompt(number % 6), last)
            for once in range(2):
                serve(manager, prompt(10_000 * (half + 1) + 2 * number + once), first)
        halves.append(hits)
    return halves


@pytest.mark.few(1)
@pytest.mark.parametrize("slabs", [True, False])
def test_the_share_grows_while_hints_are_right(*, slabs: bool) -> None:
    """Six prompts recur. They have six pages with copies, or two pages with ten copies. Plain LRU would find none of
    them.
    """
    manager = shared(60) if slabs else made(24, 10)
    assert rounds(manager, None, None) == [0, 0]
    manager = shared(60) if slabs else made(24, 10)
    assert rounds(manager, FIRST, LAST)[1] > 0.9 * HALF * 8
    assert manager.hint_share == 0.95


def test_in_one_memory_the_slabs_of_running_requests_reduce_the_room_of_the_plain_baseline() -> None:
    manager, rooms = shared(60, rows=3), list[int]()
    serve(manager, prompt(0), Retention())
    manager.reset_prefix_cache()
    plain = manager._replicas.each[0].hints._baselines[0]  # type: ignore[misc]
    for name in range(3):
        context = TextContext(prompt(name), 64)
        manager.external_claim(context.request_id, 0)
        assert manager.maybe_reserve(context)
        rooms.append(plain._room)
    # Each running request has a slab and one partial page in addition to the full pages of its prompt.
    assert rooms == [60 - running * (manager.slab_pages + 1) for running in (1, 2, 3)]


def test_in_one_memory_the_plain_baseline_has_the_hits_of_plain_lru() -> None:
    """Neutral hints change nothing. The cache therefore has about as many hits as the baseline, which does not model
    copies of states.
    """
    manager, rng = shared(80), random.Random(0)
    serve(manager, prompt(0), Retention())
    learned, hits = evidence(manager), 0
    for _ in range(300):
        hits += serve(manager, prompt(rng.randint(1, 16)), Retention()) // SIZE
    assert hits > 200
    assert abs(sum(learned[::2])) < 0.15 * hits
