"""Tests the state after an interrupted call, and the report that the caller gets. This file has chosen cases. The
random model interrupts calls at random bytecodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvcache import (
    InterruptedCallError,
    KVCacheError,
    KVCacheParams,
    PagedKVCacheManager,
    TextContext,
)
from kvcache.params import HashAlgorithm, StateShape
from kvcache.pool.index import NO_PAGE
from kvcache.replica.hashing import PrefixHasher, next_digests
from tests.kvcache.build import as_long_as, manager_of
from tests.kvcache.random_model.interrupts import interrupted
from tests.kvcache.random_model.moves import OwnContext


def interrupt_within(manager: PagedKVCacheManager, call: Callable[[], object]) -> None:
    """Interrupts the call after it has begun to change the manager's state."""
    at = 1
    while manager._mark.call is None:
        _, _, done = interrupted(call, at, KeyboardInterrupt)
        assert done, "the call has ended without changing anything"
        at += 1


def interrupted_manager() -> tuple[PagedKVCacheManager, TextContext]:
    manager, context = manager_of(checks=False), TextContext([1] * 12, 60, "r")
    manager.external_claim("r")
    interrupt_within(manager, lambda: manager.maybe_reserve(context))
    return manager, context


def test_after_the_repair_of_an_interrupted_reservation_the_mark_keeps_no_context() -> None:
    manager, context, at, done = manager_of(checks=False), TextContext([1] * 12, 60, "r"), 0, True
    while done:
        at += 1
        manager.external_claim("r")
        _, _, done = interrupted(lambda: manager.maybe_reserve(context), at, KeyboardInterrupt)
        if manager._mark.is_interrupted:
            manager.recover()
        assert manager._mark.context is None, f"interrupted at bytecode {at}"
        if manager.contains("r"):
            manager.release("r")
    assert at > 200


def test_every_call_after_an_interrupted_one_names_it_and_recover() -> None:
    manager, context = interrupted_manager()
    other = TextContext([1, 2], 9, "other")
    lease, pending = object(), object()
    calls: dict[str, Callable[[], Any]] = {
        "external_claim": lambda: manager.external_claim("other"),
        "claim": lambda: manager.claim(other).__enter__(),
        "contains": lambda: manager.contains("r"),
        "get_replica": lambda: manager.get_replica(context),
        "get_or_recommend_replica": lambda: manager.get_or_recommend_replica(context),
        "admission": lambda: manager.admission(other),
        "prefetch": lambda: manager.prefetch(other),
        "release": lambda: manager.release("r"),
        "maybe_reserve": lambda: manager.maybe_reserve(context),
        "reserve_batch": lambda: manager.reserve_batch([context]),
        "fork": lambda: manager.fork(context, other),
        "batch": lambda: manager.batch([context]),
        "fetch": lambda: manager.fetch([context]),
        "fetch_ahead": lambda: manager.fetch_ahead([context]),
        "end_step": lambda: manager.end_step(lease),  # type: ignore[arg-type]
        "step": lambda: manager.step([context]),
        "get_data_parallel_splits": lambda: manager.get_data_parallel_splits([context]),
        "block_table": lambda: manager.block_table("r"),
        "lease": lambda: manager.lease("r"),
        "end_lease": lambda: manager.end_lease(lease),  # type: ignore[arg-type]
        "import_block_table": lambda: manager.import_block_table(context, None),  # type: ignore[arg-type]
        "extend_import": lambda: manager.extend_import(context, pending, None, last=True),  # type: ignore[arg-type]
        "copier": lambda: manager.copier(pending),  # type: ignore[arg-type]
        "commit_import": lambda: manager.commit_import(context, pending),  # type: ignore[arg-type]
        "cancel_import": lambda: manager.cancel_import(pending),  # type: ignore[arg-type]
        "get_req_blocks": lambda: manager.get_req_blocks("r"),
        "reset_prefix_cache": manager.reset_prefix_cache,
        "set_weights": lambda: manager.set_weights("a"),
        "lineage": lambda: manager.lineage("r"),
        "flush_tiers": manager.flush_tiers,
        "check": manager.check,
        "contents.lease": lambda: manager.contents.lease("r", 0, manager.contents.digests(other), 4),
        "contents.bring": lambda: manager.contents.bring("r", 0, manager.contents.digests(other), 4),
    }
    # Properties only read.
    names = {name for name, of in vars(PagedKVCacheManager).items() if name[0] != "_" and not isinstance(of, property)}
    harmless = {
        *("recover", "close", "metrics", "reset_metrics", "increment_cache_lengths", "input_symbols"),
        *("estimated_memory_size", "infer_optimal_batch_size", "max_supported_sequence_length"),
    }
    assert names - harmless <= calls.keys()
    for name, call in calls.items():
        with pytest.raises(InterruptedCallError, match=r"maybe_reserve was interrupted .* call recover\(\)"):
            call()
        assert manager._mark.call is not None, name
    assert manager.recover().call == "maybe_reserve"
    manager.check()


def test_a_manager_with_a_wrong_state_can_be_closed() -> None:
    manager, _ = interrupted_manager()
    manager.close()
    manager.close()
    with pytest.raises(InterruptedCallError, match="contains: maybe_reserve was interrupted"):
        manager.contains("r")


def test_recover_changes_nothing_if_the_state_is_right() -> None:
    manager, context = manager_of(checks=False), TextContext([1] * 12, 60, "r")
    manager.external_claim("r")
    manager.maybe_reserve(context)
    lease, pages = manager.lease("r"), manager.get_req_blocks("r")
    report = manager.recover()
    assert (report.call, report.released, report.claimed, report.leases) == (None, (), ("r",), (lease,))
    assert manager.get_req_blocks("r") == pages


def test_a_with_block_does_not_hide_what_interrupts_it_and_its_request_is_released() -> None:
    manager, context = manager_of(checks=False), TextContext([1] * 12, 60, "r")

    def block() -> None:
        with manager.claim(context):
            interrupt_within(manager, lambda: manager.maybe_reserve(context))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        block()
    assert manager.recover().released == ("r",)
    assert not manager.contains("r")
    assert manager.num_free_blocks == manager.total_num_pages


def test_checks_around_calls_do_not_hide_what_interrupts_one() -> None:
    manager, context = manager_of(checks=True), TextContext([1] * 12, 60, "r")
    manager.external_claim("r")
    interrupt_within(manager, lambda: manager.maybe_reserve(context))
    with pytest.raises(InterruptedCallError, match="maybe_reserve was interrupted"):
        manager.check()
    assert manager.recover().call == "maybe_reserve"
    manager.check()


class CallersError(Exception):
    """An error that the caller's code raises."""


class Refusing(OwnContext):
    """A caller's own context. It raises an error when it is read or changed for the n-th time."""

    def __init__(self, inner: TextContext) -> None:
        super().__init__(inner)
        self.left = -1

    def __getattr__(self, name: str) -> Any:
        if name in ("start_idx", "active_idx", "end_idx", "active_length", "current_length", "tokens", "cache_salt"):
            self.count()
        if name == "set_token_indices":
            return self.set_indices
        return super().__getattr__(name)

    def set_indices(self, **indices: int) -> None:
        self.inner.set_token_indices(**indices)
        self.count()

    def count(self) -> None:
        if self.left == 0:
            self.left = -1
            raise CallersError
        self.left -= 1


@pytest.mark.parametrize(
    "call", ["maybe_reserve", "reserve_batch", "fetch", "step", "fork", "block_table", "release", "prefetch"]
)
def test_a_context_that_raises_leaves_everything_as_it_was_and_nobody_has_to_recover(call: str) -> None:
    raised = 0
    for at in range(60):
        manager = manager_of(checks=False)
        # This request publishes the pages that the request of this test finds.
        with manager.claim(first := TextContext([1] * 13, 60, "first")):
            manager.maybe_reserve(first)
            manager.fetch([first])
            first.update(2)
            manager.step([first])
        context = Refusing(TextContext([1] * 14, 60, "r"))
        manager.external_claim("r")
        if call in ("fetch", "step", "fork", "block_table"):
            manager.maybe_reserve(context)  # type: ignore[arg-type]
        if call in ("step", "fork", "block_table"):
            manager.fetch([context])  # type: ignore[list-item]
            context.update(3)
        if call in ("fork", "block_table"):
            manager.step([context])  # type: ignore[list-item]
        context.left = at
        try:
            do(manager, call, context)
        except CallersError:
            raised += 1
        context.left = -1
        manager.check()
        if call == "maybe_reserve" and not manager.get_req_blocks("r"):
            assert context.start_idx == 0
        if manager.contains("r"):
            manager.release("r")
        if manager.contains("child"):
            manager.release("child")
        assert manager.num_free_blocks == manager.total_num_pages
    assert raised or call == "release"  # `release` succeeds even if the context raises an error.


def do(manager: PagedKVCacheManager, call: str, context: Any) -> None:
    if call == "fork":
        child = Refusing(TextContext(context.inner.tokens, 60, "child"))
        child.left, context.left = context.left, -1
        manager.fork(context, child)  # type: ignore[arg-type]
    elif call in ("release", "block_table"):
        getattr(manager, call)("r")
    elif call in ("maybe_reserve", "prefetch"):
        getattr(manager, call)(context)
    else:
        getattr(manager, call)([context])


def test_our_own_errors_leave_no_mark() -> None:
    manager = manager_of(8, checks=False)
    manager.external_claim("r")
    wrong: dict[str, Callable[[], object]] = {
        "'r': is already claimed on replica 0": lambda: manager.external_claim("r"),
        "200 tokens need 50 pages": lambda: manager.maybe_reserve(TextContext([1] * 200, 250, "r")),
        "call maybe_reserve first": lambda: manager.fetch([TextContext([1], 9, "r")]),
        "'none': release: the request was never claimed": lambda: manager.release("none"),
        "'none': lease: the request was never claimed": lambda: manager.lease("none"),
        "a BlockTable is needed": lambda: manager.import_block_table(TextContext([1] * 9, 20, "r"), None),  # type: ignore[arg-type]
    }
    for message, call in wrong.items():
        with pytest.raises(KVCacheError, match=message):
            call()
        manager.check()


@pytest.mark.parametrize("algorithm", ["sha256", "xxh3_128"])
def test_a_hasher_that_is_interrupted_gives_the_same_digests_later(algorithm: HashAlgorithm) -> None:
    tokens, keys = np.arange(24), ((2, b"one"), (9, b"two"), (10, b"three"))
    wanted = PrefixHasher(algorithm, 4, "salt", keys).digests(tokens, 0, 6).tobytes()
    done, at, again = True, 0, 0
    while done:
        at += 1
        hasher, other = (PrefixHasher(algorithm, 4, "salt", keys) for _ in range(2))
        hasher.digests(tokens, 0, at % 2)
        _, _, done = interrupted(lambda h=hasher: h.digests(tokens, 0, 4), at, KeyboardInterrupt)  # type: ignore[misc]
        again += hasher.running is None
        assert hasher.copy().digests(tokens, 0, 6).tobytes() == wanted

        def both(pair: list[PrefixHasher] = [hasher, other]) -> Any:  # noqa: B006 - of this turn
            pages = np.stack([tokens[20:24], tokens[16:20]])
            pair[0].digests(tokens, 0, 5)
            pair[1].digests(tokens, 0, 4)
            return next_digests(pair, [5, 4], pages, lambda nth: pair[nth].digests(tokens, 5 - nth, 6 - nth).tobytes())

        _, _, more = interrupted(both, at, KeyboardInterrupt)
        done |= more
        found = both()
        assert found[0].tobytes() == wanted[-hasher.width :]
        assert other.digests(tokens, 0, 6).tobytes() == wanted
    assert again > 10


def test_an_interrupted_batch_update_gives_all_requests_their_tokens_or_none() -> None:
    manager = manager_of(64, checks=False, rows=3)
    contexts = [TextContext([1, 2, 3 + at], 4000, f"r{at}") for at in range(3)]
    for context in contexts:
        manager.external_claim(context.request_id)
        manager.maybe_reserve(context)
    batch, done, at = manager.batch(contexts), True, 0
    known = [context.tokens.tolist() for context in contexts]
    taken: Counter[bool] = Counter()
    while done:
        at += 1
        tokens = [at, at + 1, at + 2]
        batch.update(tokens)  # The batch now has a token that its contexts have not read yet.

        def update(mine: list[int] = tokens, nth: int = at % 3) -> None:
            batch.update(mine)
            # The context leaves the batch. It reads the token before it leaves.
            batch.contexts[nth].set_token_indices(active_idx=None)

        _, _, done = interrupted(update, at, KeyboardInterrupt)
        known = [[*one, token] for one, token in zip(known, tokens, strict=True)]
        has = {context.end_idx - len(one) for context, one in zip(contexts, known, strict=True)}
        assert has in ({0}, {1}), at
        taken[has == {1}] += 1
        known = [[*one, token] if has == {1} else one for one, token in zip(known, tokens, strict=True)]
        assert [context.tokens.tolist() for context in contexts] == known
        assert batch.lengths.tolist() == [len(one) for one in known]
        assert all(context.start_idx == context.end_idx - 1 == context.active_idx - 1 for context in contexts)
    assert taken[True] > 5
    assert taken[False] > 5


def test_recover_counts_the_idle_states_of_a_tenant_anew() -> None:
    """If states have separate memory, quotas count them separately. A repair once counted each idle state twice."""
    shape = StateShape(2, 2, 1, 1, 1, 2, torch.int64, torch.int64)
    params = KVCacheParams(
        torch.int64, 1, 2, page_size=4, enable_prefix_caching=True, states=shape, state_copies=4, tenant_quota=0.5
    )
    manager = PagedKVCacheManager(params, 4, 60, 1, ["cpu"], available_cache_memory=1 << 16)
    context = TextContext([1] * 9, 60, "r", cache_salt="tenant")
    manager.external_claim("r")
    for _ in as_long_as(lambda: context.end_idx == 9):
        assert manager.maybe_reserve(context)
        manager.fetch([context])
        pages = manager.states[0].pages_at(["r"], [context.start_idx])
        manager.states[0].advance(pages, [context.active_idx])
        context.update(1)
        manager.step([context])
    manager.release("r")
    assert manager.states[0].num_kept > 0
    other = TextContext([2] * 9, 60, "other")
    manager.external_claim("other")
    interrupt_within(manager, lambda: manager.maybe_reserve(other))
    assert manager.recover().call == "maybe_reserve"
    manager.check()


def test_pages_that_an_interrupted_call_published_are_in_host_memory_after_the_repair() -> None:
    manager, context = manager_of(checks=False, host_slots=40), TextContext([1, 2] * 8, 60, "r")
    tiers, (replica,) = manager._replicas.tiers, manager._replicas.each
    assert tiers is not None

    def serve() -> None:
        manager.maybe_reserve(context)
        manager.fetch([context])  # The call begins to copy the pages that an earlier step has published.
        context.update(1)
        manager.step([context])

    at, marked, done = 1, 0, True
    while done:
        context = TextContext([at, 2] * 8, 60, "r")
        manager.external_claim("r")
        serve()
        _, _, done = interrupted(serve, at, KeyboardInterrupt)
        marked += manager._mark.call is not None
        manager.recover()
        manager.flush_tiers()
        published = np.flatnonzero(replica.pool.index.published).astype(np.int32)
        absent = tiers.host.pool.index.find(replica.pool.index.digests_of(published)) == NO_PAGE
        assert not absent.any(), f"interrupted at {at}: {published[absent]} are not there"
        if manager.contains("r"):
            manager.release("r")
        manager.reset_prefix_cache()
        at += 3
    assert marked > 20
