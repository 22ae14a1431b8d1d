"""If a pool is divided into replicas, how many of its hits remain, and how even is their load?

The traces of `benchmarks.trace_replay` are replayed with 10,000 blocks in all, for each rule that chooses a replica.
"""

from __future__ import annotations

import sys

from benchmarks.frame import Row, options, pin, progress, report
from benchmarks.trace_replay import COUNTED, FOLDER, TRACES
from pagewire.replay.plots import REPLICAS, sweep_replicas
from pagewire.replay.replay import load_trace

CAPACITY = 10_000


def measure(name: str, counts: tuple[int, ...]) -> list[Row]:
    """The rows for one trace."""
    rows = sweep_replicas(load_trace(FOLDER / name), CAPACITY, counts, note=lambda row: progress(f"{name}: {row}"))
    for row in rows:
        for column in ("window_load_mean", "window_load_max"):
            row[column] = row[column] and round(row[column], 3)
    return [{"trace": name.split("_", maxsplit=1)[0], **row} for row in rows]


def main() -> int:
    """Runs the benchmark and reports its rows.

    The exit status is 0 even if there are no traces, because they are not part of the project.
    """
    chosen = options(__doc__)
    pin()
    missing = [name for name in TRACES if not (FOLDER / name).exists()]
    if missing:
        progress(f"trace_routing: no {missing[0]} in {FOLDER}; PAGEWIRE_TRACES names another folder")
        return 0
    rows = [row for name in TRACES for row in measure(name, (8,) if chosen.quick else REPLICAS)]
    report("trace_routing", rows, chosen, COUNTED)
    return 0


if __name__ == "__main__":
    sys.exit(main())
