"""Checks the statements of `docs/concepts/protocol.md` about NIXL: what its reports prove, and which events stop a
copy.

These tests record the behaviour of NIXL. If a test fails after an update of NIXL, the protocol may be made cheaper or
must be made stricter. Read the chapter on the transport before you change a test.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.forked import start
from tests.transfer import transport_peer
from tests.transfer.transport_peer import FILLED, PAGE, region, runs
from transfer.errors import AgentError
from transfer.nixl.agent import Agent, Handle

MANY, FEW = 2048, 64  # Copying MANY pages takes tens of milliseconds. Copying FEW pages is short.
QUIET_S = 0.1  # QUIET_S is longer than any copy in this file.
EMPTY = 0
HALF_GONE, GONE = 0, 1  # Two pages of the peer. Half of page HALF_GONE is unreadable, and all of page GONE.

numbers = itertools.count()
Order = NDArray[np.int64]


class Described(NamedTuple):
    """The agent of the other process."""

    name: str
    metadata: bytes
    pool: int  # its address
    gone: int


class Remote:
    """The other process."""

    def __init__(self) -> None:
        self.process, self.conn = start(transport_peer.serve, MANY)
        self.wait()
        self.described = Described(*self("describe"))

    def wait(self) -> Any:
        assert self.conn.poll(60), "the peer did not answer"
        return self.conn.recv()

    def __call__(self, name: str, *args: object) -> Any:
        self.conn.send((name, args))
        return self.wait()


class Here:
    """An agent of this process with its own memory. It has read from `remote` before."""

    def __init__(self, remote: Described, pages: int) -> None:
        self.remote = remote
        self.memory = region(pages, EMPTY)
        self.agent = Agent(f"here@{os.getpid()}.{next(numbers)}")
        self.agent.register([(self.memory.ctypes.data, self.memory.nbytes, 0)])
        self.agent.add_peer(remote.name, remote.metadata)
        self.read(np.arange(1))
        self.memory[:] = EMPTY

    def start(self, order: Order, gone: tuple[int, int] | None = None) -> tuple[Handle, bool]:
        """Starts to READ pages. `gone` is a pair: an index in the order of READs, and an unreadable page of the peer
        that is read at this index.
        """
        there = runs(self.remote.pool, order)
        if gone is not None:
            there[gone[0], 0] = self.remote.gone + gone[1] * PAGE
        here = runs(self.memory.ctypes.data, np.arange(len(order)))
        return self.agent.post("READ", self.remote.name, here, there)

    def read(self, order: Order, gone: tuple[int, int] | None = None) -> None:
        """Reads pages, until NIXL reports success."""
        handle, done = self.start(order, gone)
        try:
            self.wait(lambda: done or self.agent.done(handle))
        finally:
            self.agent.release(handle)  # An agent must not be destroyed while it has a handle.

    def wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline, "the transfer did not end"
            self.agent.notifications()

    def missing(self) -> list[int]:
        return np.flatnonzero((self.memory != FILLED).any(axis=1)).tolist()


@pytest.fixture(scope="module")
def remote() -> Iterator[Remote]:
    peer = Remote()
    yield peer
    peer.conn.close()
    peer.process.join(10)
    peer.process.kill()


@pytest.fixture
def meet(remote: Remote) -> Iterator[Callable[[int], Here]]:
    """Returns `meet(pages)`, which makes an agent in this process that knows the other process."""
    met: list[Here] = []

    def make(pages: int) -> Here:
        met.append(Here(remote.described, pages))
        return met[-1]

    yield make
    for here in met:
        here.agent.close(in_flight=True)


def shuffled(pages: int) -> Order:
    return np.random.default_rng(0).permutation(pages)  # Pages in ascending order would be a single run.


def test_a_run_that_fails_amid_others_is_not_reported(meet: Callable[[int], Here]):
    here = meet(FEW)
    here.read(shuffled(FEW), gone=(5, GONE))
    assert here.missing() == [5]


def test_a_run_that_ends_early_is_not_reported(meet: Callable[[int], Here]):
    here = meet(FEW)
    here.read(np.arange(1), gone=(0, HALF_GONE))
    assert here.memory[0, PAGE // 2 - 1] == FILLED
    assert here.memory[0, PAGE // 2] == EMPTY


@pytest.mark.parametrize("place", [0, MANY - 1], ids=["first", "last"])
def test_when_an_error_is_reported_nothing_is_in_flight(meet: Callable[[int], Here], place: int):
    here = meet(MANY)
    with pytest.raises(AgentError, match="REMOTE_DISCONNECT"):
        here.read(shuffled(MANY), gone=(place, GONE))
    before = here.missing()
    time.sleep(QUIET_S)
    assert here.missing() == before
    assert place in before


def destroy_in_flight(conn: Connection, remote: Described) -> None:
    """Runs in a process of its own. Reports how many pages are missing when the agent is destroyed, and how many are
    missing later.
    """
    here = Here(remote, MANY)
    here.read(shuffled(FEW))  # This READ makes the copying thread open a connection of its own.
    here.memory[:] = EMPTY
    handle, done = here.start(shuffled(MANY))
    assert not done
    here.agent.release(handle)
    del handle
    here.agent.close(in_flight=True)
    at_once = len(here.missing())
    time.sleep(QUIET_S)
    conn.send((at_once, len(here.missing())))
    os._exit(0)


@pytest.mark.slow
def test_when_the_agent_that_reads_is_destroyed_nothing_is_in_flight_or_the_process_is_gone(remote: Remote):
    process, conn = start(destroy_in_flight, remote.described)
    process.join(100)
    if process.exitcode == 0:
        at_once, later = conn.recv()
        assert at_once == later
    else:
        assert process.exitcode == -signal.SIGABRT
        with pytest.raises(EOFError):
            conn.recv()


@pytest.mark.parametrize("how", ["deregistered", "destroyed"])
def test_nothing_that_is_done_here_stops_a_peer_that_writes(meet: Callable[[int], Here], remote: Remote, how: str):
    here = meet(FEW)
    remote("prepare_write", here.agent.name, here.agent.metadata, here.memory.ctypes.data, FEW)
    done = remote("write")  # The first transfer opens the connection, for which both sides must be polled.
    here.wait(lambda: done or remote("has_written"))
    here.memory[:] = EMPTY
    if how == "destroyed":
        here.agent.close()
    else:
        for registered in here.agent._registered:  # pyright: ignore[reportPrivateUsage]
            here.agent._agent.deregister_memory(registered)  # pyright: ignore[reportPrivateUsage]
    done = remote("write")
    while not done:
        done = remote("has_written")
    assert here.missing() == []
