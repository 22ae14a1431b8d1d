"""Programs that use the public API and try to make a reader accept a stale page, or to lose a page. Everything is real:
two managers, their exchanges, and NIXL between them. Every byte of a page holds its request's value. A reader may end
with an error or with the values of its own prompt, but never with the values of another prompt.
"""

from __future__ import annotations

import copy
import dataclasses
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

from kvcache import (
    BlockTable,
    ImportProof,
    InvalidRequestError,
    KVCacheParams,
    NotReservedError,
    PagedKVCacheManager,
    PageLease,
    PendingImport,
    TextContext,
    UnknownRequestError,
)
from transfer.errors import EngineClosedError
from transfer.pull.exchange import ExchangeEvent, PageExchange
from transfer.pull.pull_state import PullEvent
from transfer.pull.replica import LeaseOver, Offered
from transfer.pull.source import Source
from transfer.wire.messages import ReaderNote

PAGES, PAGE_SIZE, MINE, OTHERS = 8, 4, 1.0, 2.0
PROMPT = list(range(16))


def manager_of(*, caching: bool = False, shards: int = 1, **params_of: Any) -> PagedKVCacheManager:
    known: dict[str, Any] = {"n_kv_heads": 2, "head_dim": 8, "page_size": PAGE_SIZE, **params_of}
    params = KVCacheParams(torch.float32, enable_prefix_caching=caching, n_devices=shards, **known)
    memory = params.bytes_per_token(1) * known["page_size"] * PAGES
    return PagedKVCacheManager(params, 4, 32, 1, ["cpu"] * shards, available_cache_memory=memory)


class Side:
    """A manager and its exchange."""

    def __init__(self, name: str, exchange: Mapping[str, Any] | None = None, **options: Any) -> None:
        self.manager = manager_of(**options)
        self.exchange = PageExchange(self.manager, name, **(exchange or {}))
        self.events: list[ExchangeEvent] = []

    def poll(self) -> None:
        self.events += self.exchange.poll()

    def until(self, condition: Callable[[], object]) -> None:
        # At the first contact the source is checked in a helper process, which has to start first.
        deadline = time.monotonic() + 60
        while not condition():
            self.poll()
            time.sleep(1e-4)
            assert time.monotonic() < deadline, self.events

    def of(self, kind: type) -> list[ExchangeEvent]:
        return [happened for happened in self.events if isinstance(happened.event, kind)]

    def run(self, context: TextContext, value: float) -> None:
        """Runs one step of a request, which writes its value to all of its pages."""
        assert self.manager.maybe_reserve(context)
        for shard in self.manager.device_tensors[0]:
            for page in self.manager.get_req_blocks(context.request_id)[context.start_idx // PAGE_SIZE :]:
                shard[page] = value
        context.update(1)
        self.manager.step([context])

    def compute(self, name: str = "r", tokens: list[int] = PROMPT, value: float = MINE) -> TextContext:
        context = TextContext(tokens, 32, name)
        self.manager.external_claim(name)
        self.run(context, value)
        return context

    def offer(self, name: str = "r") -> Source:
        offer = self.exchange.offer(name, 30.0, running=True)
        assert offer is not None
        self.until(lambda: any(happened.event.lease_id == offer.lease.lease_id for happened in self.of(Offered)))
        self.exchange.start_clock(offer)
        return offer

    def overwrite(self) -> None:
        """Runs another prompt, which takes every available page."""
        self.manager.reset_prefix_cache()
        free = self.manager.num_free_blocks
        if free:
            self.compute("other", list(range(100, 100 + min(31, free * PAGE_SIZE - 1))), OTHERS)

    @property
    def idle(self) -> bool:
        return self.manager.num_free_blocks == self.manager.total_num_pages


class Reader(Side):
    def reserve(self, table: BlockTable, name: str = "r") -> tuple[TextContext, PendingImport]:
        context = TextContext([*PROMPT[: table.num_tokens], 1], 32, name)
        self.manager.external_claim(name)
        pending = self.manager.import_block_table(context, table)
        assert pending is not None
        return context, pending

    def open(self, offer: Source, key: str = "k") -> None:
        self.exchange.open_pull(0, key, offer, 60.0)

    def end(self, source: Side, key: str = "k") -> tuple[PullEvent, ImportProof | None]:
        def last() -> list[ExchangeEvent]:
            source.poll()
            return [one for one in self.of(PullEvent) if one.event.key == key and one.event.safe]  # type: ignore[union-attr]

        self.until(last)
        (happened,) = last()
        assert isinstance(happened.event, PullEvent)
        return happened.event, happened.proof

    def pull(
        self, source: Side, offer: Source, pending: PendingImport, key: str = "k"
    ) -> tuple[PullEvent, ImportProof | None]:
        self.open(offer, key)
        self.exchange.read(0, key, pending, last=True)
        return self.end(source, key)

    def values(self, pending: PendingImport) -> set[float]:
        pages = pending.parts[0].dst_pages.tolist()
        return {float(value) for shard in self.manager.device_tensors[0] for value in shard[pages].unique()}


@pytest.fixture(params=["caching", "plain"])
def sides(request: pytest.FixtureRequest) -> Iterator[tuple[Side, Reader]]:
    made = Side("p", caching=request.param == "caching"), Reader("d", caching=request.param == "caching")
    yield made
    for side in made:
        side.exchange.close()
        side.manager.check()
        side.manager.close()


def check_accepted(source: Side, reader: Reader, offer: Source, table: BlockTable) -> None:
    """Checks that the pull succeeds, that the reader commits the leased content, and that both sides get all pages
    back.
    """
    context, pending = reader.reserve(table)
    event, proof = reader.pull(source, offer, pending)
    assert event.error == ""
    reader.manager.commit_import(context, pending, proof)
    assert reader.values(pending) == {MINE}
    reader.manager.release("r")
    source.until(lambda: any(one.event.lease_id == offer.lease.lease_id for one in source.of(LeaseOver)))
    for name in ("r", "other"):
        if source.manager.contains(name):
            source.manager.release(name)
    assert source.manager.num_leased_blocks == 0
    assert source.idle
    assert reader.idle


# ---- the source: pages are given away under a lease


def test_released_before_the_pull(sides: tuple[Side, Reader]) -> None:
    """A program that once made a reader accept another prompt's values. The program offers pages, leaves `with claim`,
    reuses the pages, and then pulls.
    """
    source, reader = sides
    context = TextContext(PROMPT, 32, "r")
    with source.manager.claim(context):
        source.run(context, MINE)
        offer = source.offer()
        table = source.manager.block_table("r")
    assert not source.manager.contains("r")
    assert source.manager.num_leased_blocks == 4
    source.overwrite()
    assert source.manager.num_free_blocks == 0
    check_accepted(source, reader, offer, table)


def test_preempted_and_run_again_under_the_same_id(sides: tuple[Side, Reader]) -> None:
    source, reader = sides
    context = source.compute()
    offer, table = source.offer(), source.manager.block_table("r")
    source.manager.release("r")
    context.reset()
    source.manager.reset_prefix_cache()
    # Another prompt runs under the same request id. The pages of the old lease keep their contents.
    source.compute("r", list(range(50, 60)), OTHERS)
    check_accepted(source, reader, offer, table)


def test_the_cache_is_reset_and_filled_with_others(sides: tuple[Side, Reader]) -> None:
    source, reader = sides
    source.compute()
    offer, table = source.offer(), source.manager.block_table("r")
    source.manager.release("r")
    for number in range(5):
        source.manager.reset_prefix_cache()
        source.compute(f"other{number}", list(range(20 * number + 100, 20 * number + 115)), OTHERS)
        source.manager.release(f"other{number}")
    check_accepted(source, reader, offer, table)


def test_released_in_the_midst_of_its_prompt(sides: tuple[Side, Reader]) -> None:
    """The source has offered a chunk, and the rest of the prompt is never computed."""
    source, reader = sides
    context = TextContext(PROMPT, 32, "r")
    source.manager.external_claim("r")
    offer = source.exchange.offer("r", 30.0, running=True)
    assert offer is not None
    context.set_token_indices(active_idx=9)
    source.run(context, MINE)
    table = source.manager.block_table("r", full_pages=True)
    source.manager.release("r")
    source.overwrite()
    ours, pending = TextContext([*PROMPT, 1], 32, "r"), None
    reader.manager.external_claim("r")
    pending = reader.manager.import_block_table(ours, table, partial=True)
    assert pending is not None
    reader.open(offer)
    reader.exchange.read(0, "k", pending, last=False)
    with pytest.raises(InvalidRequestError, match="without a proof"):
        reader.manager.commit_import(ours, pending)
    source.exchange.revoke(offer, "the prompt was given up")
    source.until(lambda: source.of(LeaseOver))
    reader.exchange.cancel_pull(0, "k", "it was given up")
    event, proof = reader.end(source)
    assert event.error
    assert proof is None
    with pytest.raises(InvalidRequestError, match="without a proof"):
        reader.manager.commit_import(ours, pending)
    reader.manager.cancel_import(pending)


def test_two_leases_of_one_request_end_one_after_another(sides: tuple[Side, Reader]) -> None:
    source, reader = sides
    source.compute()
    first, second, table = source.offer(), source.offer(), source.manager.block_table("r")
    source.manager.release("r")
    source.exchange.revoke(first, "over")
    source.until(lambda: source.of(LeaseOver))
    source.overwrite()
    check_accepted(source, reader, second, table)


def test_a_lease_that_is_revoked_gives_its_pages_back_and_the_pull_fails(sides: tuple[Side, Reader]) -> None:
    source, reader = sides
    source.compute()
    offer, table = source.offer(), source.manager.block_table("r")
    source.manager.release("r")
    source.exchange.revoke(offer, "over")
    # The pages stay held until the word is cleared and the scheduler has the event.
    assert source.manager.num_leased_blocks == 4
    source.until(lambda: source.of(LeaseOver))
    assert source.manager.num_leased_blocks == 0
    source.overwrite()
    context, pending = reader.reserve(table)
    event, proof = reader.pull(source, offer, pending)
    assert event.error
    assert proof is None
    with pytest.raises(InvalidRequestError, match="without a proof"):
        reader.manager.commit_import(context, pending, proof)
    reader.manager.cancel_import(pending)


def test_a_lease_that_has_ended_on_one_of_two_ranks(request: pytest.FixtureRequest) -> None:
    source = Side("p", shards=2)
    request.addfinalizer(source.exchange.close)
    source.compute()
    offer = source.offer()
    source.manager.release("r")
    thread = source.exchange.threads[0]
    done = ReaderNote(offer.lease.lease_id, "d", 0, 1, "done")
    thread.call(lambda replica: replica.leases.hear(done, 0))
    time.sleep(0.05)
    source.poll()
    assert source.of(LeaseOver) == []
    assert source.manager.num_leased_blocks == 4
    words = thread.call(lambda replica: [int(rank.words[offer.lease.word_idx]) for rank in replica.ranks])
    assert words == [offer.lease.lease_id] * 2
    thread.call(lambda replica: replica._on_over(replica.leases.hear(done, 1)))
    source.until(lambda: source.of(LeaseOver))
    assert source.idle


def test_offers_that_are_refused(sides: tuple[Side, Reader]) -> None:
    source, reader = sides
    with pytest.raises(UnknownRequestError, match="'r': lease: the request was never claimed"):
        source.exchange.offer("r", 30.0)
    source.compute()
    with pytest.raises(UnknownRequestError, match="'r': lease"):
        reader.exchange.offer("r", 30.0)  # The request belongs to another manager.
    reader.reserve(source.manager.block_table("r"))
    with pytest.raises(NotReservedError, match="import is pending"):
        reader.exchange.offer("r", 30.0)
    assert reader.manager.num_leased_blocks == source.manager.num_leased_blocks == 0
    source.manager.release("r")
    with pytest.raises(UnknownRequestError, match="'r': lease"):
        source.exchange.offer("r", 30.0)
    assert source.idle


def test_an_offer_that_is_not_granted_holds_nothing(sides: tuple[Side, Reader]) -> None:
    source, _ = sides
    source.compute()
    assert source.exchange.offer("r", 0.0) is not None  # No rank grants a lease of 0 s.
    source.manager.release("r")
    assert source.manager.num_leased_blocks == 4
    source.until(lambda: source.of(Offered))
    assert source.of(Offered)[0].event.error  # type: ignore[union-attr]
    assert source.idle
    assert source.exchange._words[0]._free[0] == 0  # The lease word is free again.


def test_there_are_at_most_as_many_leases_as_words(sides: tuple[Side, Reader]) -> None:
    source, _ = sides
    source.compute()
    source.exchange._words[0]._free = [0]
    assert source.exchange.offer("r", 30.0) is not None
    assert source.exchange.offer("r", 30.0) is None
    source.manager.release("r")
    source.exchange.close()
    assert source.idle


def test_a_lease_is_ended_only_by_its_own_manager(sides: tuple[Side, Reader]) -> None:
    source, reader = sides
    source.compute()
    lease = source.manager.lease("r")
    source.manager.release("r")
    for wrong in (lease.owner, None, "r"):
        with pytest.raises(InvalidRequestError, match="what lease returned is needed"):
            source.manager.end_lease(wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="'r': end_lease: another manager made this lease"):
        reader.manager.end_lease(lease)
    source.manager.end_lease(PageLease(lease.owner, "r", 0))  # A lease that no manager has made holds no pages.
    assert source.manager.num_leased_blocks == 4
    source.manager.end_lease(lease)
    assert lease.is_over
    assert source.idle
    source.compute("next")
    source.manager.end_lease(lease)
    assert source.manager.num_free_blocks == 4


def test_a_thread_that_dies_gives_nothing_back_before_it_is_closed(sides: tuple[Side, Reader]) -> None:
    source, _ = sides
    source.compute()
    offer = source.offer()
    source.manager.release("r")
    thread = source.exchange.threads[0]
    words = thread.call(lambda replica: replica.ranks[0].words)

    def die() -> None:
        raise RuntimeError("says the test")

    thread._hand_over(die)
    thread._thread.join(10)
    for _ in range(2):
        with pytest.raises(EngineClosedError, match="the transfer thread died: .*says the test"):
            source.exchange.poll()
    with pytest.raises(EngineClosedError, match="the transfer thread died: .*says the test"):
        source.exchange.revoke(offer, "over")
    source.compute("s", list(range(60, 62)))
    with pytest.raises(EngineClosedError, match="the transfer thread died: .*says the test"):
        source.exchange.offer("s", 30.0)
    source.manager.release("s")
    # A reader may still accept the pages, because the lease word is still set.
    assert words[offer.lease.word_idx] == offer.lease.lease_id
    assert source.manager.num_leased_blocks == 4
    source.exchange.close()
    assert words[offer.lease.word_idx] == 0
    assert source.idle


def test_a_lease_asked_for_as_the_exchange_closes_holds_nothing_afterwards(sides: tuple[Side, Reader]) -> None:
    source, _ = sides
    source.compute()
    for _ in range(50):
        source.exchange.offer("r", 30.0)
    source.manager.release("r")
    source.exchange.close()
    assert source.idle


def test_an_offer_that_a_closed_thread_never_took_holds_nothing(
    sides: tuple[Side, Reader], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, _ = sides
    source.compute()
    thread = source.exchange.threads[0]
    monkeypatch.setattr(thread, "_hand_over", lambda command: None)
    assert source.exchange.offer("r", 30.0) is not None
    source.manager.release("r")
    with monkeypatch.context() as stuck:
        stuck.setattr(thread, "close", lambda: None)  # The test simulates a thread that does not end.
        source.exchange.close()
        assert source.manager.num_leased_blocks == 4
    source.exchange.close()
    assert source.idle


# # ---- the reader: wrong pages must not be accepted


def leased(source: Side, reader: Reader) -> tuple[Source, TextContext, PendingImport]:
    source.compute()
    offer, table = source.offer(), source.manager.block_table("r")
    source.manager.release("r")
    return offer, *reader.reserve(table)


def test_a_proof_is_good_for_its_own_import_and_once(sides: tuple[Side, Reader]) -> None:
    source, reader = sides
    offer, context, pending = leased(source, reader)
    other = TextContext([*PROMPT[:8], 77, 78, 79], 32, "s")
    theirs = source.compute("s", [*PROMPT[:8], 77, 78], OTHERS)
    reader.manager.external_claim("s")
    another = reader.manager.import_block_table(other, source.manager.block_table("s"))
    assert theirs.start_idx
    assert another is not None
    forged = ImportProof("r", 16)
    event, proof = reader.pull(source, offer, pending)
    assert event.error == ""
    assert proof is not None
    refused = [
        (context, pending, None, "'r': commit_import without a proof"),
        (context, pending, forged, "'r': commit_import with the proof of another import"),
        (context, pending, copy.copy(proof), "'r': commit_import with the proof of another import"),
        (context, pending, "proof", "'r': commit_import with the proof of another import"),
        (other, another, proof, "'s': commit_import with the proof of another import"),
        (other, another, None, "'s': commit_import without a proof"),
        (other, pending, proof, "'s': commit_import: this import belongs to another request"),
        (TextContext([*PROMPT, 1], 32, "r"), pending, proof, "'r': commit_import got another context object"),
        (context, dataclasses.replace(pending), proof, "this import belongs to another request"),
        (context, "pending", proof, "what import_block_table returned is needed"),
    ]
    before = (reader.manager.num_free_blocks, context.start_idx, other.start_idx)
    for who, what, word, message in refused:
        with pytest.raises(InvalidRequestError, match=message):
            reader.manager.commit_import(who, what, word)  # type: ignore[arg-type]
        reader.manager.check()
        assert (reader.manager.num_free_blocks, context.start_idx, other.start_idx) == before
    reader.manager.commit_import(context, pending, proof)
    assert reader.values(pending) == {MINE}
    with pytest.raises(InvalidRequestError, match="was already finished or cancelled"):
        reader.manager.commit_import(context, pending, proof)
    reader.manager.cancel_import(pending)
    reader.manager.release("r")
    reader.manager.cancel_import(another)


def test_the_copier_is_handed_out_once(sides: tuple[Side, Reader]) -> None:
    source, reader = sides
    offer, context, pending = leased(source, reader)
    reader.open(offer)
    reader.exchange.read(0, "k", pending, last=True)
    with pytest.raises(InvalidRequestError, match="'r': the copier of this import was already handed out"):
        reader.manager.copier(pending)  # Only a copier can prove that a pull has read the pages.
    with pytest.raises(InvalidRequestError, match="'r': there are no pages left to copy"):
        reader.exchange.read(0, "k", pending, last=True)
    _, proof = reader.end(source)
    with pytest.raises(InvalidRequestError, match="no pull 'k' is open"):
        reader.exchange.read(0, "k", pending, last=True)
    reader.manager.commit_import(context, pending, proof)


def test_a_proof_is_given_once_and_not_before_the_last_part_was_taken(sides: tuple[Side, Reader]) -> None:
    source, reader = sides
    source.compute()
    context, pending = reader.reserve(source.manager.block_table("r"))
    copier = reader.manager.copier(pending)
    for prepare in (lambda: None, lambda: copier.take(last=False)):
        prepare()
        with pytest.raises(InvalidRequestError, match="'r': the copier of its pages took .* not yet the last"):
            copier.prove()
        assert copier.proof is None
    copier.take(last=True)
    proof = copier.prove()
    with pytest.raises(InvalidRequestError, match="'r': the copier of its pages has ended"):
        copier.prove()
    reader.manager.commit_import(context, pending, proof)
    source.manager.release("r")


def test_a_pull_only_reads_into_imports_of_its_own_manager(sides: tuple[Side, Reader]) -> None:
    """The page ids of another manager's import belong to other requests of this manager. READs into these pages would
    overwrite the data of the other requests.
    """
    source, reader = sides
    source.compute()
    offer, table = source.offer(), source.manager.block_table("r")
    stranger = Reader("e")
    _, foreign = stranger.reserve(table)
    reader.open(offer)
    with pytest.raises(InvalidRequestError, match="'r': copier: another manager made this import"):
        reader.exchange.read(0, "k", foreign, last=True)
    with pytest.raises(InvalidRequestError, match="'k': its pull is already open on replica 0"):
        reader.open(offer)
    reader.exchange.cancel_pull(0, "k", "over")
    stranger.exchange.close()


def test_a_pull_of_one_import_gives_no_proof_to_another_import(sides: tuple[Side, Reader]) -> None:
    source, reader = sides
    offer, _, pending = leased(source, reader)
    _, second = reader.reserve(source_table(source), "s")
    reader.open(offer)
    reader.exchange.read(0, "k", pending, last=False)
    with pytest.raises(InvalidRequestError, match="'s': the pull 'k' belongs to another import"):
        reader.exchange.read(0, "k", second, last=True)
    reader.exchange.cancel_pull(0, "k", "over")
    reader.end(source)
    for one in (pending, second):
        reader.manager.cancel_import(one)


def source_table(source: Side) -> BlockTable:
    source.compute("twin", PROMPT[:8])
    return source.manager.block_table("twin")


def test_cancelled_then_committed(sides: tuple[Side, Reader]) -> None:
    source, reader = sides
    offer, context, pending = leased(source, reader)
    reader.open(offer)
    reader.exchange.read(0, "k", pending, last=True)
    reader.manager.cancel_import(pending)
    free = reader.manager.num_free_blocks
    reader.manager.release("r")  # The READs of the pull may still write to these pages.
    assert reader.manager.num_free_blocks == free + (5 - 4)
    reader.overwrite()
    _, proof = reader.end(source)
    assert reader.manager.num_free_blocks == 4
    if reader.manager.contains("other"):
        pages = reader.manager.get_req_blocks("other")
        assert (reader.manager.device_tensors[0][0][pages] == OTHERS).all()
        reader.manager.release("other")
    reader.manager.external_claim("r")
    with pytest.raises(InvalidRequestError, match="this import was already finished or cancelled"):
        reader.manager.commit_import(context, pending, proof)
    reader.manager.release("r")
    assert reader.idle


def test_a_cancelled_import_s_request_does_not_run_while_a_read_may_write(sides: tuple[Side, Reader]) -> None:
    source, reader = sides
    offer, context, pending = leased(source, reader)
    reader.open(offer)
    reader.exchange.read(0, "k", pending, last=True)
    reader.manager.cancel_import(pending)
    with pytest.raises(NotReservedError, match="cancelled import may still be written"):
        reader.manager.maybe_reserve(context)
    reader.end(source)
    assert reader.manager.maybe_reserve(context)
    assert context.start_idx == 0
    reader.manager.fetch([context])
    reader.manager.release("r")
    assert reader.idle


@pytest.mark.parametrize("claimed", [False, True])
def test_a_wrong_manager_loses_no_pages_of_another_one(sides: tuple[Side, Reader], claimed: bool) -> None:
    source, reader = sides
    _, context, pending = leased(source, reader)
    if claimed:
        source.manager.external_claim("r")
    foreign = (InvalidRequestError, "'r': .* another manager made this import")
    unknown = foreign if claimed else (UnknownRequestError, "'r': .* was never claimed")
    for call, (error, said) in (
        (lambda: source.manager.cancel_import(pending), foreign),
        (lambda: source.manager.copier(pending), foreign),
        (lambda: source.manager.commit_import(context, pending, None), unknown),
        (lambda: source.manager.extend_import(context, pending, source_table(source), last=True), unknown),
    ):
        with pytest.raises(error, match=said):
            call()
        assert not pending.closed
        for side in sides:
            side.manager.check()
    reader.manager.cancel_import(pending)
    with pytest.raises(InvalidRequestError, match="another manager made this import"):
        source.manager.cancel_import(pending)
    reader.manager.release("r")
    assert reader.idle


def test_a_closed_exchange_accepts_nothing(sides: tuple[Side, Reader]) -> None:
    source, reader = sides
    offer, _, pending = leased(source, reader)
    source.compute("s")
    reader.open(offer, "open")
    for side in sides:
        side.exchange.close()
    leases = source.manager.num_leased_blocks
    for call in (
        lambda: source.exchange.offer("s", 30.0),
        lambda: source.exchange.start_clock(offer),
        lambda: source.exchange.revoke(offer, "it was given up"),
        lambda: reader.exchange.pull("k", offer, pending, 60.0),
        lambda: reader.exchange.open_pull(0, "k", offer, 60.0),
        lambda: reader.exchange.cancel_pull(0, "open", "it was given up"),
    ):
        with pytest.raises(EngineClosedError, match="the transfer thread was closed"):
            call()
        for side in sides:
            side.manager.check()
    assert source.manager.num_leased_blocks == leases == 0
    assert not reader.exchange.open_pulls
    reader.manager.cancel_import(pending)
    for side, name in ((source, "s"), (reader, "r")):
        side.manager.release(name)
        assert side.idle


def test_an_exchange_that_closes_in_the_midst_gives_the_pages_back_and_no_proof(sides: tuple[Side, Reader]) -> None:
    source, reader = sides
    offer, context, pending = leased(source, reader)
    reader.open(offer)
    reader.exchange.read(0, "k", pending, last=False)
    reader.manager.cancel_import(pending)
    reader.manager.release("r")
    assert reader.manager.num_free_blocks == 4
    reader.exchange.close()
    assert reader.idle
    with pytest.raises(UnknownRequestError, match="request 'r': commit_import: the request was never claimed"):
        reader.manager.commit_import(context, pending, None)


@pytest.mark.parametrize(
    ("first", "said"),
    [
        ("read", "the lease was read before, and this process has told the source that it is done with it"),
        ("cancelled", "the lease was given back by this process, because an earlier pull had failed: not wanted"),
        ("refused", "the lease was given back by this process, because an earlier pull had failed: no room"),
        ("", "the lease expired .it lasts 30 s unless its reader renews it., was ended by the source, or was never"),
    ],
)
def test_a_second_pull_of_an_offer_says_what_has_become_of_its_lease(
    sides: tuple[Side, Reader], first: str, said: str
) -> None:
    source, reader = sides
    source.compute()
    offer, table = source.offer(), source.manager.block_table("r")
    context, pending = reader.reserve(table)
    over = lambda: any(one.event.lease_id == offer.lease.lease_id for one in source.of(LeaseOver))  # noqa: E731
    if first == "read":
        event, proof = reader.pull(source, offer, pending, "first")
        assert event.error == ""
        reader.manager.commit_import(context, pending, proof)
    elif first == "cancelled":
        reader.open(offer, "first")
        reader.exchange.cancel_pull(0, "first", "not wanted")
        assert reader.end(source, "first")[0].error == "not wanted"
    elif first == "refused":
        reader.exchange.refuse(0, offer, "no room")
    else:
        source.exchange.revoke(offer, "the source's own reason")
    source.until(over)
    if first == "read":
        reader.manager.release("r")
        reader.manager.reset_prefix_cache()
        context, pending = reader.reserve(table)
    event, proof = reader.pull(source, offer, pending, "second")
    assert proof is None
    assert re.search(said, event.error), event.error
    reader.manager.cancel_import(pending)
