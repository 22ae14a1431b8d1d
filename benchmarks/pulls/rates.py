"""Times one case in a loop in which our pull, parts of our pull, and the machine's limit alternate.

Each program reads pages that no other program has just read.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter_ns as now

import numpy as np

from benchmarks.frame import Row, settle
from benchmarks.pulls.cases import Case
from benchmarks.pulls.copies import Reads, copy_pages, read_process, reads_of
from benchmarks.pulls.engines import TOKENS, Memory, huge_pages, verify
from benchmarks.pulls.reader import Pages, Reader, Times, draw
from benchmarks.pulls.source import SourceProcess

LIMIT = "process_vm_readv"
SPUN, THREADED = "pagewire", "pagewire, thread"
_LEAST, _MOST = 9, 400
_WORKING_SET = 48 << 20
"""In bytes: more than the processor's caches hold, so that no program finds data in the caches that the previous
program has read.
"""
_FEWEST_SETS, _MOST_SETS = 8, 256

Program = Callable[[int], Times]
"""A program: it reads the set of pages with this index."""


def measure(case: Case, budget_s: float) -> list[Row]:
    """A row for each program."""
    source_spec, spec = case.specs()
    with SourceProcess(source_spec) as source:
        reader = Reader(spec, source, source_spec)
        try:
            rng = np.random.default_rng(0)
            count = min(max(_WORKING_SET // case.num_bytes, _FEWEST_SETS), _MOST_SETS)
            tokens = case.pages * TOKENS
            sets = [draw(rng, spec, source_spec, tokens, scattered=case.scattered) for _ in range(count)]
            for one in sets:
                reader.pull(one, source.lease())
            verify((spec, reader.engine), source_spec, sets[-1].local, sets[-1].remote)
            runs = sum(len(local) for local, _ in reader.runs(sets[0]))
            limit = _limit(source.address.pid, [reads_of(reader.runs(one)) for one in sets])
            spun = {SPUN: _leased(reader.pull, sets, source), LIMIT: limit} | _others(case, reader, sets)
            rows = _rows(case, spec.page_bytes, runs, in_turn(spun, count, budget_s, source))
            threaded = {THREADED: _leased(reader.pull_by_thread, sets, source), LIMIT: limit}
            return rows + _rows(case, spec.page_bytes, runs, in_turn(threaded, count, budget_s / 2, source))[:1]
        finally:
            reader.close()


def _leased(pull: Callable[..., Times], sets: Sequence[Pages], source: SourceProcess) -> Program:
    return lambda at: pull(sets[at], source.lease())


def _limit(pid: int, reads: Sequence[Reads]) -> Program:
    return lambda at: _timed(lambda: read_process(pid, reads[at]))


def _others(case: Case, reader: Reader, sets: Sequence[Pages]) -> dict[str, Program]:
    """Returns the programs that can run only if both sides have equal layouts."""
    if case.topology != "equal" or len(reader.engine.regions[0]) > 1:
        return {}
    pool: Memory = reader.engine.regions[0][0]
    pages = pool.reshape(reader.spec.pages, -1)
    target = huge_pages(case.num_bytes).reshape(case.pages, -1)
    ids = [one.remote.astype(np.int64) for one in sets]
    return {
        "nixl, one descriptor": lambda _: reader.read_whole(case.num_bytes),
        "memcpy": lambda at: _timed(lambda: copy_pages(target, pages, ids[at])),
    }


def _timed(call: Callable[[], None]) -> Times:
    start = now()
    call()
    took = (now() - start) / 1e3
    return Times(took, took)


def in_turn(
    programs: dict[str, Program], sets: int, budget_s: float, source: SourceProcess | None = None
) -> dict[str, list[Times]]:
    """Runs all programs alternately for some seconds.

    There are as many rounds as sets, so that each program uses every set once. The source's processor time is counted
    only for our pull, because only our pull makes the source work: it handles the lease and the notification.
    """
    times: dict[str, list[Times]] = {name: [] for name in programs}
    stride = max(sets // len(programs), 1)
    settle()
    end = time.monotonic() + budget_s
    for at in range(_MOST):
        if at >= _LEAST and time.monotonic() > end:
            break
        for place, (name, program) in enumerate(programs.items()):
            theirs = source if source and name in {SPUN, THREADED} else None
            before = _cpu_ns(theirs)
            found = program((at + place * stride) % sets)
            times[name].append(found._replace(cpu=(_cpu_ns(theirs) - before) / 1e3))
    return times


def _cpu_ns(source: SourceProcess | None) -> int:
    return time.process_time_ns() + (source.cpu_ns() if source else 0)


def _rows(case: Case, page_bytes: int, runs: int, times: dict[str, list[Times]]) -> list[Row]:
    return list(_each_row(case, page_bytes, runs, times))


def _each_row(case: Case, page_bytes: int, runs: int, times: dict[str, list[Times]]) -> Iterator[Row]:
    limits = [one.total for one in times[LIMIT]]
    # the mean, because the work of a NIXL thread or of the source may be counted for the next pull
    cpu = {name: max(1.0, statistics.mean(one.cpu for one in found)) for name, found in times.items()}
    for name, found in times.items():
        totals = [one.total for one in found]
        yield {
            "program": name,
            "topology": case.topology,
            "order": case.order,
            "access": "random" if case.scattered else "contiguous",
            "memory": "huge pages" if case.huge else "4 KiB pages",
            "page_bytes": page_bytes,
            "pages": case.pages,
            "runs": runs,
            "gbps": round(case.num_bytes / min(totals) / 1e3, 2),
            "limit_gbps": round(case.num_bytes / min(limits) / 1e3, 2),
            "ratio": round(min(limits) / min(totals), 3),
            "ratio_median": round(statistics.median(a / b for a, b in zip(limits, totals, strict=True)), 3),
            "cpu_ratio": round(cpu[LIMIT] / cpu[name], 3),
            "cpu_us": round(cpu[name], 1),
            "host_us": round(min(one.host for one in found), 1),
            "us": round(min(totals), 1),
            "us_median": round(statistics.median(totals), 1),
            "n": len(found),
        }
