"""NIXL alone between two processes: READs of listed pages with a notification, polled, without lease and fence.

`python -m benchmarks.pulls.as_shipped [--as-ours] PAGE_BYTES,PAGES ...` prints a JSON row for each size. It is a
separate program because UCX reads the environment only once, and our agents set variables there. Without the option, it
uses default agents and no environment settings. With `--as-ours`, it uses the environment and the options of our
agents. The pools lie in huge pages, as ours do.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from benchmarks.frame import Row, now, progress, summary
from benchmarks.pulls.engines import Memory, huge_pages
from transfer.nixl.agent import Agent

POOL_BYTES = 1 << 30
AS_OURS = "--as-ours"
_BUDGET_S = 1.5
_LEAST, _MOST = 7, 200


def agent_of(name: str, pool: Memory, *, as_ours: bool) -> Any:
    """An agent that has registered a pool."""
    from nixl._api import nixl_agent  # noqa: PLC0415 - each process imports it once it is alone

    agent = Agent(name, background_runs=8)._agent if as_ours else nixl_agent(name)  # noqa: SLF001 - NIXL's own
    agent.register_memory([(pool.ctypes.data, POOL_BYTES, 0, "")], "DRAM")
    return agent


def source(pipe: Connection, as_ours: bool) -> None:
    """Runs the source, which reads notifications every millisecond."""
    pool = huge_pages(POOL_BYTES)
    pool[:] = 7
    agent = agent_of("source", pool, as_ours=as_ours)
    pipe.send((agent.get_agent_metadata(), pool.ctypes.data))
    while not pipe.poll(1e-3):
        agent.get_new_notifs()


def measure(agent: Any, peer: str, bases: tuple[int, int], size: int, count: int, *, scattered: bool) -> Row:
    """Microseconds of READs of `count` pages of `size` bytes. Each READ carries a notification."""
    pages = POOL_BYTES // size
    rng = np.random.default_rng(0)
    lists = [
        agent.prep_xfer_dlist(who, [(base + at * size, size, 0) for at in range(pages)], "DRAM")
        for who, base in zip(("", peer), bases, strict=True)
    ]
    times: list[float] = []
    end = time.monotonic() + _BUDGET_S
    while len(times) <= _LEAST or (len(times) <= _MOST and time.monotonic() < end):
        ids = [
            rng.permutation(pages)[:count] if scattered else np.arange(count) + rng.integers(pages - count + 1)
            for _ in range(2)
        ]
        here, there = (found.astype(np.int32) for found in ids)
        start = now()
        handle = agent.make_prepped_xfer("READ", lists[0], here, lists[1], there, b"done")
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        times.append((now() - start) / 1e3)
        agent.release_xfer_handle(handle)
    for made in lists:
        agent.release_dlist_handle(made)
    access = "random" if scattered else "contiguous"
    return {"page_bytes": size, "pages": count, "access": access, **summary(times[1:])}


def rows(wanted: Sequence[tuple[int, ...]], *, as_ours: bool) -> Iterator[Row]:
    """Yields two rows for each (bytes of a page, pages): one with contiguous pages, one with random ones."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=source, args=(theirs, as_ours), daemon=True)
    child.start()
    theirs.close()  # without this call, the parent would never notice that the process has died
    metadata, remote_base = ours.recv()
    pool = huge_pages(POOL_BYTES)
    agent = agent_of("reader", pool, as_ours=as_ours)
    peer = agent.add_remote_agent(metadata)
    for size, count in wanted:
        for scattered in (False, True):
            yield measure(agent, peer, (pool.ctypes.data, remote_base), size, count, scattered=scattered)
    if int(pool[-1]) not in {0, 7}:
        progress("the pages that NIXL read are not those of its source")
    ours.send(None)
    child.join(10)


def main() -> None:
    """Runs the benchmark and prints its rows."""
    given = sys.argv[1:]
    wanted = [tuple(map(int, argument.split(","))) for argument in given if argument != AS_OURS]
    for row in rows(wanted, as_ours=AS_OURS in given):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
