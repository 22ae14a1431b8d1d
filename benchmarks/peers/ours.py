"""Our side of `benchmarks.peers`. It prints as JSON the same figures as the peers' scripts, under the same names."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable

from benchmarks import admission, decode_step, evict, growing_conversation, memory, release
from benchmarks.frame import Row, now, options, pin
from benchmarks.peers.our_pulls import pulls

POOL = 1 << 15


def decoding(repeats: int) -> Iterable[tuple[str, Row]]:
    """Decode steps with 1 and 1,024 requests."""
    for page in (16, 128):
        for batch in (1, 1024):
            for row in decode_step.measure(batch, page, repeats):
                yield f"decode {page} {batch} {row['calls']}", row


def prompts(repeats: int) -> Iterable[tuple[str, Row]]:
    """Reservations of prompts. The pool has room for 14 prompts, as with the peers."""
    for page in (16, 128):
        for length in (4096, 32_768):
            for algorithm in ("sha256", "xxh3_128"):
                pages = 14 * length // page
                rows = admission.measure(pages, page, length, algorithm, repeats, ("new", "full"))
                new = {row["case"]: row for row in rows if row["pool"] == "new"}
                new["evicting"] = next(row for row in rows if row["case"] == "evicting")
                new["admit"] = {
                    column: round(new["cold"][column] + new["publish"][column], 2) for column in ("us_min", "us_median")
                }
                for case, row in new.items():
                    yield f"{case} {page} {length} {algorithm}", row


def pages(repeats: int, *, quick: bool) -> Iterable[tuple[str, Row]]:
    """Release and evict."""
    for row in release.measure(POOL, 16, repeats):
        if row["case"] == "published":
            yield "release 16 32768", row
    for size in (POOL, 100_000) if quick else (POOL, 4_000_000):
        row = evict.measure(size, (2048,), repeats)[0]
        yield f"evict {size}", {"us_min": row["evict_min"], "us_median": row["evict_median"]}
    for row in growing_conversation.measure(32_768, "sha256", repeats):
        yield f"next turn {row['context']}", row


def weights() -> Iterable[tuple[str, Row]]:
    """The memory of a pool of a million pages."""
    row = memory.child(1_000_000, "sha256")
    for name, column, factor in (
        ("memory 1M", "rss_B_per_page", 1),
        ("build 1M", "build_ms", 1e3),
        ("gc 1M", "gc_ms", 1e3),
    ):
        yield name, {"us_min": row[column] * factor, "us_median": row[column] * factor}


def main() -> None:
    """Runs the benchmark and prints its rows."""
    chosen = options(__doc__)
    pin()
    # about as many samples as the peers' scripts take, because more samples would give lower minima
    repeats = 6 if chosen.quick else 15
    steps = 64 if chosen.quick else 256
    for rows in (
        decoding(steps),
        prompts(repeats),
        pages(repeats, quick=chosen.quick),
        weights(),
    ):
        show(rows)
    if now is time.thread_time_ns:
        return  # a pull uses other threads too, which this thread's processor time leaves out
    os.sched_setaffinity(0, range(os.cpu_count() or 1))  # a pull also needs a core for the source and for NIXL's thread
    show(pulls(0.5 if chosen.quick else 3.0))


def show(rows: Iterable[tuple[str, Row]]) -> None:
    """Prints figures with their names."""
    for name, row in rows:
        print(json.dumps({"name": name, "min": row["us_min"], "med": row["us_median"]}), flush=True)


if __name__ == "__main__":
    main()
