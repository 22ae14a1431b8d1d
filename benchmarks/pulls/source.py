"""The source of a pull, in its own process. It grants leases, answers handshakes, and polls about every millisecond."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, NamedTuple, Self

from benchmarks.pools import expect
from benchmarks.pulls.engines import Spec, fill, make
from transfer.pull.lease import LeaseRef, new_lease_id
from transfer.pull.replica import LeaseOffer, LeaseOver, ReplicaTransfer
from transfer.wire.handshake import HandshakeServer

_POLL_S = 1e-3
_DURATION_S = 600.0
_BATCH = 32


class Address(NamedTuple):
    """Where a reader and `process_vm_readv` find a source: the endpoint of its handshake server, and its process id."""

    endpoint: str
    pid: int


class SourceProcess:
    """The process of a source. It starts when this object is created, and exits at the end of the `with` block.

    Args:
        spec: geometry of the source.
        filled: whether its pages have the contents that `engines.verify` checks.

    Attributes:
        address: the address of the source.
    """

    def __init__(self, spec: Spec, *, filled: bool = True) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_main, args=(theirs, spec, filled), daemon=True)
        self._process.start()
        theirs.close()
        self._leases: list[LeaseRef] = []
        endpoint = self._answer()
        self.address = Address(endpoint, self._process.pid or 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pipe.close()  # the process exits when this pipe is closed
        self._process.join(10)
        self._process.kill()

    def lease(self) -> LeaseRef:
        """Returns a new lease. All earlier leases must have been read."""
        if not self._leases:
            self._pipe.send(_BATCH)
            self._leases = self._answer()
        return self._leases.pop()

    def cpu_ns(self) -> int:
        """The processor time of all threads of the source so far."""
        # the kernel's id of the clock of a process
        return time.clock_gettime_ns(~self.address.pid << 3 | 2)

    def _answer(self) -> Any:
        expect(self._pipe.poll(300), "the source answers within five minutes")
        return self._pipe.recv()


def _main(pipe: Connection, spec: Spec, filled: bool) -> None:
    engine = make(spec)
    if filled:
        fill(spec, engine)
    with HandshakeServer([engine.card]) as server:
        pipe.send(server.endpoint)
        try:
            _serve(pipe, engine.replica)
        except EOFError:
            pass
        finally:
            engine.replica.close()


def _serve(pipe: Connection, replica: ReplicaTransfer) -> None:
    standing = 0
    wanted: list[int] = []
    while True:
        replica.poll()
        while replica.events:
            event = replica.events.popleft()
            if isinstance(event, LeaseOver):
                expect(event.reason == "read", f"a lease ends when it was read, not because it {event.reason}")
                standing -= 1
        if wanted and not standing:
            standing = wanted.pop()
            refs = [LeaseRef(new_lease_id(), slot, _DURATION_S) for slot in range(standing)]
            for ref in refs:
                replica.offer(LeaseOffer("request", ref))
            pipe.send(refs)
        if pipe.poll(_POLL_S):
            wanted.append(pipe.recv())
