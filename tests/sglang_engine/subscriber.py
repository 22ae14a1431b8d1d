"""The knowledge of a router about a cache if it reads only SGLang's KV events."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

CONFIG = '{"publisher": "zmq", "endpoint": "tcp://127.0.0.1:0", "bind": true}'
Prefix = tuple[str | None, tuple[int, ...]]
"""A prefix: its salt, and all of its tokens, up to the end of a page."""


class Subscriber:
    """A subscriber of one engine's events. Every event must be consistent with the earlier ones.

    Attributes:
        held: by hash, the tokens up to the end of each page that is cached now.
    """

    def __init__(self, engine: Any) -> None:
        (source,) = engine.scheduler.kv_events_publisher.local_kv_event_sources(engine.page_size)
        self._engine = engine
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.subscribe("")
        self._socket.connect(source["endpoint"])
        self._number: int | None = None
        self._clears = 0
        self.held: dict[int, Prefix] = {}
        self._wait(self._is_cleared)
        self.catch_up()

    def catch_up(self) -> set[Prefix]:
        """Reads all events that SGLang has published. Returns the known pages."""
        publisher = self._engine.scheduler.kv_events_publisher.kv_event_publisher
        publisher._event_queue.join()
        self._wait(lambda: self._number == publisher._buffer[-1][0])
        return set(self.held.values())

    def _wait(self, for_what: Callable[[], bool], seconds: float = 60) -> None:
        """Reads events until a condition holds."""
        deadline = time.monotonic() + seconds
        while not for_what():
            assert time.monotonic() < deadline, f"{len(self.held)} pages were reported, and no further event arrives"
            self._hear()

    def close(self) -> None:
        self._socket.close(linger=0)

    def _is_cleared(self) -> bool:
        """Clears the cache again and again until an event arrives. Events that are published before the connection
        exists are lost.
        """
        self.flush()
        return self._clears > 0

    def flush(self) -> None:
        """Makes the engine forget all cached pages."""
        assert self._engine.scheduler.flush_cache()
        self._engine.step()  # publishes

    def _hear(self) -> None:
        if not self._socket.poll(50):
            return
        _, number, payload = self._socket.recv_multipart()
        assert self._number in {None, int.from_bytes(number, "big") - 1}, "a batch of events was lost"
        self._number = int.from_bytes(number, "big")
        for event in msgspec.msgpack.decode(payload)[1]:
            getattr(self, f"_{event['type']}")(event)

    def _AllBlocksCleared(self, _: dict[str, Any]) -> None:  # noqa: N802
        self.held.clear()
        self._clears += 1

    def _BlockStored(self, event: dict[str, Any]) -> None:  # noqa: N802
        if not self._clears:  # The page continues pages that were reported before the subscription.
            return
        size, hashes, parent = event["block_size"], event["block_hashes"], event["parent_block_hash"]
        assert (size, event["medium"], event["lora_id"]) == (self._engine.page_size, "GPU", None)
        assert len(event["token_ids"]) == len(hashes) * size
        assert not self.held.keys() & set(hashes), "told of twice"
        salt = event.get("cache_salt")
        assert parent is None or self.held[parent][0] == salt
        tokens = () if parent is None else self.held[parent][1]
        for place, one in enumerate(hashes):
            tokens += tuple(event["token_ids"][place * size : (place + 1) * size])
            self.held[one] = (salt, tokens)

    def _BlockRemoved(self, event: dict[str, Any]) -> None:  # noqa: N802
        if not self._clears:
            return
        assert event["medium"] == "GPU"
        for one in event["block_hashes"]:
            del self.held[one]
        there = set(self.held.values())
        size = self._engine.page_size
        for salt, tokens in there:
            assert len(tokens) == size or (salt, tokens[:-size]) in there, (
                "a page was removed although another cached page continues it"
            )
