"""The one thread that owns the transfers of a process, and polls them about every millisecond while anybody waits.

A model's step takes tens or hundreds of milliseconds. In that time a peer's first READ and every notification would
wait, so a serving loop never touches what is here: it hands work over, and picks events up when it likes.

NIXL has no descriptor to sleep on without a thread of its own that polls. But peers read under a lease alone, and what
grants a lease or begins a pull is a command, which wakes the thread: where there is neither, it sleeps.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Concatenate, ParamSpec, TypeVar

from transfer.errors import EngineClosedError, TransferError
from transfer.plan.page_lists import PageLists
from transfer.pull.pull_state import PullEvent
from transfer.pull.replica import Event, ReplicaTransfer
from transfer.pull.source import Source
from transfer.stats import StatsSnapshot
from transfer.wire.messages import Wanted

T = TypeVar("T")
P = ParamSpec("P")

POLL_S = 1e-3
# While our own READs are in flight: they take a few hundred microseconds, and the request waits for them.
BUSY_POLL_S = 1e-4
# Without a lease or a pull, nothing is late: notes about leases that have ended, and the ends of peers.
IDLE_POLL_S = 0.25
# How long the last lease or pull is over before that counts: a reader may still wait for an answer below NIXL.
LINGER_S = 1.0


class TransferThread:
    """Runs the transfers of one replica. Any thread may call any method; only `call`, `add_engine` and `close` wait.

    Args:
        replica: nobody else uses it from now on.

    Attributes:
        replica: as given. Another thread may read what it has counted.
        events: what happened, in order. Taken from the left by one thread.
        pull_seconds: time in which at least one READ was under way, or a source was waited for, in seconds.
        is_closed: `close` has ended it: every lease word is cleared, nothing is in flight, no event will follow.
    """

    def __init__(self, replica: ReplicaTransfer) -> None:
        self.events: deque[Event] = deque()
        self.is_closed = False
        self.pull_seconds = 0.0
        self._woken = 0.0  # when the first of the last commands came
        self._used = time.perf_counter()  # when a lease or a pull was last there
        self.replica = replica
        self._commands: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._changed = threading.Condition()
        self._stopping = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="transfer", daemon=True)
        self._thread.start()

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

    def pull(self, key: str, source: Source | Wanted, groups: PageLists | None, timeout_s: float) -> None:
        """Begins a pull, with all its pages unless `groups` is None. Its `PullEvent`s come as events."""

        def run() -> None:
            try:
                self.replica.pull(key, source, timeout_s)
            except TransferError as error:
                self.events.append(PullEvent(key, str(error), safe=True))
                return
            if groups is not None:
                self.replica.add_pages(key, groups, last=True)

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
        self._commands.put(lambda: None)
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self.replica.close()
            self.events.extend(self.replica.events)
            self.replica.events.clear()
            self.is_closed = True

    def _hand_over(self, command: Callable[[], object]) -> None:
        self.raise_failure()
        if self._stopping:  # nobody would ever run it: what the caller books for it would be held for good
            raise EngineClosedError("the transfer thread was closed")
        self._commands.put(command)

    def _main(self) -> None:
        try:
            busy, since = False, time.perf_counter()  # busy: something was under way at `since`
            early = False  # what commands have brought, a few pages say, was told of before the poll, which is due
            while not self._stopping:
                changed = self._run_commands(self._pause(busy=busy or early))
                now = time.perf_counter()
                if busy:
                    self.pull_seconds += now - since
                    since = now
                else:
                    since = self._woken if changed else now
                early = not early and bool(self.replica.events)
                was_busy, busy = busy, busy if early else self.replica.poll()
                if not was_busy and not busy and any(isinstance(event, PullEvent) for event in self.replica.events):
                    self.pull_seconds += time.perf_counter() - since  # the READs were made, and ended, in this round
                if changed or busy or self.replica.events:
                    self.events.extend(self.replica.events)
                    self.replica.events.clear()
                    with self._changed:
                        self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001  (told to whoever calls next)
            self._failure = error
            with self._changed:
                self._changed.notify_all()

    def _pause(self, *, busy: bool) -> float:
        """Seconds to the next poll, where no command comes before."""
        now = time.perf_counter()
        if not self.replica.is_idle:
            self._used = now
        if self.replica.is_copying:
            return 0.0
        if busy:
            return BUSY_POLL_S
        return POLL_S if now - self._used < LINGER_S else IDLE_POLL_S

    def _run_commands(self, pause_s: float) -> bool:
        """Sleeps until there is a command, but not longer than a poll may wait. Whether there was one."""
        with contextlib.suppress(Empty):
            command = self._commands.get(timeout=pause_s) if pause_s else self._commands.get_nowait()
            self._woken = time.perf_counter()
            command()
            with contextlib.suppress(Empty):
                while True:
                    self._commands.get_nowait()()
            return True
        return False
