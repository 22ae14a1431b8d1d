"""Our side of `benchmarks.rivals`.

It measures fetches, plain pulls, and fetches during which the source dies. It prints JSON lines.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec
import torch

from benchmarks.frame import Row, progress, settle, summary
from benchmarks.pools import expect
from benchmarks.pulls.cases import Case
from benchmarks.pulls.figures import running
from benchmarks.pulls.rates import SPUN, THREADED, Program, in_turn
from benchmarks.pulls.reader import Pages, Times
from benchmarks.pulls.source import SourceProcess
from benchmarks.rivals.bare_socket import BareSocket
from benchmarks.rivals.faults import faults
from benchmarks.rivals.fetcher import Fetcher, FetchTimes
from benchmarks.rivals.lender import LenderProcess, Setting, quiet
from transfer import LeaseRef

ASKED, PULLED, SOCKET = "ours, ask to published", "ours, of it the pull", "bare socket"
FIRST = "ours, first contact"
PLAIN = {SPUN: "ours, plain pull", THREADED: "ours, plain pull by the thread"}
_LEAST, _LEAST_OVER_LINK, _MOST = 9, 3, 2000
_MOST_PROMPTS = 512
_SPARE = 32  # spare pages of the pool, so that computing a prompt evicts no other prompt


def row_of(program: str, blocks: int, page_bytes: int, times: Sequence[float], cpu_s: float | None) -> Row:
    """A row: microseconds, and the processor seconds of both processes per gigabyte."""
    size = blocks * page_bytes
    return {
        "program": program,
        "blocks": blocks,
        "block_bytes": page_bytes,
        **summary(times),
        "gbps": round(size / min(times) / 1e3, 3),
        "cpu_s_per_gb": None if cpu_s is None else round(cpu_s / (size * len(times) / 1e9), 3),
    }


def fetches(
    setting: Setting, reader: Fetcher, lender: LenderProcess, blocks: int, budget_s: float, bare: BareSocket | None
) -> Iterator[Row]:
    """Times fetches of uncached prompts of equal length. They alternate with a bare socket."""
    count = min((setting.pages - _SPARE) // blocks, _MOST_PROMPTS)
    expect(count > 1, f"a pool of {setting.pages} pages has room for two prompts of {blocks}")
    lender("lay_out", count, blocks)
    reader.forget()
    _, first = reader.fetch(0, blocks)
    expect(not first.wrong_pages(), "what was fetched is what the source computed")
    runs = first.num_runs()
    first.release()
    times, through, cpu_ns = list[FetchTimes](), list[float](), 0
    read_before, _ = reader.exchange.totals()
    settle()
    end = time.monotonic() + budget_s
    least = _LEAST if bare is None else _LEAST_OVER_LINK
    while len(times) < least or (time.monotonic() < end and len(times) < _MOST):
        number = (len(times) + 1) % count
        if not number and count * blocks <= reader.manager.total_num_pages:
            reader.forget()
        before = time.process_time_ns() + lender.cpu_ns()
        took, fetch = reader.fetch(number, blocks)
        cpu_ns += time.process_time_ns() + lender.cpu_ns() - before
        fetch.release()
        times.append(took)
        if bare is not None:
            through.append(bare.receive(blocks * setting.page_bytes))
    read = reader.exchange.totals()[0] - read_before
    expect(read == len(times) * blocks * setting.page_bytes, f"every page is read, and not {read} bytes in all")
    order = {"access": "random" if setting.scattered else "contiguous", "runs": runs}
    digests = round(statistics.median(one.digests for one in times), 1)
    size = setting.page_bytes
    yield row_of(ASKED, blocks, size, [one.total for one in times], cpu_ns / 1e9) | order | {"digests_us": digests}
    yield row_of(PULLED, blocks, size, [one.pull for one in times], None) | order
    if through:
        yield row_of(SOCKET, blocks, size, through, None)


def first_contacts(setting: Setting, lender: LenderProcess, blocks: int) -> Row:
    """Times fetches by new readers, from the query to published pages."""
    times = list[float]()
    for _ in range(_LEAST_OVER_LINK):
        lender("lay_out", 2, blocks)
        with Fetcher(setting, lender) as reader:
            took, fetch = reader.fetch(0, blocks)
            fetch.release()
            times.append(took.total)
    return row_of(FIRST, blocks, setting.page_bytes, times, None)


def _leased(pull: Callable[[Pages, LeaseRef], Times], pages: Sequence[Pages], source: SourceProcess) -> Program:
    return lambda at: pull(pages[at], source.lease())


def plain(blocks: int, budget_s: float) -> Iterator[Row]:
    """Times pulls of random pages without managers, under a lease that exists already."""
    case = Case("equal", "head-major", 64 << 10, blocks)
    sets = min(max((48 << 20) // case.num_bytes, 8), 256)
    with running(case.specs(), blocks, sets) as (reader, source, pages):
        for name, pull in ((SPUN, reader.pull), (THREADED, reader.pull_by_thread)):
            times = in_turn({name: _leased(pull, pages, source)}, len(pages), budget_s, source)[name]
            cpu_s = sum(one.cpu for one in times) / 1e6
            found = row_of(PLAIN[name], blocks, case.page_bytes, [one.total for one in times], cpu_s)
            yield found | {"access": "random", "runs": blocks}


def arguments() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rivals.ours", description=__doc__)
    parser.add_argument("--setting", default="{}", help="a `Setting` as JSON")
    parser.add_argument("--prefix", default="[]", help="JSON list: a command that runs the source on its host")
    parser.add_argument("--blocks", default="1,16,256,2048", help="numbers of blocks of a fetch, with commas between")
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds for each number of blocks")
    parser.add_argument("--plain", action="store_true", help="also measure pulls without managers")
    parser.add_argument("--socket", action="store_true", help="alternate with a bare socket")
    parser.add_argument("--faults", action="store_true", help="measure only fetches whose source dies or evicts")
    return parser.parse_args()


def main() -> None:
    """Runs the benchmark and prints its rows."""
    chosen = arguments()
    quiet()
    torch.set_num_threads(1)
    setting = msgspec.json.decode(chosen.setting, type=Setting)
    prefix = json.loads(chosen.prefix)
    every = [int(blocks) for blocks in chosen.blocks.split(",")]
    if chosen.faults:
        show(faults(setting, prefix, every[-1]))
        return
    with LenderProcess(setting, prefix) as lender, Fetcher(setting, lender) as reader:
        bare = BareSocket(setting.address, lender("listen")) if chosen.socket else None
        for blocks in every:
            show(fetches(setting, reader, lender, blocks, chosen.seconds, bare))
            progress(f"ours: {blocks} blocks")
        if bare is not None:
            show(first_contacts(setting, lender, blocks) for blocks in every)
    if chosen.plain:
        for blocks in every:
            show(plain(blocks, chosen.seconds))


def show(rows: Iterator[Row]) -> None:
    """Prints the rows, one in each line."""
    for row in rows:
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
