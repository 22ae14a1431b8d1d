"""Reports a process of the service to `pagewire top`: its pages, requests by phase, leases, pulls and totals."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext

from kvcache.manager import PagedKVCacheManager
from kvcache.watch.endpoint import ManagerWatch
from kvcache.watched import Beside
from scheduler_adapters.service.decode import DecodeScheduler
from scheduler_adapters.service.prefill import PrefillScheduler
from transfer.pull.exchange import PageExchange
from transfer.watch import transfers_of
from transfer.wire.keys import Keyring


def watched_service(
    endpoint: str,
    scheduler: PrefillScheduler | DecodeScheduler,
    manager: PagedKVCacheManager,
    exchange: PageExchange,
    keyring: Keyring | None,
) -> AbstractContextManager[ManagerWatch | None]:
    """Returns a context manager that watches a process if that is wanted. `attend` must be called within it."""
    if not endpoint:
        return nullcontext()
    secure = None if keyring is None else keyring.secure_server
    beside = service_beside(scheduler, exchange)
    return closing(ManagerWatch(manager, endpoint, name=scheduler.name, secure=secure, beside=beside))


def service_beside(scheduler: PrefillScheduler | DecodeScheduler, exchange: PageExchange) -> Callable[[], Beside]:
    """Returns a function that reads a scheduler's phases and totals and the state of an exchange.

    The watch's thread calls it.
    """
    transfers = transfers_of(exchange)

    def read() -> Beside:
        stats, found = scheduler.counters(), transfers()
        every = scheduler._requests  # noqa: SLF001  # pyright: ignore[reportPrivateUsage] - read, and nothing else
        phases = {key: request.phase for key, request in list(every.items())}
        told = {"running": stats.running, "queued": stats.waiting, "failed": stats.failed, "retries": stats.retries}
        return found._replace(phases=phases, figures={**found.figures, **{name: float(n) for name, n in told.items()}})

    return read
