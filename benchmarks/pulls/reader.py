"""The reader of the pulls. It can poll without a pause, use the transfer thread, or leave out the fence."""

from __future__ import annotations

import itertools
from time import perf_counter_ns as now
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from benchmarks.pools import expect
from benchmarks.pulls.engines import TABLE_KEY, Engine, Spec, make
from benchmarks.pulls.source import SourceProcess
from kvcache.replica.block_table import BlockTable, PageCopy
from transfer.plan.plan import plan
from transfer.plan.source_ranks import sources
from transfer.pull.lease import LeaseRef
from transfer.pull.parts import Part
from transfer.pull.pull_state import PullEvent
from transfer.pull.rank import RankTransfer
from transfer.pull.remote import RemoteEngine
from transfer.pull.seals import TableSeals
from transfer.pull.source import Source
from transfer.pull.thread import TransferThread

_TIMEOUT_S = 60.0
_SEALS = TableSeals(TABLE_KEY)
Ids = NDArray[np.int32]
Rows = NDArray[np.uint64]


class Pages(NamedTuple):
    """The pages of one pull: page ids of the reader and of the source, int32, and the number of tokens."""

    local: Ids
    remote: Ids
    tokens: int

    @property
    def groups(self) -> list[PageCopy]:
        """The pages in the form that a transfer takes."""
        return [PageCopy(self.local, self.remote, (0, self.tokens))]


class Times(NamedTuple):
    """Microseconds of one pull.

    Attributes:
        total: from the call until the event that allows the pages to be used.
        host: until the calls that begin the pull have returned.
        stall: the longest delay of code that ran beside the pull; 0 if no such code ran.
        cpu: processor time of all threads of this process, and of the source if that is counted.
    """

    total: float
    host: float
    stall: float = 0.0
    cpu: float = 0.0


def draw(rng: np.random.Generator, reader: Spec, source: Spec, tokens: int, *, scattered: bool) -> Pages:
    """Draws pages for a pull: at random positions in both pools, or adjacent in both."""
    found: list[Ids] = []
    for spec in (reader, source):
        count = -(-tokens // spec.page_size)
        if scattered:
            ids = rng.permutation(spec.pages)[:count]
        else:
            ids = np.arange(count) + rng.integers(spec.pages - count + 1)
        found.append(ids.astype(np.int32))
    return Pages(found[0], found[1], tokens)


class Reader:
    """An engine in this process that pulls from one source.

    Args:
        spec: geometry of this engine.
        source: the source process.
        source_spec: geometry of the source.
    """

    def __init__(self, spec: Spec, source: SourceProcess, source_spec: Spec) -> None:
        self.spec, self.source_spec = spec, source_spec
        self.engine: Engine = make(spec)
        self.replica = self.engine.replica
        self.thread: TransferThread | None = None
        self._address = source.address
        self._keys = (f"pull {number}" for number in itertools.count())

    def _source(self, lease: LeaseRef) -> Source:
        return Source(self._address.endpoint, self.source_spec.name, lease)

    def _tables(self, pages: Pages, lease: LeaseRef) -> tuple[BlockTable]:
        """Returns the block table that a source would send for these pages, with the seal that the reader checks."""
        table = BlockTable(
            request_id="r",
            replica_idx=0,
            num_tokens=pages.tokens,
            page_size=self.source_spec.page_size,
            groups=(tuple(pages.remote.tolist()),),
            fingerprint="",
            hash_algorithm="sha256",
            digests=bytes(32 * len(pages.remote)),
        )
        return (replace(table, seals=(_SEALS.seal(lease.lease_id, table),)),)

    def pull(self, pages: Pages, lease: LeaseRef) -> Times:
        """Pulls once, polling without a pause."""
        key, source, groups, replica = next(self._keys), self._source(lease), pages.groups, self.replica
        tables = self._tables(pages, lease)
        start = now()
        replica.pull(key, source, _TIMEOUT_S, groups, tables=tables)
        begun = now()
        while not replica.events:
            replica.poll()
        end = now()
        _check(replica.events.popleft())
        return Times((end - start) / 1e3, (begun - start) / 1e3)

    def start_thread(self) -> TransferThread:
        """From now on a transfer thread does the pulls, and `pull` must not be called any more."""
        self.thread = TransferThread(self.replica)
        return self.thread

    def pull_by_thread(self, pages: Pages, lease: LeaseRef) -> Times:
        """Pulls once through the transfer thread, while this thread sleeps."""
        if self.thread is None:
            self.start_thread()
        thread = self.thread
        key, source, groups, events = next(self._keys), self._source(lease), pages.groups, thread.events
        tables = self._tables(pages, lease)
        start = now()
        thread.pull(key, source, groups, _TIMEOUT_S, tables)
        begun = now()
        thread.wait(lambda: bool(events), _TIMEOUT_S)
        end = now()
        _check(events.popleft())
        return Times((end - start) / 1e3, (begun - start) / 1e3)

    def pull_beside_loop(self, pages: Pages, lease: LeaseRef) -> Times:
        """Pulls once through the transfer thread, while this thread runs Python code, as a serving loop does.

        `stall` is the longest delay of this code.
        """
        thread = self.thread or self.start_thread()
        key, source, groups, events = next(self._keys), self._source(lease), pages.groups, thread.events
        tables = self._tables(pages, lease)
        start = now()
        thread.pull(key, source, groups, _TIMEOUT_S, tables)
        begun = last = now()
        longest = 0
        while not events:
            at = now()
            longest, last = max(longest, at - last), at
        end = now()
        _check(events.popleft())
        return Times((end - start) / 1e3, (begun - start) / 1e3, longest / 1e3)

    def pull_of_rank(self, pages: Pages, lease: LeaseRef, *, fenced: bool) -> Times:
        """Pulls once with the first rank's puller alone, until its event.

        Without a fence, it ends when the data has arrived.
        """
        rank = self.replica.ranks[0]
        key, puller, groups = next(self._keys), rank.puller, pages.groups
        remote = self._remote(rank)
        start = now()
        pull = puller.open(key, remote, lease, _TIMEOUT_S)
        puller.add(pull, remote.parts(key, groups), last=fenced)
        begun = now()
        while not puller.events and (fenced or pull.reading or pull.waiting):
            puller.poll()
        end = now()
        if not fenced:
            puller.add(pull, [], last=True)
            while not puller.events:
                puller.poll()
        _check(puller.events.popleft())
        puller.ended.clear()
        return Times((end - start) / 1e3, (begun - start) / 1e3)

    def parts(self, pages: Pages) -> list[Part]:
        """The READs of all ranks for a pull, as the transfer builds them.

        At least one pull must have been made before.
        """
        found: list[Part] = []
        for rank in self.replica.ranks:
            found += self._remote(rank).parts("parts", pages.groups)
        return found

    def runs(self, pages: Pages) -> list[tuple[Rows, Rows]]:
        """The runs of a pull without staging, from the source's pages into ours: uint64 `[runs, 3]` for each side."""
        found: list[tuple[Rows, Rows]] = []
        for rank in self.replica.ranks:
            there = self._remote(rank).ranks
            for at, kept in sources(rank.layout, [one.layout for one in there], rank.identity.rank):
                (group,) = pages.groups
                planned = plan(kept, there[at].layout, (rank.bases, there[at].bases))
                found.append(planned.runs(0, *group).descriptors())
        return found

    def _remote(self, rank: RankTransfer) -> RemoteEngine:
        remote = rank.remote(self.source_spec.name)
        if remote is None:
            raise RuntimeError("the source is unknown: pull from it once before asking for its runs")
        return remote

    def read_whole(self, size: int) -> Times:
        """Reads the first `size` bytes of the source's pool as one descriptor, without pages, lease and fence."""
        rank = self.replica.ranks[0]
        remote = self._remote(rank)
        agent, there = remote.agent, remote.ranks[0]
        local = np.array([[rank.bases[0], size, 0]], np.uint64)
        source = np.array([[there.bases[0], size, 0]], np.uint64)
        start = now()
        handle, done = agent.post("READ", there.agent_name, local, source)
        begun = now()
        while not done:
            done = agent.done(handle)
        end = now()
        agent.release(handle)
        return Times((end - start) / 1e3, (begun - start) / 1e3)

    def close(self) -> None:
        """Closes the engine."""
        if self.thread is not None:
            self.thread.close()
        self.replica.close()


def _check(event: object) -> None:
    expect(isinstance(event, PullEvent) and event.safe and not event.error, f"a pull ends well, not so: {event}")
