"""Tests pulls by content. Any request may have computed the pages, and the pages may be evicted or changed during a
pull. There are two managers with their exchanges and real NIXL. Every byte of a page holds its prompt's value, as in
`test_ownership`.
"""

from __future__ import annotations

import dataclasses
import select
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from msgspec.structs import replace

from kvcache import BlockTableMismatchError, InvalidRequestError, PageDigests, TextContext
from kvcache.copies import PageMover
from kvcache.layout import kv_kind
from tests.kvcache import build
from tests.kvcache.build import evict_idle
from tests.transfer.clock import Clock
from tests.transfer.pull.test_ownership import MINE, OTHERS, PAGE_SIZE, PROMPT, Reader, Side
from transfer import Lent
from transfer.errors import InvalidEngineError, MetadataError
from transfer.pull import asking, lending
from transfer.pull.exchange import PageExchange
from transfer.pull.lease import LEASE_WORDS, LENT_WORDS
from transfer.pull.pull_state import PullEvent
from transfer.pull.replica import LeaseOver, Offered
from transfer.wire.messages import ContentQuery, LeaseQuery, LeaseReply, open_pages
from transfer.wire.prompt import HashedPages

# The prompt has one more page and one more token. No request has computed them.
LONGER = [*PROMPT, 91, 92, 93, 94, 95]


@pytest.fixture
def side() -> Iterator[Callable[..., Any]]:
    made: list[Side] = []

    def make(kind: type[Side], name: str, exchange: dict[str, Any] | None = None, **options: Any) -> Side:
        options = {"caching": True, **options}
        made.append(kind(name, exchange={"lend": 1.0, **(exchange or {})}, **options))
        return made[-1]

    yield make
    for one in made:
        one.exchange.close()
        one.manager.check()
        one.manager.close()


def computed(source: Side, tokens: list[int] = PROMPT) -> None:
    """Makes the source compute the prompt, whose pages are then cached and idle."""
    source.compute("theirs", tokens)
    source.manager.release("theirs")
    assert source.idle


def asked(reader: Side, source: Side, context: TextContext, key: str = "k", **options: Any) -> Lent:
    exchange = source.exchange
    wanted = options.pop("wanted", None) or reader.manager.contents.digests(context)
    reader.exchange.ask(0, key, exchange.address, exchange.engine_id(0), wanted, **{"timeout_s": 30.0, **options})

    def lent() -> list[Lent]:
        source.poll()
        events = [one.event for one in reader.events]
        return [event for event in events if isinstance(event, Lent) and event.key == key]

    reader.until(lent)
    return lent()[0]


def taken(reader: Reader, source: Side, context: TextContext, lent: Lent, key: str = "k") -> str:
    """Pulls and commits the lent pages. Returns the error of the pull."""
    assert lent.source is not None
    assert lent.table is not None
    reader.manager.external_claim(context.request_id)
    pending = reader.manager.import_block_table(context, lent.table)
    assert pending is not None
    reader.exchange.pull(key, lent.source, pending, 60.0)
    event, proof = reader.end(source, key)
    if event.error:
        assert proof is None
        reader.manager.cancel_import(pending)
        return event.error
    reader.manager.commit_import(context, pending, proof)
    assert reader.values(pending) <= {MINE}
    return ""


def all_given_back(source: Side) -> None:
    """Checks that all lent pages are free again. The scheduler gets no event for this."""
    source.until(lambda: source.manager.num_leased_blocks == 0 and not len(source.exchange.threads[0].replica.leases))
    assert source.idle
    assert not source.of(Offered)
    assert not source.of(LeaseOver)
    assert len(source.exchange._words[0]._free) == LEASE_WORDS
    assert len(source.exchange._lent_words[0]._free) == LENT_WORDS


def test_pages_that_another_request_has_computed_are_found_pulled_and_published(side: Any) -> None:
    source, reader = side(Side, "p"), side(Reader, "d")
    computed(source)
    context = TextContext(LONGER, 32, "mine")
    lent = asked(reader, source, context)
    assert lent.table is not None
    assert lent.table.num_tokens == 16
    assert source.manager.num_leased_blocks == 4
    source.overwrite()  # No other request gets the lent pages.
    assert taken(reader, source, context, lent) == ""
    assert context.start_idx == 16  # The reader computes the rest of the prompt.
    reader.run(context, MINE)
    source.manager.release("other")
    all_given_back(source)
    reader.manager.release("mine")
    again = TextContext(LONGER, 32, "again")
    with reader.manager.claim(again):
        assert reader.manager.maybe_reserve(again)
        assert again.start_idx == 20


def test_a_reader_asks_once_and_is_answered_when_the_lease_stands(side: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transfer.wire.handshake._HOLD_S", 1e3)
    source, reader = side(Side, "p"), side(Reader, "d")
    computed(source)
    # With a time limit of 1,000 s, the reader would repeat its question only after 500 s.
    lent = asked(reader, source, TextContext(LONGER, 32, "mine"), timeout_s=1e3)
    assert lent.source is not None
    assert len(source.exchange.threads[0].replica.leases) == 1
    assert source.exchange.queries == {"answered": 1}


def test_only_what_the_reader_lacks_is_read(side: Any) -> None:
    source, reader = side(Side, "p"), side(Reader, "d")
    computed(source)
    computed(reader, PROMPT[:8])
    context = TextContext(LONGER, 32, "mine")
    assert taken(reader, source, context, asked(reader, source, context)) == ""
    page = reader.manager.device_tensors[0][0][0].nbytes
    assert reader.exchange.totals() == (2 * page, 0)
    all_given_back(source)


def test_what_was_lost_meanwhile_makes_the_answer_shorter_and_never_an_error(side: Any) -> None:
    source, reader = side(Side, "p"), side(Reader, "d")
    computed(source)
    # The other request takes six of eight pages, so two pages of the prompt are left.
    source.compute("other", list(range(100, 123)))
    source.manager.release("other")
    context = TextContext(LONGER, 32, "mine")
    lent = asked(reader, source, context)
    assert lent.table is not None
    assert lent.table.num_tokens == 8
    assert taken(reader, source, context, lent) == ""
    all_given_back(source)
    source.manager.reset_prefix_cache()
    assert asked(reader, source, context, "later") == Lent("later", None, None, "")


def forget_head(source: Side, pages: int) -> None:
    """Makes the source forget the first `pages` pages of the prompt."""
    contents = source.manager.contents
    held, _ = contents.lease("tail", 0, contents.digests(TextContext(LONGER, 32, "theirs"), pages), 8)  # pyright: ignore[reportGeneralTypeIssues]
    evict_idle(source.manager)
    source.manager.end_lease(held)


def begun(reader: Side, source: Side, context: TextContext, key: str) -> Lent:
    """Returns the pages that a source lends after the pages that the reader has already cached."""
    contents = reader.manager.contents
    here = contents.cached(0, contents.digests(context)) // PAGE_SIZE
    return asked(reader, source, context, key, wanted=contents.digests(context, here))


def test_the_head_comes_from_one_source_and_the_tail_from_another_that_never_had_the_head(side: Any) -> None:
    head, tail, reader = side(Side, "p"), side(Side, "q"), side(Reader, "d")
    computed(head, PROMPT[:8])
    computed(tail)
    forget_head(tail, 2)
    context = TextContext(LONGER, 32, "mine")
    assert asked(reader, tail, context, "nothing").source is None
    first = asked(reader, head, context, "head")
    assert taken(reader, head, context, first, "head") == ""
    reader.manager.release("mine")
    context.reset()
    second = begun(reader, tail, context, "tail")
    assert second.table is not None
    assert (second.table.first_page, second.table.num_tokens, len(second.table.groups[0])) == (2, 16, 2)
    assert tail.manager.num_leased_blocks == 2
    assert taken(reader, tail, context, second, "tail") == ""
    assert context.start_idx == 16
    pages = reader.manager.get_req_blocks("mine")[:4]
    assert {float(value) for value in reader.manager.device_tensors[0][0][pages].unique()} == {MINE}
    for source in (head, tail):
        all_given_back(source)
    page = reader.manager.device_tensors[0][0][0].nbytes
    assert reader.exchange.totals() == (4 * page, 0)


def test_a_tail_is_not_taken_once_the_head_is_gone(side: Any) -> None:
    source, reader = side(Side, "p"), side(Reader, "d")
    computed(source)
    computed(reader, PROMPT[:8])
    context = TextContext(LONGER, 32, "mine")
    lent = begun(reader, source, context, "tail")
    assert lent.table is not None
    assert lent.source is not None
    reader.manager.reset_prefix_cache()
    reader.manager.external_claim("mine")
    with pytest.raises(BlockTableMismatchError, match="begins at token 8, but only 0 tokens before it are cached here"):
        reader.manager.import_block_table(context, lent.table)
    assert reader.idle
    reader.exchange.refuse(0, lent.source, "a hole")
    all_given_back(source)


HOST = {"enable_kvcache_swapping_to_host": True, "host_kvcache_swap_space_gb": 1e-4}


def below(side: Any, **options: Any) -> Side:
    """Returns a source that has the prompt only in host memory."""
    source: Side = side(Side, "p", **HOST, **options)
    computed(source)
    for first in (100, 200):
        source.compute("other", list(range(first, first + 23)), OTHERS)
        source.manager.release("other")
    contents = source.manager.contents
    assert contents.cached(0, contents.digests(TextContext(LONGER, 32, "theirs"))) == 0
    return source


class Endless:
    """A substitute for the event that marks the end of a copy. The copy has ended when the test sets `is_over`."""

    is_over = False

    @property
    def event(self) -> Endless:
        return self

    def query(self) -> bool:
        return self.is_over

    def synchronize(self) -> None:
        self.is_over = True


def copied_beside(monkeypatch: pytest.MonkeyPatch) -> Endless:
    """Makes copies from host memory run in the background, as on a GPU. Returns the event with which the test ends the
    copies.
    """
    load, mark = PageMover.load, Endless()

    def beside_us(mover: PageMover, slots: Any, pages: Any) -> Any:
        copy = load(mover, slots, pages)
        copy.begin()
        copy._marks = [mark]
        return copy

    monkeypatch.setattr(PageMover, "load", beside_us)
    return mark


def test_pages_that_a_source_has_only_in_host_memory_are_lent(side: Any) -> None:
    source, reader = below(side), side(Reader, "d")
    context = TextContext(LONGER, 32, "mine")
    lent = asked(reader, source, context)
    assert lent.table is not None
    assert lent.table.num_tokens == 16
    assert source.manager.metrics.h2d_blocks_copied == 4
    assert taken(reader, source, context, lent) == ""
    all_given_back(source)


def test_the_limit_of_lent_pages_also_limits_loads_from_host_memory(side: Any) -> None:
    source, reader = below(side, exchange={"lend": 0.25}), side(Reader, "d")
    lent = asked(reader, source, TextContext(LONGER, 32, "mine"))
    assert lent.table is not None
    assert lent.table.num_tokens == 8
    assert source.manager.metrics.h2d_blocks_copied == 2


def test_the_reader_is_told_of_a_load_and_what_is_late_makes_the_answer_shorter(
    side: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = below(side)
    mark = copied_beside(monkeypatch)
    monkeypatch.setattr(lending, "_LOAD_S", 0.3)
    lender = source.exchange.lending
    wanted = source.manager.contents.digests(TextContext(LONGER, 32, "mine"))
    first, second = question(0, 1, wanted.digests), question(0, 2, wanted.digests)
    lender.answer(0, first)
    source.poll()
    for _ in range(3):
        assert lender.answer(0, first).waits_for == "its pages to come from a lower tier"
        assert lender.is_asked  # A question waits, so the source's loop must not sleep.
        source.poll()
    assert source.manager.metrics.h2d_blocks_copied == 0  # A copy counts only after its end.
    source.until(lambda: lender.answer(0, first).pages)
    assert open_pages(lender.answer(0, first).pages, "p/0", None).num_tokens == 0
    assert not lender.is_asked
    mark.is_over = True
    lender.answer(0, second)
    source.until(lambda: lender.answer(0, second).pages)
    assert open_pages(lender.answer(0, second).pages, "p/0", None).num_tokens == 16
    assert source.manager.metrics.h2d_blocks_copied == 4  # The pages of the slow copy have arrived now.


@pytest.mark.parametrize("met", [False, True])
def test_what_is_refused_comes_back_at_once_and_is_no_failed_pull(side: Any, met: bool) -> None:
    source, reader = side(Side, "p"), side(Reader, "d")
    computed(source)
    context = TextContext(LONGER, 32, "mine")
    if met:
        assert taken(reader, source, context, asked(reader, source, context, "first"), "first") == ""
        all_given_back(source)
    wanted = reader.manager.contents.digests(context)
    lent = asked(reader, source, context, "second", wanted=wanted)
    assert lent.source is not None
    assert source.exchange.lending.num_leases == 1
    began, thread = time.monotonic(), reader.exchange.threads[0]
    reader.exchange.refuse(0, lent.source, "of no use")
    source.until(lambda: not source.exchange.lending.num_leases)
    assert time.monotonic() - began < lending.LENT_S / 2
    all_given_back(source)
    reader.until(lambda: thread.replica.is_idle)
    assert not thread.replica.stats.failures
    assert not [one for one in reader.of(PullEvent) if one.event.key != "first"]
    assert thread.replica.num_pulls == (0, 0)


@pytest.mark.parametrize(
    "context",
    [
        TextContext([7, *LONGER[1:]], 32, "mine"),
        TextContext(LONGER, 32, "mine", cache_salt="a"),
        TextContext(LONGER, 32, "mine", extra_keys=[(0, b"image")]),
        # The last token of a prompt always runs at the reader, so the reader has no page to ask for.
        TextContext(PROMPT[:PAGE_SIZE], 32, "mine"),
    ],
)
def test_another_prompt_salt_or_image_has_nothing_there(side: Any, context: TextContext) -> None:
    source, reader = side(Side, "p"), side(Reader, "d")
    computed(source)
    assert asked(reader, source, context, wanted=reader.manager.contents.digests(context)).source is None
    assert source.manager.num_leased_blocks == 0


def test_the_limit_of_lent_pages_leaves_the_other_pages_to_the_source_s_own_requests(side: Any) -> None:
    source, reader = side(Side, "p", {"lend": 0.4}), side(Reader, "d")
    computed(source)
    context = TextContext(LONGER, 32, "mine")
    first = asked(reader, source, context, "first")
    assert first.table is not None
    assert first.table.num_tokens == 12  # The 12 tokens take three of the eight pages.
    assert asked(reader, source, context, "second") == Lent("second", None, None, "")
    assert source.manager.num_free_blocks == 5
    assert taken(reader, source, context, first) == ""
    all_given_back(source)
    third = asked(reader, source, context, "third")
    assert third.table is not None
    assert third.table.num_tokens == 12
    closed = side(Side, "q", {"lend": 0.0})
    computed(closed)
    assert asked(reader, closed, context, "fourth").source is None
    with pytest.raises(InvalidEngineError, match="lend is 1.5"):
        side(Side, "r", {"lend": 1.5})


def test_the_slab_of_a_lent_state_counts_as_lent(side: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source, reader = side(Side, "p"), side(Reader, "d")
    computed(source)
    monkeypatch.setattr(type(source.manager), "slab_pages", 3)
    context = TextContext(LONGER, 32, "mine")
    head = reader.manager.contents.digests(TextContext(PROMPT[:9], 32, "head"))
    assert asked(reader, source, context, "head", wanted=head).source is not None
    tail = asked(reader, source, context, "tail", wanted=reader.manager.contents.digests(context, 2))
    assert tail.table is not None
    assert tail.table.num_tokens == 16
    most = source.exchange.lending
    assert sorted(one.size for one in most._lent.values()) == [2 + 3, 2 + 3]


def test_an_unread_lease_ends_by_itself(side: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transfer.pull.exchange.LENT_S", 0.3)
    source, reader = side(Side, "p"), side(Reader, "d")
    computed(source)
    context = TextContext(LONGER, 32, "mine")
    lent = asked(reader, source, context)
    all_given_back(source)
    source.manager.reset_prefix_cache()
    source.overwrite()
    assert "lease" in taken(reader, source, context, lent)
    assert reader.manager.maybe_reserve(context)  # The request computes its tokens itself.
    assert context.start_idx == 0


def test_if_pages_cannot_be_compared_the_reader_is_told_why(side: Any) -> None:
    source, reader = side(Side, "p", {"compatibility": {"model": "a"}}), side(Reader, "d")
    context = TextContext(LONGER, 32, "mine")
    assert "is not compatible: model: 'a' at the source" in asked(reader, source, context).error
    pages = side(Side, "q", page_size=8)
    assert "caches pages of 8 tokens with digests of sha256" in asked(reader, pages, context, "pages").error
    plain = side(Side, "r", caching=False)
    assert "this manager caches no pages" in asked(reader, plain, context, "plain").error
    wrong = PageDigests(PAGE_SIZE, "sha256", bytes(33))
    assert "33 bytes of digests" in asked(reader, source_of(side), context, "odd", wanted=wrong).error
    with pytest.raises(InvalidRequestError, match="digests of 'mine': request_id is None"):
        reader.manager.contents.digests("mine")


def question(query_id: int, ask_id: int, digests: bytes) -> ContentQuery:
    return ContentQuery(
        query_id=query_id,
        engine_id="p/0",
        ask_id=ask_id,
        reader="d",
        kind="float32, 1 layers of 2 x 2 heads of 8",
        page_size=PAGE_SIZE,
        hash_algorithm="sha256",
        digests=digests,
    )


def source_of(side: Any) -> Side:
    source: Side = side(Side, "s")
    computed(source)
    return source


@pytest.mark.parametrize(("name", "value"), [("n_kv_heads", 4), ("head_dim", 4)])
def test_a_foreign_layout_is_refused_and_nothing_is_held(side: Any, name: str, value: int) -> None:
    source, reader = side(Side, "p", **{name: value}), side(Reader, "d")
    computed(source)
    lent = asked(reader, source, TextContext(LONGER, 32, "mine"))
    assert (
        "cache is 'float32, 1 layers of 2 x 2 heads of 8', but this engine's is 'float32, 1 layers of 2 x" in lent.error
    )
    assert source.manager.num_leased_blocks == 0


def test_a_source_of_two_shards_lends_to_a_reader_of_one(side: Any) -> None:
    source, reader = side(Side, "p", shards=2), side(Reader, "d")
    computed(source)
    context = TextContext(LONGER, 32, "mine")
    assert taken(reader, source, context, asked(reader, source, context)) == ""
    all_given_back(source)


def asked_in_vain(reader: Reader, source: Side, key: str, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Asks a source whose loop does not run, until the time of the question is over. Returns the clock of the reader's
    questions.
    """
    clock, asks = Clock(), reader.exchange._asks
    monkeypatch.setattr(asking, "time", SimpleNamespace(monotonic=clock))
    asks._client._clock = clock
    wanted = reader.manager.contents.digests(TextContext(LONGER, 32, "mine"))
    reader.exchange.ask(0, key, source.exchange.address, source.exchange.engine_id(0), wanted)
    # Only the reader polls, so the source's loop does not run.
    reader.until(lambda: any(question.waits_for for question in asks._open.values()))
    clock.now += 5.0
    reader.until(lambda: reader.of(Lent))
    return clock


def test_a_source_that_is_gone_or_does_not_look_is_given_up(side: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source, reader = side(Side, "p"), side(Reader, "d")
    context = TextContext(LONGER, 32, "mine")
    computed(source)
    with monkeypatch.context() as patched:
        asked_in_vain(reader, source, "idle", patched)
    (idle,) = reader.of(Lent)
    assert "waited in vain for its serving loop to look" in idle.event.error
    source.exchange.close()
    assert "p/0" in asked(reader, source, context, "gone", timeout_s=0.3).error


def test_a_lease_that_is_granted_too_late_is_given_back_at_once(side: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source, reader = side(Side, "p"), side(Reader, "d")
    computed(source)
    clock = asked_in_vain(reader, source, "late", monkeypatch)
    begin = time.monotonic()
    source.until(lambda: source.exchange.lending.num_leases)

    def both() -> bool:
        clock.now += 1e-3
        reader.poll()
        return not source.exchange.lending.num_leases

    source.until(both)
    assert time.monotonic() - begin < lending.LENT_S / 2, "the lease must be given back before it expires by itself"
    all_given_back(source)
    assert len(reader.of(Lent)) == 1


def test_a_question_wakes_a_loop_that_sleeps_and_one_turn_after_it_sleeps_again(side: Any) -> None:
    source, reader = side(Side, "p"), side(Reader, "d")
    computed(source)
    lending, exchange, bell = source.exchange.lending, source.exchange, source.exchange.bell
    assert not select.select([bell], [], [], 0.0)[0]
    wanted = reader.manager.contents.digests(TextContext(LONGER, 32, "mine"))
    reader.exchange.ask(0, "k", exchange.address, exchange.engine_id(0), wanted)
    # Only the reader polls, because the source's loop sleeps.
    reader.until(lambda: select.select([bell], [], [], 0.0)[0])
    source.until(lambda: lending.num_leases and not lending.is_asked)
    source.poll()
    assert not select.select([bell], [], [], 0.0)[0]


def test_an_answer_wakes_a_loop_that_sleeps_on_the_sockets(side: Any) -> None:
    source, reader = side(Side, "p"), side(Reader, "d")
    exchange = source.exchange
    wanted = reader.manager.contents.digests(TextContext(LONGER, 32, "mine"))

    def is_woken() -> bool:
        return bool(zmq.zmq_poll([(one, zmq.POLLIN) for one in reader.exchange.sockets], 0))

    assert not is_woken()
    assert asked(reader, source, TextContext(LONGER, 32, "mine")).error == ""  # both sides are connected now
    assert reader.exchange.sockets == [reader.exchange.bell]
    reader.exchange.ask(0, "k", exchange.address, exchange.engine_id(0), wanted)
    assert not is_woken()
    source.until(is_woken)  # Only the source polls, because the reader's loop sleeps.
    reader.poll()
    assert reader.of(Lent)[-1].event.key == "k"
    assert not is_woken()


def test_a_source_that_leases_other_pages_than_it_was_asked_for_is_not_read(side: Any) -> None:
    source, reader = side(Side, "p"), side(Reader, "d")
    computed(source)
    exchange, context = source.exchange, TextContext([7, *LONGER[1:]], 32, "mine")
    others = source.manager.contents.digests(TextContext(LONGER, 32, "theirs")).digests

    def mixed_up(query: ContentQuery) -> Any:
        return exchange.lending.answer(0, replace(query, digests=query.digests and others))

    exchange._server.serve(dataclasses.replace(exchange.cards[0], lent=mixed_up))
    lent = asked(reader, source, context)
    assert lent.source is None
    assert "holds other pages than this engine asked for" in lent.error


def test_a_source_that_lends_no_more_answers_so(side: Any) -> None:
    source, reader = side(Side, "p"), side(Reader, "d")
    computed(source)
    context = TextContext(LONGER, 32, "mine")
    before = asked(reader, source, context, "before")
    source.exchange.lending.stop()
    assert asked(reader, source, context, "after") == Lent("after", None, None, "")
    assert source.exchange.lending.num_leases == 1
    assert taken(reader, source, context, before) == ""  # the lent pages stay valid
    all_given_back(source)
    assert source.exchange.lending.num_leases == 0


def test_a_repeated_question_gets_the_same_answer_and_one_lease(side: Any) -> None:
    source = side(Side, "p")
    computed(source)
    lender = source.exchange.lending
    wanted = source.manager.contents.digests(TextContext(LONGER, 32, "mine"))
    query, unknown = question(3, 5, wanted.digests), question(4, 6, b"")
    assert "question 0x6 is unknown" in lender.answer(0, unknown).error
    for _ in range(3):
        assert lender.answer(0, query).waits_for
    source.until(lambda: lender.answer(0, query).pages)
    assert lender.pages_lent == 4
    first, second = lender.answer(0, query), lender.answer(0, query)
    assert first == second
    assert first.query_id == 3
    pages = open_pages(first.pages, "p/0", None)
    assert pages.prompt_digest == wanted.digests[96:128]
    with pytest.raises(MetadataError, match="names engine 'p/0' and lease"):
        open_pages(first.pages, "p/0", pages.lease_id + 1)


def test_a_reader_that_knows_only_the_lease_is_told_its_pages(side: Any) -> None:
    """So ask the ranks of a connector, whose scheduler has asked for the pages."""
    source, reader = side(Side, "p"), side(Reader, "d")
    computed(source)
    context = TextContext(LONGER, 32, "mine")
    lent = asked(reader, source, context)
    assert lent.source is not None
    assert lent.table is not None
    lender, lease_id, table = source.exchange.lending, lent.source.lease.lease_id, lent.table
    content = HashedPages(PAGE_SIZE, table.hash_algorithm, table.digests, 32)

    def said(tokens: int, replica: int = 0, lease_id: int = lease_id) -> LeaseReply:
        query = LeaseQuery(query_id=5, engine_id=f"p/{replica}", lease_id=lease_id, num_tokens=tokens)
        return lender.leased(replica, query)

    for tokens in range(17):
        reply = said(tokens)
        assert (reply.query_id, reply.error, reply.waits_for) == (5, "", "")
        pages = open_pages(reply.pages, "p/0", lease_id)
        assert (pages.num_tokens, pages.block_ids, pages.prompt_digest) == (16, table.groups, content.digest(tokens))
        assert (pages.word_idx, pages.incarnation) == (lent.source.lease.word_idx, source.exchange.incarnation)
    for tokens in (-1, 17, 1 << 40):
        assert f"it holds the pages of 16 tokens, but {tokens} tokens were asked for" in said(tokens).error
    for reply in (said(16, 1), said(16, 0, lease_id + 1)):
        assert (reply.is_over, reply.pages) == (True, b"")
        assert "has ended, or engine" in reply.error
    assert taken(reader, source, context, lent) == ""
    all_given_back(source)
    assert said(16).is_over


def test_a_lease_is_not_told_before_all_ranks_have_granted_it(side: Any) -> None:
    source = side(Side, "p")
    computed(source)
    lender = source.exchange.lending
    wanted = source.manager.contents.digests(TextContext(LONGER, 32, "mine"))
    lender.answer(0, question(3, 5, wanted.digests))
    lender.poll()
    (lease_id,) = lender._lent
    query = LeaseQuery(query_id=0, engine_id="p/0", lease_id=lease_id, num_tokens=16)
    assert lender.leased(0, query) == LeaseReply(query_id=0, waits_for="all its ranks to grant the lease")
    source.until(lambda: lender.leased(0, query).pages)


def test_a_lease_that_a_rank_has_refused_is_never_told(side: Any) -> None:
    """The handshake server's thread may ask at any moment while the loop takes the refusal."""
    source = side(Side, "p")
    computed(source)
    lender = source.exchange.lending
    lender.answer(0, question(3, 5, source.manager.contents.digests(TextContext(LONGER, 32, "mine")).digests))
    lender.poll()
    (lease_id,) = lender._lent
    query = LeaseQuery(query_id=0, engine_id="p/0", lease_id=lease_id, num_tokens=16)
    replies: list[LeaseReply] = []

    class Watched(set[int]):
        def discard(self, value: int) -> None:
            super().discard(value)
            replies.append(lender.leased(0, query))

    lender._granting = Watched(lender._granting)
    assert lender.settle(Offered("mine", lease_id, "its rank has no room"))
    assert [reply.pages for reply in replies] == [b""]


def test_a_tail_that_is_asked_for_by_its_lease_has_the_digest_of_its_own_pages(side: Any) -> None:
    source = side(Side, "p")
    computed(source)
    lender = source.exchange.lending
    wanted = source.manager.contents.digests(TextContext(LONGER, 32, "mine"))
    tail = replace(question(3, 5, wanted.digests[64:]), first_page=2)
    lender.answer(0, tail)
    source.until(lambda: lender.answer(0, tail).pages)
    (lease_id,) = lender._lent
    reply = lender.leased(0, LeaseQuery(query_id=0, engine_id="p/0", lease_id=lease_id, num_tokens=16))
    pages = open_pages(reply.pages, "p/0", lease_id)
    content = HashedPages(PAGE_SIZE, tail.hash_algorithm, wanted.digests[64:128], 32, 2)
    assert (pages.prompt_digest, len(pages.block_ids[0])) == (content.digest(16), 2)


def test_at_most_the_allowed_number_of_questions_is_kept(side: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending, "_KNOWN", 8)
    source = side(Side, "p")
    lender = source.exchange.lending
    for ask_id in range(20):
        lender.answer(0, question(0, ask_id, bytes(32)))
    assert len(lender._answers) == 8


def test_questions_that_come_while_the_loop_is_busy_take_little_memory(
    side: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lending, "_MOST_ASKED", 3)
    source = side(Side, "p")
    computed(source)
    lender = source.exchange.lending
    wanted = source.manager.contents.digests(TextContext(LONGER, 32, "mine")).digests
    answers = [lender.answer(0, question(0, ask_id, wanted)) for ask_id in range(5)]
    assert [answer.error for answer in answers] == ["", "", "", *["3 questions already wait for its serving loop"] * 2]
    assert len(lender._asked) == 3
    assert lender.answer(0, question(0, 1, wanted)).waits_for  # A repeated question does not count again.
    with monkeypatch.context() as loading:
        loading.setattr(type(source.manager.contents), "bring", lambda *_: True)  # The test simulates a slow tier.
        source.poll()
        assert lender.answer(0, question(0, 4, wanted)).error  # All questions now wait for their pages.
    source.poll()
    # The loop has answered the questions, so the reader may ask again.
    assert not lender.answer(0, question(0, 4, wanted)).error


def test_a_manager_leases_the_pages_that_it_has_by_content_and_refuses_what_it_cannot_compare(side: Any) -> None:
    source = side(Side, "p")
    computed(source)
    contents = source.manager.contents
    wanted = contents.digests(TextContext(LONGER, 32, "mine"))
    assert len(wanted.digests) == 5 * 32
    found = contents.lease("mine", 0, wanted, 3)
    assert found is not None
    lease, table = found
    assert (table.num_tokens, len(table.groups[0]), table.digests) == (12, 3, wanted.digests[:96])
    assert source.manager.num_leased_blocks == 3
    evict_idle(source.manager)
    # Leased pages stay cached, and other readers find them until a reset.
    assert contents.lease("more", 0, wanted, 8)[1].num_tokens == 12
    source.manager.reset_prefix_cache()
    assert contents.lease("late", 0, wanted, 8) is None
    assert contents.lease("none", 0, wanted, 0) is None
    assert contents.lease("none", 0, wanted, -4) is None
    source.manager.check()
    for wrong in (wanted._replace(page_size=8), wanted._replace(hash_algorithm="xxh3_128")):
        with pytest.raises(BlockTableMismatchError, match="request 'mine': asks for .*160 bytes"):
            contents.lease("mine", 0, wrong, 8)
    source.manager.end_lease(lease)


# ---- floods of questions


class Flood:
    """Questions for one page each. A peer that knows one digest can send any number of such questions. The peer chooses
    the asker's name.
    """

    def __init__(self, source: Side, wanted: PageDigests) -> None:
        self.source, self.lender = source, source.exchange.lending
        self.query = ContentQuery(
            query_id=1,
            engine_id=source.exchange.engine_id(0),
            ask_id=1,
            reader="r",
            kind=kv_kind(source.manager.layouts),
            page_size=wanted.page_size,
            hash_algorithm=wanted.hash_algorithm,
            # The question has only the digest of the first page.
            digests=wanted.digests[: len(wanted.digests) // (len(LONGER) // PAGE_SIZE)],
        )
        self.asked = 0
        self.said: list[str] = []

    def ask(self, count: int, asker: Callable[[int], str]) -> None:
        """Delivers `count` more questions, as the handshake server does. The serving loop polls in between."""
        for _ in range(count):
            self.asked += 1
            self.said.append(
                self.lender.answer(0, replace(self.query, ask_id=self.asked, asker=asker(self.asked))).error
            )
            if self.asked % 32 == 0:
                self.source.poll()


def pool_of(side: Any, pages: int) -> Side:
    source: Side = side(Side, "p")
    source.exchange.close()
    source.manager.close()
    source.manager = build.manager_of(
        pages, page_size=PAGE_SIZE, max_seq_len=32, checks=False
    )  # The checks would count all pages again at each call, which takes long.
    source.exchange = PageExchange(source.manager, "p", lend=1.0)
    return source


def test_questions_of_readers_take_no_lease_word_that_our_own_requests_need(
    side: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transfer.pull.exchange.LENT_S", 1e3)
    source = pool_of(side, 8000)
    computed(source)
    flood = Flood(source, source.manager.contents.digests(TextContext(LONGER, 32)))
    flood.ask(LEASE_WORDS + LENT_WORDS, lambda number: f"reader {number}")
    source.until(lambda: not source.exchange.lending.is_asked)
    assert source.exchange.lending.num_leases == LENT_WORDS
    source.compute()
    own = [source.exchange.offer("r", 30.0, running=True) for _ in range(LEASE_WORDS)]
    assert None not in own
    assert source.exchange.offer("r", 30.0) is None
    source.until(lambda: len(source.of(Offered)) == LEASE_WORDS)
    assert not any(one.event.error for one in source.of(Offered))  # type: ignore[union-attr]
    source.exchange.threads[0].call(lambda replica: replica.leases.check())
    source.exchange.close()
    assert source.manager.num_leased_blocks == 0
    source.manager.release("r")


def test_a_reader_has_each_page_under_one_lease_at_a_time(side: Any) -> None:
    source = pool_of(side, 8000)
    computed(source)
    flood = Flood(source, source.manager.contents.digests(TextContext(LONGER, 32)))
    flood.ask(2000, lambda _: "one reader")
    source.until(lambda: not source.exchange.lending.is_asked)
    assert source.exchange.lending.num_leases == 1
    assert source.exchange.lending.pages_lent == 1
    assert any("32 questions already wait" in said for said in flood.said)
    flood.ask(1, lambda _: "another reader")
    source.until(lambda: source.exchange.lending.num_leases == 2)


def test_a_flood_of_one_reader_leaves_room_for_the_questions_of_others(side: Any) -> None:
    source = pool_of(side, 100)
    computed(source)
    flood = Flood(source, source.manager.contents.digests(TextContext(LONGER, 32)))
    for number in range(100):  # The loop does not read the questions meanwhile.
        flood.lender.answer(0, replace(flood.query, ask_id=1000 + number, asker="one reader"))
    assert flood.lender.answer(0, replace(flood.query, ask_id=2000, asker="another reader")).error == ""


def test_two_prompts_of_one_reader_that_begin_alike_are_lent_one_after_the_other(side: Any) -> None:
    source, reader = side(Side, "p"), side(Reader, "d")
    computed(source)
    first, second = (TextContext(LONGER, 32, name) for name in ("first", "second"))
    lent = asked(reader, source, first)
    wanted = reader.manager.contents.digests(second)
    reader.exchange.ask(0, "again", source.exchange.address, source.exchange.engine_id(0), wanted)
    reader.until(lambda: source.poll() or source.exchange.lending._loading)
    reader.exchange.refuse(0, lent.source, "it was tried")
    reader.until(lambda: source.poll() or len([one for one in reader.events if isinstance(one.event, Lent)]) == 2)
    again = reader.events[-1].event
    assert isinstance(again, Lent)
    assert again.table is not None
    assert again.table.num_tokens == 16
    reader.exchange.refuse(0, again.source, "it was tried")
    all_given_back(source)
    assert not source.exchange.lending._lent_to
