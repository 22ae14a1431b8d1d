"""What does a request of a public trace cost, and does a long replay leave anything behind?

The real manager replays the traces of `../shared/data/mooncake`, or of the folder that PAGEWIRE_TRACES names.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

from benchmarks.frame import Row, options, pin, progress, report
from pagewire.replay.replay import load_trace, replay

FOLDER = Path(os.environ.get("PAGEWIRE_TRACES", Path(__file__).resolve().parents[2] / "shared" / "data" / "mooncake"))
COUNTED = "hits are counted; us_per_request_p50: median of all requests of a replay"
TRACES = ("conversation_trace.jsonl", "synthetic_trace.jsonl")


def measure(name: str, capacity: int) -> Row:
    """Replays one trace and returns its row.

    The row has the hits, the hits of the reference LRU and of the optimum, the cost of a request, and the growth of
    memory. `rss_growth_kib` is how much resident memory grows in the second half of the replay, in KiB. This growth
    includes 8 bytes for each request, for the list of times that this function keeps. The replay itself checks that no
    page is held at the end.
    """
    trace, resident = load_trace(FOLDER / name), list[int]()

    def note(_: int) -> None:
        done[0] += 1
        if done[0] in (len(trace) // 2, len(trace)):
            gc.collect()
            resident.append(_resident_kib())

    done = [0]
    result = replay(trace, capacity, progress=note)
    return {
        "trace": name.split("_", maxsplit=1)[0],
        "blocks": capacity,
        "requests": result.requests,
        "hits": result.hits,
        "reference_lru": result.reference_lru_hits,
        "optimum": result.optimum_hits,
        "hit_pct": round(100 * result.hit_rate, 2),
        "us_per_request_p50": round(result.us_per_request_p50, 1),
        "rss_growth_kib": resident[1] - resident[0],
    }


def _resident_kib() -> int:
    """The resident memory of this process in KiB; 0 if /proc does not have it."""
    path = Path("/proc/self/statm")
    return int(path.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024 if path.exists() else 0


def main() -> int:
    """Runs the benchmark and reports its rows.

    The exit status is 0 even if there are no traces, because they are not part of the project.
    """
    chosen = options(__doc__)
    pin()
    missing = [name for name in TRACES if not (FOLDER / name).exists()]
    if missing:
        progress(f"trace_replay: no {missing[0]} in {FOLDER}; PAGEWIRE_TRACES names another folder")
        return 0
    capacities = (5000,) if chosen.quick else (1000, 5000, 10_000, 30_000)
    report("trace_replay", [measure(name, capacity) for name in TRACES for capacity in capacities], chosen, COUNTED)
    return 0


if __name__ == "__main__":
    sys.exit(main())
