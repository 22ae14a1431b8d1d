"""A subscriber that behaves like a router: it follows the stream of a rank, and asks for a replay if a message is
missing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

import msgspec
import numpy as np
import zmq

from kvcache import PagedKVCacheManager
from kvcache.endpoints.publisher import _JOIN_S
from kvcache.events.book import Told
from kvcache.events.log import FILES, HOST
from kvcache.events.wire import END_OF_REPLAY, AllBlocksCleared, KVEvent, encode, hashes_of
from kvcache.pool.index import PrefixIndex

PATIENCE_S = 60.0
MEDIA = {HOST: "CPU", FILES: "STORAGE"}


class Known:
    """The pages that a subscriber knows from the events of one rank.

    `there` maps a medium and a hash to tokens and parent. `tree` has the GPU's pages as Dynamo's index keeps them: a
    page without a known parent is ignored, and the removal of a page removes all pages that continue it.
    """

    def __init__(self) -> None:
        self.there: dict[str, dict[int, tuple[tuple[int, ...], int | None]]] = {}
        self.tree: dict[int, int | None] = {}
        self.events: list[dict[str, Any]] = []
        # For each table after the first, by its index, the pages that the events have reported.
        self.groups: dict[int, Known] = {}
        # The attention type and window of the layers, according to the events.
        self.spec: tuple[str | None, int | None] | None = None

    def take_up(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            self.events.append(event)
            if group := event.get("group_idx", 0):
                self.groups.setdefault(group, Known()).take_up([{**event, "group_idx": 0}])
            elif event["type"] == "AllBlocksCleared":
                self.there, self.tree, self.groups = {}, {}, {}
            elif event["type"] == "BlockRemoved":
                for block in event["block_hashes"]:
                    self.there.get(event["medium"], {}).pop(block, None)
                    if event["medium"] == "GPU":
                        self.prune(block)
            else:
                self.store(event)

    def store(self, event: dict[str, Any]) -> None:
        size, before, tokens = event["block_size"], event["parent_block_hash"], event["token_ids"]
        if "kv_cache_spec_kind" in event:
            self.spec = event["kv_cache_spec_kind"], event.get("kv_cache_spec_sliding_window")
        assert len(tokens) == size * len(event["block_hashes"])
        for at, block in enumerate(event["block_hashes"]):
            mine = tuple(tokens[at * size : (at + 1) * size])
            self.there.setdefault(event["medium"], {})[block] = (mine, before)
            if event["medium"] == "GPU" and size and (before is None or before in self.tree):
                self.tree[block] = before
            before = block

    def prune(self, block: int) -> None:
        gone = [block]
        while gone:
            one = gone.pop()
            if one in self.tree:
                del self.tree[one]
                gone += [child for child, parent in self.tree.items() if parent == one]

    def whole(self) -> None:
        """Asserts that `tree` contains a known page exactly if all earlier pages of its prompt are known."""
        gpu = self.there.get("GPU", {})
        for block in gpu:
            way, before = [block], gpu[block][1]
            while before in gpu:
                way.append(before)
                before = gpu[before][1]
            assert (block in self.tree) == (before is None), (
                f"block {block}, the last of {len(way)} blocks of its prompt"
            )


class Reader(Known):
    """Follows the events of one rank, read directly from the log, without sockets.

    `longest` returns the length of the prefix that a follower would find if it knew only the events.
    """

    def __init__(self, manager: PagedKVCacheManager, rank: int) -> None:
        super().__init__()
        worker = worker_of(manager)
        self._rank, self._book = rank, worker._book
        self._tables = len(manager.layer_tables.tables)
        groups = [table.group for table in manager.layer_tables.tables]
        self._chunk = next((group.window for group in groups if group.kind == "chunked"), 1)
        self._page_size = manager._replicas.each[rank].page_size
        self.take_up(_decoded([AllBlocksCleared(), *self._book.state(rank)]))

    def follow(self, told: list[Told]) -> None:
        self.take_up(_decoded([event for source, event in told if self._book.is_of(source, self._rank)]))

    def longest(self, hashes: list[int], media: tuple[str, ...]) -> int:
        """Returns the number of these pages after which all tables can continue. A page counts as present if any of
        `media` has it.
        """
        return next((end for end in range(len(hashes), 0, -1) if self._goes_on(hashes[:end], media)), 0)

    def _goes_on(self, hashes: list[int], media: tuple[str, ...]) -> bool:
        end = len(hashes) * self._page_size
        for group in range(self._tables):
            known = self.groups.get(group, Known()) if group else self
            kind, size = known.spec or ("", None)
            chunk = self._chunk  # events have no field for it
            seen = {"sliding_window": end - (size or 0) + 1, "chunked_local_attention": end - end % chunk}
            first = seen.get(kind or "", 0)
            needed = hashes[max(0, first) // self._page_size :]
            if not all(any(one in known.there.get(medium, {}) for medium in media) for one in needed):
                return False
        return True


def _decoded(events: Sequence[KVEvent]) -> list[dict[str, Any]]:
    return msgspec.msgpack.decode(encode(list(events)))


class Mirror(Known):
    """The pages that a subscriber of one rank knows. `lose` chooses messages that never arrive."""

    def __init__(self, endpoints: tuple[str, str | None], lose: Callable[[int], bool] = lambda _: False) -> None:
        super().__init__()
        context = zmq.Context.instance()
        self.sub = context.socket(zmq.SUB)
        self.sub.setsockopt(zmq.RCVHWM, 0)
        self.sub.connect(endpoints[0])
        self.sub.subscribe(b"")
        self.dealer = None
        if endpoints[1]:
            self.dealer = context.socket(zmq.DEALER)
            self.dealer.connect(endpoints[1])
        self.lose = lose
        self.expected: int | None = None
        self.replays = 0
        self.begun = False
        self.made_at = time.monotonic()

    def begin(self) -> Mirror:
        """Waits until messages of the stream arrive."""
        self.until(lambda: self.begun)
        return self

    def forget_the_begin(self, manager: PagedKVCacheManager, rank: int) -> None:
        """Waits until the manager has sent its whole state to all subscribers. It sends the state whenever a new
        subscriber arrives.
        """
        worker = worker_of(manager)
        self.until(lambda: worker._told_anew_at >= self.made_at + _JOIN_S and not worker._owed)
        self.settle(manager, rank)
        del self.events[:]

    def take(self, timeout_ms: int = 0) -> bool:
        """Handles one message. Returns whether a message had arrived."""
        if not self.sub.poll(timeout_ms):
            return False
        _, number, payload = self.sub.recv_multipart()
        sequence = int.from_bytes(number, "big")
        self.begun = True
        if self.lose(sequence) or (self.expected is not None and sequence < self.expected):
            return True
        if self.dealer is not None and sequence != self.expected:
            self.replay(0 if self.expected is None else self.expected)
        if self.expected is None or sequence >= self.expected:
            self.apply(payload)
            self.expected = sequence + 1
        return True

    def replay(self, first: int) -> None:
        assert self.dealer is not None
        self.replays += 1
        self.dealer.send_multipart([b"", first.to_bytes(8, "big")])
        while True:
            assert self.dealer.poll(int(PATIENCE_S * 1000)), "no answer to a replay"
            _, _, number, payload = self.dealer.recv_multipart()
            if number == END_OF_REPLAY:
                return
            self.apply(payload)
            self.expected = int.from_bytes(number, "big") + 1

    def apply(self, payload: bytes) -> None:
        self.take_up(msgspec.msgpack.decode(payload)[1])

    def until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < deadline, "the stream did not bring the expected messages in time"
            self.take(20)

    def settle(self, manager: PagedKVCacheManager, rank: int) -> None:
        """Handles all events that the manager has recorded so far."""
        last = settled(manager)[rank]
        self.until(lambda: self.expected is not None and self.expected > last)

    def close(self) -> None:
        self.sub.close(linger=0)
        if self.dealer is not None:
            self.dealer.close(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check_same(self, manager: PagedKVCacheManager, rank: int) -> None:
        """Asserts that the mirror equals the manager's indexes. Call `settle` first."""
        sizes: dict[str, int] = {}
        for number, index in indexes_of(manager, rank).items():
            medium = MEDIA.get(number, "GPU")
            for group in range(len(manager.layer_tables.tables)):
                pages = index.published & (index.tables == group)
                want = set(hashes_of(index.digests_of(np.flatnonzero(pages).astype(np.int32))).tolist())
                known = self if not group else self.groups.get(group, Known())
                have = set(known.there.get(medium, {}))
                where = f"rank {rank}, {medium}, group {group}"
                assert have == want, f"{where}: {len(have - want)} too many, {len(want - have)} too few"
                sizes[medium] = len(want)
                known.whole()
        told = {medium for medium, blocks in self.there.items() if blocks}
        assert told <= sizes.keys(), f"rank {rank}: no medium has these reported blocks: {told - sizes.keys()}"


def parked(worker: Any) -> None:
    """Stops the publisher's thread from reading the log until the test deletes the worker's attribute `turn`."""
    is_parked = threading.Event()

    def turn() -> bool:
        is_parked.set()
        return False

    worker.turn = turn
    assert is_parked.wait(PATIENCE_S)


def worker_of(manager: PagedKVCacheManager) -> Any:
    assert manager._replicas._events is not None
    return manager._replicas._events._worker


def settled(manager: PagedKVCacheManager) -> list[int]:
    """Waits until all recorded events are sent. Returns the last number that each rank has sent."""
    worker = worker_of(manager)
    deadline = time.monotonic() + PATIENCE_S
    while True:
        with worker._applying:
            if not (worker._log.entries or worker._behind or worker._untold or worker._lost):
                return [stream.sequence - 1 for stream in worker.streams]
        assert time.monotonic() < deadline, "the publisher's thread has not sent everything in time"
        time.sleep(0.001)


def indexes_of(manager: PagedKVCacheManager, rank: int) -> dict[int, PrefixIndex]:
    """Returns the indexes whose changes the event stream of a rank reports."""
    found = {rank: manager._replicas.each[rank].pool.index}
    tiers = manager._replicas.tiers
    if tiers is not None:
        found[HOST] = tiers.host.pool.index
        if tiers.files is not None:
            found[FILES] = tiers.files.index
    return found
