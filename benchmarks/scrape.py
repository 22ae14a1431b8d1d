"""What does a metrics scrape cost, and what does it cost to count a pull?

A scrape does the work of `/metrics`: it reads every metric family and writes the text. Its registry has the manager's
collector, the exchange's, or both. The manager has two replicas and a host tier, with a few hundred pages in use, and
`leases` open leases of 32 pages each. A scrape runs in its own thread, and holds the interpreter for about this long.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from prometheus_client import CollectorRegistry, generate_latest

from benchmarks.frame import Row, options, pin, report, samples, summary
from kvcache import KVCacheParams, PagedKVCacheManager, TextContext
from kvcache.endpoints.prometheus import ManagerCollector
from transfer.prometheus import TransferCollector
from transfer.pull.exchange import PageExchange
from transfer.stats import PullRecord, TransferStats

PAGE, PROMPT, REPLICAS = 16, 512, 2
COUNTED = 1000
"""Pulls that are counted in one sample."""


@contextmanager  # pyright: ignore[reportDeprecated]
def served(pages: int, leases: int) -> Iterator[tuple[PagedKVCacheManager, PageExchange]]:
    """Returns a manager that has served some requests, with `pages` pages in each replica, and its exchange."""
    shape: dict[str, Any] = {"n_kv_heads": 1, "head_dim": 1, "page_size": PAGE, "enable_prefix_caching": True}
    plain = KVCacheParams(torch.float16, n_devices=REPLICAS, data_parallel_degree=REPLICAS, **shape)
    memory = plain.bytes_per_token(1) * PAGE * pages * REPLICAS
    params = KVCacheParams(
        torch.float16,
        n_devices=REPLICAS,
        data_parallel_degree=REPLICAS,
        enable_kvcache_swapping_to_host=True,
        host_kvcache_swap_space_gb=memory / REPLICAS / 2**30,
        **shape,
    )
    devices = ["cpu"] * REPLICAS
    manager = PagedKVCacheManager(params, 512, PROMPT * 2, 1, devices, available_cache_memory=memory)
    exchange = PageExchange(manager, "p")
    for number in range(max(leases, 8)):
        context = TextContext([number, *range(PROMPT - 1)], PROMPT * 2, f"r{number}")
        with manager.claim(context, number % REPLICAS):
            if not manager.maybe_reserve(context):
                raise RuntimeError(f"{pages} pages are too few for {leases} leases")
            manager.fetch([context])
            context.update(1)
            manager.step([context])
            if number < leases:
                exchange.offer(context.request_id, 600.0)
    try:
        yield manager, exchange
    finally:
        exchange.close()
        manager.close()


def scrapes(pages: int, leases: int, repeats: int) -> list[Row]:
    """Times a scrape of each collector, and of both together."""
    rows: list[Row] = []
    with served(pages, leases) as (manager, exchange):
        made = {"manager": [ManagerCollector(manager)], "exchange": [TransferCollector(exchange)]}
        for name, collectors in {**made, "both": [*made["manager"], *made["exchange"]]}.items():
            registry = CollectorRegistry()
            for collector in collectors:
                registry.register(collector)
            text = generate_latest(registry)
            rows.append(
                {
                    "operation": f"scrape, {name}",
                    "pages": pages,
                    "leases": leases,
                    "families": text.count(b"# TYPE "),
                    "bytes": len(text),
                    **summary(samples(repeats, lambda found=registry: found, generate_latest)),
                }
            )
    return rows


def counting(repeats: int) -> Row:
    """Times the counting of a pull, which sorts its four figures into buckets."""
    record = PullRecord(1 << 20, 40, 2e-4, 1.5e-3)

    def count(stats: TransferStats) -> None:
        for _ in range(COUNTED):
            stats.record(record)

    times = [time / COUNTED for time in samples(repeats, TransferStats, count)]
    return {"operation": "count a pull", **summary(times)}


def rows(sizes: tuple[tuple[int, int], ...], repeats: int) -> list[Row]:
    """All rows."""
    return [*(row for pages, leases in sizes for row in scrapes(pages, leases, repeats)), counting(repeats)]


def main() -> None:
    """Runs the benchmark and reports its rows."""
    chosen = options(__doc__)
    pin()
    sizes = ((10_000, 0), (10_000, 100), (1_000_000, 0), (1_000_000, 100))
    report("scrape", rows(sizes[:2] if chosen.quick else sizes, 300), chosen)


if __name__ == "__main__":
    main()
