"""Engines in one process for tests: ranks over pools of known bytes, driven by the test or by a thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.layout import PageLayout
from kvcache.replica.block_table import PageCopy
from tests.transfer.clock import Clock
from transfer.errors import AgentError
from transfer.nixl.agent import Agent
from transfer.plan.shapes import dense
from transfer.pull.lease import LeaseRef, new_lease_id
from transfer.pull.pull_state import PullEvent
from transfer.pull.rank import RankIdentity, RankTransfer, ShardMemory, new_incarnation
from transfer.pull.replica import LeaseOffer, LeaseOver, Offered, ReplicaTransfer
from transfer.pull.source import Source
from transfer.wire.handshake import EngineCard, HandshakeClient, HandshakeServer
from transfer.wire.messages import Wanted


class Hindrance:
    """Delays or refuses the READs of one rank, as a stuck or dying peer would.

    Attributes:
        held: while this is set, every READ seems to be in flight.
        hold_from: while this is set, READs from this number on (counted from 0) seem to be in flight.
        refuse: which of the next READs raise, counted from 0.
        reads: READs so far, as (runs, note).
    """

    def __init__(self) -> None:
        self.held = False
        self.hold_from: int | None = None
        self.refuse: set[int] = set()
        self.reads: list[tuple[int, bytes]] = []


class Hindered(Agent):
    """A real agent whose READs a `Hindrance` can delay or refuse."""

    def __init__(self, hindrance: Hindrance, *args: Any) -> None:
        super().__init__(*args)
        self.hindrance = hindrance

    def read(self, peer: str, local: Any, remote: Any, memory_types: Any) -> Any:
        self._note_read(len(local), b"")
        if self._is_held():
            return self.post("READ", peer, local, remote, b"", memory_types)[0]
        return super().read(peer, local, remote, memory_types)

    def read_word(self, peer: str, local: int, remote: int, note: bytes) -> Any:
        self._note_read(1, note)
        if self._is_held():
            return self.post("READ", peer, [(local, 8, 0)], [(remote, 8, 0)], note)[0]
        return super().read_word(peer, local, remote, note)

    def _note_read(self, runs: int, note: bytes) -> None:
        self.hindrance.reads.append((runs, note))
        if len(self.hindrance.reads) - 1 in self.hindrance.refuse:
            raise AgentError("refused by the test", peer_lost=False)

    def done(self, handle: Any) -> bool:
        return not self._is_held() and super().done(handle)

    def _is_held(self) -> bool:
        held = self.hindrance
        return held.held or (held.hold_from is not None and len(held.reads) > held.hold_from)


KEY = b"tests"
HEADS = 4
TOKENS = 16
PAGES = 16


class Engine:
    """The ranks of one engine over pools of bytes. The heads are divided over `tp` ranks. A fixture closes the engine.

    All engines share a key unless the caller gives another key or no key. Without a key an engine vouches for itself on
    this host.

    Attributes:
        pools: per rank uint8 `[pages, heads of the rank, bytes of a head]`.
        hindrances: per rank.
    """

    def __init__(self, engine_id: str, tp: int = 1, *, seed: int = 0, incarnation: str = "", **options: Any) -> None:
        self.engine_id, self.incarnation = engine_id, incarnation or new_incarnation()
        layer_dims = options.pop("layers", 2)
        pages = options.pop("pages", PAGES)
        compatibility = options.pop("compatibility", {"model": "m"})
        clock = options.pop("clock", time.monotonic)
        key = options.pop("key", KEY)
        stuck_s = options.pop("stuck_s", 30.0)
        self.hindrances = [Hindrance() for _ in range(tp)]
        self.pools: list[NDArray[np.uint8]] = []
        self.ranks: list[RankTransfer] = []
        for rank in range(tp):
            heads = HEADS // tp
            layout = dense(
                PageLayout("bfloat16", 2, layer_dims, 2, rank * heads, heads, TOKENS, 8, "head,layer,side,token,dim"),
                pages,
            )
            pool = np.random.default_rng(seed + rank).integers(
                0, 256, (pages, heads, layout.region_bytes[0] // pages // heads)
            )
            self.pools.append(pool.astype(np.uint8))
            identity = RankIdentity(
                engine_id=engine_id,
                incarnation=self.incarnation,
                rank=rank,
                ranks=tp,
                compatibility=compatibility,
                key=key,
            )
            self.ranks.append(
                RankTransfer(
                    identity,
                    ShardMemory(layout, [self.pools[-1].ctypes.data]),
                    stuck_s=stuck_s,
                    agent=partial(Hindered, self.hindrances[rank]),
                    clock=clock,
                )
            )
        self.replica = ReplicaTransfer(self.ranks, HandshakeClient(clock=clock), clock=clock, **options)
        self.card = EngineCard(engine_id, self.incarnation, tuple(rank.metadata for rank in self.ranks), compatibility)
        self.server: HandshakeServer | None = None
        self.events: list[Any] = []

    def serve(self, bind: str = "tcp://127.0.0.1:0") -> str:
        if self.server is None:
            self.server = HandshakeServer([self.card], bind)
        return self.server.endpoint

    def poll(self) -> None:
        self.replica.poll()
        self.take()

    def take(self) -> None:
        self.events.extend(self.replica.events)
        self.replica.events.clear()

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def pulls(self) -> list[PullEvent]:
        return self.of(PullEvent)

    @property
    def overs(self) -> list[LeaseOver]:
        return self.of(LeaseOver)

    def offer(self, request_id: str = "r", word_idx: int = 0, duration_s: float = 30.0, **options: Any) -> LeaseRef:
        """Returns an open lease."""
        lease = LeaseRef(new_lease_id(), word_idx, duration_s)
        self.replica.offer(LeaseOffer(request_id, lease, **options))
        self.take()
        assert self.of(Offered)[-1] == Offered(request_id, lease.lease_id, "")
        return lease

    def source(self, lease: LeaseRef) -> Source:
        return Source(self.serve(), self.engine_id, lease)

    def heads(self, pages: Sequence[int]) -> NDArray[np.uint8]:
        """Returns the bytes of pages, `[pages, all heads, bytes]`, independent of the division over ranks."""
        return np.concatenate([pool[list(pages)] for pool in self.pools], axis=1)

    def blank(self) -> None:
        for pool in self.pools:
            pool[:] = 0x5A

    def close(self) -> None:
        if self.server is not None:
            self.server.close()
        self.replica.close()


LOCAL, REMOTE = [1, 2, 3], [5, 6, 9]
WHOLE = [PageCopy(LOCAL, REMOTE, (0, 3 * TOKENS))]


def pull(reader: Engine, source: Source | Wanted, key: str = "r", groups: Any = WHOLE, timeout_s: float = 20.0) -> None:
    reader.replica.pull(key, source, timeout_s)
    if groups is not None:
        reader.replica.add_pages(key, groups, last=True)


def settled(reader: Engine, *keys: str) -> Callable[[], bool]:
    """Returns a function that says whether these pulls have had their last event. Without `keys` the function is about
    the pull `r`.
    """
    return lambda: {*(keys or ("r",))} <= {event.key for event in reader.pulls if event.safe}


def passing(clock: Clock, until: Callable[[], object], answered: Engine | None = None) -> Callable[[], object]:
    """Returns `until` for a `run` during which the clock advances 10 ms a round.

    It never advances while the engine `answered` waits for an answer. Answers take real time, on a busy machine any
    time, so no such engine finds a living peer silent.
    """

    def moved() -> object:
        if answered is None or not answered.replica._client.is_waiting:
            clock.now += 0.01
        return until()

    return moved


def run(*engines: Engine, until: Callable[[], object], seconds: float = 20.0) -> None:
    """Polls engines in turn until a condition holds."""
    deadline = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < deadline, f"nothing within {seconds} s: {[engine.events for engine in engines]}"
        for engine in engines:
            engine.poll()
        time.sleep(2e-4)
