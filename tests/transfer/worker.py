"""A process that serves one engine after another. A test drives the process over a pipe. The process polls its engine
between commands, and ends with the test.
"""

from __future__ import annotations

import os
import traceback
from multiprocessing.connection import Connection

import numpy as np
import torch
import xxhash

import transfer


def filled(pages: int, bytes_per_page: int, seed: int) -> np.ndarray:
    """Returns uint8 `[pages, bytes_per_page]` of bytes that depend only on `seed`.

    Up to 256 pages differ from each other.
    """
    row = np.random.default_rng(seed).integers(0, 256, bytes_per_page, np.uint8)
    return row + np.arange(pages, dtype=np.uint8)[:, None]


def digest(pages: np.ndarray) -> bytes:
    """Returns a digest of pages that are too large for a pipe."""
    return xxhash.xxh3_128_digest(pages)


class Worker:
    def __init__(self) -> None:
        self.engine: transfer.KVTransferEngine | None = None
        self.pools: list[list[torch.Tensor]] = []
        self.polls = True

    def make(self, name: str, dp: int, tp: int, pages: int, bytes_per_page: int, seed: int) -> bytes:
        if self.engine is not None:
            self.engine.cleanup()
        self.pools = [
            [torch.from_numpy(filled(pages, bytes_per_page, seed + r * tp + t)) for t in range(tp)] for r in range(dp)
        ]
        self.engine = transfer.KVTransferEngine(name, self.pools, total_num_pages=pages)
        return transfer.encode(self.engine.metadata)

    def connect(self, data: bytes) -> None:
        self.engine.connect(transfer.decode_metadata(data))

    def start(self, kind: str, peer: str, src: list[int], dst: list[int], src_replica: int, dst_replica: int) -> bytes:
        begin = getattr(self.engine, f"initiate_{kind}_transfer")
        remote = self.engine.remote_connections[peer]
        return transfer.encode(begin(remote, src, dst, src_replica, dst_replica))

    def request(self, method: str, data: bytes, *args: object) -> object:
        return getattr(self.engine, method)(transfer.decode_request(data), *args)

    def call(self, method: str, *args: object) -> object:
        return getattr(self.engine, method)(*args)

    def look(self, attribute: str) -> object:
        return getattr(self.engine, attribute)

    def pool(self, replica: int, shard: int) -> bytes:
        return self.pools[replica][shard].numpy().tobytes()

    def digests(self) -> list[list[bytes]]:
        return [[digest(shard.numpy()) for shard in replica] for replica in self.pools]

    def set_polls(self, polls: bool) -> None:
        self.polls = polls

    def step(self, conn: Connection) -> bool:
        if not conn.poll(0.0005):
            if self.polls and self.engine is not None:
                self.engine.poll()
            return True
        name, args = conn.recv()
        if name == "quit":
            if self.engine is not None:
                self.engine.cleanup()
            conn.send(("done", None))
            return False
        try:
            conn.send(("done", getattr(self, name)(*args)))
        except Exception as error:  # noqa: BLE001 -- whatever it is, the test gets to see it
            kinds = [kind.__name__ for kind in type(error).__mro__]
            conn.send(("raised", (kinds, str(error), traceback.format_exc())))
        return True


def serve(conn: Connection) -> None:
    """Serves a test until the test ends or sends the end command."""
    worker = Worker()
    conn.send(("done", os.getpid()))
    try:
        while worker.step(conn):
            pass
    except EOFError:
        os._exit(1)
