"""Tests the pages that a load asks for, and the records of loads and leases."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from transfer.connector.config import GroupConfig, StatePart
from transfer.connector.metadata import ConnectorMetadata, LoadRequest, SendRequest
from transfer.connector.worker_book import OpenLoad, WorkerBook
from transfer.errors import InvalidTransferError
from transfer.plan.page_lists import BlocksOfGroup
from transfer.pull.lease import LeaseRef
from transfer.pull.pull_state import PullEvent
from transfer.pull.replica import LeaseOver, Offered
from transfer.wire.messages import Wanted

FULL = GroupConfig(layers={"a": 0}, block_size=8, head_dim=4)
KERNEL = GroupConfig(layers={"a": 0}, block_size=8, kernel_block_size=2, head_dim=4)
WINDOW = GroupConfig(layers={"w": 1}, kind="sliding_window", window=10, block_size=8, head_dim=4)
STATE = GroupConfig(layers={"m": 2}, kind="mamba", state=(StatePart(kind="ssm", units=4),))


def asked(local: Any, tokens: tuple[int, int], *, there: int = 0, first: Any = None) -> LoadRequest:
    """Returns a load of the tokens from `tokens[0]` to `tokens[1]`. The source has computed `there` tokens, where 0
    means all tokens.
    """
    start, stop = tokens
    return LoadRequest(
        wanted=Wanted("tcp://x:1", "p", 1, there or stop, b""),
        local_block_ids=local,
        first_blocks=first or (start // 8,) * len(local),
        num_computed_tokens=start,
        num_tokens=stop,
    )


def make(*groups: GroupConfig, whole_pages: bool = False) -> WorkerBook:
    book = WorkerBook(groups)
    book.whole_pages = whole_pages
    return book


def add(book: WorkerBook, request_id: str, request: LoadRequest) -> tuple[OpenLoad, Any]:
    load = book.find(request_id) or book.begin(request_id)
    return load, book.ask(load, request)


def pages(found: BlocksOfGroup) -> tuple[list[int], tuple[int, int], int]:
    return [int(page) for page in found.local], found.tokens, found.needed


def test_a_load_of_a_whole_request() -> None:
    load, (group,) = add(make(FULL), "r", asked(((4, 5, 6),), (0, 20)))
    assert pages(group) == ([4, 5, 6], (0, 20), 0)
    assert (load.closed, load.silent, load.blocks, load.pages) == (True, False, {4, 5, 6}, [[4, 5, 6]])


def test_a_prompt_may_be_longer_or_shorter_than_what_the_source_computed() -> None:
    for wanted, tokens in ((25, (0, 20)), (17, (0, 17))):
        load, (group,) = add(make(FULL), "r", asked(((4, 5, 6, 7),), (0, wanted), there=20))
        assert (load.closed, pages(group)[:2]) == (True, ([4, 5, 6], tokens))


def test_blocks_beyond_the_last_token_are_not_written() -> None:
    _, (group,) = add(make(FULL), "r", asked(((4, 5, 6, 7),), (0, 20)))
    assert pages(group)[0] == [4, 5, 6]


def test_kernel_pages_of_blocks() -> None:
    _, (group,) = add(make(KERNEL), "r", asked(((3, 5),), (0, 11)))
    assert pages(group)[0] == [12, 13, 14, 15, 20, 21]
    _, (group,) = add(make(KERNEL), "s", asked(((3, 5),), (5, 11)))
    assert pages(group)[0] == [14, 15, 20, 21]


def test_a_window_is_clipped_to_what_it_needs() -> None:
    _, (group,) = add(make(WINDOW), "r", asked(((1, 2, 3, 4, 5),), (0, 40)))
    assert pages(group) == ([4, 5], (24, 40), 31)
    _, (group,) = add(make(WINDOW), "s", asked(((4, 5),), (0, 40), first=(3,)))
    assert pages(group) == ([4, 5], (24, 40), 31)
    _, (group,) = add(make(WINDOW), "t", asked(((5,),), (32, 40)))
    assert pages(group) == ([5], (32, 40), 32)
    with pytest.raises(
        InvalidTransferError, match="its blocks on this engine begin with token 32, but the load starts at token 24"
    ):
        add(make(WINDOW), "u", asked(((5,),), (0, 40), first=(4,)))


def test_a_state_is_one_page_and_comes_with_the_last_tokens() -> None:
    book = make(FULL, STATE)
    ours = ((4, 5, 6), (3,))
    _, (full, state) = add(book, "r", asked(ours, (8, 20)))
    assert (pages(full)[:2], pages(state)[:2]) == (([4, 5], (8, 20)), ([3], (8, 20)))


def test_nothing_is_read_from_a_source_before_the_reader_has_blocks() -> None:
    book = make(FULL)
    whole = asked(((4, 5),), (0, 16))
    load, found = add(book, "r", LoadRequest(wanted=whole.wanted))
    assert (found, load.closed, load.silent) == (None, False, False)
    load, (group,) = add(book, "r", whole)
    assert (load.closed, load.silent, pages(group)[0]) == (True, False, [4, 5])


def test_a_group_with_nothing_to_load_reads_nothing() -> None:
    load, (full, window) = add(make(FULL, WINDOW), "r", asked(((), ()), (16, 16)))
    assert (pages(full), pages(window)) == (([], (0, 0), 0), ([], (0, 0), 0))
    assert load.silent


def test_an_empty_block_list_is_not_a_load_of_nothing() -> None:
    load, (group,) = add(make(FULL), "r", asked(((),), (0, 16)))
    assert group.tokens == (0, 16)
    assert not load.silent


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (asked(((1,), (2,)), (0, 8)), r"got blocks for 2 groups; there are 1"),
        (asked(((1,),), (-8, 8)), "the load starts at token -8"),
    ],
)
def test_a_load_that_does_not_fit_is_an_error_of_its_request(request_: LoadRequest, message: str) -> None:
    book = make(FULL)
    load = book.begin("r")
    with pytest.raises(InvalidTransferError, match=f"request 'r'.*{message}"):
        book.ask(load, request_)
    book.fail(load, "why", safe=True)
    assert book.output.failed == {"r": "request 'r': why"}
    assert book.output.received == {"r"}
    assert book.find("r") is None


def test_host_buffers_take_whole_pages() -> None:
    with pytest.raises(InvalidTransferError, match="the load starts at token 5, which is not the start of a page of 2"):
        add(make(KERNEL, whole_pages=True), "r", asked(((3, 5),), (5, 11)))
    add(make(KERNEL, whole_pages=True), "r", asked(((3, 5),), (6, 11)))


def test_a_load_that_has_its_pages_accepts_no_more() -> None:
    book = make(FULL)
    whole = asked(((4, 5, 6),), (0, 20))
    step = ConnectorMetadata(reqs_to_recv={"q": whole, "r": whole})
    book.check_new(step)
    load, _ = add(book, "r", LoadRequest(wanted=whole.wanted))
    book.check_new(step)
    add(book, "r", whole)
    with pytest.raises(InvalidTransferError, match="request 'r': its load has not ended yet"):
        book.check_new(step)
    book.on_pull(PullEvent(load.key, "", safe=True))
    book.check_new(step)


def test_a_failure_is_reported_once_with_the_blocks_of_every_group_and_its_end_later() -> None:
    book = make(FULL, WINDOW)
    load, _ = add(book, "r", asked(((4, 5), (14, 15)), (0, 16)))
    assert book.on_pull(PullEvent(load.key, "lost", safe=False)) is None
    output = book.output
    assert (output.failed, output.received) == ({"r": "request 'r': lost"}, set())
    assert output.block_ids_with_errors == {4, 5, 14, 15}
    output.failed, output.block_ids_with_errors = {}, set()
    assert book.on_pull(PullEvent(load.key, "lost", safe=True)) is None
    assert (output.failed, output.received, output.block_ids_with_errors) == ({}, {"r"}, set())
    assert book.on_pull(PullEvent(load.key, "lost", safe=True)) is None


def test_a_load_that_was_given_up_is_not_reported_as_a_failure() -> None:
    book = make(FULL)
    load, _ = add(book, "r", asked(((4, 5),), (0, 16)))
    load.cancelled = True
    book.on_pull(PullEvent(load.key, "left", safe=True))
    output = book.output
    assert (output.failed, output.received, output.block_ids_with_errors) == ({}, {"r"}, set())
    silent, _ = add(book, "s", asked(((),), (16, 16)))
    book.on_pull(PullEvent(silent.key, "no answer", safe=True))
    assert (output.failed, output.received, book.find("s")) == ({}, {"r"}, None)


@pytest.mark.parametrize(
    ("asks", "read", "unwritten"),
    [
        # Whole blocks are read. The window's first block begins at token 24, and the first token that is needed is
        # token 31.
        (asked(((1, 2, 3, 4, 5), (4, 5)), (0, 40), first=(0, 3)), (0, 24), {}),
        (asked(((1, 2, 3, 4, 5), (4, 5)), (0, 40), first=(0, 3)), (0, 28), {1: 28}),
        # The blocks before the read blocks get no data.
        (asked(((1, 2, 3, 4, 5), (1, 2, 3, 4, 5)), (0, 40), first=(0, 0)), (0, 24), {1: 24}),
        # 28 tokens are local. Some of them are at the beginning of the first block.
        (asked(((4, 5), (4, 5)), (28, 40), first=(3, 3)), (28, 28), {}),
        (asked(((4, 5), (4, 5)), (28, 40), first=(3, 3)), (28, 30), {1: 30}),
    ],
)
def test_blocks_that_the_source_had_given_up_are_reported_by_group(
    asks: LoadRequest, read: tuple[int, int], unwritten: dict[int, int]
) -> None:
    book = make(FULL, WINDOW)
    load, _ = add(book, "r", asks)
    book.on_pull(PullEvent(load.key, "", safe=True, begins=read))
    assert (book.output.received, book.output.unwritten) == ({"r"}, {"r": unwritten} if unwritten else {})


def test_a_group_without_anything_to_read_has_unwritten_blocks() -> None:
    """The window has one token, so the next token needs no earlier token. The reader therefore reads no block of the
    window.
    """
    book = make(FULL, msgspec.structs.replace(WINDOW, window=1), STATE)
    load, groups = add(book, "r", asked(((1, 2), (1, 2), (3,)), (0, 16), first=(0, 0, 0)))
    assert [group.tokens for group in groups] == [(0, 16), (0, 0), (0, 16)]
    book.on_pull(PullEvent(load.key, "", safe=True, begins=(0, 0, 0)))
    assert book.output.unwritten == {"r": {1: 16}}


def test_a_failed_load_reports_no_unwritten_blocks() -> None:
    book = make(WINDOW)
    load, _ = add(book, "r", asked(((1, 2, 3, 4, 5),), (0, 40)))
    book.on_pull(PullEvent(load.key, "lost", safe=True))
    assert (book.output.received, book.output.unwritten) == ({"r"}, {})


def test_each_pull_has_a_new_name() -> None:
    book = make(FULL)
    keys = set()
    for _ in range(3):
        load, _ = add(book, "r", asked(((4, 5),), (0, 16)))
        keys.add(load.key)
        assert book.on_pull(PullEvent(load.key, "", safe=True)) is load
    assert len(keys) == 3


@pytest.fixture
def leased() -> WorkerBook:
    book = make(FULL)
    book.leases["r"] = 5
    return book


def test_a_lease_is_offered_and_then_sent(leased: WorkerBook) -> None:
    leased.on_lease(Offered("r", 5, ""))
    assert (leased.output.offered, leased.output.sent) == ({"r": ""}, {})
    leased.on_lease(LeaseOver("r", 5, "read"))
    assert leased.output.sent == {"r": "read"}
    assert leased.leases == {}


def test_a_lease_that_was_not_granted_is_offered_with_the_reason_and_never_sent(leased: WorkerBook) -> None:
    leased.on_lease(Offered("r", 5, "word 1 is taken"))
    leased.on_lease(LeaseOver("r", 5, "late"))
    assert (leased.output.offered, leased.output.sent) == ({"r": "word 1 is taken"}, {})


def test_events_of_an_earlier_lease_of_a_request_do_not_count(leased: WorkerBook) -> None:
    for event in (Offered("r", 4, ""), LeaseOver("r", 4, "read"), LeaseOver("unknown", 5, "read")):
        leased.on_lease(event)
    assert (leased.output.offered, leased.output.sent) == ({}, {})
    send = SendRequest(lease=LeaseRef(6, 0, 1.0))
    with pytest.raises(InvalidTransferError, match="request 'r': its lease 0x5 has not ended yet"):
        leased.check_new(ConnectorMetadata(reqs_to_send={"q": send, "r": send}))
