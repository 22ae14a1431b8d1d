"""Random moves and faults with real engines over real NIXL: accepted data must equal the source's data.

`python -m tests.transfer.engine_moves --runs 10000` prints the seeds.

Both sides live in this process and are driven step by step with their own clock. The seed therefore decides everything
except the times at which NIXL's copies end. Sources hold pages of known content under leases, and overwrite a page as
soon as its lease has ended. Readers treat their pages as a manager does: only the pull that a page was given to may
write to that page.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from kvcache.layout import PageLayout
from kvcache.replica.block_table import PageCopy
from tests.transfer.clock import Clock
from transfer.memory import MemoryType
from transfer.nixl.chaos import ChaosAgent, Rates
from transfer.plan.shapes import dense
from transfer.pull.lease import LeaseRef, new_lease_id
from transfer.pull.pull_state import PullEvent
from transfer.pull.rank import RankIdentity, RankTransfer, ShardMemory, new_incarnation
from transfer.pull.replica import LeaseOffer, LeaseOver, Offered, ReplicaTransfer
from transfer.pull.source import Source
from transfer.wire.handshake import EngineCard, HandshakeClient, HandshakeServer

HEADS, PAGES, PAGE_SIZE, HEAD_BYTES = 2, 12, 4, 256
LEASE_S = 4.0
FREE = 0xEE


class ViolationError(AssertionError):
    """An event that must never happen."""


@dataclass(eq=False)
class Side:
    """One engine, its pools as `[rank][page, head, byte]`, and its free pages."""

    engine_id: str
    replica: ReplicaTransfer
    pools: list[np.ndarray]
    card: EngineCard
    agents: list[ChaosAgent]
    free: list[int] = field(default_factory=lambda: list(range(PAGES)))

    def content(self, pages: list[int]) -> np.ndarray:
        return np.concatenate([pool[pages] for pool in self.pools], axis=1)

    def fill(self, pages: list[int], content: np.ndarray | int) -> None:
        for rank, pool in enumerate(self.pools):
            heads = pool.shape[1]
            pool[pages] = content if isinstance(content, int) else content[:, rank * heads : (rank + 1) * heads]


def make_side(engine_id: str, tp: int, seed: int, rates: Rates, clock: Clock, verify: float) -> Side:
    incarnation, ranks, pools, agents = new_incarnation(), [], [], []

    def agent(name: str, memory_type: MemoryType) -> ChaosAgent:
        agents.append(ChaosAgent(name, memory_type, seed=seed * 8 + len(agents), rates=rates))
        return agents[-1]

    for rank in range(tp):
        heads = HEADS // tp
        page = PageLayout(
            "uint8", 1, 1, 1, rank * heads, heads, PAGE_SIZE, HEAD_BYTES // PAGE_SIZE, "head,layer,side,token,dim"
        )
        pools.append(np.full((PAGES, heads, HEAD_BYTES), FREE, np.uint8))
        identity = RankIdentity(engine_id=engine_id, incarnation=incarnation, rank=rank, ranks=tp)
        address = pools[-1].ctypes.data
        ranks.append(
            RankTransfer(
                identity,
                ShardMemory(dense(page, PAGES), [address]),
                checks=True,
                verify=verify,
                stuck_s=60.0,
                agent=agent,
                clock=clock,
            )
        )
    replica = ReplicaTransfer(ranks, HandshakeClient(), heartbeat_s=1e9, clock=clock)
    return Side(engine_id, replica, pools, EngineCard(engine_id, incarnation, tuple(r.metadata for r in ranks)), agents)


@dataclass
class Held:
    """Leased pages and their contents."""

    lease: LeaseRef
    pages: list[int]
    content: np.ndarray
    incarnation: str
    offered: bool = False


@dataclass
class Reading:
    """A pull: its lease, its target pages, and whether the reader knows that the pull has failed."""

    held: Held
    pages: list[int]
    failed: bool = False


class World:
    """One source and two readers, driven by a seed.

    Attributes:
        counts: counts of events, over all runs.
    """

    def __init__(self, tps: tuple[int, int, int], rates: Rates, *, verify: float = 0.0, seed: int = 0) -> None:
        self.counts: Counter[str] = Counter()
        self.clock = Clock()
        self._tps, self._rates, self._verify = tps, rates, verify
        self._made = itertools.count(seed)
        self.source = self._make("source", tps[0])
        self.readers = [self._make(f"reader{at}", tp) for at, tp in enumerate(tps[1:])]
        self.server = HandshakeServer([self.source.card])
        # The clock of this model is fast, so questions come more often than in reality.
        self.server._throttle.admits = lambda _: True
        self.held: dict[int, Held] = {}
        self.reading: list[dict[str, Reading]] = [{}, {}]
        self.retired: list[Side] = []
        self._stale: Held | None = None
        self._names = itertools.count()

    def _make(self, engine_id: str, tp: int) -> Side:
        return make_side(engine_id, tp, next(self._made), self._rates, self.clock, self._verify)

    def run(self, seed: int, moves: int = 40) -> None:
        """Makes one run: random moves, and then the end of all leases, pulls and copies."""
        self._random = random.Random(seed)
        kinds = {
            self.lease: 5, self.pull: 8, self.poll_source: 10, self.poll_reader: 30, self.pass_time: 3,
            self.revoke: 1, self.cancel: 2, self.restart_source: 0.05, self.restart_reader: 0.05,
        }  # fmt: skip
        for move in self._random.choices(list(kinds), list(kinds.values()), k=moves):
            move()
        self.finish()

    def lease(self) -> None:
        count = self._random.randint(1, 4)
        if len(self.source.free) < count:
            return
        pages = [self.source.free.pop(self._random.randrange(len(self.source.free))) for _ in range(count)]
        content = np.frombuffer(self._random.randbytes(count * HEADS * HEAD_BYTES), np.uint8)
        content = content.reshape(count, HEADS, HEAD_BYTES)
        self.source.fill(pages, content)
        word_idx = self._random.randrange(64)
        held = Held(LeaseRef(new_lease_id(), word_idx, LEASE_S), pages, content, self.source.card.incarnation)
        self.held[held.lease.lease_id] = held
        self.source.replica.offer(
            LeaseOffer(str(held.lease.lease_id), held.lease, engines=self._random.choice((1, 2, 2)), pages=[pages])
        )
        self.take_source_events()

    def pull(self) -> None:
        at = self._random.randrange(2)
        reader, offered = self.readers[at], [held for held in self.held.values() if held.offered]
        # A late reader may use a lease that has ended.
        if not offered or (self._random.random() < 0.1 and self._stale is not None):
            offered = [self._stale] if self._stale is not None else []
        if not offered:
            return
        held = self._random.choice(offered)
        if len(reader.free) < len(held.pages):
            return
        pages = [reader.free.pop(self._random.randrange(len(reader.free))) for _ in held.pages]
        key = f"r{next(self._names)}"
        self.reading[at][key] = Reading(held, pages)
        self._connect(reader)
        reader.replica.pull(
            key, Source(self.server.endpoint, "source", held.lease, held.incarnation), self._random.choice((0.5, 5.0))
        )
        groups = [PageCopy(pages, held.pages, (0, PAGE_SIZE * len(pages)))]
        if len(pages) > 1 and self._random.random() < 0.3:
            first = [PageCopy(pages[:1], held.pages[:1], (0, PAGE_SIZE))]
            reader.replica.add_pages(key, first, last=False)
            groups = [PageCopy(pages[1:], held.pages[1:], (0, PAGE_SIZE * (len(pages) - 1)))]
        reader.replica.add_pages(key, groups, last=True)
        self.counts["pulls"] += 1
        self.take_reader_events(at)

    def _connect(self, reader: Side) -> None:
        """Connects a reader. The server runs in real time and not by the test's clock."""
        deadline = time.monotonic() + 5
        while self.source.replica.ranks and time.monotonic() < deadline:
            if all(rank.remote("source") is not None for rank in reader.replica.ranks):
                return
            reader.replica.directory.connect((self.server.endpoint, "source"))
            reader.replica.poll()
            time.sleep(1e-4)

    def poll_source(self) -> None:
        self.source.replica.poll()
        self.take_source_events()

    def poll_reader(self) -> None:
        at = self._random.randrange(2)
        for _ in range(self._random.choice((1, 1, 4, 16))):
            self.readers[at].replica.poll()
        self.take_reader_events(at)

    def pass_time(self) -> None:
        self.clock.now += self._random.choice((0.01, 0.01, 0.05, 0.05, 0.1, 0.3, LEASE_S * 1.1))

    def revoke(self) -> None:
        if self.held:
            self.source.replica.revoke(self._random.choice(list(self.held)), "aborted")
            self.take_source_events()

    def cancel(self) -> None:
        at = self._random.randrange(2)
        if self.reading[at]:
            self.readers[at].replica.cancel(self._random.choice(list(self.reading[at])), "cancelled")
            self.take_reader_events(at)

    def restart_source(self) -> None:
        """Restarts the source under the same engine id. The pages of the restarted source have new contents."""
        self.counts["source restarts"] += 1
        old, self.source = self.source, self._make("source", self._tps[0])
        self.server.serve(self.source.card)
        old.replica.close()
        old.fill(list(range(PAGES)), FREE)
        self.retired.append(old)  # The memory of a dead process is unmapped. The memory of the old source stays mapped.
        self._stale = next(iter(self.held.values()), None)
        self.held.clear()

    def restart_reader(self) -> None:
        at = self._random.randrange(2)
        self.counts["reader restarts"] += 1
        old, self.readers[at] = self.readers[at], self._make(f"reader{at}", self._tps[1 + at])
        old.replica.close()
        self.reading[at].clear()
        self.retired.append(old)

    def take_source_events(self) -> None:
        events = self.source.replica.events
        while events:
            match events.popleft():
                case Offered(lease_id=lease_id, error=error):
                    if error:  # Another lease has taken the lease word.
                        self._give_back(self.held.pop(lease_id))
                    else:
                        self.held[lease_id].offered = True
                        self.counts["leases"] += 1
                case LeaseOver(lease_id=lease_id, reason=reason):
                    self.counts["leases read" if reason == "read" else "leases ended otherwise"] += 1
                    self._stale = self.held.pop(lease_id)
                    self._give_back(self._stale)
                case _:
                    raise ViolationError("the source has no pulls")

    def _give_back(self, held: Held) -> None:
        """Returns pages to the source, which overwrites them at once. A late reader therefore gets other data."""
        self.source.fill(held.pages, self._random.randrange(256))
        self.source.free += held.pages

    def take_reader_events(self, at: int) -> None:
        reader, events = self.readers[at], self.readers[at].replica.events
        while events:
            event = events.popleft()
            if not isinstance(event, PullEvent) or event.key not in self.reading[at]:
                raise ViolationError(f"reader {at}: {event} belongs to no pull")
            self.on_pull(reader, self.reading[at], event)

    def on_pull(self, reader: Side, reading: dict[str, Reading], event: PullEvent) -> None:
        pull = reading[event.key]
        if event.error and not event.safe:
            pull.failed = True
            return
        if event.error:
            self.counts["pulls failed"] += 1
        else:
            if pull.failed:
                raise ViolationError(f"{event.key}: failed, and then accepted")
            self.counts["pulls accepted"] += 1
            if not (reader.content(pull.pages) == pull.held.content).all():
                raise ViolationError(
                    f"{event.key}: the reader has accepted pages {pull.pages}, whose content differs from the source's"
                )
        del reading[event.key]
        reader.fill(pull.pages, FREE)
        reader.free += pull.pages

    def finish(self) -> None:
        """Waits until all deadlines have passed, all copies have ended, and all pages are free."""
        deadline = time.monotonic() + 10
        ranks = [rank for side in self.readers for rank in side.replica.ranks]
        while time.monotonic() < deadline:
            if not (self.held or any(self.reading) or any(len(rank.puller) for rank in ranks)):
                break
            self.clock.now += 0.05
            self.poll_source()
            for at in range(2):
                self.readers[at].replica.poll()
                self.take_reader_events(at)
        self.check()

    def check(self) -> None:
        """Checks that no page is held, counted or written by mistake."""
        if self.held or any(self.reading):
            raise ViolationError(
                f"nothing ends any more: leases {list(self.held)}, pulls {[list(pulls) for pulls in self.reading]}"
            )
        for side in (self.source, *self.readers):
            if sorted(side.free) != list(range(PAGES)):
                raise ViolationError(f"{side.engine_id}: free pages {sorted(side.free)}")
            leases, pulls = side.replica.leases, sum(len(rank.puller) for rank in side.replica.ranks)
            leases.check()
            if len(leases) or pulls:
                raise ViolationError(f"{side.engine_id}: {len(leases)} leases and {pulls} pulls are left")
        for side in self.readers:
            if any((pool != FREE).any() for pool in side.pools):
                raise ViolationError(f"{side.engine_id}: a READ has written to a page of no pull")

    def close(self) -> None:
        for side in (self.source, *self.readers):
            side.replica.close()
        self.server.close()


CONFIGS: list[tuple[tuple[int, int, int], Rates, float]] = [
    ((1, 1, 1), Rates(), 0.0),
    ((2, 2, 1), Rates(), 0.0),
    ((1, 2, 2), Rates(delay=0.6, polls=60), 0.0),
    ((1, 1, 1), Rates(short=0.1, corrupt=0.1, drop=0.0), 1.0),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--moves", type=int, default=40)
    args = parser.parse_args()
    begin, share = time.perf_counter(), -(-args.runs // len(CONFIGS))
    for number, (tps, rates, verify) in enumerate(CONFIGS):
        first = args.seed + number * share
        world = World(tps, rates, verify=verify, seed=first)
        for seed in range(first, first + share):
            try:
                world.run(seed, args.moves)
            except ViolationError as error:
                print(f"seed {seed}, tp {tps}: {error}")  # noqa: T201
                return 1
        faults: Counter[str] = Counter()
        for side in (world.source, *world.readers):
            for agent in side.agents:
                faults.update(agent.faults)
        seeds = f"seeds {first} to {first + share - 1}, tp {tps}, verify {verify}"
        print(f"{seeds}: {dict(world.counts)}; faults {dict(faults)}")  # noqa: T201
        with suppress(Exception):
            world.close()
    print(f"{share * len(CONFIGS)} runs of {args.moves} moves, {time.perf_counter() - begin:.0f} s, no violation")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
