"""The view of a service's process for watchers, beside its pages: phases, leases, pulls and totals."""

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
    """The watch of a process, where one is wanted, for the length of a `with` block; in it `attend` is to be called."""
    if not endpoint:
        return nullcontext()
    secure = None if keyring is None else keyring.secure_server
    beside = service_beside(scheduler, exchange)
    return closing(ManagerWatch(manager, endpoint, name=scheduler.name, secure=secure, beside=beside))


def service_beside(scheduler: PrefillScheduler | DecodeScheduler, exchange: PageExchange) -> Callable[[], Beside]:
    """Reads phases and totals of a scheduler and all of an exchange, in the thread of the watch."""
    transfers = transfers_of(exchange)

    def read() -> Beside:
        stats, found = scheduler.counters(), transfers()
        every = scheduler._requests  # noqa: SLF001  # pyright: ignore[reportPrivateUsage] - read, and nothing else
        phases = {key: request.phase for key, request in list(every.items())}
        told = {"running": stats.running, "queued": stats.waiting, "failed": stats.failed, "retries": stats.retries}
        return found._replace(phases=phases, figures={**found.figures, **{name: float(n) for name, n in told.items()}})

    return read
