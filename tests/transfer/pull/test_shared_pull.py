"""Pages of several sources are read from all sources at once, with real processes, NIXL, and faults in each phase."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import msgspec
import pytest
import torch

from kvcache import BlockTableMismatchError, InvalidRequestError, PendingImport, TextContext
from tests.forked import start
from tests.transfer.pull.shared_source import PAGE_SIZE, PROMPT, Links, SharedSide, serve
from transfer.pull import shared_pull
from transfer.pull.asking import Lent
from transfer.pull.pull_state import PullEvent

PAGE_BYTES = 2 * 2 * PAGE_SIZE * 4 * 32 * 4
ALL = len(PROMPT) // PAGE_SIZE


class Lender(NamedTuple):
    """A source in its own process."""

    name: str
    process: BaseProcess
    pipe: Connection
    address: str
    engine: str

    def told(self, command: str) -> tuple[int, int]:
        self.pipe.send(command)
        held: tuple[int, int] = self.pipe.recv()
        return held


@pytest.fixture
def lender() -> Iterator[Callable[..., Lender]]:
    made: list[Lender] = []

    def make(name: str, pages: int = ALL, **options: Any) -> Lender:
        process, pipe = start(serve, name, pages, options)
        made.append(Lender(name, process, pipe, *pipe.recv()))
        return made[-1]

    yield make
    for one in made:
        one.process.kill()
        one.process.join()


class Reader:
    """A reader that asks each source, and pulls from every source that lends pages."""

    def __init__(self, **options: Any) -> None:
        self.links = Links()
        self.side = SharedSide("d", agent=self.links.agent, **options)
        self.context = TextContext([*PROMPT, 1], len(PROMPT) + 8, "mine")
        self.runs_from = 0  # the token from which the request ran after its import

    def until(self, condition: Callable[[], object], seconds: float = 30.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.side.happened
            self.side.poll()
            time.sleep(1e-4)

    def ask(self, *lenders: Lender) -> list[Lent]:
        wanted = self.side.manager.contents.digests(self.context)
        for one in lenders:
            self.side.exchange.ask(0, one.name, one.address, one.engine, wanted)
        self.until(lambda: len(self.side.lent) == len(lenders))
        found = {one.key: one for one in self.side.lent}
        self.side.happened.clear()
        return [found[one.name] for one in lenders]

    def begin(self, lent: list[Lent], timeout_s: float = 20.0) -> PendingImport:
        sources, tables = [one.source for one in lent if one.source], [one.table for one in lent if one.table]
        self.side.manager.external_claim("mine")
        pending = self.side.manager.import_block_table(self.context, tables[0], others=tables[1:])
        assert pending is not None
        self.side.exchange.pull("k", sources, pending, timeout_s)
        return pending

    def begin_at_once(self, lent: list[Lent]) -> PendingImport:
        """Begins a pull, and holds all READs until each source has a READ. A source with a slow first contact could
        otherwise come too late for any page.
        """
        engines = {f"{one.key}/0" for one in lent}
        self.links.held |= engines
        pending = self.begin(lent)
        self.until(lambda: engines <= self.links.begun.keys())
        self.links.held -= engines
        return pending

    def end(self, pending: PendingImport) -> PullEvent:
        """Waits for the last event of the pull. If the pull has succeeded, commits it and compares every byte."""
        self.until(lambda: any(one.event.safe for one in self.side.pulls))  # type: ignore[union-attr]
        happened = self.side.pulls[-1]
        event = happened.event
        assert isinstance(event, PullEvent)
        manager = self.side.manager
        if event.error:
            manager.cancel_import(pending)
        else:
            manager.commit_import(self.context, pending, happened.proof)
            for group, part in enumerate(pending.parts):
                count = (part.stop - part.first) // PAGE_SIZE
                for shard in range(len(manager.layouts)):
                    found = self.side.blocks(shard)[part.dst_pages[:count].tolist()]
                    assert torch.equal(found, self.side.expected(shard, group, part.first // PAGE_SIZE, count))
        self.runs_from = self.context.start_idx
        manager.release("mine")
        return event

    def cached(self) -> int:
        contents = self.side.manager.contents
        return contents.cached(0, contents.digests(self.context))

    def all_given_back(self, *lenders: Lender) -> None:
        self.until(lambda: self.side.held == (0, 0))
        self.until(lambda: all(one.told("held") == (0, 0) for one in lenders))


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Reader]]:
    """Returns a reader that divides even small pulls between sources, because the pulls of this test are small."""
    monkeypatch.setattr(shared_pull, "ONE_SOURCE_BYTES", PAGE_BYTES)
    monkeypatch.setattr(shared_pull, "_PROBE_BYTES", 2 * PAGE_BYTES)
    monkeypatch.setattr(shared_pull, "_LEAST_BYTES", 2 * PAGE_BYTES)
    made: list[Reader] = []

    def make(**options: Any) -> Reader:
        made.append(Reader(**options))
        return made[-1]

    yield make
    for one in made:
        one.side.close()


def shares(event: PullEvent) -> dict[str, int]:
    """Returns the number of pages from each source."""
    return {share.contact[1][0]: share.num_bytes // PAGE_BYTES for share in event.shares}


@pytest.mark.parametrize(("theirs", "ours"), [((1, 1), 1), ((2, 1), 1), ((1, 2), 2), ((4, 2), 1)])
def test_both_sources_are_read_and_every_byte_is_right(
    lender: Any, reader: Any, theirs: tuple[int, int], ours: int
) -> None:
    p, q, d = lender("p", tp=theirs[0]), lender("q", tp=theirs[1]), reader(tp=ours)
    d.links.bytes_per_s |= {"p/0": 4e6, "q/0": 4e6}
    event = d.end(d.begin_at_once(d.ask(p, q)))
    assert (event.error, event.stop) == ("", 0)
    assert min(shares(event).values()) > 0
    assert sum(shares(event).values()) == ALL
    assert d.cached() == len(PROMPT)
    assert d.side.exchange.totals()[0] == ALL * PAGE_BYTES
    d.all_given_back(p, q)


def test_more_is_read_from_the_faster_source(lender: Any, reader: Any) -> None:
    p, q, d = lender("p"), lender("q"), reader()
    d.links.bytes_per_s |= {"p/0": 4e5, "q/0": 8e6}
    event = d.end(d.begin_at_once(d.ask(p, q)))
    assert event.error == ""
    assert shares(event)["q"] > 3 * shares(event)["p"] > 0
    d.all_given_back(p, q)


def test_pages_that_only_one_source_holds_are_read_from_it(lender: Any, reader: Any) -> None:
    p, q, d = lender("p"), lender("q", ALL // 4), reader()
    d.links.bytes_per_s |= {"p/0": 4e6, "q/0": 64e6}
    event = d.end(d.begin_at_once(d.ask(p, q)))
    assert event.error == ""
    assert shares(event)["p"] >= ALL * 3 // 4
    assert shares(event)["q"] > 0
    d.all_given_back(p, q)


def test_windows_are_read_from_both(lender: Any, reader: Any) -> None:
    p, q, d = lender("p", windows=True), lender("q", windows=True), reader(windows=True)
    d.links.bytes_per_s |= {"p/0": 16e6, "q/0": 16e6}
    pending = d.begin_at_once(d.ask(p, q))
    assert pending.parts[1].first > pending.parts[0].first
    event = d.end(pending)
    assert event.error == ""
    assert min(shares(event).values()) > 0
    d.all_given_back(p, q)


def test_a_source_of_a_shorter_prompt_is_not_read_for_windows_that_it_lacks(lender: Any, reader: Any) -> None:
    p, q, d = lender("p", windows=True), lender("q", ALL // 2, windows=True), reader(windows=True)
    d.links.bytes_per_s |= {"p/0": 4e6, "q/0": 16e6}
    event = d.end(d.begin(d.ask(p, q)))
    assert event.error == ""
    d.all_given_back(p, q)


def test_a_small_pull_reads_one_source(lender: Any, reader: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_pull, "ONE_SOURCE_BYTES", 1 << 20)
    p, q, d = lender("p"), lender("q"), reader()
    event = d.end(d.begin(d.ask(p, q)))
    assert event.error == ""
    assert sorted(shares(event).values()) == [0, ALL]
    d.all_given_back(p, q)


@pytest.mark.parametrize("phase", ["before", "reading", "held"])
def test_a_source_that_is_killed_leaves_its_pages_to_the_other(lender: Any, reader: Any, phase: str) -> None:
    p, q, d = lender("p"), lender("q"), reader()
    d.links.bytes_per_s |= {"p/0": 4e6, "q/0": 4e6}
    lent = d.ask(p, q)
    if phase == "before":
        p.process.kill()
        p.process.join()
    elif phase == "held":
        d.links.held.add("p/0")
    pending = d.begin(lent)
    if phase != "before":
        d.until(lambda: min(d.links.begun.get(one, 0) for one in ("p/0", "q/0")) > 2 * PAGE_BYTES * (phase != "held"))
        p.process.kill()
        p.process.join()
        d.links.held.clear()
    event = d.end(pending)
    assert (event.error, event.stop) == ("", 0)
    assert sum(shares(event).values()) == ALL
    found = {share.contact[1]: share for share in event.shares}
    assert bool(found["p/0"].error) == (phase != "before"), (
        "the import does not wait for the first contact with a dead source"
    )
    d.all_given_back(q)


def test_a_source_that_forgets_leaves_its_pages_to_the_other(lender: Any, reader: Any) -> None:
    p, q, d = lender("p"), lender("q"), reader()
    d.links.held.add("p/0")
    d.links.bytes_per_s["q/0"] = 4e6
    pending = d.begin(d.ask(p, q))
    d.until(lambda: d.links.begun.get("p/0"))
    p.told("revoke")
    d.links.held.clear()
    event = d.end(pending)
    assert (event.error, event.stop) == ("", 0)
    assert shares(event) == {"p": 0, "q": ALL}
    assert "no longer held the pages" in str(event.shares)
    d.all_given_back(p, q)


def test_if_the_only_source_of_a_page_forgets_it_the_import_ends_before_that_page(lender: Any, reader: Any) -> None:
    p, q, d = lender("p"), lender("q", ALL // 2), reader()
    d.links.bytes_per_s |= {"p/0": 1e6, "q/0": 1e6}
    pending = d.begin(d.ask(p, q))
    d.until(lambda: d.links.begun.get("q/0", 0) > 4 * PAGE_BYTES)
    p.told("revoke")
    event = d.end(pending)
    assert event.error == ""
    assert ALL // 2 * PAGE_SIZE <= event.stop < len(PROMPT)
    assert pending.tokens == (0, event.stop)
    assert d.runs_from == event.stop == d.cached()
    d.all_given_back(p, q)


def test_windows_cannot_end_earlier_and_fail_as_a_whole(lender: Any, reader: Any) -> None:
    p, q, d = lender("p", windows=True), lender("q", ALL // 2, windows=True), reader(windows=True)
    d.links.held.add("p/0")
    pending = d.begin(d.ask(p, q))
    d.until(lambda: d.links.begun.get("p/0"))
    p.told("revoke")
    d.links.held.clear()
    event = d.end(pending)
    assert "no longer held the pages" in event.error
    d.all_given_back(p, q)


@pytest.mark.parametrize("number", [signal.SIGKILL, None])
def test_if_all_sources_fail_at_once_nothing_half_done_is_left(lender: Any, reader: Any, number: Any) -> None:
    p, q, d = lender("p"), lender("q"), reader()
    d.links.held |= {"p/0", "q/0"}
    pending = d.begin(d.ask(p, q))
    d.until(lambda: len(d.links.begun) == 2)
    for one in (p, q):
        if number is None:
            one.told("revoke")
        else:
            os.kill(one.process.pid, number)
            one.process.join()
    d.links.held.clear()
    event = d.end(pending)
    assert event.error
    assert (d.cached(), event.stop) == (0, 0)
    d.all_given_back(*[one for one in (p, q) if number is None])


def test_a_source_that_hangs_ends_the_pull_at_its_deadline(lender: Any, reader: Any) -> None:
    p, q, d = lender("p"), lender("q"), reader()
    d.links.held.add("p/0")
    pending = d.begin(d.ask(p, q), timeout_s=1.0)
    d.until(lambda: d.side.pulls)
    event = d.side.pulls[0].event
    assert isinstance(event, PullEvent)
    assert "timed out" in event.error
    assert not event.safe, "a READ is still in flight"
    d.side.manager.cancel_import(pending)
    assert d.side.held[0] > 0, "the READ may write to these pages, so they must stay held"
    d.links.held.clear()
    assert d.end(pending).error
    assert d.cached() == 0
    d.all_given_back(p, q)


def test_a_pull_can_be_given_up(lender: Any, reader: Any) -> None:
    p, q, d = lender("p"), lender("q"), reader()
    d.links.held.add("p/0")
    pending = d.begin(d.ask(p, q))
    d.until(lambda: d.links.begun.get("p/0"))
    d.side.exchange.cancel_pull(0, "k", "nobody wants it")
    d.until(lambda: d.side.pulls)
    d.links.held.clear()
    assert d.end(pending).error == "nobody wants it"
    d.all_given_back(p, q)


def test_a_table_that_was_changed_on_its_way_is_read_from_no_source(lender: Any, reader: Any) -> None:
    p, q, d = lender("p"), lender("q"), reader()
    lent = d.ask(p, q)
    pages = lent[0].table.groups[0]
    forged = msgspec.structs.replace(lent[0].table, groups=((pages[1], pages[0], *pages[2:]),))
    event = d.end(d.begin([lent[0]._replace(table=forged), lent[1]]))
    assert event.error == ""
    assert shares(event) == {"p": 0, "q": ALL}
    assert "did not confirm that lease" in str(event.shares)
    d.all_given_back(p, q)


def test_a_source_that_is_restarted_is_not_read(lender: Any, reader: Any) -> None:
    p, q, d = lender("p"), lender("q"), reader()
    lent = d.ask(p, q)
    stale = lent[0].source._replace(incarnation="another")
    event = d.end(d.begin([lent[0]._replace(source=stale), lent[1]]))
    assert event.error == ""
    assert shares(event) == {"p": 0, "q": ALL}
    d.all_given_back(q)


def test_the_number_of_sources_must_equal_that_of_tables(lender: Any, reader: Any) -> None:
    p, q, d = lender("p"), lender("q"), reader()
    lent = d.ask(p, q)
    d.side.manager.external_claim("mine")
    pending = d.side.manager.import_block_table(d.context, lent[0].table)
    with pytest.raises(InvalidRequestError, match="got 2 sources, but the block tables of its import come from 1 sour"):
        d.side.exchange.pull("k", [one.source for one in lent], pending, 20.0)
    d.side.manager.cancel_import(pending)
    d.side.manager.release("mine")
    for one in lent:
        d.side.exchange.refuse(0, one.source, "test")
    d.all_given_back(p, q)


def test_a_table_of_another_prompt_is_refused_beside_a_right_one(lender: Any, reader: Any) -> None:
    p, d = lender("p"), reader()
    (lent,) = d.ask(p)
    other = msgspec.structs.replace(lent.table, digests=bytes(len(lent.table.digests)))
    d.side.manager.external_claim("mine")
    with pytest.raises(BlockTableMismatchError, match="holds other tokens"):
        d.side.manager.import_block_table(d.context, lent.table, others=[other])
    assert d.side.held[0] == 0
    d.side.manager.release("mine")
    d.side.exchange.refuse(0, lent.source, "test")
    d.all_given_back(p)


def test_no_key_of_a_caller_is_taken_for_one_of_the_exchange(lender: Any, reader: Any) -> None:
    p, q, d = lender("p"), lender("q"), reader()
    lent, engines = d.ask(p, q), {"p/0", "q/0"}
    d.links.held |= engines
    exchange, source = d.side.exchange, lent[0].source
    unknown = source._replace(lease=source.lease._replace(lease_id=source.lease.lease_id ^ 1))
    keys = ["\0part 0 k", "\0part 1 k", "\0refused 0", "refusal"]
    for key in keys:
        exchange.open_pull(0, key, unknown, 60.0)
    exchange.refuse(0, unknown, "not wanted")
    pending = d.begin(lent)
    d.until(lambda: engines <= d.links.begun.keys())
    replica = exchange.threads[0].replica
    assert replica.num_pulls == (1 + len(keys), 0)
    assert exchange.open_pulls == {"k", *keys}
    for key in keys:
        exchange.cancel_pull(0, key, "given up")
    d.until(lambda: len(d.side.pulls) == len(keys))
    assert {one.event.key: one.event.error for one in d.side.pulls} == dict.fromkeys(keys, "given up")
    assert replica.num_pulls == (1, 0)
    d.side.happened.clear()
    d.links.held -= engines
    event = d.end(pending)
    assert (event.key, event.error) == ("k", "")
    d.all_given_back(p, q)
