"""A manager that publishes KV events, or a router that follows them: `python -m tests.hosts.events NAME ADDRESS KEYS`.

The process named `publisher` has the manager. It listens on `PORTS`, also after its host has come back. A process with
any other name follows the publisher. `KEYS` is the file of the process's keyring.
"""

import itertools
import random
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

from kvcache import KVEvents, TextContext
from kvcache.endpoints.sockets import connect
from kvcache.events.wire import END_OF_REPLAY, hashes_of
from tests.hosts.told import serve
from tests.kvcache.build import manager_of
from tests.kvcache.events.mirror import Known, settled
from transfer.wire.keys import load_keyring

PORTS = 5557, 5657
PAGES, PAGE_SIZE = 256, 16
_SILENCE_S = 3.0
"""In seconds. A stream has a message each second. A follower that hears nothing for this long reconnects."""


class Publisher:
    """A manager whose prompts need more pages than its pool has, so that pages are evicted all the time."""

    def __init__(self, address: str, keys: Path) -> None:
        ports = (f"tcp://{address}:{port}" for port in PORTS)
        events = KVEvents(*ports, buffer_steps=64, secure=load_keyring(keys).secure_server)
        self.manager = manager_of(PAGES, page_size=PAGE_SIZE, max_seq_len=1024, params={"kv_events": events})
        self._chooser = random.Random(time.time_ns())
        self._names = itertools.count()

    def compute(self, prompts: int) -> int:
        """Runs this many prompts of up to 40 pages. Half of the prompts share their first pages.

        Returns how many pages were evicted.
        """
        evicted = 0
        for _ in range(prompts):
            begin = self._chooser.randrange(40)
            tokens = [*range(1000 * begin, 1000 * begin + PAGE_SIZE * self._chooser.randrange(1, 40))]
            with self.manager.claim(context := TextContext([*tokens, next(self._names)], 1024)):
                before = self.there()
                assert self.manager.maybe_reserve(context)
                context.update(1)
                self.manager.step([context])
            evicted += len({*before} - {*self.there()})
        return evicted

    def there(self) -> list[int]:
        """Waits until all published pages have been sent, and returns their hashes."""
        settled(self.manager)
        index = self.manager._replicas.each[0].pool.index
        return sorted(hashes_of(index.digests_of(np.flatnonzero(index.published).astype(np.int32))).tolist())

    def idle(self) -> None:
        """Does nothing, because the publisher's thread sends the messages."""


class Follower:
    """A router. It receives messages, asks for missing messages, and reconnects if it gets no message for some time."""

    def __init__(self, address: str, keys: Path) -> None:
        self._endpoints = [f"tcp://{address}:{port}" for port in PORTS]
        self._keys = load_keyring(keys)
        self.known = Known()
        self._expected: int | None = None
        self._asked = 0.0  # The time at which the open replay has begun. It is 0 if no replay is open.
        self.seen = {"messages": 0, "replays": 0, "connections": 0}
        self._sockets = ExitStack()
        self._connect()

    def _connect(self) -> None:
        self._sockets.close()
        self._stream, self._dealer = (self._socket(kind) for kind in (zmq.SUB, zmq.DEALER))
        self._stream.subscribe(b"")
        for socket, endpoint in zip((self._stream, self._dealer), self._endpoints, strict=True):
            connect(socket, endpoint)
        self.seen["connections"] += 1
        self._heard, self._asked = time.monotonic(), 0.0

    def _socket(self, kind: int) -> Any:
        socket = zmq.Context.instance().socket(kind)
        socket.set(zmq.RCVHWM, 0)
        socket.set(zmq.LINGER, 0)
        self._keys.secure_client(socket)
        self._sockets.callback(socket.close)
        return socket

    def idle(self) -> None:
        """Handles the messages that have arrived."""
        if time.monotonic() - self._heard > _SILENCE_S:
            self._connect()
        while self._dealer.poll(0):
            _, _, number, payload = self._dealer.recv_multipart()
            self._heard = time.monotonic()
            if number == END_OF_REPLAY:
                self._asked = 0.0
            else:
                self._take_up(int.from_bytes(number, "big"), payload)
        while not self._asked and self._stream.poll(0):
            _, number, payload = self._stream.recv_multipart()
            self._heard = time.monotonic()
            sequence = int.from_bytes(number, "big")
            # A gap precedes this message. The replay that closes the gap will also contain this message.
            if sequence > (self._expected or 0):
                self._dealer.send_multipart([b"", (self._expected or 0).to_bytes(8, "big")])
                self.seen["replays"] += 1
                self._asked = time.monotonic()
            else:
                self._take_up(sequence, payload)

    def _take_up(self, sequence: int, payload: bytes) -> None:
        if sequence < (self._expected or 0):
            return
        self._expected = sequence + 1
        self.known.take_up(msgspec.msgpack.decode(payload)[1])
        self.seen["messages"] += 1

    def there(self) -> list[int]:
        """Returns the hashes of the pages that the other host has, as far as this follower knows."""
        self.known.whole()
        return sorted(self.known.there.get("GPU", {}))

    def counted(self) -> dict[str, int]:
        return self.seen


if __name__ == "__main__":
    name, address, keys = sys.argv[1:]
    side = (Publisher if name == "publisher" else Follower)(address, Path(keys))
    serve(side, side.idle, 0.002)
