"""Measures single figures: latency, the cost of the fence, how long the caller waits, first contact, and host time."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter_ns as now
from typing import Any

import numpy as np

from benchmarks.frame import Row, samples
from benchmarks.pulls.cases import KIB, Case
from benchmarks.pulls.engines import TOKENS, Spec, verify
from benchmarks.pulls.rates import Program, in_turn
from benchmarks.pulls.reader import Pages, Reader, Times, draw
from benchmarks.pulls.source import SourceProcess
from transfer.plan.shapes import PACKED_HND

REGIONS, PAGES = 64, 2048
Running = tuple[Reader, SourceProcess, list[Pages]]


def row(question: str, values: Sequence[float], unit: str, goal: float | None = None) -> Row:
    """A row with the minimum and the median of a figure's samples."""
    return {
        "question": question,
        "min": round(min(values), 3),
        "median": round(statistics.median(values), 3),
        "unit": unit,
        "goal": goal,
        "n": len(values),
    }


@contextmanager
def running(specs: tuple[Spec, Spec], pages: int, sets: int) -> Iterator[Running]:
    """Starts a source and a reader. Draws some sets of random pages, and pulls each set once before it yields."""
    source_spec, spec = specs
    with SourceProcess(source_spec) as source:
        reader = Reader(spec, source, source_spec)
        try:
            rng = np.random.default_rng(0)
            drawn = [draw(rng, spec, source_spec, pages * TOKENS, scattered=True) for _ in range(sets)]
            for one in drawn:
                reader.pull(one, source.lease())
            verify((spec, reader.engine), source_spec, drawn[-1].local, drawn[-1].remote)
            yield reader, source, drawn
        finally:
            reader.close()


def latency(budget_s: float) -> Iterator[Row]:
    """The latency of a pull of one page of 64 KiB."""
    with running(Case("equal", "head-major", 64 * KIB, 1).specs(), 1, 256) as (reader, source, sets):
        pulls = _pulls({"spun": reader.pull, "thread": reader.pull_by_thread}, source, sets)
        spun = in_turn({"spun": pulls["spun"]}, len(sets), budget_s)["spun"]
        yield row("one page of 64 KiB, fence included", [one.total for one in spun], "µs", 30)
        by_thread = in_turn({"thread": pulls["thread"]}, len(sets), budget_s)["thread"]
        yield row("the same through the transfer thread", [one.total for one in by_thread], "µs")


def fence(budget_s: float) -> Iterator[Row]:
    """The cost of the fence: a second READ, of 8 bytes, which carries the notification."""
    for pages in (1, PAGES):
        with running(Case("equal", "head-major", 64 * KIB, pages).specs(), pages, 256 if pages == 1 else 8) as found:
            reader, source, sets = found
            alone = {name: partial(reader.pull_of_rank, fenced=name == "with") for name in ("with", "without")}
            times = in_turn(_pulls(alone, source, sets), len(sets), budget_s)
            with_fence, without = ([one.total for one in times[name]] for name in ("with", "without"))
            if pages == 1:
                added = min(with_fence) - min(without)
                middle = statistics.median(with_fence) - statistics.median(without)
                yield row("fence of one page of 64 KiB", [added], "µs", 20) | {"median": round(middle, 3)}
            else:
                share = 100 * (min(with_fence) / min(without) - 1)
                middle = 100 * (statistics.median(a / b for a, b in zip(with_fence, without, strict=True)) - 1)
                yield row(f"fence of {pages:,} pages of 64 KiB", [share], "%", 2) | {"median": round(middle, 3)}


def caller(budget_s: float) -> Iterator[Row]:
    """How long a pull of 2,048 pages in the transfer thread delays a serving loop."""
    with running(Case("equal", "head-major", 64 * KIB, PAGES).specs(), PAGES, 8) as (reader, source, sets):
        reader.start_thread()
        times = in_turn(_pulls({"": reader.pull_by_thread}, source, sets), len(sets), budget_s)[""]
        yield row("caller blocked by a pull of 2,048 pages", [one.host / 1e3 for one in times], "ms", 0.5)
        beside = in_turn(_pulls({"": reader.pull_beside_loop}, source, sets), len(sets), budget_s)[""]
        yield row("longest halt of a Python loop beside it", [one.stall / 1e3 for one in beside], "ms")
        rate = [PAGES * 64 * KIB / one.total / 1e3 for one in beside]
        yield row("rate of such a pull beside a Python loop", [-value for value in rate], "GB/s") | {
            "min": round(max(rate), 3),
            "median": round(statistics.median(rate), 3),
        }


def host(budget_s: float) -> Iterator[Row]:
    """Host time for a pull of 2,048 pages in 64 tensors, one for each layer: 131,072 runs of 4 KiB."""
    fields: dict[str, Any] = {"layers": REGIONS, "heads": 1, "pages": PAGES * 5 // 4, "order": PACKED_HND}
    specs = Spec(name="source", **fields), Spec(name="reader", **fields)
    with running(specs, PAGES, 4) as (reader, source, sets):
        times = in_turn(_pulls({"": reader.pull}, source, sets), len(sets), budget_s)[""]
        yield row("2,048 pages × 64 regions: until the call returns", [one.host / 1e3 for one in times], "ms")
        yield row("2,048 pages × 64 regions: the whole pull", [one.total / 1e3 for one in times], "ms")
        built = samples(9, lambda: sets[0], reader.parts)
        yield row("2,048 pages × 64 regions: build the runs", [one / 1e3 for one in built], "ms", 1)
    with running(Case("equal", "head-major", 64 * KIB, PAGES).specs(), PAGES, 2) as (reader, _, sets):
        built = samples(50, lambda: sets[0], reader.parts)
        yield row("2,048 pages, head-major: build the runs", [one / 1e3 for one in built], "ms", 1)


def first_contact(rounds: int) -> Iterator[Row]:
    """Measures the host time of the work that is done once for each peer, which has 64 layers of 100,000 pages each."""
    fields: dict[str, Any] = {"layers": REGIONS, "heads": 1, "head_dim": 1, "pages": 100_000, "order": PACKED_HND}
    host_ms: list[float] = []
    total_ms: list[float] = []
    for at in range(rounds):
        source_spec, spec = Spec(name="source", **fields), Spec(name=f"reader {at}", **fields)
        with SourceProcess(source_spec, filled=False) as source:
            reader = Reader(spec, source, source_spec)
            rank = reader.replica.ranks[0]
            connected = [_timed_method(rank, name) for name in ("inspect", "load")]
            pages = Pages(np.arange(8, dtype=np.int32), np.arange(8, dtype=np.int32), 8 * TOKENS)
            total_ms.append(reader.pull(pages, source.lease()).total / 1e3)
            host_ms.append(sum(map(sum, connected)) / 1e3)
            reader.close()
    yield row("first contact, 64 layers × 100,000 pages: host", host_ms, "ms", 5)
    yield row("first contact: until the first pages are here, handshake included", total_ms, "ms")


def _timed_method(owner: Any, name: str) -> list[float]:
    """Replaces a method with one that records the microseconds of each call. Returns the list of these times."""
    took: list[float] = []
    method = getattr(owner, name)

    def timed(*arguments: Any, **named: Any) -> Any:
        start = now()
        try:
            return method(*arguments, **named)
        finally:
            took.append((now() - start) / 1e3)

    setattr(owner, name, timed)
    return took


def _pulls(pulls: dict[str, Callable[..., Times]], source: SourceProcess, sets: Sequence[Pages]) -> dict[str, Program]:
    def leased(pull: Callable[..., Times]) -> Program:
        return lambda at: pull(sets[at], source.lease())

    return {name: leased(pull) for name, pull in pulls.items()}
