"""How much memory does a pool of a million published pages take, and how long does it take to build?

Each row runs in its own process, and measures how much the memory of that process grows. The contents of the pages
(here one byte for each token) are subtracted. `arrays` is the total size of the manager's arrays. `rss` is the kernel's
figure after malloc has returned its free memory. `freed` is that returned memory, which held tokens and digests of the
released requests that filled the pool. How much malloc keeps of it varies from run to run. `gc` is a full garbage
collection with the pool full, and `gc_before` is one before the manager was made.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from benchmarks.frame import Row, now, options, pin, report, timed
from benchmarks.pools import Prompts, claimed, compute, expect, manager_of, reserve
from kvcache import PagedKVCacheManager

PROMPT_PAGES = 2048
_CHILD = "import json; from benchmarks.memory import weigh; print(json.dumps(weigh({pages}, {algorithm!r})))"


def resident() -> int:
    """The resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def trimmed() -> int:
    """`resident` after malloc has returned its free memory."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # only glibc has it
        trim(0)
    return resident()


def arrays_of(manager: PagedKVCacheManager) -> int:
    """Returns the total bytes of all arrays that the manager's replicas refer to, without the contents of the pages."""
    seen: set[int] = set()
    total = 0
    waiting: list[object] = list(manager._replicas.each)  # noqa: SLF001 - what it weighs is inside
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, np.ndarray):
            # A view has no memory of its own.
            total += one.nbytes if one.base is None else 0
            waiting += [] if one.base is None else [one.base]
        elif type(one).__module__.startswith("kvcache"):
            waiting += _parts(one)
    return total


def _parts(one: object) -> Iterable[object]:
    names = [name for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ())]
    return [*getattr(one, "__dict__", {}).values(), *(getattr(one, name) for name in names if hasattr(one, name))]


def gc_pass() -> float:
    """Milliseconds of a full collection that finds nothing."""
    gc.collect()
    return round(timed(lambda _: gc.collect(), None) / 1e3, 2)


def fill(manager: PagedKVCacheManager, prompts: Prompts) -> None:
    """Publish every page of the pool, then release all of them."""
    left, requests = manager.total_num_pages, []
    while left:
        count = min(left, PROMPT_PAGES)
        context = prompts.claimed(manager, count * manager.page_size)
        reserve(manager, context)
        compute(manager, context)
        requests.append(context.request_id)
        left -= count
    for request_id in requests:
        manager.release(request_id)


def weigh(pages: int, algorithm: str) -> Row:
    """Measures one row in this process."""
    prompts = Prompts()
    requests = -(-pages // PROMPT_PAGES)
    small = manager_of(PROMPT_PAGES, rows=requests, max_seq_len=PROMPT_PAGES * 16, algorithm=algorithm)
    fill(small, prompts)  # first use of libraries, whose memory would otherwise count for the pages
    before, objects, gc_before = trimmed(), len(gc.get_objects()), gc_pass()
    start = now()
    manager = manager_of(pages, rows=requests, max_seq_len=PROMPT_PAGES * 16, algorithm=algorithm)
    built = (now() - start) / 1e6
    for _ in range(2):  # after two rounds, the memory of every page has been written
        fill(manager, prompts)
    gc.collect()
    blocks = sum(block.untyped_storage().nbytes() for shards in manager.device_tensors for block in shards)
    # the block tables of running requests are not part of the pool, and are reported separately
    table = requests * PROMPT_PAGES * 4
    kept = resident()
    grown = trimmed() - before - blocks
    row: Row = {
        "pages": pages,
        "hash": algorithm,
        "arrays_B_per_page": round((arrays_of(manager) - table) / pages, 1),
        "rss_B_per_page": round((grown - table) / pages, 1),
        "freed_B_per_page": round((kept - before - blocks - grown) / pages, 1),
        "build_ms": round(built, 1),
        "gc_ms": gc_pass(),
        "gc_before_ms": gc_before,
        "objects": len(gc.get_objects()) - objects,
    }
    last = claimed(manager, Prompts().tokens(17))
    reserve(manager, last)
    expect(manager.metrics.evictions == pages + 2, "every page was published, and is evicted when one is wanted")
    return row


def child(pages: int, algorithm: str) -> Row:
    """Measures one row in a new process."""
    script = _CHILD.format(pages=pages, algorithm=algorithm)
    run = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True)  # noqa: S603 - ourselves
    return json.loads(run.stdout)


def main() -> None:
    """Runs the benchmark and reports its rows."""
    chosen = options(__doc__)
    pin()  # the child processes inherit the core
    sizes = (100_000, 1_000_000) if chosen.quick else (10_000, 100_000, 1_000_000, 4_000_000)
    rows = [child(pages, algorithm) for algorithm in ("sha256", "xxh3_128") for pages in sizes]
    report("memory", rows, chosen, "one sample a row: every figure is as it was found once")


if __name__ == "__main__":
    main()
