"""The thread that polls the transfers of a replica, about every millisecond while a transfer is open.

A model's step takes tens or hundreds of milliseconds, during which a peer's first READ and every notification would
wait. A serving loop therefore hands work to this thread, and collects events whenever it likes. Small pulls and most
grants of leases are an exception, because waking this thread would take longer than the work. The calling thread does
this work itself between two rounds of this thread. The event is available when the call returns.

Without a lease or a pull, this thread sleeps. That is safe: peers read only under a lease, and a lease or a pull begins
with a command, which wakes this thread. NIXL also has a descriptor to sleep on, but that needs a NIXL thread that
polls.
"""

from __future__ import annotations

import atexit
import ctypes
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Concatenate, ParamSpec, TypeVar
from weakref import WeakSet

import torch

from kvcache.replica.block_table import BlockTable
from transfer.errors import EngineClosedError
from transfer.memory import MemoryType
from transfer.plan.page_lists import PageLists
from transfer.pull.bell import Alarm, free_in_forks
from transfer.pull.pull_state import PullEvent
from transfer.pull.replica import Event, LeaseOffer, ReplicaTransfer
from transfer.pull.source import Source
from transfer.stats import StatsSnapshot
from transfer.wire.messages import Wanted

_open: WeakSet[TransferThread] = WeakSet()


@atexit.register
def _close_open() -> None:
    """Closes the threads that are still open when the interpreter exits, for whatever reason.

    Otherwise the interpreter would later end such a thread in the middle of a call into NIXL. C++ treats that as an
    exception that must not be caught, and aborts the process, sometimes before the traceback of the program's own
    error.
    """
    for thread in list(_open):
        thread.close()


# A forked child has none of these threads.
os.register_at_fork(after_in_child=_open.clear)


T = TypeVar("T")
P = ParamSpec("P")

POLL_S = 1e-3
# In seconds: the poll interval while our own READs are in flight, for which a request waits.
BUSY_POLL_S = 1.5e-4
# READs over a link (TCP) need polls on both sides. The poll interval is `SHARE_OF_WAIT` times the time waited so far,
# but at least `SOON_POLL_S` and at most `BUSY_POLL_S`. It applies while a READ is in flight, and while a reader with a
# new lease may begin a READ. With the normal intervals, a pull of 1 MiB at 1 Gbit/s would take a tenth longer, because
# its READ and its fence each wait for polls.
SHARE_OF_WAIT, SOON_POLL_S = 1 / 200, 3e-5
# In seconds: a source returns to the normal interval when this time has passed since a lease was granted. A pull that
# takes longer than this loses little with the normal interval.
READ_SOON_S = BUSY_POLL_S / SHARE_OF_WAIT
# In seconds: the poll interval without a lease or a pull. Only notes about ended leases, and the deaths of peers,
# arrive then, and neither is urgent.
IDLE_POLL_S = 0.25
# In seconds: the poll interval if there is no recent lease, and all pulls wait for their owner to name pages. Polling
# then only has to notice expired time limits.
AWAIT_POLL_S = 1e-2
# In seconds: `IDLE_POLL_S` applies if there was no lease or pull for this long, and `AWAIT_POLL_S` applies if there was
# no lease for this long. Before that, a reader may still wait for an answer from NIXL.
LINGER_S = 1.0
_PR_SET_TIMERSLACK, _SLACK_NS = 29, 1000
"""A Linux constant that Python does not define, and how late a sleep of this thread may end, in nanoseconds.

By default, Linux may end a sleep later by a third of `BUSY_POLL_S`.
"""


class TransferThread:
    """Runs the transfers of one replica.

    Any thread may call any method. `call`, `wait`, `snapshot` and `close` block.

    Args:
        replica: the replica to run. From now on, only this thread may use it.
        ring: called when there are events or the thread has died, on the thread where that happens.

    Attributes:
        replica: the replica. Other threads may read its statistics.
        events: events in order. One other thread removes them, with `take`.
        pull_seconds: seconds during which a READ was under way or a source was awaited.
        is_closed: True after a complete `close`: every lease word is cleared, nothing is in flight, and no event will
            follow.
    """

    def __init__(self, replica: ReplicaTransfer, ring: Callable[[], None] = lambda: None) -> None:
        self.events: deque[Event] = deque()
        self.is_closed = False
        self.pull_seconds = 0.0
        self._ring = ring
        self._woken = 0.0  # when a command last woke this thread
        self._used = time.perf_counter()  # the last time at which a lease or a pull was open
        self._leased = self._used  # the last time at which a lease was open
        self._awaited = 0, -math.inf  # the latest value of `ReplicaTransfer.reads_awaited`, and when it last increased
        self._is_resting = False  # whether there was no lease or pull for `LINGER_S`
        self._busy, self._since = False, 0.0  # whether READs are under way or a source is awaited, and since when
        self._early = False  # whether the last round only delivered events of commands, so that a poll is still due
        self.replica = replica
        self._turn = free_in_forks(threading.Lock())  # only the thread that holds this lock may use the replica
        self._commands: deque[Callable[[], object]] = deque()
        self._alarm = Alarm()  # rung for each command
        self._changed = free_in_forks(threading.Condition())
        self._stopping = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="transfer", daemon=True)
        self._thread.start()
        _open.add(self)

    def call(self, function: Callable[[ReplicaTransfer], T], timeout_s: float = 30.0) -> T:
        """Runs `function` on the thread and waits for the result. Meant for set-up, not for serving."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function(self.replica))
            except Exception as error:  # noqa: BLE001  (the caller gets the error, whatever it is)
                future.set_exception(error)

        self._hand_over(run)
        return future.result(timeout_s)

    def call_soon(
        self, method: Callable[Concatenate[ReplicaTransfer, P], object], *args: P.args, **options: P.kwargs
    ) -> None:
        """Calls a method of `ReplicaTransfer` on the thread, without waiting. Its events report the outcome."""
        self._hand_over(partial(method, self.replica, *args, **options))

    def offer(self, offer: LeaseOffer) -> None:
        """Grants a lease; see `ReplicaTransfer.offer`. The checksums of `pages`, if any, are computed on the thread."""
        self._run(partial(self.replica.offer, offer), lambda: offer.pages is None)

    def pull(
        self,
        key: str,
        source: Source | Wanted,
        groups: PageLists | None,
        timeout_s: float,
        tables: Sequence[BlockTable] = (),
    ) -> None:
        """Begins a pull. If `groups` is not None, it has all pages of the pull. `PullEvent`s report the outcome."""
        self._run(
            partial(self.replica.pull, key, source, timeout_s, groups, tables=tables),
            lambda: groups is not None and self.replica.is_small(source, groups),
        )

    def add_pages(self, key: str, groups: PageLists, *, last: bool, tables: Sequence[BlockTable] = ()) -> None:
        """Reads pages of a pull; see `ReplicaTransfer.add_pages`."""

        def is_small() -> bool:
            pull = self.replica.look_up(key)
            return pull is not None and self.replica.is_small(pull.source, groups)

        self._run(partial(self.replica.add_pages, key, groups, last=last, tables=tables), is_small)

    def snapshot(self) -> StatsSnapshot:
        """Returns counters, and percentiles since the last call; see `TransferStats.snapshot`."""
        return self.call(lambda replica: replica.stats.snapshot())

    def wait(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        """Waits until `ready` returns True. `ready` is called after each round of the thread that changed something.

        Returns:
            Whether `ready` returned True before the timeout.
        """
        with self._changed:
            return self._changed.wait_for(lambda: ready() or self._failure is not None, timeout_s) and ready()

    def take(self) -> Event:
        """Removes and returns the oldest event.

        If torch has moved the pages by now, a pull has failed. Its READs may have written to the old memory after torch
        had copied it. This is checked here, because another thread may read while the caller's thread moves the memory.
        """
        event = self.events.popleft()
        if isinstance(event, PullEvent) and (moved := self.replica.moved):
            return event._replace(error=f"request {event.key!r}: {moved}")
        return event

    def raise_failure(self) -> None:
        """Raises an error if the thread has died.

        Raises:
            EngineClosedError: the thread has died.
        """
        if self._failure is not None:
            raise EngineClosedError(f"the transfer thread died: {self._failure!r}") from self._failure

    def close(self, timeout_s: float = 10.0) -> None:
        """Ends the leases and pulls, and stops the thread. Safe to call twice."""
        self._stopping = True
        self._alarm.ring()
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            with self._turn:
                self.replica.close()
                self.events.extend(self.replica.events)
                self.replica.events.clear()
                self.is_closed = True
            _open.discard(self)

    def _hand_over(self, command: Callable[[], object]) -> None:
        self.raise_failure()
        if self._stopping:  # the command would never run, and its pages would be held for ever
            raise EngineClosedError("the transfer thread was closed")
        self._commands.append(command)
        self._alarm.ring()

    def _run(self, command: Callable[[], object], is_small: Callable[[], bool]) -> None:
        """Runs `command` on the caller's thread if it is small, and otherwise hands it over."""
        if not self._run_here(command, is_small):
            self._hand_over(command)

    def _run_here(self, command: Callable[[], object], is_small: Callable[[], bool]) -> bool:
        """Runs `command` on the caller's thread if it is small. Returns whether it ran.

        It does not run if the transfer thread is busy, has commands waiting, or is not alive. After the command, the
        transfer thread is woken if it has to poll now.
        """
        if self._stopping or self._failure is not None or not self._turn.acquire(blocking=False):
            return False
        try:
            # A forked child has no transfer thread, so the command does not run there.
            if self._commands or not self._thread.is_alive() or not is_small():
                return False
            begin = self._used = time.perf_counter()
            command()
            is_over = bool(self.replica.events) and isinstance(self.replica.events[-1], PullEvent)
            if is_over and not self._busy:
                self.pull_seconds += time.perf_counter() - begin
            self._tell()
            if not is_over or self._is_resting:
                self._woken = begin
                self._alarm.ring()
        except BaseException as error:  # noqa: BLE001  (as in the thread: the command may have begun)
            self._failure = error
            self._alarm.ring()
        finally:
            self._turn.release()
        return True

    def _main(self) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, _SLACK_NS, 0, 0, 0)
        try:
            while not self._stopping and self._failure is None:
                if self._alarm.sleep(self._pause()):  # a command has arrived before the next poll was due
                    self._woken = time.perf_counter()
                with self._turn:
                    self._round()
        except BaseException as error:  # noqa: BLE001  (the next call raises it)
            self._failure = error
        self._tell()

    def _round(self) -> None:
        """Runs the commands, and then polls.

        If the commands have caused events, this round only delivers these events, and the next round polls.
        """
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
            # the READs were posted, and have ended, in this round
            self.pull_seconds += time.perf_counter() - self._since
        if changed or self._busy or events:
            self._tell()

    def _tell(self) -> None:
        """Delivers events, and wakes threads that wait for them."""
        has_news = bool(self.replica.events) or self._failure is not None
        self.events.extend(self.replica.events)
        self.replica.events.clear()
        with self._changed:
            self._changed.notify_all()
        if has_news:
            self._ring()

    def _pause(self) -> float:
        """Returns how many seconds to sleep before the next poll. A command ends the sleep earlier."""
        now = time.perf_counter()
        if not self.replica.is_idle:
            self._used = now
        if len(self.replica.leases):
            self._leased = now
        if self._awaited[0] != (awaited := self.replica.reads_awaited):
            self._awaited = awaited, now
        self._is_resting = now - self._used >= LINGER_S
        if self.replica.is_copying:
            return 0.0
        waited_s = now - self._awaited[1]
        is_read_soon = self._leased == now and waited_s < READ_SOON_S
        if self._busy or self._early or is_read_soon:
            return min(max(waited_s * SHARE_OF_WAIT, SOON_POLL_S), BUSY_POLL_S)
        if self._is_resting:
            return IDLE_POLL_S
        if now - self._leased < LINGER_S or any(rank.puller.is_moving for rank in self.replica.ranks):
            return POLL_S
        return AWAIT_POLL_S  # for example between two chunks of a prompt, when a poll would delay the next chunk


def start_thread(replica: ReplicaTransfer, ring: Callable[[], None] = lambda: None) -> TransferThread:
    """Starts the thread that owns a replica from now on. For GPU memory, sets the thread's device."""
    thread = TransferThread(replica, ring)
    rank = replica.ranks[0]
    if rank.memory_type is MemoryType.VRAM:  # without a CUDA context in the thread, UCX does not use its GPU transports
        thread.call(lambda _: torch.cuda.set_device(rank.device))
    return thread
