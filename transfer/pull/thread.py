"""The one thread that polls the transfers of a process, about every millisecond while anybody waits.

A model's step takes tens or hundreds of milliseconds. In that time a peer's first READ and every notification would
wait, so a serving loop hands its work over, and picks events up when it likes. The exception are pages so few that to
wake the thread, and to be woken by it, would take about as long as to read them: whoever asks for them reads them,
between two rounds of the thread, and the event is there when the call returns.

NIXL has no descriptor to sleep on without a thread of its own that polls. But peers read under a lease alone, and what
grants a lease or begins a pull is a command, which wakes the thread: where there is neither, it sleeps.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar
from weakref import WeakSet

import torch

from transfer.errors import EngineClosedError, TransferError
from transfer.memory import MemoryType
from transfer.plan.page_lists import PageLists
from transfer.pull.pull_state import PullEvent
from transfer.pull.replica import Event, ReplicaTransfer
from transfer.pull.source import Source
from transfer.stats import StatsSnapshot
from transfer.wire.messages import Wanted

if TYPE_CHECKING:
    from kvcache.replica.block_table import BlockTable

_open: WeakSet[TransferThread] = WeakSet()


@atexit.register
def _close_open() -> None:
    """Ends what is still open when the interpreter ends, whatever ended it.

    Later the interpreter would end the thread itself, in the midst of a call into NIXL. C++ takes that for an exception
    that nobody may catch, and aborts the process, sometimes before the traceback of the program's own error.
    """
    for thread in list(_open):
        thread.close()


os.register_at_fork(after_in_child=_open.clear)  # a fork has none of them, and a lock may be held there for ever


T = TypeVar("T")
P = ParamSpec("P")

POLL_S = 1e-3
# While our own READs are in flight: they take a few hundred microseconds, and the request waits for them.
BUSY_POLL_S = 1e-4
# Without a lease or a pull, nothing is late: notes about leases that have ended, and the ends of peers.
IDLE_POLL_S = 0.25
# Where no lease has stood for a while, and pulls wait for their owner to name pages: only their times run.
AWAIT_POLL_S = 1e-2
# How long the last lease or pull is over before that counts: a reader may still wait for an answer below NIXL.
LINGER_S = 1.0


class TransferThread:
    """Runs the transfers of one replica. Any thread may call any method; only `call`, `add_engine` and `close` wait.

    Args:
        replica: nobody else uses it from now on.
        ring: called when there are events, or the thread has died, in whatever thread that happens.

    Attributes:
        replica: as given. Another thread may read what it has counted.
        events: what happened, in order. Taken from the left by one thread.
        pull_seconds: time in which at least one READ was under way, or a source was waited for, in seconds.
        is_closed: `close` has ended it: every lease word is cleared, nothing is in flight, no event will follow.
    """

    def __init__(self, replica: ReplicaTransfer, ring: Callable[[], None] = lambda: None) -> None:
        self.events: deque[Event] = deque()
        self.is_closed = False
        self.pull_seconds = 0.0
        self._ring = ring
        self._woken = 0.0  # when the first of the last commands came
        self._used = time.perf_counter()  # when a lease or a pull was last there
        self._leased = self._used  # when a lease was
        self._is_resting = False  # there was none for a while
        self._busy, self._since = False, 0.0  # something was under way at that time
        self._early = False  # what commands have brought, a few pages say, was told of before the poll, which is due
        self.replica = replica
        self._turn = threading.Lock()  # of whoever is at the replica
        self._commands: deque[Callable[[], object]] = deque()
        self._wake: SimpleQueue[None] = SimpleQueue()  # one for each command
        self._changed = threading.Condition()
        self._stopping = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="transfer", daemon=True)
        self._thread.start()
        _open.add(self)

    def call(self, function: Callable[[ReplicaTransfer], T], timeout_s: float = 30.0) -> T:
        """Runs `function` in the thread and waits for the result. For set-up, not for serving."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function(self.replica))
            except Exception as error:  # noqa: BLE001  (the caller gets it, whatever it is)
                future.set_exception(error)

        self._hand_over(run)
        return future.result(timeout_s)

    def add_engine(self, address: str, ranks: Sequence[bytes]) -> str:
        """Loads an engine whose metadata came by another way than the handshake. Returns its id.

        Args:
            address: where it answers signs of life, as requests will name it.
            ranks: sealed metadata of each of its ranks.

        Raises:
            TransferError: the metadata is damaged, does not fit, or nothing vouches for it. Nothing stays loaded.
        """
        return self.call(lambda replica: replica.directory.add(address, ranks))

    def call_soon(
        self, method: Callable[Concatenate[ReplicaTransfer, P], object], *args: P.args, **options: P.kwargs
    ) -> None:
        """Has a method of `ReplicaTransfer` called in the thread, and waits for nothing: its events tell of it."""
        self._hand_over(lambda: method(self.replica, *args, **options))

    def pull(
        self,
        key: str,
        source: Source | Wanted,
        groups: PageLists | None,
        timeout_s: float,
        tables: Sequence[BlockTable] = (),
    ) -> None:
        """Begins a pull, with all its pages unless `groups` is None. Its `PullEvent`s come as events."""

        def run() -> None:
            try:
                self.replica.pull(key, source, timeout_s, groups, tables=tables)
            except TransferError as error:
                self.events.append(PullEvent(key, str(error), safe=True))

        if groups is None or not self._run_here(lambda: self.replica.is_small(source, groups), run):
            self._hand_over(run)

    def add_pages(self, key: str, groups: PageLists, *, last: bool, tables: Sequence[BlockTable] = ()) -> None:
        """Reads pages of a pull, or further ones, as `ReplicaTransfer.add_pages`."""

        def run() -> None:
            self.replica.add_pages(key, groups, last=last, tables=tables)

        if not self._run_here(lambda: self.replica.is_small(self.replica.source_of(key), groups), run):
            self._hand_over(run)

    def snapshot(self) -> StatsSnapshot:
        """Counters and percentiles since the last call; see `TransferStats.snapshot`."""
        return self.call(lambda replica: replica.stats.snapshot())

    def wait(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        """Waits until `ready`, which is asked after each round of the thread that changed something.

        Returns:
            Whether it is ready.
        """
        with self._changed:
            return self._changed.wait_for(lambda: ready() or self._failure is not None, timeout_s) and ready()

    def raise_failure(self) -> None:
        """Raises what ended the thread, if anything did.

        Raises:
            EngineClosedError: the thread has died.
        """
        if self._failure is not None:
            raise EngineClosedError(f"the transfer thread died: {self._failure!r}") from self._failure

    def close(self, timeout_s: float = 10.0) -> None:
        """Ends the thread and everything that it runs. Safe to call twice."""
        self._stopping = True
        self._wake.put(None)
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            with self._turn:
                self.replica.close()
                self.events.extend(self.replica.events)
                self.replica.events.clear()
                self.is_closed = True
            _open.discard(self)

    def _hand_over(self, command: Callable[[], object]) -> None:
        self._refuse_ended()
        self._commands.append(command)
        self._wake.put(None)

    def _refuse_ended(self) -> None:
        self.raise_failure()
        if self._stopping:  # nobody would ever run it: what the caller books for it would be held for good
            raise EngineClosedError("the transfer thread was closed")

    def _run_here(self, is_small: Callable[[], bool], command: Callable[[], object]) -> bool:
        """Runs a small command in the caller's thread. False: the thread is at work, or has others to run before."""
        self._refuse_ended()
        if not self._turn.acquire(blocking=False):
            return False
        try:
            if self._commands or not self._thread.is_alive() or not is_small():  # in a fork it is not alive
                return False
            begin = self._used = time.perf_counter()
            command()
            is_over = bool(self.replica.events)
            if is_over and not self._busy:
                self.pull_seconds += time.perf_counter() - begin
            self._tell()
            if not is_over or self._is_resting:
                self._woken = begin
                self._wake.put(None)
        except BaseException as error:  # noqa: BLE001  (as in the thread; the caller must not think that nothing began)
            self._failure = error
            self._wake.put(None)
        finally:
            self._turn.release()
        return True

    def _main(self) -> None:
        try:
            while not self._stopping and self._failure is None:
                self._sleep()
                with self._turn:
                    self._round()
        except BaseException as error:  # noqa: BLE001  (told to whoever calls next)
            self._failure = error
        self._tell()

    def _round(self) -> None:
        """Runs what it was told to, and polls, unless that has brought something which can be told of before."""
        changed = bool(self._commands)
        while self._commands:
            self._commands.popleft()()
        now = time.perf_counter()
        if self._busy:
            self.pull_seconds += now - self._since
            self._since = now
        else:
            self._since = self._woken if changed else now
        events, was_busy = self.replica.events, self._busy
        self._early = not self._early and bool(events)
        if not self._early:
            self._busy = self.replica.poll()
        if not was_busy and not self._busy and any(isinstance(event, PullEvent) for event in events):
            self.pull_seconds += time.perf_counter() - self._since  # the READs were made, and ended, in this round
        if changed or self._busy or events:
            self._tell()

    def _tell(self) -> None:
        """Hands events over, and wakes threads that wait for them."""
        has_news = bool(self.replica.events) or self._failure is not None
        self.events.extend(self.replica.events)
        self.replica.events.clear()
        with self._changed:
            self._changed.notify_all()
        if has_news:
            self._ring()

    def _pause(self) -> float:
        """Seconds to the next poll, where no command comes before."""
        now = time.perf_counter()
        if not self.replica.is_idle:
            self._used = now
        if self.replica.num_leases:
            self._leased = now
        self._is_resting = now - self._used >= LINGER_S
        if self.replica.is_copying:
            return 0.0
        if self._busy or self._early:
            return BUSY_POLL_S
        if self._is_resting:
            return IDLE_POLL_S
        if now - self._leased < LINGER_S or any(rank.puller.is_moving for rank in self.replica.ranks):
            return POLL_S
        return AWAIT_POLL_S  # say, between two chunks of a prompt: a poll would be in the way of the next one

    def _sleep(self) -> None:
        """Sleeps until there is a command, but not longer than a poll may wait."""
        pause_s = self._pause()
        with contextlib.suppress(Empty):
            self._wake.get(pause_s > 0, pause_s)
            self._woken = time.perf_counter()
            while not self._wake.empty():  # it is awake for all of them
                self._wake.get_nowait()


def start_thread(replica: ReplicaTransfer, ring: Callable[[], None] = lambda: None) -> TransferThread:
    """Starts the thread that owns a replica from now on; on a GPU one that has it as its device."""
    thread = TransferThread(replica, ring)
    rank = replica.ranks[0]
    if rank.memory_type is MemoryType.VRAM:  # without a context in the thread, UCX does without the GPU's own paths
        thread.call(lambda _: torch.cuda.set_device(rank.device))
    return thread
