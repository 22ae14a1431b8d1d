"""The Prometheus metrics of a process of the service, and their HTTP endpoint."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from prometheus_client import CollectorRegistry, start_http_server

from kvcache.endpoints.addresses import to_bind
from kvcache.endpoints.families import Family, FamilyCollector, Sample
from kvcache.endpoints.prometheus import ManagerCollector
from kvcache.manager import PagedKVCacheManager
from scheduler_adapters.errors import ServiceError
from scheduler_adapters.service import messages as msg
from scheduler_adapters.service.peer_prefixes import FETCH_OUTCOMES
from scheduler_adapters.service.requests import DECODE_MOVES, PREFILL_MOVES
from transfer.prometheus import TransferCollector
from transfer.pull.exchange import PageExchange


class Counted(Protocol):
    """A `PrefillScheduler`, or a `DecodeScheduler`."""

    def counters(self) -> msg.Stats:
        """Returns the counters. Safe from any thread."""
        ...


def _figure(name: str) -> Callable[[msg.Stats], Iterator[Sample]]:
    return lambda stats: iter([((), getattr(stats, name))])


def _outcomes(stats: msg.Stats) -> Iterator[Sample]:
    return (((outcome,), stats.prefixes.get(outcome, 0)) for outcome in FETCH_OUTCOMES)


def _ways(name: str) -> Callable[[msg.Stats], Iterator[Sample]]:
    return lambda stats: (((way,), getattr(stats, name).get(way, 0.0)) for way in ("pull", "compute"))


def _phases(stats: msg.Stats) -> Iterator[Sample]:
    phases = PREFILL_MOVES if stats.role == "prefill" else DECODE_MOVES
    return (((phase,), stats.phases.get(phase, 0)) for phase in phases if phase != "over")


FAMILIES = (
    Family("pagewire_requests", "gauge", "Open requests, by phase.", ("phase",), _phases),
    Family("pagewire_running_requests", "gauge", "Requests that the loop runs.", (), _figure("running")),
    Family(
        "pagewire_queued_requests", "gauge", "Requests that wait for the loop without pages.", (), _figure("waiting")
    ),
    Family("pagewire_preemptions_total", "counter", "Requests that were preempted.", (), _figure("preemptions")),
    Family(
        "pagewire_retries_total",
        "counter",
        "Attempts at a request that failed and were followed by another.",
        (),
        _figure("retries"),
    ),
    Family("pagewire_failed_requests_total", "counter", "Requests that ended with an error.", (), _figure("failed")),
    Family(
        "pagewire_pulled_pages_total",
        "counter",
        "Pages that pulls filled; a page of several shards counts once.",
        (),
        _figure("pages_pulled"),
    ),
    Family(
        "pagewire_reused_pages_total",
        "counter",
        "Pages of handed-over requests that were already cached here and not pulled.",
        (),
        _figure("pages_reused"),
    ),
    Family(
        "pagewire_prefixes_total",
        "counter",
        "Prompts for which a source of pages was named, by outcome; `computed`: computing them was quicker.",
        ("outcome",),
        _outcomes,
    ),
    Family(
        "pagewire_prefix_seconds_total",
        "counter",
        "Time taken to pull prefixes (including the question), and to compute prompts.",
        ("way",),
        _ways("taken_s"),
    ),
    Family(
        "pagewire_misjudged_prefix_seconds_total",
        "counter",
        "Sum of the absolute errors of the estimated times, by way: to pull prefixes, or to compute prompts.",
        ("way",),
        _ways("misjudged_s"),
    ),
    Family(
        "pagewire_late_messages_total",
        "counter",
        "Repeated messages, and messages of attempts that were over.",
        (),
        _figure("late"),
    ),
    Family(
        "pagewire_malformed_messages_total",
        "counter",
        "Messages that could not be decoded.",
        (),
        _figure("malformed"),
    ),
)


class ServiceCollector(FamilyCollector):
    """Collects requests and messages of a prefill or decode scheduler. `labels` are added to every sample."""

    def __init__(self, scheduler: Counted, **labels: object) -> None:
        super().__init__("service", scheduler.counters, FAMILIES, labels)


def collectors(
    scheduler: Counted, manager: PagedKVCacheManager, exchange: PageExchange, **labels: object
) -> list[FamilyCollector]:
    """Returns all collectors of a process of the service, for a registry."""
    return [
        ServiceCollector(scheduler, **labels),
        ManagerCollector(manager, **labels),
        TransferCollector(exchange, **labels),
    ]


def registry_of(*made: FamilyCollector) -> CollectorRegistry:
    """Returns a registry that has only these collectors."""
    registry = CollectorRegistry()
    for collector in made:
        registry.register(collector)
    return registry


@contextmanager
def serve_metrics(address: str, made: Sequence[FamilyCollector]) -> Generator[str]:
    """A `with` block in which scrapes at `host:port` are answered in a thread. Yields the bound address.

    Raises:
        ServiceError: the address cannot be bound.
    """
    host, _, port = address.rpartition(":")
    try:
        at = to_bind(host.strip("[]") or "127.0.0.1")
        server, thread = start_http_server(int(port), at, registry_of(*made))
    except (OSError, OverflowError, ValueError) as error:
        raise ServiceError(f"metrics cannot be served at {address!r} (host:port is needed): {error}") from error
    try:
        yield f"{host or '127.0.0.1'}:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
