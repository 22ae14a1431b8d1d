"""What does it cost to ask another process for pages by content?

Two managers and their exchanges run in one process. The source has a prompt of `pages` pages. The reader has none of
these pages, asks for all of them, and gives the lent pages back. The rows of a loop have the times of its calls. The
reader's loop calls `ask`, and polls for the answer. The source's loop polls twice: once to find and lease the pages,
and once to learn that the lease was granted. The row `poll` is a poll with nothing to do. Bytes and messages are
counted on the wire, from a question to its answer. `kept` is the memory that the source keeps, as allocated by Python.
It is measured for a question that the source's loop has not processed yet, for an open lease, and for an ended lease.
Times are processor time of the loop's thread, because in this benchmark both sides share a core, which they do not in a
real fleet.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import secrets
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from msgspec.structs import replace

from benchmarks.frame import Row, header, options, pin, settle, summary, table, write
from kvcache import KVCacheParams, PageDigests, PagedKVCacheManager, TextContext
from transfer import Lent
from transfer.pull.exchange import PageExchange
from transfer.wire.messages import ContentQuery, LeaseReply, encode_message

PAGE, SIZES, KEPT = 16, (16, 128, 1024, 8192), 32
_PAUSE_S = 4e-3  # in seconds: time for messages to arrive, after which a query may be repeated
_LONGEST_S = 60.0


class Pair:
    """A source that has a prompt of `pages` pages, and a reader that has none of them."""

    def __init__(self, pages: int, spare: int) -> None:
        tokens = [*range(pages * PAGE + 1)]
        self.managers = [_manager(pages * spare + 2, len(tokens)), _manager(8, len(tokens))]
        self.source, self.reader = (
            PageExchange(manager, name, lend=1.0) for manager, name in zip(self.managers, "pd", strict=True)
        )
        computed = TextContext(tokens, len(tokens) + 1, "computed")
        with self.managers[0].claim(computed):
            if not self.managers[0].maybe_reserve(computed):
                raise RuntimeError(f"a pool of this size has too few free pages for a prompt of {pages} pages")
            self.managers[0].fetch([computed])
            computed.update(1)
            self.managers[0].step([computed])
        self.context = TextContext(tokens, len(tokens) + 1, "asked")
        self.wire: list[int] = []  # bytes of queries and answers
        lent = functools.partial(self.source.lending.answer, 0)

        def counted(query: ContentQuery) -> LeaseReply:
            reply = lent(query)
            # a query without digests only repeats an earlier query
            self.wire += [len(encode_message(query))] * bool(query.digests)
            self.wire += [len(encode_message(reply))] * (not reply.waits_for)
            return reply

        self.source._server.serve(dataclasses.replace(self.source.cards[0], lent=counted))  # noqa: SLF001

    @property
    def wanted(self) -> PageDigests:
        """The digests of all pages of the prompt."""
        return self.managers[1].contents.digests(self.context)

    def close(self) -> None:
        """Close the reader and the source."""
        for exchange in (self.reader, self.source):
            exchange.close()
        for manager in self.managers:
            manager.close()


def _manager(pages: int, tokens: int) -> PagedKVCacheManager:
    params = KVCacheParams(torch.float16, n_kv_heads=1, head_dim=1, page_size=PAGE, enable_prefix_caching=True)
    memory = params.bytes_per_token(1) * PAGE * pages
    return PagedKVCacheManager(params, 4, tokens + PAGE, 1, ["cpu"], available_cache_memory=memory)


@contextmanager
def pair(pages: int, spare: int = 1) -> Iterator[Pair]:
    """Creates a `Pair`. The source has room for `spare` copies of its prompt besides the one that it lends."""
    made = Pair(pages, spare)
    try:
        yield made
    finally:
        made.close()


def until(condition: Callable[[], object], poll: Callable[[], object] = lambda: None) -> None:
    """Poll until a condition holds, to wait for the other threads."""
    deadline = time.monotonic() + _LONGEST_S
    while not condition():
        poll()
        time.sleep(1e-4)
        if time.monotonic() > deadline:
            raise TimeoutError("the other side does nothing")


def meet(it: Pair) -> None:
    """Sends the first query, which opens a connection."""
    found: list[Any] = []

    def poll() -> None:
        it.source.poll()
        found.extend(one.event for one in it.reader.poll() if isinstance(one.event, Lent))

    it.reader.ask(0, "first", it.source.address, it.source.engine_id(0), it.wanted, 30.0)
    until(lambda: found, poll)
    it.reader.refuse(0, found[0].source, "measured")


def question(it: Pair, spent: dict[str, list[float]]) -> None:
    """Sends one query, records the times of its calls in `spent`, and ends the lease that the query got."""

    def timed(name: str, call: Callable[[], Any]) -> Any:
        start = time.thread_time_ns()
        result = call()
        spent[name].append((time.thread_time_ns() - start) / 1e3)
        return result

    until(lambda: not len(it.source.threads[0].replica.leases), it.source.poll)
    time.sleep(_PAUSE_S)
    it.source.poll()
    timed("source: poll", it.source.poll)
    timed("reader: poll", it.reader.poll)
    wanted = timed("reader: digests", lambda: it.wanted)
    place = it.source.address, it.source.engine_id(0)
    timed("reader: ask", lambda: it.reader.ask(0, "k", *place, wanted, 30.0))
    until(lambda: it.source.lending.is_asked)
    timed("source: look and lease", it.source.poll)
    until(lambda: it.source.threads[0].events)
    timed("source: learn that it stands", it.source.poll)
    time.sleep(_PAUSE_S)
    lent: list[Lent] = []

    def hear() -> None:
        events = timed("reader: hear what is lent", it.reader.poll)
        lent.extend(one.event for one in events if isinstance(one.event, Lent))
        if not lent:  # the answer has not arrived yet
            spent["reader: hear what is lent"].pop()

    until(lambda: lent, hear)
    if len(lent) != 1 or lent[0].source is None:
        raise RuntimeError(f"the source has {lent} leases, expected 1")
    timed("reader: refuse", lambda: it.reader.refuse(0, lent[0].source, "measured"))
    until(
        lambda: not it.managers[0].num_leased_blocks, it.source.poll
    )  # a reader gets each page under only one lease at a time, so the lease must end before the next query


def asked(pages: int, repeats: int) -> list[Row]:
    """The rows for queries of one size."""
    with pair(pages) as it:
        meet(it)
        question(it, defaultdict(list))
        settle()
        it.wire.clear()
        spent: dict[str, list[float]] = defaultdict(list)
        for _ in range(repeats):
            question(it, spent)
        messages, sent = len(it.wire) / repeats, sum(it.wire) / repeats
    rows: list[Row] = [{"operation": name, "pages": pages, **summary(times)} for name, times in spent.items()]
    for side in ("source", "reader"):
        parts = [times for name, times in spent.items() if name.startswith(side) and not name.endswith(": poll")]
        total = [sum(times) for times in zip(*parts, strict=True)]
        rows.append({"operation": f"{side}: in all", "pages": pages, **summary(total)})
    return [*rows, {"operation": "on the wire", "pages": pages, "messages": messages, "bytes": round(sent)}]


def _allocated(act: Callable[[], object]) -> int:
    """The bytes that Python has allocated during a call."""
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    act()
    gc.collect()
    return tracemalloc.get_traced_memory()[0] - before


def kept(pages: int) -> list[Row]:
    """The bytes that the source keeps for a waiting query, for its lease, and for that lease after it has ended."""
    with pair(pages, KEPT) as it:
        lender, wanted = it.source.lending, it.wanted
        template = ContentQuery(
            query_id=0,
            engine_id=it.source.engine_id(0),
            ask_id=0,
            reader="k of d",
            kind=lender._kind,  # noqa: SLF001
            page_size=wanted.page_size,
            hash_algorithm=wanted.hash_algorithm,
            digests=b"",
        )

        def ask() -> None:
            for _ in range(KEPT):
                digests = bytes(bytearray(wanted.digests))  # a copy, as a message would bring
                lender.answer(0, replace(template, ask_id=secrets.randbits(63), digests=digests))

        def grant() -> None:
            until(lambda: not lender.is_asked, it.source.poll)

        def end() -> None:
            replica = it.source.threads[0].replica
            for lease_id in list(lender._lent):  # noqa: SLF001
                it.source.threads[0].call_soon(type(replica).revoke, lease_id, "measured")
            until(lambda: not lender.num_leases, it.source.poll)

        tracemalloc.start()
        try:
            waits = _allocated(ask)
            stands = waits + _allocated(grant)
            over = stands + _allocated(end)
        finally:
            tracemalloc.stop()
    names = {"a question that waits": waits, "a lease that stands": stands, "a lease that is over": over}
    return [{"operation": f"kept: {name}", "pages": pages, "bytes": size // KEPT} for name, size in names.items()]


def rows(sizes: Sequence[int], repeats: int) -> list[Row]:
    """All rows."""
    return [row for pages in sizes for row in (*asked(pages, repeats), *kept(pages))]


def main() -> None:
    """Runs the benchmark and reports its rows."""
    chosen = options(__doc__)
    pin()
    found = rows(SIZES[:2] if chosen.quick else SIZES, 10 if chosen.quick else 100)
    print(table(found), flush=True)
    if chosen.json:
        command = "python -m benchmarks.asking" + (" --quick" if chosen.quick else "")
        write(chosen.json, {**header(command, clock="cpu"), "rows": found})


if __name__ == "__main__":
    main()
