"""Causes faults in our source while a reader fetches from it: the source dies, evicts the pages, or revokes the lease.

Reports what the reader is told, and how many pages it still holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from benchmarks.frame import Row
from benchmarks.pools import expect
from benchmarks.rivals.fetcher import Fetch, Fetcher
from benchmarks.rivals.lender import LenderProcess, Setting

OURS = "ours"
_LOOK_S = 1e-4


def faults(setting: Setting, prefix: Sequence[str], blocks: int) -> Iterator[Row]:
    """A row for each fault: eviction before the query, eviction while pages are lent, revocation, and a kill."""
    with LenderProcess(setting, prefix) as lender, Fetcher(setting, lender) as reader:
        lender("lay_out", min(4, setting.pages // blocks), blocks)
        reader.forget()
        usual_s = _usual_s(reader, blocks)
        yield from lent(reader, lender, blocks)
        lender("lay_out", 2, blocks)
        reader.forget()
        yield killed(reader, lender, blocks, usual_s)


def lent(reader: Fetcher, lender: LenderProcess, blocks: int) -> Iterator[Row]:
    """Causes faults in a source that continues to serve. Yields a row for each fault.

    The source evicts all it can during a pull, evicts the pages before the query, and revokes the lease during a pull.
    """
    asked = _asked(reader, 0, blocks)
    row = _in_a_pull(reader, asked, lambda _: lender.say("evict"), "evicts all it can while pages are lent")
    evicted = lender.answer()
    yield row | {"evicted": evicted, **_held_by_source(lender)}
    yield _evicted_before(reader, blocks)
    lender("lay_out", 2, blocks)
    reader.forget()
    asked = _asked(reader, 1, blocks)
    source = msgspec.msgpack.encode(asked.lent.source).hex()
    row = _in_a_pull(
        reader, asked, lambda _: lender.say("revoke", source), "revokes the lease in the middle of the pull"
    )
    lender.answer()
    yield row | _held_by_source(lender)


def killed(reader: Fetcher, lender: LenderProcess, blocks: int, usual_s: float) -> Row:
    """The source is killed by SIGKILL during a pull, after the first bytes have arrived."""

    def kill(fetch: Fetch) -> None:
        deadline = time.monotonic() + 20
        while not fetch.has_begun() and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        lender.kill()

    row = _in_a_pull(reader, _asked(reader, 1, blocks), kill, "is killed in the middle of the pull")
    return row | {"usual_s": round(usual_s, 4)}


def _usual_s(reader: Fetcher, blocks: int) -> float:
    """The usual duration of a pull, in seconds."""
    seconds: list[float] = []
    for number in range(2):
        times, fetch = reader.fetch(number, blocks)
        fetch.release()
        seconds.append(times.pull / 1e6)
    reader.forget()
    return min(seconds)


def _asked(reader: Fetcher, number: int, blocks: int) -> Fetch:
    fetch = Fetch(reader, number, blocks)
    fetch.ask()
    expect(fetch.hear().source is not None, "the source lends the pages")
    return fetch


def _in_a_pull(reader: Fetcher, fetch: Fetch, act: Callable[[Fetch], None], fault: str) -> Row:
    """Begin the pull, cause a fault at its source, and wait for the result.

    Returns the seconds since the fault, and the reader's result.
    """
    fetch.pull()
    act(fetch)
    begin = time.monotonic()
    event = fetch.end()
    seconds = time.monotonic() - begin
    wrong = 0 if event.error else fetch.wrong_pages()
    fetch.release()
    reader.manager.check()
    return {
        "program": OURS,
        "the source": fault,
        "told_after_s": round(seconds, 4),
        "told": event.error or "published",
        "wrong_blocks": wrong,
        "held_by_reader": reader.manager.num_held_blocks,
    }


def _evicted_before(reader: Fetcher, blocks: int) -> Row:
    """The pages are evicted before the reader asks for them."""
    fetch = Fetch(reader, 1, blocks)
    begin = time.monotonic()
    fetch.ask()
    heard = fetch.hear()
    return {
        "program": OURS,
        "the source": "has evicted the pages before it is asked",
        "told_after_s": round(time.monotonic() - begin, 4),
        "told": heard.error or ("lends nothing" if heard.source is None else "lends pages"),
        "wrong_blocks": 0,
        "held_by_reader": reader.manager.num_held_blocks,
    }


def _held_by_source(lender: LenderProcess) -> Row:
    """How many pages the source still holds after its reader has finished."""
    deadline = time.monotonic() + 20
    while (held := lender("held")) and time.monotonic() < deadline:
        time.sleep(0.01)
    return {"held_by_source": held}
