"""The leases and pulls that `pagewire top` shows: `ManagerWatch(manager, beside=transfers_of(exchange))`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from kvcache.watch.messages import Beside, LeaseRow, PullRow
from transfer.pull.thread import TransferThread


class Transfers(Protocol):
    """An owner of leases and pulls: a `PageExchange`, or a `NixlConnectorWorker`."""

    @property
    def threads(self) -> Sequence[TransferThread]:
        """The transfer thread of each replica."""
        ...


def transfers_of(owner: Transfers) -> Callable[[], Beside]:
    """Returns a function that reads the leases, pulls, bytes and failures of `owner` for `pagewire top`.

    The thread of `ManagerWatch` calls this function.
    """
    return lambda: Beside(
        leases=tuple(row for at, thread in enumerate(owner.threads) for row in _leases(str(at), thread)),
        pulls=tuple(row for at, thread in enumerate(owner.threads) for row in _pulls(str(at), thread)),
        figures={
            "bytes_pulled": float(sum(thread.replica.stats.num_bytes for thread in owner.threads)),
            "pull_seconds": sum(thread.pull_seconds for thread in owner.threads),
            "failed_pulls": float(sum(thread.replica.stats.failures.total() for thread in owner.threads)),
        },
    )


def _leases(pool: str, thread: TransferThread) -> Iterator[LeaseRow]:
    book = thread.replica.leases
    for lease in filter(None, map(book.find, book.ids())):
        age_s, left_s = book.times(lease)
        heard = f"{len(lease.heard)} of {lease.engines} readers" if lease.heard else ""
        yield LeaseRow(request_id=lease.request_id, pool=pool, age_s=age_s, left_s=left_s, heard=heard)


def _pulls(pool: str, thread: TransferThread) -> Iterator[PullRow]:
    now = time.monotonic()
    for key, pull in thread.replica.pulls.items():
        parts = list(pull.reads)
        began = min((part.started for part in parts), default=None)
        yield PullRow(
            key=key,
            pool=pool,
            source=pull.source.engine_id,
            stage="failing" if pull.error else "reading" if parts else "connecting",
            num_bytes=sum(part.num_bytes for part in parts),
            age_s=None if began is None else now - began,
            left_s=pull.deadline - now,
        )
