"""What does making a transfer plan cost the host, and what do runs on the wire and copies from the staging area cost?

`check`, `sources` and `plan` are parts of the first contact with a rank of 64 layers and 100,000 pages. `runs` is the
time to make the runs for a pull of 2,048 pages, and their NIXL descriptors. `wire` is the time of NIXL READs between
two processes, of runs that are never adjacent. `copy` is the time of `StagingPlan.permute` for 16 MiB, between
tokens-first and heads-first pages. A cost for each run and a cost for each byte are fitted to `wire` and to `copy`.
`transfer/plan/staging.py` has the results.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.frame import Row, options, pin, report, samples, summary
from benchmarks.pulls.layouts import per_layer
from kvcache.layout import PageLayout, allocate_blocks
from transfer.nixl.agent import Agent
from transfer.plan.boxes import ShardLayout, check
from transfer.plan.plan import Plan, plan
from transfer.plan.runs import Runs
from transfer.plan.shapes import PACKED_HND, SPLIT_NHD, dense
from transfer.plan.source_ranks import sources
from transfer.pull.staging_area import BUFFER_BYTES

POOL = 100_000
PAGES = 2048
PAGE_SIZE = 16
OURS, HND, NHD = "head,layer,side,token,dim", "layer,side,head,token,dim", "layer,side,token,head,dim"
SOURCE_BYTES = 256 << 20


def page(heads: range = range(8), page_size: int = PAGE_SIZE, order: str = OURS, **sizes: int) -> PageLayout:
    """The layout of a page for a model with 64 layers in bfloat16."""
    layers, dim = sizes.get("layers", 64), sizes.get("dim", 128)
    return PageLayout("bfloat16", 2, layers, 2, heads.start, len(heads), page_size, dim, order)


def bases(layout: ShardLayout) -> NDArray[np.int64]:
    """Addresses for the regions of a layout."""
    return np.cumsum([0, *layout.region_bytes[:-1]]) + (1 << 40)


def contact(repeats: int) -> list[Row]:
    """The rows for a first contact."""
    local = per_layer(page(), POOL, PACKED_HND)
    ranks = [per_layer(page(range(head, head + 1)), POOL, PACKED_HND) for head in range(8)]
    parts = sources(local, ranks, 0)
    cases = {
        "check, 64 regions": lambda _: check(local),
        "sources, 1 rank, 64 regions": lambda _: sources(local, [local], 0),
        "sources, 8 ranks, 64 regions each": lambda _: sources(local, ranks, 0),
        "plan, 64 regions": lambda _: plan(local, local),
        "plan, one of 8 ranks": lambda _: plan(parts[3][1], ranks[3]),
    }
    return [{"case": case, **summary(samples(repeats, lambda: None, call))} for case, call in cases.items()]


def pulls(repeats: int) -> list[Row]:
    """The rows for a pull of 2,048 pages."""
    rng = np.random.default_rng(0)
    random = rng.permutation(POOL)[:PAGES], rng.permutation(POOL)[:PAGES]
    ascending = np.sort(random[0]), np.sort(random[1])
    together = np.arange(PAGES), np.arange(PAGES) + 5
    one, many, apart = dense(page(), POOL), per_layer(page(), POOL, PACKED_HND), per_layer(page(), POOL, SPLIT_NHD)
    other = per_layer(page(page_size=64), POOL // 4, SPLIT_NHD)
    cases: list[tuple[str, ShardLayout, ShardLayout, tuple[NDArray[np.int64], NDArray[np.int64]]]] = [
        ("1 region, together", one, one, together),
        ("1 region, ascending", one, one, ascending),
        ("1 region, random", one, one, random),
        ("64 regions, together", many, many, together),
        ("64 regions, random", many, many, random),
        ("64 regions, K and V apart, random", apart, apart, random),
        ("64 regions, pages of 16 from pages of 64, random", apart, other, (random[0], random[1][: PAGES // 4] // 4)),
    ]
    rows: list[Row] = []
    for case, local, remote, pages in cases:
        made, given = plan(local, remote, (bases(local), bases(remote))), (*pages, (0, PAGES * PAGE_SIZE))
        found = made.runs(0, *given)
        times = samples(repeats, lambda made=made: made, partial(_run, given))
        rows.append({"case": f"runs, {case}", "runs": len(found), **summary(times)})
        times = samples(repeats, lambda found=found: found, Runs.descriptors)
        rows.append({"case": f"descriptors, {case}", "runs": len(found), **summary(times)})
    return rows


def _run(given: Any, made: Plan) -> Runs:
    return made.runs(0, *given)


def _serve(pipe: Connection) -> None:
    """Runs the process whose memory is read: it writes to its buffer once, and polls until it is told to exit."""
    memory = _buffer(SOURCE_BYTES)
    agent = Agent("plan-source")
    agent.register([(memory.ctypes.data, memory.nbytes, 0)])
    pipe.send((agent.metadata, memory.ctypes.data))
    while not pipe.poll(0.0005):
        agent.notifications()
    agent.close()


def _buffer(num_bytes: int) -> NDArray[np.uint8]:
    """Memory in huge pages, written to once so that the pages exist."""
    layout = PageLayout("uint8", 1, 1, 1, 0, 1, 1, 1 << 20, OURS)
    return allocate_blocks(layout, num_bytes >> 20, torch.device("cpu")).reshape(-1).numpy()


@contextmanager
def source() -> Iterator[tuple[bytes, int]]:
    """Starts another process with memory to read. Yields its metadata and its address."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()  # without this call, the parent would never notice that the process has died
    try:
        yield ours.recv()
    finally:
        ours.send(None)
        process.join(10)


def wire(repeats: int) -> list[Row]:
    """READs of runs of several lengths."""
    rng = np.random.default_rng(0)
    memory = _buffer(SOURCE_BYTES)
    rows: list[Row] = []
    agent = Agent("plan-reader")
    agent.register([(memory.ctypes.data, memory.nbytes, 0)])
    with source() as (metadata, address):
        agent.add_peer("plan-source", metadata)
        for length in (256, 1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20):
            slots = SOURCE_BYTES // (2 * length)
            count = min(slots, 4096)
            places = [rng.permutation(slots)[:count] * 2 * length for _ in range(2)]
            runs = Runs(places[0] + memory.ctypes.data, places[1] + address, np.full(count, length))
            descriptors = runs.descriptors()

            def read(given: tuple[NDArray[np.uint64], NDArray[np.uint64]]) -> None:
                handle, done = agent.post("READ", "plan-source", *given)
                while not done:
                    time.sleep(50e-6)  # leaves the shared core to NIXL's thread for a moment
                    done = agent.done(handle)
                agent.release(handle)

            times = samples(repeats, lambda given=descriptors: given, read)
            rows.append({"case": "wire", "run_bytes": length, "runs": count, **summary(times), **_rate(runs, times)})
    agent.close()
    return rows


def copies(repeats: int) -> list[Row]:
    """Copies of buffers to their final pages."""
    rng = np.random.default_rng(0)
    rows: list[Row] = []
    for dim, page_size, ours, theirs in (
        (32, 16, OURS, NHD),
        (64, 16, OURS, NHD),
        (128, 16, OURS, NHD),
        (128, 16, NHD, HND),
        (128, 64, OURS, NHD),
        (256, 16, OURS, NHD),
        (128, 16, OURS, HND),
    ):
        sizes = {"layers": 4, "dim": dim}
        one = page(page_size=page_size, **sizes).page_bytes
        count, pool = BUFFER_BYTES // one, SOURCE_BYTES // one
        local, remote = (dense(page(page_size=page_size, order=order, **sizes), pool) for order in (ours, theirs))
        made, tokens, pages = plan(local, remote), (0, count * page_size), rng.permutation(pool)[:count]
        staging, memory, staged = made.staging(0), _buffer(SOURCE_BYTES), _buffer(BUFFER_BYTES)
        runs = made.runs(0, pages, pages, tokens)

        def home(_: object, staging=staging, given=(pages, tokens, staged, [memory])) -> None:  # noqa: ANN001
            staging.permute(*given)

        times = samples(repeats, lambda: None, home)
        case = f"copy, {ours.replace(',', ' ')} from {theirs.replace(',', ' ')}, page {page_size}"
        row = {"case": case, "runs": len(runs), "run_bytes": int(runs.length[0])}
        rows.append(row | summary(times) | _rate(runs, times))
    return rows


def _rate(runs: Runs, times: Sequence[float]) -> Row:
    return {"gbps": round(runs.num_bytes / min(times) / 1e3, 2)}


def fitted(rows: Sequence[Row], case: str) -> Row:
    """Returns the cost of a run and the cost of a byte for which the relative errors of the rows are smallest."""
    times = np.array([row["us_min"] for row in rows])
    sizes = np.array([[row["runs"], row["runs"] * row["run_bytes"]] for row in rows], float)
    run_us, byte_us = np.linalg.lstsq(sizes / times[:, None], np.ones(len(times)), rcond=None)[0]
    worst = float(np.abs(sizes @ [run_us, byte_us] / times - 1).max())
    return {
        "case": case,
        "run_ns": round(run_us * 1e3, 1),
        "byte_gbps": round(1e-3 / byte_us, 2),
        "off": round(worst, 2),
    }


def main() -> None:
    """Runs the benchmark and reports its rows."""
    chosen = options(__doc__)
    pin()
    repeats = 20 if chosen.quick else 100
    begin = time.monotonic()
    rows = contact(repeats) + pulls(repeats)
    on_wire, home = wire(max(9, repeats // 5)), copies(max(9, repeats // 5))
    rows += [*on_wire, *home, fitted(on_wire, "wire, fitted"), fitted(home, "copy, fitted")]
    report("plan", rows, chosen)
    print(f"{time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
