"""What do retention hints gain on public traces, and what do wrong hints cost?

The real manager runs the traces of `benchmarks.trace_replay` with hints that are derived from the rest of the trace.
The hints are all right, 20 % wrong, all inverted, or left out. Without hints there must be exactly as many hits as with
the reference LRU.
"""

from __future__ import annotations

import sys

from benchmarks.frame import Row, options, pin, progress, report
from benchmarks.pools import expect
from benchmarks.trace_replay import COUNTED, FOLDER, TRACES
from pagewire.replay.plots import CAPACITIES, sweep_capacities
from pagewire.replay.replay import load_trace


def measure(name: str, capacities: tuple[int, ...]) -> list[Row]:
    """The rows of one trace. `points` is the hit rate minus that of a plain LRU, in percentage points."""
    rows = sweep_capacities(load_trace(FOLDER / name), capacities, note=lambda row: progress(f"{name}: {row}"))
    for row in rows:
        row["points"] = round(row["hit_pct"] - row["lru_pct"], 2)
        expect(row["hints"] != "none" or row["hit_pct"] == row["lru_pct"], "without hints it is the reference LRU")
    return [{"trace": name.split("_", maxsplit=1)[0], **row} for row in rows]


def main() -> int:
    """Runs the benchmark and reports its rows.

    The exit status is 0 even if there are no traces, because they are not part of the project.
    """
    chosen = options(__doc__)
    pin()
    missing = [name for name in TRACES if not (FOLDER / name).exists()]
    if missing:
        progress(f"trace_hints: no {missing[0]} in {FOLDER}; PAGEWIRE_TRACES names another folder")
        return 0
    capacities = (5000,) if chosen.quick else CAPACITIES
    report("trace_hints", [row for name in TRACES for row in measure(name, capacities)], chosen, COUNTED)
    return 0


if __name__ == "__main__":
    sys.exit(main())
