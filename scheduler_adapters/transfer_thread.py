"""The one thread that owns a transfer engine, and polls it about every millisecond.

A model's step takes tens of milliseconds. In that time a peer's first READ and every notification would wait for us, so
the serving loop never touches the engine: it hands work to this thread, and picks up events when it likes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from scheduler_adapters.errors import WorkerError
from transfer.errors import TransferError, TransferIncompleteError

if TYPE_CHECKING:
    from collections.abc import Callable

    from transfer.engine import KVTransferEngine
    from transfer.metadata import KVTransferEngineMetadata, TransferReqData

T = TypeVar("T")

_POLL_S = 1e-3
# While our own READs are in flight: they take a few hundred microseconds, and the request waits for them.
_BUSY_POLL_S = 1e-4


class Posted(NamedTuple):
    """A READ is on its way: the source may be told its name."""

    request_id: str
    transfer: TransferReqData


class Ended(NamedTuple):
    """A transfer has ended: nothing reads or writes its pages any more. `error` is empty where all bytes arrived."""

    request_id: str
    error: str


@dataclass(slots=True)
class _Job:
    """A transfer on its way.

    Attributes:
        request_id: comes back in the event.
        transfer: None once the engine has forgotten it.
        replica: of ours.
        pages: of ours that are written; empty for a peer's READ.
        error: why it failed, if it has.
    """

    request_id: str
    transfer: TransferReqData | None
    replica: int = 0
    pages: frozenset[int] = frozenset()
    error: str = ""


@dataclass(slots=True)
class _Busy:
    """Adds up the time in which at least one READ of ours was in flight."""

    seconds: float = 0.0
    since: float | None = field(default=None)

    def update(self, busy: bool) -> None:
        now = time.perf_counter()
        if self.since is not None:
            self.seconds += now - self.since
        self.since = now if busy else None


class TransferThread:
    """Runs an engine. Every method may be called from the serving loop's thread; none but `call` and `close` waits.

    Args:
        engine: nobody else uses it from now on.
    """

    def __init__(self, engine: KVTransferEngine) -> None:
        self._engine = engine
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._jobs: list[_Job] = []
        self._busy = _Busy()
        self._stopping = False
        self._failure: BaseException | None = None
        self.events: deque[Posted | Ended] = deque()
        self._thread = threading.Thread(target=self._main, name="transfer", daemon=True)
        self._thread.start()

    @property
    def pull_seconds(self) -> float:
        """Time in which at least one READ was in flight, in seconds."""
        return self._busy.seconds

    def call(self, function: Callable[[KVTransferEngine], T], timeout_s: float = 30.0) -> T:
        """Run `function` on the engine in its thread, and wait for the result. For set-up, not for serving."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function(self._engine))
            except Exception as error:  # noqa: BLE001  (the caller gets it, whatever it is)
                future.set_exception(error)

        self._commands.put(run)
        return future.result(timeout_s)

    def pull(
        self,
        request_id: str,
        remote: KVTransferEngineMetadata,
        pages: tuple[list[int], list[int]],
        replicas: tuple[int, int],
    ) -> None:
        """Start to READ pages; `Posted` and later `Ended` come as events, or `Ended` alone where it could not start.

        Args:
            request_id: comes back in the events.
            remote: the source's engine, connected.
            pages: of the source, and of ours to write.
            replicas: of the source, and ours.
        """

        def post() -> None:
            job = _Job(request_id, None, replicas[1], frozenset(pages[1]))
            self._jobs.append(job)
            self._busy.update(True)
            try:
                job.transfer = self._engine.initiate_read_transfer(remote, *pages, *replicas)
            except TransferError as error:
                job.error = str(error)  # some of its shards may be on their way all the same
            else:
                self.events.append(Posted(request_id, job.transfer))

        self._commands.put(post)

    def watch(self, request_id: str, transfer: TransferReqData) -> None:
        """Wait for the notification of a READ that a peer has started; `Ended` comes as an event."""
        self._commands.put(lambda: self._jobs.append(_Job(request_id, transfer)))

    def unwatch(self, request_id: str) -> None:
        """Forget a READ of a peer's: the peer has said that it came to nothing."""

        def drop() -> None:
            self._jobs[:] = [job for job in self._jobs if job.pages or job.request_id != request_id]

        self._commands.put(drop)

    def raise_failure(self) -> None:
        """Raise what ended the thread, if anything did.

        Raises:
            WorkerError: the thread has died.
        """
        if self._failure is not None:
            raise WorkerError(f"the transfer thread died: {self._failure!r}") from self._failure

    def close(self, timeout_s: float = 10.0) -> None:
        """End the thread, and give back all that the engine holds. Safe twice."""
        self._stopping = True
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._engine.cleanup()

    def _main(self) -> None:
        try:
            while not self._stopping:
                self._wait()
                self._engine.poll()
                self._jobs[:] = [job for job in self._jobs if not self._ended(job)]
                self._busy.update(any(job.pages for job in self._jobs))
        except BaseException as error:  # noqa: BLE001  (told to the serving loop, which ends the process)
            self._failure = error

    def _wait(self) -> None:
        """Sleep until there is a command, but not longer than a poll may wait."""
        pause = _POLL_S if self._busy.since is None else _BUSY_POLL_S
        with contextlib.suppress(Empty):
            self._commands.get(timeout=pause)()
            while True:
                self._commands.get_nowait()()

    def _ended(self, job: _Job) -> bool:
        """Move a job on. A failed one has ended when nothing of it is in flight: then its pages are safe."""
        if job.transfer is not None and not self._forgotten(job, job.transfer):
            return False
        if job.pages & self._engine.quarantined_pages(job.replica):
            return False
        self.events.append(Ended(job.request_id, job.error))
        return True

    def _forgotten(self, job: _Job, transfer: TransferReqData) -> bool:
        """Let the engine forget a transfer that is over."""
        try:
            if not job.error and not self._engine.is_complete(transfer):
                return False
            self._engine.cleanup_transfer(transfer)
        except TransferIncompleteError:
            return False
        except TransferError as error:
            if not job.error:
                job.error = str(error)
                return False
        job.transfer = None
        return True
