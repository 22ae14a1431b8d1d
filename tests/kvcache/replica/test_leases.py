from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from kvcache import (
    InvalidRequestError,
    InvariantError,
    NotReservedError,
    PagedKVCacheManager,
    TextContext,
    UnknownRequestError,
)
from kvcache.layer_groups import LayerGroup, layer_tables
from kvcache.pool.pages import PagePool
from kvcache.replica.block_table import BlockTable
from kvcache.replica.leases import PageLease, PageLeases, granted_by
from kvcache.replica.rows import AllRows, BlockRows
from kvcache.under_way import Call
from tests.kvcache.build import proven
from tests.kvcache.random_model.interrupts import interrupted


def run(manager: PagedKVCacheManager, context: TextContext, chunk: int = 64, token: int = 7) -> None:
    """Runs one step of a claimed request, of at most `chunk` tokens."""
    context.set_token_indices(active_idx=min(context.end_idx, context.start_idx + chunk))
    assert manager.maybe_reserve(context)
    manager.fetch([context])
    context.update(token)
    manager.step([context])


def computed(
    manager: PagedKVCacheManager, tokens: Any, name: str = "r", replica: int = 0, chunk: int = 64
) -> TextContext:
    context = TextContext([*tokens], 64, name)
    manager.external_claim(name, replica)
    run(manager, context, chunk)
    return context


@pytest.mark.parametrize("caching", [True, False])
def test_release_passes_what_is_computed_to_the_lease_and_the_rest_is_free(make: Any, caching: bool) -> None:
    manager = make(8, page_size=4, caching=caching)
    context = computed(manager, range(9))
    lease = manager.lease("r")
    assert manager.maybe_reserve(context, 8)  # The reservation adds pages in which no token is computed.
    pages = manager.get_req_blocks("r")
    assert len(pages) == 5
    assert manager.num_leased_blocks == 0  # The request's row still holds the leased pages.
    manager.release("r")
    assert (manager.num_leased_blocks, manager.num_free_blocks) == (3, 5)
    other = computed(manager, range(100, 119), "other")
    assert not set(manager.get_req_blocks("other")) & set(pages[:3])
    assert other.start_idx == 19
    manager.end_lease(lease)
    manager.end_lease(lease)
    assert (manager.num_leased_blocks, manager.num_free_blocks) == (0, 3)


def test_leased_pages_are_found_by_their_prefix(make: Any) -> None:
    manager = make(8, page_size=4)
    computed(manager, range(9))
    lease = manager.lease("r")
    manager.release("r")
    again = TextContext([*range(9)], 64, "again")
    manager.external_claim("again")
    assert manager.maybe_reserve(again)
    assert again.start_idx == 8
    manager.end_lease(lease)
    assert manager.num_free_blocks == 8 - 3
    manager.release("again")
    assert manager.num_free_blocks == 8


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
@pytest.mark.parametrize("release_at", [0, 1, 2, 3])
def test_leases_of_one_request_end_in_any_order_before_and_after_its_release(
    make: Any, order: tuple[int, ...], release_at: int
) -> None:
    manager = make(8, page_size=4)
    manager.external_claim("r")
    context = TextContext([*range(12)], 64, "r")
    leases = [manager.lease("r")]
    run(manager, context, 5)
    leases += [manager.lease("r"), manager.lease("r")]
    run(manager, context)
    for at, nth in enumerate(order):
        if at == release_at:
            manager.release("r")
        manager.end_lease(leases[nth])
        assert leases[nth].is_over
        assert manager.num_free_blocks == (5 if at < 2 or release_at == 3 else 8)
    if release_at == 3:
        manager.release("r")
    assert manager.num_free_blocks == 8


def test_a_request_of_the_same_id_has_nothing_to_do_with_an_older_lease(make: Any) -> None:
    manager = make(8, page_size=4)
    computed(manager, range(8))
    lease = manager.lease("r")
    manager.release("r")
    computed(manager, range(20, 32))
    manager.release("r")
    assert manager.num_leased_blocks == 2
    computed(manager, range(40, 44))
    manager.end_lease(lease)
    assert len(manager.get_req_blocks("r")) == 1
    assert manager.num_free_blocks == 7


def test_leases_of_replicas_and_forks_are_apart(make: Any) -> None:
    manager = make(8, page_size=4, dp=2)
    parent = computed(manager, range(9))
    run(manager, parent)
    computed(manager, range(9), "s", replica=1)
    child = parent.fork("child")
    assert manager.fork(parent, child)
    lease = manager.lease("r")
    manager.release("r")
    manager.release("child")
    manager.release("s")
    assert lease.replica_idx == 0
    assert (manager.num_leased_blocks, manager.num_free_blocks) == (3, 13)
    assert manager._replicas.each[1].pool.free_count == 8
    manager.end_lease(lease)
    assert manager.num_free_blocks == 16


def test_a_page_known_to_readers_is_kept_when_step_finds_its_content_elsewhere(make: Any) -> None:
    """The request continues under its lease. Readers learned of its last page before the page was full."""
    manager = make(8, page_size=4)
    manager.external_claim("r")
    context, twin = TextContext([*range(6)], 64, "r"), TextContext([*range(6), 7, 7], 64, "twin")
    run(manager, context)
    lease = manager.lease("r")
    told = manager.block_table("r").groups[0]
    manager.external_claim("twin")
    run(manager, twin)
    for _ in range(2):
        run(manager, context)
    assert manager.get_req_blocks("r")[1] == manager.get_req_blocks("twin")[1] != told[1]
    assert manager.num_leased_blocks == 1
    manager.release("twin")
    manager.release("r")
    assert manager.num_leased_blocks == 3
    computed(manager, range(100, 119), "o")
    assert not set(manager.get_req_blocks("o")) & set(told)
    manager.release("o")
    manager.end_lease(lease)
    assert manager.num_free_blocks == 8


def test_a_duplicate_page_that_no_reader_can_know_is_free_at_once(make: Any) -> None:
    manager = make(8, page_size=4)
    context, twin = TextContext([*range(9)], 64, "r"), TextContext([*range(9)], 64, "twin")
    for one in (context, twin):
        manager.external_claim(one.request_id)
        assert manager.maybe_reserve(one)
    lease = manager.lease("r")
    manager.fetch([context, twin])
    for one in (twin, context):
        one.update(7)
        manager.step([one])
    assert manager.get_req_blocks("r")[:2] == manager.get_req_blocks("twin")[:2]
    assert (manager.num_leased_blocks, manager.num_free_blocks) == (0, 4)
    manager.end_lease(lease)


def test_a_page_known_to_readers_is_kept_when_a_later_chunk_hits_the_cache(make: Any) -> None:
    manager = make(8, page_size=4)
    tokens = [*range(14)]
    manager.external_claim("r")
    context = TextContext(tokens, 64, "r")
    run(manager, context, 6)
    lease = manager.lease("r")
    told = manager.block_table("r").groups[0]
    computed(manager, tokens, "twin")
    run(manager, context)
    assert manager.get_req_blocks("r")[1] == manager.get_req_blocks("twin")[1] != told[1]
    assert manager.num_leased_blocks == 1
    manager.end_lease(lease)
    assert manager.num_leased_blocks == 0


def test_a_page_known_to_readers_does_not_count_as_room_when_a_later_chunk_hits_the_cache(make: Any) -> None:
    manager = make(8, page_size=4)
    context, twin = TextContext(range(14), 64, "r"), TextContext(range(14), 64, "twin")
    for one in (context, twin):
        manager.external_claim(one.request_id)
    run(manager, context, 6)
    manager.lease("r")
    manager.block_table("r")
    run(manager, twin)
    assert manager.num_free_blocks == 1  # Each of the two requests has 4 pages. The first page is shared.
    # The request needs 3 more pages. Pages of its twin replace 2 of its pages, and readers know 1 of these 2 pages.
    assert not manager.maybe_reserve(context, 12)
    assert manager.maybe_reserve(context, 8)
    assert manager.num_free_blocks == 0


def test_a_lease_under_which_nothing_was_computed_holds_nothing(make: Any) -> None:
    manager = make(8, page_size=4)
    with pytest.raises(UnknownRequestError, match="'r': lease: the request was never claimed"):
        manager.lease("r")
    manager.external_claim("r")
    lease = manager.lease("r")
    assert manager.maybe_reserve(TextContext([1, 2], 64, "r"))
    manager.release("r")
    assert manager.num_free_blocks == 8
    assert not lease.is_over
    manager.end_lease(lease)


def test_a_lease_waits_for_an_import_and_then_holds_its_pages(make: Any) -> None:
    source, target = make(8, page_size=4), make(8, page_size=4)
    computed(source, range(8))
    context = TextContext([*range(8), 7], 64, "r")
    target.external_claim("r")
    before = target.lease("r")
    pending = target.import_block_table(context, source.block_table("r"))
    with pytest.raises(NotReservedError, match="import is pending"):
        target.lease("r")
    target.commit_import(context, pending, proven(target, pending))
    target.release("r")
    assert target.num_leased_blocks == 2
    target.end_lease(before)
    assert target.num_free_blocks == 8


def test_pages_being_loaded_from_the_host_are_not_free_before_they_have_arrived(make: Any) -> None:
    manager = make(8, page_size=4, host_slots=16)
    computed(manager, range(24), "first")
    manager.release("first")
    manager.flush_tiers()
    computed(manager, range(100, 130), "flush")
    manager.release("flush")
    context = TextContext([*range(24)], 64, "r")
    manager.external_claim("r")
    assert manager.maybe_reserve(context)
    assert context.start_idx
    lease = manager.lease("r")
    manager.release("r")  # The request does not run, so it does not wait for the copies from the host.
    manager.check()
    manager.end_lease(lease)
    assert manager.num_free_blocks == 8


@pytest.mark.parametrize("what", ["lost", "twice"])
def test_check_counts_what_leases_hold(make: Any, what: str) -> None:
    manager = make(8, page_size=4, checks=False)
    computed(manager, range(9))
    lease, _other = manager.lease("r"), manager.lease("r")
    manager.release("r")
    held = manager._replicas.each[0].leases._held[lease]
    held.append(held[0]) if what == "twice" else held.clear()
    with pytest.raises(InvariantError, match="holders, but"):
        manager.check()
    manager.check = lambda: None


def test_check_finds_an_import_that_nobody_can_close(make: Any) -> None:
    """`cancel_import` of another manager once left an import that was closed but kept its pages forever."""
    source, target = make(8, page_size=4), make(8, page_size=4, checks=False)
    computed(source, range(8))
    target.external_claim("r")
    pending = target.import_block_table(TextContext([*range(8), 7], 64, "r"), source.block_table("r"))
    pending.closed = True
    with pytest.raises(InvariantError, match="'r': its import is closed, but still has its pages"):
        target.check()
    target.check = lambda: None


def test_an_import_is_copied_in_parts_and_proven_once_all_were_taken(make: Any) -> None:
    source, target = make(8, page_size=4), make(8, page_size=4)
    whole = computed(source, range(18), chunk=9)
    first = source.block_table("r", full_pages=True)
    context = TextContext([*range(18)], 64, "r")
    target.external_claim("r")
    pending = target.import_block_table(context, first, 2, partial=True)
    copier = target.copier(pending)
    (part,) = copier.take(last=False)
    assert part.tokens == (0, 8)
    with pytest.raises(InvalidRequestError, match="took tokens up to 8, but not yet the last"):
        copier.prove()
    run(source, whole)
    context.update(7)
    target.extend_import(context, pending, source.block_table("r"), last=True)
    (part,) = copier.take()
    assert part.tokens == (8, 18)
    assert part.dst_pages.tolist() == pending.parts[0].dst_pages[2:].tolist()
    proof = copier.prove()
    with pytest.raises(InvalidRequestError, match="has ended"):
        copier.prove()
    with pytest.raises(InvalidRequestError, match="no pages left to copy"):
        copier.take()
    target.commit_import(context, pending, proof)
    assert context.start_idx == 18


def test_a_proof_that_is_older_than_the_last_table_is_refused(make: Any) -> None:
    source, target = make(8, page_size=4), make(8, page_size=4)
    whole = computed(source, range(18), chunk=9)
    context = TextContext([*range(18)], 64, "r")
    target.external_claim("r")
    pending = target.import_block_table(context, source.block_table("r", full_pages=True), 2, partial=True)
    proof = proven(target, pending)
    run(source, whole)
    context.update(7)
    target.extend_import(context, pending, source.block_table("r"), last=True)
    with pytest.raises(
        InvalidRequestError, match="'r': commit_import with a proof for 8 tokens, but its table now covers 18"
    ):
        target.commit_import(context, pending, proof)
    assert not pending.closed
    target.cancel_import(pending)
    target.release("r")
    assert target.num_free_blocks == 8


def test_the_pages_of_a_cancelled_import_are_free_when_its_copier_ends(make: Any) -> None:
    source, target = make(8, page_size=4), make(8, page_size=4)
    computed(source, range(8))
    context = TextContext([*range(8), 7], 64, "r")
    target.external_claim("r")
    pending = target.import_block_table(context, source.block_table("r"))
    copier = target.copier(pending)
    copier.take()
    target.cancel_import(pending)
    target.cancel_import(pending)
    with pytest.raises(NotReservedError, match="cancelled import may still be written"):
        target.maybe_reserve(context)
    target.release("r")
    assert target.num_free_blocks == 6
    assert copier.prove() is not None  # The copier returns a proof, but no call accepts the proof any more.
    copier.give_up()
    assert target.num_free_blocks == 8


@pytest.mark.parametrize("released", [True, False])
def test_a_cancelled_import_that_is_written_keeps_its_pages_beyond_a_recovery(make: Any, released: bool) -> None:
    """The copier does not know that another call was interrupted, and continues to write."""
    source, target = make(8, page_size=4), make(8, page_size=4)
    computed(source, range(8))
    context = TextContext([*range(8), 7], 64, "r")
    target.external_claim("r")
    pending = target.import_block_table(context, source.block_table("r"))
    copier = target.copier(pending)
    copier.take()
    target.cancel_import(pending)
    if released:
        target.release("r")
    target._mark.call = Call("step")  # This call simulates an interrupted `step`.
    found = target.recover()
    assert found.imports == (pending,)
    assert found.copiers == (copier,)
    assert not target.contains("r")
    assert target.num_free_blocks == 6
    other = computed(target, range(100, 124), "other")
    assert not {*target.get_req_blocks("other")} & {*pending.parts[0].dst_pages.tolist()}
    assert other.start_idx == 24
    copier.give_up()
    target.release("other")
    assert target.num_free_blocks == 8
    target.check()


@pytest.mark.parametrize("caching", [True, False])
def test_pages_under_a_lease_are_not_overwritten(make: Any, caching: bool) -> None:
    manager = make(6, page_size=4, caching=caching)
    computed(manager, range(9))
    blocks = manager.device_tensors[0][0]
    pages = list(manager.block_table("r").groups[0])
    lease = manager.lease("r")
    blocks[pages] = 1.0
    manager.release("r")
    for number in range(8):
        name = f"o{number}"
        computed(manager, range(100 * number + 100, 100 * number + 111), name)
        blocks[manager.get_req_blocks(name)] = 2.0
        manager.release(name)
    assert torch.equal(blocks[pages], torch.ones_like(blocks[pages]))
    manager.end_lease(lease)


def other_tokens(context: TextContext, keep: int) -> None:
    """Drops the tokens after the first `keep` tokens, and adds other tokens."""
    context.set_token_indices(start_idx=keep - 1, active_idx=keep, end_idx=keep)
    for _ in range(4):
        context.set_token_indices(active_idx=context.end_idx)
        context.update(99)
    context.set_token_indices(start_idx=keep - 1)


@pytest.mark.parametrize("call", ["maybe_reserve", "reserve_batch", "fetch"])
@pytest.mark.parametrize("told", ["by a table before the lease", "by a table under the lease"])
def test_tokens_told_under_a_lease_are_not_recomputed(make: Any, call: str, told: str) -> None:
    """The request drops tokens and adds other tokens. If the request ran, it would write the KV of the new tokens into
    pages that readers of its lease already know.
    """
    manager = make(8, page_size=4, rows=2)
    context, bystander = computed(manager, range(10)), computed(manager, range(50, 56), "bystander")
    if told == "by a table before the lease":
        pages = manager.block_table("r").groups[0]
        lease = manager.lease("r")
    else:
        lease = manager.lease("r")
        run(manager, context)
        pages = manager.block_table("r").groups[0]
    assert manager.maybe_reserve(context, 4)
    other_tokens(context, 6)
    manager.step([context])  # The row now has fewer tokens than its readers know.
    before = manager.metrics
    calls = {
        "maybe_reserve": lambda: manager.maybe_reserve(context),
        "reserve_batch": lambda: manager.reserve_batch([bystander, context]),
        "fetch": lambda: manager.fetch([bystander, context]),
    }
    with pytest.raises(
        InvalidRequestError, match="'r': would recompute from token 5, but a lease still covers its first 1"
    ):
        calls[call]()
    assert manager.metrics == before
    manager.fetch([bystander])
    manager.release("r")  # The lease also holds pages that readers have learned of before the request dropped tokens.
    assert manager.num_leased_blocks == len(pages)
    manager.end_lease(lease)
    again = TextContext(context.tokens, 64, "r")
    with manager.claim(again):
        run(manager, again)
    manager.check()


def test_without_a_lease_tokens_may_be_recomputed(make: Any) -> None:
    manager = make(8, page_size=4)
    context = computed(manager, range(10))
    lease = manager.lease("r")
    assert manager.maybe_reserve(context, 4)
    other_tokens(context, 6)
    manager.end_lease(lease)
    run(manager, context)
    assert manager._replicas.each[0].leases.told.tolist() == [0] * len(manager._replicas.each[0].leases.told)


class Books:
    """The leases of four rows, with pages of four tokens and without a manager."""

    def __init__(self) -> None:
        self.pool = PagePool(20, 1)
        self.rows = BlockRows(AllRows(1, 4, 4), 0, 64, layer_tables((), 1).groups, pinned=False)
        self.leases = PageLeases(self.pool, self.rows)

    def claim(self, row: int, cached: int = 0) -> str:
        name = f"r{row}"
        self.rows.request_ids[row] = name
        self.rows.row_of[name] = row
        self.rows.cached[row] = cached
        return name

    def lease(self, row: int, seal: Callable[[BlockTable], bytes] | None = None) -> PageLease:
        lease = PageLease(self.leases, f"r{row}", 0, seal)
        self.leases.grant(lease, row)
        return lease

    def held_by(self, lease: PageLease) -> list[int]:
        return [page for one, held in self.leases.held() if one is lease for pages in held for page in pages.tolist()]


@pytest.mark.parametrize(
    ("cached", "told", "committed", "passed"),
    [(8, 0, 0, 2), (9, 0, 0, 3), (8, 13, 0, 4), (8, 4, 3, 3), (0, 0, 0, 0), (12, 16, 2, 4)],
)
def test_a_lease_takes_over_the_pages_computed_told_or_published_whichever_are_most(
    cached: int, told: int, committed: int, passed: int
) -> None:
    books = Books()
    books.claim(1, cached)
    lease, pages = books.lease(1), books.pool.allocate(5)
    books.leases.tell(1, told, [[(0, -(-told // 4))]])
    books.rows.committed[1] = committed
    books.leases.leave(1, lambda _row, end: pages[:end])
    assert books.held_by(lease) == pages[:passed].tolist()
    assert (books.leases.told.any(), books.leases.named) == (False, {})
    books.leases.check()
    held = pages[:passed].copy()
    pages[:] = 0  # Another request now has the memory of the row.
    assert books.held_by(lease) == held.tolist()


@pytest.mark.parametrize(
    ("named", "kept"),
    [
        ([], []),
        ([(0, 2)], []),
        ([(0, 3)], [0]),
        ([(0, 9)], [0, 1, 2, 3]),
        ([(3, 5)], [1, 2]),
        ([(0, 3), (5, 8)], [0, 3]),
        ([(5, 8), (0, 3), (4, 5)], [0, 2, 3]),
        ([(3, 3), (6, 7)], []),
    ],
)
def test_leases_keep_the_pages_that_leave_their_row_if_a_table_has_named_them(named: Any, kept: list[int]) -> None:
    """From its third page on, the row gets other pages in place of four of its own. No lease knows the new ones."""
    books = Books()
    books.claim(0, 64)
    books.claim(1, 64)
    lease, pages = books.lease(1), books.pool.allocate(4)
    for row in range(2):
        for columns in named:
            books.leases.tell(row, 64, [[(0, 0)], [columns]])
    books.leases.replace(1, 0, 2, pages)
    assert not books.held_by(lease), "no page of the first table was named"
    for new in (pages, books.pool.allocate(4)):
        books.leases.replace(1, 1, 2, new)
        assert books.held_by(lease) == pages[kept].tolist()
    books.leases.replace(0, 1, 0, pages)  # This row has no lease.
    assert books.held_by(lease) == pages[kept].tolist()
    left = books.pool.allocate(12)
    books.leases.replace(1, 1, 0, left)
    every = {column for first, end in named for column in range(first, end)}
    assert books.held_by(lease) == [*pages[kept].tolist(), *(left[at] for at in sorted(every - {2, 3, 4, 5}))]


def test_a_named_page_that_a_decode_step_slides_out_of_a_window_stays_with_the_lease(make: Any) -> None:
    groups = (LayerGroup("full", (0,)), LayerGroup("window", (1,), window=4))
    manager = make(24, page_size=4, layers=2, params={"groups": groups})
    context = computed(manager, range(6))
    lease = manager.lease("r")
    assert len(manager.block_table("r").groups[1]) == 2  # the query at token 6 sees tokens 3 to 6
    for token in range(3):
        assert manager.reserve_batch([context]).all()
        manager.fetch([context])
        context.update(token)
        manager.step([context])
    replica = manager._replicas.each[0]
    assert replica.rows.table[1, replica.rows.row_of["r"], 0] == 0, "the query at token 8 sees no token before 5"
    assert manager.num_leased_blocks == 1
    before = manager.num_free_blocks
    manager.end_lease(lease)
    assert manager.num_free_blocks == before + 1


def test_a_table_made_before_the_lease_is_kept_if_the_request_has_not_run_since() -> None:
    for ran, leased in ((False, False), (True, False), (True, True)):
        books = Books()
        books.claim(1, 8)
        before = [books.lease(1)] if leased else []
        books.leases.tell(1, 8, [[(0, 1)]])
        books.leases.tell(1, 8, [[(1, 2)]])
        if ran:
            books.rows.cached[1] = 9
        lease = books.lease(1)
        assert [*books.leases.known(1, 0)] == ([(0, 2)] if leased or not ran else [])
        if ran:
            books.leases.tell(1, 9, [[(2, 3)]])
        pages = books.pool.allocate(3)
        books.leases.replace(1, 0, 0, pages)
        for each in (*before, lease):
            assert books.held_by(each) == (pages if leased else pages[2:] if ran else pages[:2]).tolist()


def test_the_tokens_told_to_readers_only_grow() -> None:
    books = Books()
    books.claim(1, 6)
    books.leases.tell(1, 6, [[(0, 2)]])  # The row has no lease, so it has no readers to inform.
    assert books.leases.told.tolist() == [0] * 4
    books.lease(1)
    assert books.leases.told[1] == 6
    for tokens in (12, 4, 9, 3, 16, 0):
        books.leases.tell(1, tokens, [[(0, 0)]])
    assert books.leases.told[1] == 16
    with pytest.raises(
        InvalidRequestError, match="request 'r1': would recompute from token 15, .* its first 16 tokens"
    ):
        books.leases.refuse_rewrite(slice(0, 4), np.array([64, 15, 64, 64]))
    books.leases.refuse_rewrite(np.array([1]), np.array([16]))


def test_after_an_interrupt_leases_take_over_the_pages_of_their_rows_even_if_that_is_interrupted() -> None:
    at, done = 0, True
    while done:
        at += 1
        books = Books()
        for row in range(2):
            books.claim(row, 4)
        kept, half_made = books.lease(0), books.lease(1)
        del books.leases._held[half_made]  # `lease` was interrupted between its two records
        books.leases.tell(0, 8, [[(0, 2)]])
        pages = books.pool.allocate(3)
        free = books.pool.free_count
        call = partial(books.leases.leave_all, lambda _row, end, pages=pages: pages[:end])
        _, _, done = interrupted(call, at, KeyboardInterrupt)
        call()
        books.leases.check()
        assert not books.leases.of_row
        assert (books.leases.told.any(), books.leases.named) == (False, {})
        assert [lease.is_over for lease in (kept, half_made)] == [False, True]
        assert {*books.held_by(kept)} == {*pages[:2].tolist()}
        books.pool.rebuild(books.leases.holders(), np.zeros(books.pool.num_pages + 1, np.int64))
        assert books.pool.free_count == free + 1
        books.leases.end(kept)
        assert books.pool.free_count == free + 3
    assert at > 20


def test_a_request_is_leased_until_the_last_of_its_leases_has_ended() -> None:
    books = Books()
    books.claim(1, 8)
    first, second = books.lease(1), books.lease(1)
    assert len({first, second}) == 2
    books.leases.end(first)
    books.leases.end(first)
    assert (first.is_over, second.is_over, books.leases.told[1]) == (True, False, 8)
    books.leases.check()
    books.leases.end(second)
    assert (books.leases.of_row, books.leases.told[1]) == ({}, 0)
    books.leases.check()


def test_a_table_is_sealed_by_each_lease_with_a_seal() -> None:
    books = Books()
    books.claim(1, 8)
    table = BlockTable("r1", 0, 8, 4, ((1, 2),), "f")
    assert books.leases.sealed(1, table) is table
    books.lease(1)
    assert books.leases.sealed(1, table) is table  # With one lease in the row, `sealed` returns the table unchanged.
    for word in (b"first ", b"second "):
        books.lease(1, lambda sealed, word=word: word + sealed.request_id.encode())
    assert books.leases.sealed(1, table).seals == (b"first r1", b"second r1")
    assert replace(books.leases.sealed(1, table), seals=()) == table
    assert books.leases.sealed(0, table) is table


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda books: books.leases.of_row.update({2: books.leases.of_row[1]}),
            "is recorded with row 2 of request None",
        ),
        (lambda books: books.leases.told.__setitem__(0, 4), "row 0 has no lease, but 4 of its tokens count as leased"),
        (lambda books: books.leases.named.update({3: (8, [])}), "row 3 has no request, but block tables of it are"),
        (lambda books: books.rows.request_ids.__setitem__(1, "other"), "is recorded with row 1 of request 'other'"),
        (lambda books: books.leases._held.clear(), "is recorded with row 1 of request 'r1'"),
    ],
)
def test_check_names_the_lease_or_the_row_that_is_booked_wrongly(
    damage: Callable[[Books], object], message: str
) -> None:
    books = Books()
    books.claim(1, 8)
    books.lease(1)
    books.leases.check()
    damage(books)
    with pytest.raises(InvariantError, match=message):
        books.leases.check()


def test_a_lease_is_looked_for_in_the_books_that_granted_it() -> None:
    ours, theirs = Books(), Books()
    theirs.claim(1)
    lease = theirs.lease(1)
    assert granted_by(lease, [ours.leases, theirs.leases]) is theirs.leases
    with pytest.raises(InvalidRequestError, match="request 'r1': end_lease: another manager made this lease"):
        granted_by(lease, [ours.leases])
    with pytest.raises(InvalidRequestError, match="end_lease: the lease is .*: what lease returned is needed"):
        granted_by("lease", [ours.leases])  # type: ignore[arg-type]
