"""A source that forks. The child keeps a copy of the source's memory. If the test asks for it, the child also has the
pid of the source. Both processes report to the test over one pipe.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch

from kvcache.replica.block_table import PageCopy
from tests.kvcache.build import manager_of
from tests.transfer.replicas import TOKENS, Engine, run
from transfer.engine.engine import KVTransferEngine
from transfer.pull.exchange import PageExchange
from transfer.pull.thread import TransferThread

_LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Condition)
LAST_PID = Path("/proc/sys/kernel/ns_last_pid")
WORD_IDX = 2
_TRIES = 1000


def can_choose_pids() -> bool:
    """Returns whether this process may choose the next pid of the kernel."""
    with suppress(OSError):
        LAST_PID.write_text(LAST_PID.read_text())
        return True
    return False


def serve(pipe: Connection, life: Connection, reborn: bool) -> None:
    """Leases pages, reports its address, and forks on command. The test kills it.

    Args:
        pipe: pipe to the test.
        life: a pipe; forks end when the test closes its end.
        reborn: whether the fork takes the pid of its dead parent.
    """
    source = Engine("p", seed=3)
    lease = source.offer("r", word_idx=WORD_IDX, duration_s=1000.0)
    rank = source.ranks[0]
    words, pages = rank.words, source.pools[0]
    fences = rank.puller.words
    fences[5] = 77
    pipe.send((source.serve(), [rank.metadata], lease, words.ctypes.data, pages.ctypes.data, fences.ctypes.data))
    while not pipe.poll(1e-3):
        source.replica.poll()
    pipe.recv()
    parent = os.getpid()
    if not os.fork():
        seen = (int(words.sum()), int(fences.sum()), bool(pages.any()))
        words[0] = fences[5] = 1234  # The values change only in the fork's copy, which no peer reads.
        pipe.send((os.getpid(), seen))
        if reborn:
            _take_pid(parent, pipe, life)
        _wait(life)
    while True:
        source.replica.poll()
        if pipe.poll(1e-3):
            pipe.recv()
            pipe.send((words[:3].tolist() == [0, 0, lease.lease_id], int(fences[5]) == 77))


def _take_pid(parent: int, pipe: Connection, life: Connection) -> None:
    """Forks until a child has the pid of the dead parent. This child reports to the test and stays alive."""
    while os.getppid() == parent or Path(f"/proc/{parent}").exists():
        time.sleep(1e-3)
    for _ in range(_TRIES):
        LAST_PID.write_text(str(parent - 1))
        child = os.fork()
        if not child:
            if os.getpid() == parent:
                pipe.send(parent)
                _wait(life)
            os._exit(0)
        if child == parent:
            os.waitpid(child, 0)
            os._exit(0)
        os.waitpid(child, 0)
    pipe.send(0)


def goes_on(pipe: Connection, how: str) -> None:
    """Forks a process with open engines and threads. The fork ends, and the parent can still lease pages, pull pages
    and end.

    Args:
        pipe: the connection to the test, which needs only the exit status, 7.
        how: how the fork treats its copies of the engines before it ends.
    """
    pipe.close()
    p, d, e = Engine("p"), Engine("d"), KVTransferEngine("e", [[torch.zeros(64)]], total_num_pages=4)
    _pull(p, d, 0)
    lease = p.offer("open", 1)
    thread = TransferThread(Engine("t").replica)
    if not (fork := os.fork()):
        if how == "closed":
            _close(p, d, e, thread)
            assert p.replica.leases.find(lease.lease_id), (
                "a fork must end no lease, because the leases belong to its parent"
            )
        if how == "dropped":
            del p, d, e, thread
            gc.collect()
        _end(3)
    status = os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])
    assert status == 3, status
    assert p.replica.leases.find(lease.lease_id)
    _pull(p, d, 2)
    _close(p, d, e, thread)
    _end(7)


def locks_of_transfer() -> list[Any]:
    """Returns every lock and condition of the objects of `transfer`."""
    objects = [one for one in gc.get_objects() if type(one).__module__.startswith("transfer.")]
    found = [getattr(one, name, None) for one in objects for name in (*vars_of(one),)]
    return list({id(lock): lock for lock in found if isinstance(lock, _LOCKS)}.values())


def vars_of(one: object) -> list[str]:
    return [*getattr(one, "__dict__", {}), *getattr(type(one), "__slots__", ())]


def closes_while_locks_are_held(pipe: Connection) -> None:
    """A process forks while other threads hold every lock of its exchange. The child closes its copy of the exchange
    and ends. The lock of the thread's alarm is left out, because it is always held until the alarm rings.
    """
    exchange = PageExchange(manager_of(), "p", lend=0.5)
    locks = [lock for lock in locks_of_transfer() if lock is not exchange.threads[0]._alarm._quiet]
    released = threading.Event()

    def hold(lock: Any, is_held: threading.Event) -> None:
        with lock:
            is_held.set()
            released.wait(60)

    for lock in locks:
        is_held = threading.Event()
        threading.Thread(target=hold, args=(lock, is_held), daemon=True).start()
        assert is_held.wait(20)
    if not (fork := os.fork()):
        exchange.close()
        os._exit(3)
    deadline = time.monotonic() + 20
    while not (ended := os.waitpid(fork, os.WNOHANG))[0] and time.monotonic() < deadline:
        time.sleep(0.01)
    if not ended[0]:
        os.kill(fork, signal.SIGKILL)
        os.waitpid(fork, 0)
    released.set()
    exchange.close()
    pipe.send((len(locks), os.waitstatus_to_exitcode(ended[1]) if ended[0] else "it waits for a lock"))


def _end(status: int) -> NoReturn:
    """Ends this process through the interpreter's own finalization. `multiprocessing` would skip the finalization."""
    ctypes.pythonapi.Py_Exit(status)
    raise SystemError("it goes on")


def _pull(p: Engine, d: Engine, word_idx: int) -> None:
    key = f"r{word_idx}"
    d.replica.pull(key, p.source(p.offer(key, word_idx)), 20.0)
    d.replica.add_pages(key, [PageCopy([1], [4], (0, TOKENS))], last=True)
    run(p, d, until=lambda: any(event.key == key and event.safe for event in d.pulls))
    assert d.pulls[-1].error == "", d.pulls[-1]


def _close(p: Engine, d: Engine, e: KVTransferEngine, thread: TransferThread) -> None:
    thread.close()
    p.close()
    d.close()
    e.cleanup()


def _wait(life: Connection) -> None:
    """Waits until the test closes its end of the pipe, and ends this process."""
    with suppress(EOFError, OSError):
        life.recv()
    os._exit(0)
