"""`Watch` answers watchers of some pools, in its own thread. `ManagerWatch` does so for the pools of a manager.

This thread makes a snapshot when a watcher asks. The loop makes no snapshots, because copying the arrays of 4 million
pages takes milliseconds, which is too long for a step. Reading the arrays in another thread costs the loop nothing
(`cells.py` says why this is safe). A recount (`check`) must run in the loop's thread, so it waits until the loop calls
`attend`.
"""

import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from kvcache.arguments import shown
from kvcache.endpoints.sockets import BoundSocket, bound_socket
from kvcache.errors import InvalidParamsError, InvariantError
from kvcache.manager import PagedKVCacheManager
from kvcache.replicas import Replicas
from kvcache.types import KVCacheMetrics
from kvcache.watch.book import WatchBook, counted
from kvcache.watch.messages import AskLook, Beside, CheckReport, WatchRefusal, other_version
from kvcache.watch.names import WatchNames
from kvcache.watch.pools import WatchedPool, pools_of

_WAKE_MS = 200  # in milliseconds: how often the thread tests whether the endpoint is closed or its manager is gone
# the share of the thread's time that snapshots may take; when they have used it up, requests have to wait
_SHARE = 0.25
# The share of the loop's time that snapshots may cost it by holding the interpreter lock. If the other threads of the
# process are always busy, the pauses between snapshots are so long that snapshots keep to this share, unless a pause
# reaches its maximum. If these threads mostly wait for the model, snapshots disturb nothing, and the pauses are short.
_LOOP_SHARE = 0.01
_LEAST_S, _MOST_S = 0.05, 2.0
_FAILED_S = 1.0  # in seconds: how long to pause after a snapshot that failed
_FORGET_S = 10.0  # in seconds: if no watcher asks for this long, recording stops, and the recorded state is dropped
_CHECK_SHARE = 0.1  # the share of the loop's time that recounts may take
_MOST_WAITING = 64  # how many answers may wait in the socket for a slow watcher; further answers to it are dropped
_MOST_WATCHERS = 64  # how many watchers may have asked in the last `_FORGET_S` seconds; further watchers are refused
# In seconds of processor time: how long the answers from one snapshot may take. The remaining watchers are answered
# from the next snapshot.
_TURN_S = 0.1
_QUESTIONS = 256  # how many requests the thread reads at a time
_REFUSAL = msgspec.msgpack.encode(
    WatchRefusal(
        refused=f"there are {_MOST_WATCHERS} watchers, the most allowed: ask again {_FORGET_S:.0f} s after one has left"
    )
)
_log = logging.getLogger("pagewire")
_HERE = ("tcp://127.", "tcp://[::1]:", "tcp://localhost:", "ipc://", "inproc://")


@dataclass(slots=True)
class _Watcher:
    """A watcher that has asked before and may ask again."""

    asked: AskLook | None = None  # the watcher's last request; None if it was answered
    asked_at: float = 0.0
    answered_at: float = 0.0  # when the watcher got its last answer; 0 if it has not got any


class _WatchThread:
    """The program of the thread that answers `pagewire top`.

    It ends with `close`, or when the object that is watched is garbage-collected.
    """

    def __init__(
        self,
        socket: BoundSocket,
        owner: object,
        make_book: Callable[[Any], WatchBook],
        metrics: Callable[[Any], KVCacheMetrics],
    ) -> None:
        self.closing = threading.Event()
        self.check_asked = False
        self.checked: tuple[float, CheckReport] | None = None
        self._socket = socket
        self._owner = weakref.ref(owner)
        self._make_book, self._metrics = make_book, metrics
        self._book: WatchBook | None = None
        self._watchers: dict[bytes, _Watcher] = {}
        self._asked_at = self._due = 0.0
        self._clocks = _clocks()  # the result of `_clocks` at the end of the last snapshot

    def run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        while not self.closing.is_set() and self._owner() is not None:
            try:
                if poller.poll(self._wait_ms()):
                    self._hear()
                if any(one.asked for one in self._watchers.values()) and time.monotonic() >= self._due:
                    self._answer()
                elif self._book is not None and time.monotonic() - self._asked_at > _FORGET_S:
                    self._forget()
            except zmq.ContextTerminated:
                break
            except Exception:  # noqa: BLE001 - watchers ask again, and a new book is made
                _log.exception("watch: a snapshot could not be made")
                self._forget()
                self._watchers.clear()
                self._due = time.monotonic() + _FAILED_S
        self._forget()
        self._socket.close(linger=200)

    def _wait_ms(self) -> int:
        if not any(one.asked for one in self._watchers.values()):
            return _WAKE_MS
        return min(_WAKE_MS, max(0, math.ceil((self._due - time.monotonic()) * 1000)))

    def _forget(self) -> None:
        if self._book is not None:
            self._book.forget()
            self._book = None

    def _hear(self) -> None:
        """Read the requests that have arrived. For each watcher, only the last request counts.

        If there are too many watchers, a new one is refused at once.
        """
        with suppress(zmq.Again):
            for _ in range(_QUESTIONS):
                sender, *rest = self._socket.recv_multipart(zmq.NOBLOCK)
                asked = rest[-1] if len(rest) == 1 else b""
                try:
                    ask = msgspec.msgpack.decode(asked, type=AskLook)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    if why := other_version(asked, AskLook):
                        self._send([sender, msgspec.msgpack.encode(WatchRefusal(refused=why))])
                    continue  # a malformed request gets no answer
                now = time.monotonic()
                if sender not in self._watchers and not self._has_room(now):
                    self._send([sender, _REFUSAL])
                    continue
                self._asked_at = now
                watcher = self._watchers.setdefault(sender, _Watcher())
                watcher.asked, watcher.asked_at = ask, now
                self.check_asked |= ask.check

    def _has_room(self, now: float) -> bool:
        if len(self._watchers) >= _MOST_WATCHERS:
            for sender in [one for one, watcher in self._watchers.items() if now - watcher.asked_at > _FORGET_S]:
                del self._watchers[sender]
        return len(self._watchers) < _MOST_WATCHERS

    def _answer(self) -> None:
        """Make one snapshot for all watchers that ask.

        New watchers get it first. Then the watcher whose last answer is the oldest comes first.
        """
        if self._book is not None and self._book.is_outdated:
            self._forget()
        if (owner := self._owner()) is None:
            return
        book = self._book = self._book or self._make_book(owner)
        metrics = self._metrics(owner)
        del owner
        started = time.thread_time()
        book.update()
        book.check = self.checked
        made: dict[int, list[Any]] = {}  # for each number of a watcher's last snapshot, the frames to send
        waiting = [(sender, watcher) for sender, watcher in self._watchers.items() if watcher.asked is not None]
        for sender, watcher in sorted(waiting, key=lambda one: one[1].answered_at):
            ask, watcher.asked = watcher.asked, None
            watcher.answered_at = time.monotonic()
            base = ask.known if ask is not None and ask.incarnation == book.incarnation else 0
            if base not in made:
                header, frames = book.look(base, metrics)
                made[base] = [msgspec.msgpack.encode(header), *(frame.data for frame in frames)]
            if not self._send([sender, *made[base]]):
                del self._watchers[sender]
            if time.thread_time() - started > _TURN_S:
                break
        book.cost_s = time.thread_time() - started
        before, self._clocks = self._clocks, _clocks()
        busy = (self._clocks[1] - before[1]) / max(1e-9, self._clocks[0] - before[0])
        self._due = time.monotonic() + _pause(book.cost_s, book.cost_s - book.beside_s, busy)

    def _send(self, parts: Sequence[Any]) -> bool:
        """Send without waiting. Returns False if the watcher is gone."""
        try:
            # The frames need not be copied: each snapshot makes new arrays, and these are never changed.
            self._socket.send_multipart(parts, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            return error.errno == zmq.EAGAIN  # EAGAIN means that the watcher is there, but its queue is full
        return True


class Watch:
    """Shows watchers, such as `pagewire top ADDRESS`, the state of every page of some pools.

    It costs the loop nothing while no watcher asks. Tokens are never shown. Salts are shown only as digests, which are
    different in each process.

    Args:
        owner: the object to watch until `close`, or until it is garbage-collected. The thread keeps only a weak
            reference to it, so neither `make_book` nor the book that it returns may refer to it.
        make_book: takes the owner, and returns the `WatchBook` for the thread.
        metrics: takes the owner, and returns its counters. Called in the thread.
        recount: counts everything again, in the loop's thread. Raises `InvariantError` if the counts disagree.
        pools: returns the pools whose pages are counted after a recount.
        endpoint: the address to bind. Without `secure` it must be on this host. Port 0 means any free port, see
            `address`.
        secure: prepares the socket before it is bound. `Keyring.secure_server` of `transfer` turns CURVE on.

    Raises `InvalidParamsError` if the endpoint cannot be bound, and whatever `secure` raises.
    """

    def __init__(
        self,
        owner: object,
        make_book: Callable[[Any], WatchBook],
        metrics: Callable[[Any], KVCacheMetrics],
        recount: Callable[[], None],
        pools: Callable[[], list[WatchedPool]],
        endpoint: str,
        secure: Callable[[Any], None] | None,
    ) -> None:
        self._recount, self._pools = recount, pools
        self._check_due = 0.0
        socket = _bound(endpoint, secure)
        self.address = socket.address
        self._worker = _WatchThread(socket, owner, make_book, metrics)
        self._thread = threading.Thread(target=self._worker.run, name="pagewire-watch", daemon=True)
        self._thread.start()

    def attend(self) -> None:
        """Recount everything if a watcher has asked for a recount. The loop calls this between two steps.

        If no watcher has asked, the call only tests a flag. A recount takes as long as `check`. Recounts take at most a
        tenth of the loop's time.
        """
        if not self._worker.check_asked or time.monotonic() < self._check_due:
            return
        started, error = time.monotonic(), ""
        try:
            self._recount()
        except InvariantError as wrong:
            error = str(wrong)
        seconds = time.monotonic() - started
        self._check_due = started + seconds / _CHECK_SHARE
        counts = {one.name: counted(one.cells()) for one in self._pools()}
        self._worker.check_asked = False
        self._worker.checked = (started, CheckReport(age_s=0.0, seconds=seconds, error=error, counts=counts))

    def close(self) -> None:
        """Stop the thread and close the socket. Safe to call twice."""
        self._worker.closing.set()
        self._thread.join(2.0)


class ManagerWatch(Watch):
    """A `Watch` of a manager.

    Args:
        manager: the manager to watch until `close`, or until it is garbage-collected.
        endpoint: the address to bind. Without `secure` it must be on this host. Port 0 means any free port, see
            `address`.
        name: the name under which this process is shown.
        secure: prepares the socket before it is bound. `Keyring.secure_server` of `transfer` turns CURVE on.
        beside: returns further data to show, for example `transfers_of(exchange)` of `transfer.watch`. It is called in
            the endpoint's thread, not in the loop's.
        clear_names: whether requests are shown by their ids. If not, they are shown by their `request_digest`. None
            means that ids are shown only if `secure` is given.

    Raises `InvalidParamsError` if the endpoint cannot be bound, and whatever `secure` raises.
    """

    def __init__(
        self,
        manager: PagedKVCacheManager,
        endpoint: str = "tcp://127.0.0.1:0",
        *,
        name: str = "manager",
        secure: Callable[[Any], None] | None = None,
        beside: Callable[[], Beside] = Beside,
        clear_names: bool | None = None,
    ) -> None:
        all_of = manager._replicas  # noqa: SLF001  # pyright: ignore[reportPrivateUsage] - the manager's own watch
        sizes = manager.page_size, sum(layout.page_bytes for layout in manager.layouts)
        names = WatchNames(are_clear=secure is not None if clear_names is None else clear_names)

        def make_book(owner: Replicas) -> WatchBook:
            return WatchBook(name, pools_of(owner), sizes, beside, names)

        def metrics(owner: Replicas) -> KVCacheMetrics:
            return owner.metrics

        super().__init__(all_of, make_book, metrics, manager.check, lambda: pools_of(all_of), endpoint, secure)


def _clocks() -> tuple[float, float]:
    """Returns the wall time, and the processor time that all other threads of this process have used."""
    return time.monotonic(), time.process_time() - time.thread_time()


def _pause(cost_s: float, held_s: float, busy: float) -> float:
    """Returns how many seconds to wait after a snapshot that took `cost_s` seconds of processor time.

    `held_s` is the part of `cost_s` in which the snapshot held the interpreter lock. `busy` is the number of cores that
    other threads have used on average since the last snapshot. If two threads need the interpreter lock at the same
    time, one delays the other. The more cores the other threads use, the more often a snapshot delays them.
    """
    for_the_loop = min(_MOST_S, held_s * min(1.0, busy) / _LOOP_SHARE)
    return max(_LEAST_S, cost_s * (1 / _SHARE - 1), for_the_loop)


def _bound(endpoint: str, secure: Callable[[Any], None] | None) -> BoundSocket:
    if secure is None and not endpoint.startswith(_HERE):
        raise InvalidParamsError(
            f"watch: {shown(endpoint)} can be reached from other hosts: give keys (`secure`), or use an address of "
            "this host"
        )
    socket = bound_socket("watch", zmq.ROUTER, endpoint, _MOST_WAITING, secure)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    return socket
