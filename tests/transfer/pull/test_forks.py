"""Forks of a source or a reader: a fork holds a copy of the pages, and never answers for its parent."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvcache.replica.block_table import PageCopy
from tests.forked import start
from tests.transfer import fork_source
from tests.transfer.replicas import TOKENS, Engine, run
from transfer.pull.lease import LeaseRef, make_words
from transfer.pull.source import Source

LOCAL, REMOTE = [1, 2], [4, 5]
_LIBC = ctypes.CDLL(None, use_errno=True)


class _Span(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


def memory_of(pid: int, address: int, num_bytes: int) -> bytes:
    """Returns the bytes at an address of another process. They are read in the same way as NIXL reads them on one
    host.
    """
    here = ctypes.create_string_buffer(num_bytes)
    local, remote = _Span(ctypes.addressof(here), num_bytes), _Span(address, num_bytes)
    got = _LIBC.process_vm_readv(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
    assert got == num_bytes, os.strerror(ctypes.get_errno())
    return here.raw


class Forking:
    """A source in a process of its own, its fork, and their reports."""

    def __init__(self, *, reborn: bool) -> None:
        self._life, held = multiprocessing.Pipe()
        self._process, self.pipe = start(fork_source.serve, held, reborn)
        held.close()
        self.pid = self._process.pid
        found: tuple[str, list[bytes], LeaseRef, int, int, int] = self.told()
        self.address, self.ranks, self.lease, self.words, self.pages, self.fences = found

    def told(self) -> Any:
        assert self.pipe.poll(60), "the source has sent no message"
        return self.pipe.recv()

    def fork(self) -> tuple[int, tuple[int, int, bool]]:
        self.pipe.send("fork")
        return self.told()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    @property
    def source(self) -> Source:
        return Source(self.address, "p", self.lease)

    def close(self) -> None:
        self._life.close()
        self.pipe.close()
        self._process.kill()
        self._process.join()


@pytest.fixture
def forking() -> Iterator[Callable[..., Forking]]:
    made: list[Forking] = []

    def make(**options: Any) -> Forking:
        made.append(Forking(**options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def reader() -> Iterator[Engine]:
    engine = Engine("d", seed=9)
    yield engine
    engine.close()


def test_a_fork_neither_sees_nor_writes_the_lease_words_of_its_parent(forking: Any) -> None:
    source = forking(reborn=False)
    child, (words, fences, has_pages) = source.fork()
    assert (words, fences, has_pages) == (0, 0, True)
    word = source.words + 8 * fork_source.WORD_IDX
    assert memory_of(source.pid, word, 8) == source.lease.lease_id.to_bytes(8, "little")
    assert memory_of(child, word, 8) == bytes(8)
    # The fork has the contents of the pages, but not of the words.
    assert memory_of(child, source.pages, 64) == memory_of(source.pid, source.pages, 64)
    source.pipe.send("what do your words hold")
    assert source.told() == (True, True)


def test_lease_words_are_wiped_in_forks_whatever_their_number() -> None:
    for count in (1, 511, 512, 513, 4096):
        words = make_words(count)
        words[:] = 7
        child = os.fork()
        if not child:
            os._exit(bool(words.any()))
        assert os.waitpid(child, 0)[1] == 0
        assert (words == 7).all()


def test_a_pull_from_a_fork_with_the_pid_of_its_parent_fails_at_the_fence(forking: Any, reader: Engine) -> None:
    if not fork_source.can_choose_pids():
        pytest.skip("the kernel lets this process choose no pid")
    source = forking(reborn=True)
    reader.replica.directory.add(source.address, source.ranks)
    reader.replica.pull("r", source.source, 10.0)
    reader.replica.add_pages("r", [PageCopy(LOCAL[:1], REMOTE[:1], (0, TOKENS))], last=False)
    run(reader, until=lambda: reader.replica.look_up("r").passed)
    source.fork()
    source.kill()
    assert source.told() == source.pid
    reader.replica.add_pages("r", [PageCopy(LOCAL[1:], REMOTE[1:], (TOKENS, 2 * TOKENS))], last=True)
    run(reader, until=lambda: any(event.safe for event in reader.pulls))
    assert reader.pulls[-1].error.endswith(
        f"its lease word {fork_source.WORD_IDX} holds 0x0 instead of {source.lease.lease_id:#x}"
    )
    size = reader.pools[0][0].nbytes
    held = [memory_of(source.pid, source.pages + page * size, size) for page in REMOTE]
    # The pages had arrived. Only the lease word showed that the source was another process.
    assert [reader.pools[0][page].tobytes() for page in LOCAL] == held


@pytest.mark.parametrize("how", ["left", "closed", "dropped"])
def test_a_fork_ends_normally_and_its_parent_continues(how: str) -> None:
    parent, conn = start(fork_source.goes_on, how)
    conn.close()
    parent.join(100)
    assert parent.exitcode == 7


def test_a_fork_can_close_its_exchange_while_threads_of_its_parent_hold_locks() -> None:
    parent, conn = start(fork_source.closes_while_locks_are_held)
    assert conn.poll(60), "the parent has sent no message"
    held, status = conn.recv()
    parent.join(20)
    assert held >= 4  # The held locks include the locks of the thread, of the bell and of the lending.
    assert status == 3
