"""A request continues from the progress that the manager has recorded, whatever position its context claims. All KV
that a request reads is compared, so each result has been computed from the right tokens.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kvcache import (
    InvalidRequestError,
    LayerGroup,
    NotReservedError,
    PagedKVCacheManager,
    TextContext,
)
from tests.kvcache.build import manager_of, proven
from tests.kvcache.kv import KVTokens
from tests.test_docs import PROGRAMS

SIZE = 4
PROMPT = [*range(100, 118)]
WINDOWS = (LayerGroup("full", (0,)), LayerGroup("window", (1,), 6))
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "not cached": {"caching": False},
    "host": {"host_slots": 40},
    "groups": {"layers": 2, "params": {"groups": WINDOWS}},
    "groups with a host": {"layers": 2, "host_slots": 80, "params": {"groups": WINDOWS}},
    "replicas": {"dp": 2},
}


class Own(TextContext):
    """A caller's own context class. No call takes a fast path for it."""


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> dict[str, Any]:
    return KINDS[request.param]


@pytest.fixture
def manager(kind: dict[str, Any]) -> Iterator[PagedKVCacheManager]:
    made = manager_of(80, page_size=SIZE, rows=4, dtype=torch.int64, **kind)
    yield made
    for name in [*made._claims.places]:
        made.release(name)
    made.check()
    assert made.num_held_blocks == 0
    made.close()


def run(manager: PagedKVCacheManager, *contexts: TextContext, steps: int = 1, batch: bool = False) -> None:
    kv = KVTokens(manager)
    for _ in range(steps):
        given = manager.batch(contexts) if batch else list(contexts)
        assert manager.reserve_batch(given).all() if batch else all(map(manager.maybe_reserve, contexts))
        kv.run_contexts(contexts, manager.fetch(given))
        for context in contexts:
            context.update(7)
        manager.step(given)


def started(manager: PagedKVCacheManager, name: str, made: type[TextContext] = TextContext, steps: int = 6) -> Any:
    context = made(PROMPT, 250, name)
    manager.external_claim(name, 0)
    run(manager, context, steps=steps)
    return context


def use_all_pages(manager: PagedKVCacheManager) -> None:
    """Runs other requests that overwrite every free page, and then releases them."""
    for at in range(3):
        for replica in range(manager.num_replicas):
            other = TextContext([1000 + at, *range(100)], 250, f"other{at}{replica}", cache_salt=f"tenant{at}")
            manager.external_claim(other.request_id, replica)
            run(manager, other)
            manager.release(other.request_id)


@pytest.mark.each_value
@pytest.mark.parametrize("made", [TextContext, Own])
@pytest.mark.parametrize("evicted", [False, True])
@pytest.mark.parametrize("batch", [False, True])
def test_a_preempted_request_comes_back(
    manager: PagedKVCacheManager, made: type[TextContext], evicted: bool, batch: bool
) -> None:
    context = started(manager, "r", made)
    before = context.tokens.tolist()
    for _ in range(2):  # A request may be preempted several times.
        manager.release("r")
        if evicted:
            use_all_pages(manager)
        manager.prefetch(context)
        found = manager.admission(context)
        assert found.fits
        manager.external_claim("r", found.replica_idx)
        run(manager, context, batch=batch)
        run(manager, context, steps=5, batch=batch)
        assert context.tokens.tolist()[: len(before)] == before
    assert context.start_idx == len(PROMPT) + 17


@pytest.mark.parametrize("at", [5, 17])
def test_a_start_that_was_set_before_the_first_reservation_is_ignored(manager: PagedKVCacheManager, at: int) -> None:
    use_all_pages(manager)
    context = TextContext(PROMPT, 250, "r", cache_salt="ours")
    context.set_token_indices(start_idx=at)
    manager.external_claim("r", 0)
    assert manager.maybe_reserve(context)
    assert (context.start_idx, context.active_idx) == (0, len(PROMPT))
    run(manager, context, steps=3)
    manager.release("r")
    again = TextContext(PROMPT, 250, "again", cache_salt="ours")
    manager.external_claim("again", 0)
    # `run` compares the KV of the found pages with the KV that this request would have computed.
    run(manager, again, steps=3)


def test_a_refused_reservation_leaves_the_context_where_it_was(manager: PagedKVCacheManager) -> None:
    blockers = [TextContext([at, *range(119)], 250, f"b{at}") for at in range(3)]
    for blocker in blockers:
        manager.external_claim(blocker.request_id, 0)
        assert manager.maybe_reserve(blocker) or blocker is not blockers[0]
    big = TextContext([*range(500, 620)], 250, "big")
    big.set_token_indices(start_idx=12)
    manager.external_claim("big", 0)
    before = manager.num_free_blocks, manager.metrics
    assert not manager.maybe_reserve(big)
    assert (big.start_idx, big.active_idx, big.end_idx) == (12, 120, 120)
    assert (manager.num_free_blocks, manager.metrics) == before


def test_a_start_that_is_set_back_leaves_the_end_of_the_chunk(manager: PagedKVCacheManager) -> None:
    context = TextContext(PROMPT, 250, "r")
    context.set_token_indices(start_idx=9, active_idx=13)
    manager.external_claim("r", 0)
    assert manager.maybe_reserve(context)
    assert (context.start_idx, context.active_idx, context.end_idx) == (0, 13, 18)


# ---- the loop of the guides


@pytest.mark.parametrize("kind", [name for name in KINDS if "replicas" not in name], indirect=True)
def test_the_loop_of_the_guides_keeps_its_token_budget(kind: dict[str, Any]) -> None:
    """The loop is that of `docs/guides/chunked-prefill.md`. All KV that a request reads is compared."""
    guide: dict[str, Any] = {}
    exec(PROGRAMS["docs/guides/chunked-prefill.md-2"].code, guide)  # noqa: S102 - our own page
    manager = manager_of(30, page_size=SIZE, rows=4, dtype=torch.int64, **kind)
    draw, kv, budget = random.Random(5), KVTokens(manager), 20
    running, waiting, left = list[TextContext](), deque[TextContext](), dict[str, int]()
    counts = Counter[str]()
    for step in range(300):
        if len(waiting) < 3:
            length = draw.randint(1, 60)
            first = draw.choice([100, 1000 * step])
            made = draw.choice([TextContext, Own])
            waiting.append(made(range(first, first + length), 250, f"r{step}"))
            left[f"r{step}"] = draw.randint(1, 50)
        before = [*running]
        batch = guide["next_step"](manager, running, waiting, budget)
        ran = sum(one.active_length for one in batch)
        assert 0 < ran <= budget, f"step {step} runs {ran} tokens"
        counts["full"] += ran == budget
        counts["preempted"] += sum(one not in running for one in before)
        kv.run_contexts(batch, manager.fetch(batch))
        for one in batch:
            left[one.request_id] -= one.active_idx == one.end_idx
            one.update(7)
        manager.step(batch)
        for one in [one for one in running if not left[one.request_id]]:
            counts["finished"] += 1
            running.remove(one)
            manager.release(one.request_id)
    assert min(counts["full"], counts["preempted"], counts["finished"]) > 5, counts
    manager.check()
    manager.close()


@pytest.mark.parametrize("made", [TextContext, Own])
def test_after_a_release_all_tokens_are_active_again(manager: PagedKVCacheManager, made: type[TextContext]) -> None:
    context = made(PROMPT, 250, "r")
    manager.external_claim("r", 0)
    for end in (6, 12):
        context.set_token_indices(active_idx=end)
        run(manager, context)
    context.set_token_indices(active_idx=16)
    assert manager.maybe_reserve(context)
    manager.release("r")
    assert (context.start_idx, context.active_idx, context.end_idx) == (0, 18, 18)


# ---- a request with pages


CALLS: dict[str, Callable[[PagedKVCacheManager, TextContext], object]] = {
    "maybe_reserve": lambda manager, one: manager.maybe_reserve(one),
    "reserve_batch": lambda manager, one: manager.reserve_batch([one]),
    "reserve_batch of a batch": lambda manager, one: manager.reserve_batch(manager.batch([one])),
    "fetch": lambda manager, one: manager.fetch([one]),
    "fetch of a tuple": lambda manager, one: manager.fetch((one,)),
    "fetch of a batch": lambda manager, one: manager.fetch(manager.batch([one])),
}


@pytest.mark.each_value
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("made", [TextContext, Own])
@pytest.mark.parametrize("ran", [0, 8])
def test_a_prompt_runs_from_no_token_that_was_not_computed(
    manager: PagedKVCacheManager, call: str, made: type[TextContext], ran: int
) -> None:
    context = made(PROMPT, 250, "r")
    manager.external_claim("r", 0)
    assert manager.maybe_reserve(context)
    if ran:
        context.set_token_indices(active_idx=ran)
        run(manager, context)
    metrics = manager.metrics
    context.set_token_indices(start_idx=ran + 3)
    with pytest.raises(InvalidRequestError, match=f"'r': its start_idx is {ran + 3}, but at most {ran} tokens are"):
        CALLS[call](manager, context)
    assert manager.metrics == metrics
    context.set_token_indices(start_idx=ran)
    run(manager, context, steps=5)


@pytest.mark.each_value
@pytest.mark.parametrize("call", ["maybe_reserve", "reserve_batch", "reserve_batch of a batch"])
@pytest.mark.parametrize("made", [TextContext, Own])
@pytest.mark.parametrize("more", [2, 9])
def test_a_request_has_computed_no_more_than_its_pages_hold(
    manager: PagedKVCacheManager, call: str, made: type[TextContext], more: int
) -> None:
    context = started(manager, "r", made, steps=3)  # The request has 20 tokens in 5 pages and one more token to run.
    assert manager.maybe_reserve(context)
    room = len(manager.get_req_blocks("r")) * SIZE
    while context.start_idx < room + more - 1:
        context.update(7)
    pages = manager.get_req_blocks("r")
    with pytest.raises(InvalidRequestError, match=f"'r': its start_idx is {room + more - 1}, but at most {room} "):
        CALLS[call](manager, context)
    with pytest.raises(NotReservedError, match="'r'"):
        manager.step([context])
    assert manager.get_req_blocks("r") == pages
    context.set_token_indices(start_idx=20)  # The context returns to its real position.
    run(manager, context, steps=5)


def test_several_steps_at_once_are_accepted(manager: PagedKVCacheManager) -> None:
    context = started(manager, "r")
    for _ in range(4):
        assert manager.maybe_reserve(context, 5)
        start = context.start_idx
        inputs, kv = manager.fetch([context], 5), KVTokens(manager)
        for _ in range(5):
            kv.run_contexts([context], inputs)
            context.update(7)
        assert manager.maybe_reserve(context)  # The reservation comes before the step that records these tokens.
        manager.step([context])
        assert context.start_idx == start + 5
    run(manager, context)


def test_taking_drafted_tokens_back_is_accepted(manager: PagedKVCacheManager) -> None:
    """Three tokens are drafted at a time. Only the first of them is kept."""
    context = started(manager, "r")
    for _ in range(9):
        start, end = context.start_idx, context.end_idx
        assert manager.maybe_reserve(context, 4)
        for guess in (7, 8, 9):
            context.update(guess)
        context.set_token_indices(start_idx=start)
        KVTokens(manager).run_contexts([context], manager.fetch([context]))
        context.set_token_indices(active_idx=end + 1, end_idx=end + 1)
        context.update(5)
        manager.step([context])
    run(manager, context)


def test_a_fork_begins_where_its_parent_is(manager: PagedKVCacheManager) -> None:
    parent = started(manager, "parent")
    for at in (0, 3, parent.end_idx - 1):
        child = parent.fork(f"child{at}")
        child.set_token_indices(start_idx=at)
        assert manager.fork(parent, child)
        assert child.start_idx == parent.start_idx
        run(manager, child, steps=3)
        manager.release(child.request_id)
        manager.external_claim(child.request_id, 0)
        run(manager, child, steps=3)


# ---- imports


def prefilled(length: int) -> tuple[PagedKVCacheManager, Any]:
    source = manager_of(40, page_size=SIZE, dtype=torch.int64)
    context = TextContext(PROMPT[:length], 250, "p")
    source.external_claim("p")
    run(source, context)
    return source, source.block_table("p")


@pytest.mark.parametrize("start", [0, 9, 17])
def test_an_import_begins_with_what_is_here(start: int) -> None:
    _, table = prefilled(13)
    manager = manager_of(40, page_size=SIZE)
    context = TextContext(PROMPT, 250, "r")
    context.set_token_indices(start_idx=start)
    manager.external_claim("r")
    pending = manager.import_block_table(context, table)
    assert pending is not None
    assert pending.tokens == (0, 13)
    manager.commit_import(context, pending, proven(manager, pending))
    assert context.start_idx == 13


@pytest.mark.parametrize("start", [14, 16, 17])
def test_an_import_ends_with_what_was_imported(start: int) -> None:
    _, table = prefilled(13)
    manager = manager_of(40, page_size=SIZE)
    context = TextContext(PROMPT, 250, "r")
    manager.external_claim("r")
    pending = manager.import_block_table(context, table)
    assert pending is not None
    proof = proven(manager, pending)
    context.set_token_indices(start_idx=start)
    with pytest.raises(InvalidRequestError, match=f"'r': its start_idx is {start}, but at most 13 tokens are computed"):
        manager.commit_import(context, pending, proof)
    assert not manager._replicas.each[0].pool.index.published.any()
    context.set_token_indices(start_idx=0)
    manager.commit_import(context, pending, proof)
    assert context.start_idx == 13


@pytest.mark.parametrize("found", [0, 8])
def test_a_cancelled_import_adds_no_computed_tokens(found: int) -> None:
    _, table = prefilled(17)
    manager = manager_of(40, page_size=SIZE, dtype=torch.int64)
    if found:
        manager.external_claim("first")
        run(manager, TextContext(PROMPT[: found + 1], 250, "first"))
    context = TextContext(PROMPT[:17], 250, "r")
    manager.external_claim("r")
    assert context.end_idx == 17
    context.update(7)  # The source has sampled this token.
    pending = manager.import_block_table(context, table)
    assert pending is not None
    manager.cancel_import(pending)
    context.set_token_indices(start_idx=17)
    for call in ("fetch", "fetch of a tuple"):
        with pytest.raises(InvalidRequestError, match=f"'r': its start_idx is 17, but at most {found} tokens"):
            CALLS[call](manager, context)
    context.set_token_indices(start_idx=found)
    run(manager, context, steps=4)


# ---- contexts that refuse new indices


class Stubborn(TextContext):
    """A context that refuses new indices: it raises an error, or it returns without setting them."""

    raises = True

    def set_token_indices(self, *_: Any, **__: Any) -> None:
        if self.raises:
            raise ZeroDivisionError("told to stay")


@pytest.mark.parametrize("raises", [True, False])
def test_a_context_that_refuses_to_be_set_back_changes_nothing(manager: PagedKVCacheManager, raises: bool) -> None:
    use_all_pages(manager)
    context = Stubborn(PROMPT, 250, "r")
    context.raises, context._start = raises, 8
    manager.external_claim("r", 0)
    error: type[Exception] = ZeroDivisionError if raises else InvalidRequestError
    message = "told to stay" if raises else r"request 'r': set_token_indices\(0\) left start_idx at 8"
    before = manager.num_free_blocks, manager.metrics
    for _ in range(2):
        with pytest.raises(error, match=message):
            manager.maybe_reserve(context)
        assert (manager.num_free_blocks, manager.metrics) == before
        assert manager.get_req_blocks("r") == []
    other = TextContext(PROMPT, 250, "r")
    run(manager, other, steps=3)


def test_tokens_of_an_earlier_run_count_as_found_when_the_request_returns() -> None:
    manager = manager_of(40, page_size=SIZE, dtype=torch.int64)
    context = started(manager, "r", steps=6)
    manager.release("r")
    manager.reset_metrics()
    manager.external_claim("r")
    run(manager, context)
    assert (manager.metrics.input_tokens, manager.metrics.cache_tokens) == (4, 20)
    assert np.array_equal(context.tokens[:18], PROMPT)
