"""How fast is the object tier, and how long does a prompt wait for its pages?

`python -m benchmarks.objects` measures the object tier with its checksums and NIXL's OBJ plugin. The store is moto, an
S3 server in Python on this host. Its speed dominates, so a plain client also reads the same objects, eight at a time. A
proxy in between adds a delay, as if the store were further away.

    write_mbps, read_mbps    MB/s of whole prompts
    plain_mbps               MB/s of a plain client
    prompt_ms                from asking for a prompt's pages until all of them are in host memory
    misjudged_pct            the error of the preceding estimate, in percent
"""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch

from benchmarks.frame import Row, header, options, progress, table, write
from benchmarks.pools import expect
from kvcache.pool.index import Digests
from kvcache.tiers.host_tier import HostTier
from kvcache.tiers.object_tier import ObjectFormat, ObjectTier
from kvcache.tiers.page_files import FileFormat
from kvcache.tiers.page_folder import namespace_of
from tests.transfer.nixl.moto_store import MotoStore, moto_store
from tests.transfer.nixl.slow_link import SlowLink, slow_link

PROMPT = 64  # pages
_PROMPTS = 4
_WAIT_S = 60.0  # a long limit, because the store is slow here
_STATISTICS = "columns *_max, *_min and *_median: of the rounds of a row; MB/s are maxima, times minima"


def host_of(page_bytes: int) -> tuple[HostTier, list[Digests]]:
    """Host memory that holds the pages of some prompts, under random digests."""
    host = HostTier([page_bytes], 4 * _PROMPTS * PROMPT, 4, pinned=False)
    host.memory[0].view(torch.int64).random_()
    prompts = [np.random.default_rng(at).integers(0, 1 << 63, (PROMPT, 4), np.uint64) for at in range(_PROMPTS)]
    for digests in prompts:
        slots = host.pool.allocate(PROMPT)
        host.pool.index.publish(slots, digests)
        host.pool.release(slots)
    return host, prompts


def fetch(tier: ObjectTier, host: HostTier, digests: Digests) -> tuple[float, float]:
    """Returns the seconds until a prompt's pages are in host memory, and the estimate of this time."""
    rates, before = tier.rates, tier.read
    expected = 2 * rates.answer_s + PROMPT * (rates.page_s or 0.0)
    every, began = np.ones((1, PROMPT), np.bool_), time.perf_counter()
    while tier.read < before + PROMPT:
        tier.ask(digests[None], tier.has_of(digests[None], every, perhaps=True))
        missing = every & (host.pool.index.find(digests) == 0)
        tier.fetch(digests[None], tier.has_of(digests[None], missing, perhaps=False), wait=False, gain=PROMPT)
        expect(time.perf_counter() - began < _WAIT_S, "every page comes")
        time.sleep(2e-4)
    return time.perf_counter() - began, expected


def plain(store: MotoStore, link: SlowLink, bucket: str, prefix: str) -> float:
    """MB/s of a client that reads the raw objects, eight at a time."""
    near = MotoStore(store.process, link.url)
    keys = [key for key in store.keys(bucket) if key.startswith(prefix) and not key.endswith("current")]
    began = time.perf_counter()
    with ThreadPoolExecutor(8) as threads:
        size = sum(map(len, threads.map(lambda key: near.request("GET", f"{bucket}/{key}"), keys)))
    return size / (time.perf_counter() - began) / 1e6


def one_round(store: MotoStore, link: SlowLink, page_bytes: int, count: int, name: str) -> Row:
    """Writes the pages of some prompts to the store, drops them from host memory, and reads them back."""
    host, prompts = host_of(page_bytes)
    layout = ObjectFormat(FileFormat(namespace_of(name), page_bytes, 32), count)
    objects = replace(store.bucket("benchmark", f"{name}/"), endpoint=link.url)
    tier = ObjectTier(layout, host, objects, _WAIT_S)
    # leaves out the first prompt of each kind, which also waits until the plugin's process has started
    size = (_PROMPTS - 1) * PROMPT * page_bytes
    tier.ended(prompts[0][None])
    tier.flush()
    began = time.perf_counter()
    for digests in prompts[1:]:
        tier.ended(digests[None])
    tier.flush()
    wrote = time.perf_counter() - began
    expect(tier.written == _PROMPTS * PROMPT, "every page was written")
    tier.close()
    host.pool.forget()
    tier = ObjectTier(layout, host, objects, _WAIT_S)  # stands for another process, which has written nothing
    times = [fetch(tier, host, digests) for digests in prompts][1:]
    expect(not tier.refusals, "every page that was read is right")
    tier.close()
    return {
        "write": size / wrote / 1e6,
        "read": size / sum(seconds for seconds, _ in times) / 1e6,
        "plain": plain(store, link, "benchmark", f"{name}/"),
        "prompt_ms": [1e3 * seconds for seconds, _ in times],
        "misjudged": [abs(seconds - expected) / seconds for seconds, expected in times],
    }


def row_of(store: MotoStore, link: SlowLink, page_bytes: int, count: int, delay_s: float, rounds: int) -> Row:
    """A row with the best and the median figures of some rounds."""
    link.delay_s = delay_s
    each = [
        one_round(store, link, page_bytes, count, f"{page_bytes}-{count}-{delay_s}-{number}")
        for number in range(rounds)
    ]
    link.delay_s = 0.0
    row: Row = {
        "page_kib": page_bytes >> 10,
        "object_pages": count,
        "delay_ms": 1e3 * delay_s,
    }
    for what in ("write", "read", "plain"):
        row[f"{what}_mbps_max"] = round(max(one[what] for one in each))
        row[f"{what}_mbps_median"] = round(statistics.median(one[what] for one in each))
    times = [time_ms for one in each for time_ms in one["prompt_ms"]]
    row["prompt_ms_min"], row["prompt_ms_median"] = round(min(times), 1), round(statistics.median(times), 1)
    row["misjudged_pct_median"] = round(100 * statistics.median(part for one in each for part in one["misjudged"]))
    return row


def main() -> None:
    """Runs the benchmark and reports its rows."""
    chosen = options(__doc__)
    sizes = [(64 << 10, 8)] if chosen.quick else [(64 << 10, 8), (64 << 10, 32), (512 << 10, 8)]
    rows: list[Row] = []
    with moto_store() as store, slow_link(store.url) as link:
        for page_bytes, count in sizes:
            for delay_s in (0.0, 0.01):
                progress(f"pages of {page_bytes >> 10} KiB, {count} an object, {1e3 * delay_s:.0f} ms")
                rows.append(row_of(store, link, page_bytes, count, delay_s, 1 if chosen.quick else 5))
    print(table(rows), flush=True)
    if chosen.json:
        command = "python -m benchmarks.objects" + (" --quick" if chosen.quick else "")
        write(chosen.json, {**header(command, _STATISTICS), "prompt_pages": PROMPT, "rows": rows})


if __name__ == "__main__":
    main()
