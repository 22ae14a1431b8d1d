"""Prometheus metrics of a manager: `REGISTRY.register(ManagerCollector(manager, engine="0"))`."""

from collections.abc import Callable, Iterator

import numpy as np

from kvcache.endpoints.families import Family, FamilyCollector, Sample
from kvcache.manager import PagedKVCacheManager
from kvcache.replica.replica import Replica
from kvcache.replicas import Replicas
from kvcache.states.state_pages import StatePages
from kvcache.tiers.page_files import FileRefusal
from kvcache.types import KVCacheMetrics


def _each(name: str, text: str, read: Callable[[Replica], float]) -> Family:
    """Returns a family with one figure for each replica. The figure is a counter if the name ends in `_total`."""

    def samples(all_of: Replicas) -> Iterator[Sample]:
        return (((number,), read(replica)) for number, replica in enumerate(all_of.each))

    return Family(name, "counter" if name.endswith("_total") else "gauge", text, ("replica",), samples)


def _total(name: str) -> Callable[[Replicas], Iterator[Sample]]:
    """Returns a function that reads one counter of `KVCacheMetrics`, summed over all replicas."""
    return lambda all_of: iter([((), getattr(all_of.metrics, name))])


def _free(replica: Replica) -> int:
    """Returns the number of free pages, but at most `num_pages`.

    `free_count` is a sum of counts. The loop may change them between the reads, so the sum may be too large.
    """
    return min(replica.pool.free_count, replica.pool.num_pages)


def _prompt_tokens(all_of: Replicas) -> Iterator[Sample]:
    for number, replica in enumerate(all_of.each):
        metrics: KVCacheMetrics = replica.metrics
        yield (number, "computed"), metrics.input_tokens
        yield (number, "cached"), metrics.cache_tokens


def _pages(all_of: Replicas) -> Iterator[Sample]:
    for number, replica in enumerate(all_of.each):
        free = _free(replica)
        idle = min(replica.pool.idle.count, free)
        yield (number, "held"), replica.pool.num_pages - free
        yield (number, "idle"), idle
        yield (number, "empty"), free - idle


def _cached_pages(all_of: Replicas) -> Iterator[Sample]:
    for number, replica in enumerate(all_of.each):
        published = replica.pool.index.published.copy()
        older = replica.pool.versions.num_older(published)
        yield (number, "current"), int(np.count_nonzero(published)) - older
        yield (number, "older"), older


def _switches(all_of: Replicas) -> Iterator[Sample]:
    yield (), all_of.rows.weights.now.switches


def _states(all_of: Replicas) -> Iterator[Sample]:
    for number, states in enumerate(all_of.states):
        yield (number, "held"), states.num_held
        yield (number, "idle"), states.pool.idle.count


def _of_states(read: Callable[[StatePages], float]) -> Callable[[Replicas], Iterator[Sample]]:
    """Returns a function that reads one figure of each replica's recurrent states, if the model has any."""
    return lambda all_of: (((number,), read(states)) for number, states in enumerate(all_of.states))


def _quarantined(replica: Replica) -> int:
    return sum(len(pending.written) for pending in list(replica.imports.each) if pending.closed)


def _host_pages(at: int) -> Callable[[Replicas], Iterator[Sample]]:
    """Returns a function that reads one of the figures of `Replicas.host_pages`."""
    return lambda all_of: iter([((), all_of.host_pages[at])])


def _refused_pages(all_of: Replicas) -> Iterator[Sample]:
    metrics = all_of.metrics
    return (((why.value,), getattr(metrics, f"file_blocks_{why}")) for why in FileRefusal)


# Counters over all replicas: the name without "pagewire_" and "_total", the field of `KVCacheMetrics`, and the help
# text.
_TOTALS = (
    ("file_written_pages", "file_blocks_written", "Pages written to files."),
    ("file_read_pages", "file_blocks_read", "Pages read from files into the host tier."),
    ("object_written_pages", "object_blocks_written", "Pages written to the object store."),
    ("object_read_pages", "object_blocks_read", "Pages read from the object store into the host tier."),
    (
        "object_refused_pages",
        "object_blocks_refused",
        "Pages of objects that were refused: damaged, cut short or gone.",
    ),
    ("object_store_failures", "object_store_failures", "Calls of the object store that failed or timed out."),
    (
        "refused_files",
        "files_refused",
        "Files in the file tier's folder that were refused: broken, or of another kind.",
    ),
    ("host_stored_states", "d2h_states_copied", "Recurrent states copied to the host tier."),
    ("host_loaded_states", "h2d_states_copied", "Recurrent states copied back from the host tier."),
    ("file_written_states", "file_states_written", "Recurrent states written to files."),
    ("file_read_states", "file_states_read", "Recurrent states read from files into the host tier."),
    (
        "file_refused_states",
        "file_states_refused",
        "Recurrent states of files that were refused: wrong, cut short or gone.",
    ),
    ("object_written_states", "object_states_written", "Recurrent states written to the object store."),
    ("object_read_states", "object_states_read", "Recurrent states read from the object store into the host tier."),
    (
        "object_refused_states",
        "object_states_refused",
        "Recurrent states of objects that were refused: wrong, cut short or gone.",
    ),
)

FAMILIES = (
    Family(
        "pagewire_prompt_tokens_total",
        "counter",
        "Prompt tokens by source: computed here, or found in the prefix cache.",
        ("replica", "source"),
        _prompt_tokens,
    ),
    _each(
        "pagewire_evicted_pages_total",
        "Published pages that were evicted because their memory was needed.",
        lambda replica: replica.pool.evictions,
    ),
    Family(
        "pagewire_pages",
        "gauge",
        "Pages by state: held (by a request or lease, or being written), idle (findable by their prefix), or empty.",
        ("replica", "state"),
        _pages,
    ),
    Family(
        "pagewire_cached_pages",
        "gauge",
        "Pages in the prefix cache by the weights that computed them: current, or older.",
        ("replica", "weights"),
        _cached_pages,
    ),
    Family(
        "pagewire_weights_switches_total",
        "counter",
        "Switches to other weights (`set_weights`).",
        (),
        _switches,
    ),
    _each(
        "pagewire_page_usage_ratio",
        "Share of the pages that are held by a request or lease, or being written.",
        lambda replica: 1.0 - _free(replica) / replica.pool.num_pages,
    ),
    _each("pagewire_claimed_requests", "Requests that have a row.", lambda replica: len(replica.rows.row_of)),
    _each(
        "pagewire_leased_pages",
        "Pages that leases of released requests hold for their readers.",
        lambda replica: replica.leases.num_pages,
    ),
    _each(
        "pagewire_open_imports",
        "Imports of pages that are still open, neither committed nor cancelled.",
        lambda replica: len(replica.imports.each),
    ),
    _each(
        "pagewire_quarantined_pages",
        "Pages of cancelled imports that a transfer in flight may still write.",
        _quarantined,
    ),
    _each(
        "pagewire_hint_ratio",
        "Share of the idle pages that follow retention hints.",
        lambda replica: replica.hints.share,
    ),
    _each("pagewire_host_stored_pages_total", "Pages copied to the host tier.", lambda replica: replica.tier.stored),
    _each(
        "pagewire_host_loaded_pages_total", "Pages copied back from the host tier.", lambda replica: replica.tier.loaded
    ),
    Family("pagewire_host_pages", "gauge", "Pages that the host tier has room for.", (), _host_pages(0)),
    Family("pagewire_host_cached_pages", "gauge", "Pages of the host tier that can be found.", (), _host_pages(1)),
    Family(
        "pagewire_file_refused_pages_total",
        "counter",
        "Pages of files that were refused, by reason.",
        ("reason",),
        _refused_pages,
    ),
    Family(
        "pagewire_state_hits_total",
        "counter",
        "Requests that resumed from a cached recurrent state.",
        ("replica",),
        _of_states(lambda pages: pages.hits),
    ),
    Family(
        "pagewire_evicted_states_total",
        "counter",
        "Cached recurrent states that were evicted from the device.",
        ("replica",),
        _of_states(lambda pages: pages.pool.evictions),
    ),
    Family(
        "pagewire_states",
        "gauge",
        "Recurrent states on the device: held (by a request or lease, or being written), or idle (findable by their "
        "prefix).",
        ("replica", "state"),
        _states,
    ),
    *(Family(f"pagewire_{name}_total", "counter", text, (), _total(counter)) for name, counter, text in _TOTALS),
)


class ManagerCollector(FamilyCollector):
    """Metrics of a manager's pages, prefix cache and tiers since it was made. `reset_metrics` does not reset them.

    `labels` are the labels of the process, such as `engine="0"`. Every sample has these labels. The collector never
    raises, see `FamilyCollector`.
    """

    def __init__(self, manager: PagedKVCacheManager, **labels: object) -> None:
        inner = manager._replicas  # noqa: SLF001  # pyright: ignore[reportPrivateUsage] - the manager's own collector
        super().__init__("cache", lambda: inner, FAMILIES, labels)
