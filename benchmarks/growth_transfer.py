"""How does the cost of pulls grow with the number of pages, regions and sources?

`pages` is a pull of a growing number of 16 KiB pages, at random places of both pools, between two processes. `regions`
is a pull of 16 pages with a growing number of layers. Each layer has its own tensor and region, and 16 KiB in each
page. It also times the first contact with such an engine (`benchmarks.first_contact`). For both, `process_vm_readv` of
the same runs is the reference. `peers` is a process that knows a growing number of sources, each an engine with its own
agent and handshake server. All sources live in one other process. `contact` is the first pull of a page from one more
source, `pull` is a pull from a known source, and `poll` is a poll of a process that reads nothing. `poll, pulls open`
is a poll while a pull from each source waits for its pages. `mib` is the reader's memory for each source. Times are
wall time.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter_ns as now
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks import first_contact
from benchmarks.frame import Row, options, progress, report, settle, summary
from benchmarks.pools import expect
from benchmarks.pulls.cases import KIB, Case
from benchmarks.pulls.engines import TOKENS, Engine, Spec, make
from benchmarks.pulls.rates import LIMIT, SPUN, THREADED
from benchmarks.pulls.rates import measure as rates_of
from kvcache.replica.block_table import PageCopy
from transfer.pull.lease import LeaseRef, new_lease_id
from transfer.pull.pull_state import PullEvent
from transfer.pull.replica import LeaseOffer, LeaseOver, ReplicaTransfer
from transfer.pull.source import Source
from transfer.wire.handshake import HandshakeServer

PAGES = (1, 8, 64, 512, 4096, 16_384, 65_536)
REGIONS = (1, 2, 8, 32, 128, 512)
PEERS = (1, 4, 16, 64, 256)
_PAGE_BYTES = 16 * KIB
_READ = 16  # pages
_POOL = 64  # pages of each of many sources, and of the reader that pulls from them
_NEEDED_MIB = 64  # memory for a source, and for what the reader keeps of it, with a margin
_TIMEOUT_S = 120.0


def row(along: str, size: int, call: str, found: Row) -> Row:
    """A point of a curve."""
    return {"along": along, "size": size, "call": call, **found}


def by_pages(count: int, budget_s: float) -> Iterator[Row]:
    """A pull of `count` pages."""
    yield from _pulls("pages", count, Case("equal", "head-major", _PAGE_BYTES, count), budget_s)


def by_regions(count: int, budget_s: float) -> Iterator[Row]:
    """A pull of 16 pages with `count` layers, and the first contact."""
    yield from _pulls("regions", count, Case("equal", "a tensor a layer", count * _PAGE_BYTES, _READ), budget_s)
    for one in first_contact.contact(first_contact.PULLED, 1, 10, count):
        if one["operation"] == "connect":
            yield row("regions", count, "contact", {key: one[key] for key in ("us_min", "us_median", "n")})


def _pulls(along: str, count: int, case: Case, budget_s: float) -> Iterator[Row]:
    calls = {SPUN: "pull", THREADED: "pull, thread", LIMIT: LIMIT}
    for one in rates_of(case, budget_s):
        if one["program"] in calls:
            found = {"us_min": one["us"], "us_median": one["us_median"], "n": one["n"], "runs": one["runs"]}
            yield row(along, count, calls[one["program"]], found)


class Sources(NamedTuple):
    """Many sources in one other process, which creates more sources on request."""

    pipe: Connection
    process: Any

    def more(self, count: int) -> list[str]:
        """Creates sources until there are `count`. Returns the addresses of the new sources."""
        return self._asked(("make", count))

    def leases(self, numbers: Sequence[int]) -> list[LeaseRef]:
        """Returns a lease from each of these sources. All earlier leases must have been read."""
        return self._asked(("lease", numbers))

    def close(self) -> None:
        """Stop the sources."""
        self.pipe.close()
        self.process.join(5)
        self.process.kill()

    def _asked(self, question: object) -> Any:
        self.pipe.send(question)
        expect(self.pipe.poll(300), "the sources answer within five minutes")
        return self.pipe.recv()


def start_sources() -> Sources:
    """Starts the process of the sources. It creates none yet."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_main, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return Sources(ours, process)


def _spec(name: str) -> Spec:
    return Spec(name=name, layers=1, pages=_POOL, huge=False)


def _main(pipe: Connection) -> None:
    engines: list[Engine] = []
    standing: set[int] = set()
    with ExitStack() as stack:
        while True:
            for number in list(standing):
                replica = engines[number].replica
                replica.poll()
                while replica.events:
                    if isinstance(replica.events.popleft(), LeaseOver):
                        standing.discard(number)
            if standing or not pipe.poll(0.5):  # the slot of a lease becomes free when the lease has ended
                continue
            try:
                what, given = pipe.recv()
            except EOFError:
                return
            if what == "make":
                servers: list[HandshakeServer] = []
                for number in range(len(engines), given):
                    engines.append(make(_spec(f"source {number}")))
                    stack.callback(engines[-1].replica.close)
                    servers.append(stack.enter_context(HandshakeServer([engines[-1].card])))
                pipe.send([server.endpoint for server in servers])
            else:
                refs = [LeaseRef(new_lease_id(), 0, 60.0) for _ in given]
                for number, ref in zip(given, refs, strict=True):
                    engines[number].replica.offer(LeaseOffer("request", ref))
                standing.update(given)
                pipe.send(refs)


class Peers:
    """A reader, and all sources that the reader knows."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._engine = make(_spec("reader"))  # the engine is kept because it owns its memory
        self._replica: ReplicaTransfer = self._engine.replica
        self._addresses: list[str] = []
        self._pulls = 0

    def close(self) -> None:
        """Close the reader."""
        self._replica.close()

    def _source(self, number: int, lease: LeaseRef) -> Source:
        return Source(self._addresses[number], f"source {number}", lease)

    def _pull(self, number: int, lease: LeaseRef) -> float:
        replica, ids = self._replica, np.array([self._pulls % _POOL], np.int32)
        self._pulls += 1
        start = now()
        replica.pull("pull", self._source(number, lease), _TIMEOUT_S, [PageCopy(ids, ids, (0, TOKENS))])
        while not replica.events:
            replica.poll()
        took = (now() - start) / 1e3
        event = replica.events.popleft()
        expect(isinstance(event, PullEvent) and event.safe and not event.error, f"the pull ends well, not as {event}")
        return took

    def _polls(self, repeats: int) -> list[float]:
        times: list[float] = []
        for _ in range(repeats):
            start = now()
            self._replica.poll()
            times.append((now() - start) / 1e3)
        return times

    def measure(self, count: int, repeats: int) -> Iterator[Row]:
        """The rows for `count` sources, after contacting the new ones."""
        known, before = len(self._addresses), _resident()
        self._addresses += self._sources.more(count)
        new = range(known, count)
        met = [self._pull(number, lease) for number, lease in zip(new, self._sources.leases(new), strict=True)]
        mib = round((_resident() - before) / len(new) / 2**20, 2)
        settle()
        yield row("peers", count, "contact", summary(met) | {"mib": mib})
        self._polls(20)
        yield row("peers", count, "poll", summary(self._polls(repeats)))
        read = np.random.default_rng(0).integers(count, size=repeats).tolist()
        times = [self._pull(number, self._sources.leases([number])[0]) for number in read]
        yield row("peers", count, "pull", summary(times))
        for number in range(count):  # these pulls name a lease that does not exist, so nothing is read
            self._replica.pull(f"open {number}", self._source(number, LeaseRef(new_lease_id(), 0, 600.0)), _TIMEOUT_S)
        polls = self._polls(max(repeats, 100))
        expect(not self._replica.events, "all pulls are open")
        yield row("peers", count, "poll, pulls open", summary(polls) | {"us_mean": round(statistics.mean(polls), 2)})
        for number in range(count):
            self._replica.cancel(f"open {number}", "measured")
        expect(all(event.safe for event in self._replica.events if isinstance(event, PullEvent)), "all pulls are over")
        self._replica.events.clear()


def by_peers(counts: Sequence[int], repeats: int) -> Iterator[Row]:
    """A reader with a growing number of known sources."""
    with ExitStack() as stack:
        sources = start_sources()
        stack.callback(sources.close)
        reader = Peers(sources)
        stack.callback(reader.close)
        for count in counts:
            if _available_mib() < _NEEDED_MIB * count:
                progress(
                    f"growth_transfer: {count} sources are left out, {_available_mib():,.0f} MiB are free for them"
                )
                return
            yield from reader.measure(count, repeats)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _available_mib() -> float:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) / 1024


def main() -> None:
    """Runs the benchmark and reports its rows."""
    chosen = options(__doc__)
    torch.set_num_threads(1)
    quick, rows = chosen.quick, list[Row]()
    curves: list[tuple[str, Callable[[int], Iterator[Row]], Sequence[int]]] = [
        ("pages", partial(by_pages, budget_s=0.1 if quick else 1.0), PAGES[:3] if quick else PAGES),
        ("regions", partial(by_regions, budget_s=0.1 if quick else 1.0), REGIONS[1:4:2] if quick else REGIONS),
    ]
    for name, curve, sizes in curves:
        for size in sizes:
            start = time.monotonic()
            rows += curve(size)
            progress(f"growth_transfer: {size:,} {name} in {time.monotonic() - start:.0f} s")
    rows += by_peers(PEERS[:2] if quick else PEERS, 50 if quick else 300)
    report("growth_transfer", rows, chosen)


if __name__ == "__main__":
    main()
