"""A process with an agent over a pool and over unreadable memory. A test drives the process, which ends with the
test.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from multiprocessing.connection import Connection

import numpy as np
from numpy.typing import NDArray

from transfer.nixl.agent import Agent, Handle

PAGE = 64 << 10
FILLED = 7
_LIBC = ctypes.CDLL(None, use_errno=True)


def region(pages: int, value: int) -> NDArray[np.uint8]:
    """Returns uint8 `[pages, PAGE]` in newly mapped memory."""
    memory = np.frombuffer(mmap.mmap(-1, pages * PAGE), np.uint8).reshape(pages, PAGE)
    memory[:] = value
    return memory


def runs(base: int, pages: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Returns uint64 `[pages, 3]` with one descriptor for each page."""
    rows = np.empty((len(pages), 3), np.uint64)
    rows[:, 0] = base + pages * PAGE
    rows[:, 1:] = PAGE, 0
    return rows


class Peer:
    """All of `pool` is readable.

    In the memory `gone`, the second half of page 0 and all of page 1 are registered but unreadable. Unmapped memory
    behaves in the same way until something else is mapped there.
    """

    def __init__(self, pages: int) -> None:
        self.pool, self.gone = region(pages, FILLED), region(2, FILLED)
        self.agent = Agent(f"peer@{os.getpid()}")
        self.agent.register([(memory.ctypes.data, memory.nbytes, 0) for memory in (self.pool, self.gone)])
        address = ctypes.c_void_p(self.gone.ctypes.data + PAGE // 2)
        if _LIBC.mprotect(address, ctypes.c_size_t(PAGE + PAGE // 2), 0):
            raise OSError(ctypes.get_errno(), "mprotect")
        self.handle: Handle = None

    def describe(self) -> tuple[str, bytes, int, int]:
        return self.agent.name, self.agent.metadata, self.pool.ctypes.data, self.gone.ctypes.data

    def prepare_write(self, name: str, metadata: bytes, base: int, pages: int) -> None:
        """Prepares a WRITE of the first pages of the pool to another process. `write` posts the WRITE, any number of
        times.
        """
        self.agent.add_peer(name, metadata)
        agent, every = self.agent._agent, np.arange(pages)  # pyright: ignore[reportPrivateUsage] -- `Agent` only reads
        here, there = (agent.get_xfer_descs(runs(at, every), "DRAM") for at in (self.pool.ctypes.data, base))
        self.handle = agent.initialize_xfer("WRITE", here, there, name, b"")

    def write(self) -> bool:
        return self.agent.start(self.handle)

    def has_written(self) -> bool:
        return self.agent.done(self.handle)


def serve(conn: Connection, pages: int) -> None:
    """Serves a test until the test ends."""
    peer = Peer(pages)
    conn.send(None)
    while True:
        if conn.poll(0.0005):
            try:
                name, args = conn.recv()
            except (EOFError, ConnectionError):
                os._exit(0)  # A transfer may be in flight, so the process exits without releasing its memory.
            conn.send(getattr(peer, name)(*args))
        peer.agent.notifications()
