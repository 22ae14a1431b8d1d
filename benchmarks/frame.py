"""Code that all benchmarks share.

It pins a core, warms up, takes minima and medians, and writes a header. The garbage collector stays on, because a
collection that our calls cause is part of their cost. As in servers, the objects of imported modules are frozen first,
because collecting them is not part of that cost.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import logging
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.measured import PACKAGES, ROOT, measured

Row = dict[str, Any]

HEADER = ("command", "commit", "uncommitted", "date", "statistics", "machine", "versions", "measures")
"""Every result begins with these keys."""
MINIMA_AND_MEDIANS = "columns *_min and *_median: minimum and median of the n samples of a row"
_LOAD_BEFORE = round(os.getloadavg()[0], 2)  # read first, so that it does not include the load of this process

WARM_UP = 3
CLOCK_VARIABLE = "BENCH_CLOCK"
"""`cpu` counts the processor time of this thread instead of wall time, for machines that have other work to do."""
now: Callable[[], int] = time.thread_time_ns if os.environ.get(CLOCK_VARIABLE) == "cpu" else time.perf_counter_ns
POOL_SIZES = (10_000, 100_000, 1_000_000, 4_000_000)


def pin() -> int:
    """Pin this process to the last core that it may use, and limit torch to one thread. Returns the core."""
    # suppresses the warning that a longest request would not fit; pools are small on purpose
    logging.getLogger("pagewire").setLevel(logging.ERROR)
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    return core


def settle() -> None:
    """Collects and freezes all existing objects, so that the following samples pay only for their own garbage."""
    gc.collect()
    gc.freeze()


def timed(measured: Callable[[Any], object], given: Any) -> float:
    """Returns the microseconds that one call takes."""
    start = now()
    measured(given)
    return (now() - start) / 1e3


def samples(repeats: int, prepare: Callable[[], Any], measured: Callable[[Any], object]) -> list[float]:
    """Returns, `repeats` times after a warm-up, the microseconds of `measured(prepare())` without the preparation."""
    for _ in range(WARM_UP):
        measured(prepare())
    settle()
    return [timed(measured, prepare()) for _ in range(repeats)]


def summary(times: Sequence[float]) -> Row:
    """The columns for samples: minimum and median in microseconds, and their number."""
    return {"us_min": round(min(times), 2), "us_median": round(statistics.median(times), 2), "n": len(times)}


def options(description: str | None) -> argparse.Namespace:
    """Parses the options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repeats")
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write the rows to this file, together with the command line, a description of the machine and the "
        "version of the code",
    )
    return parser.parse_args()


def header(command: str, statistics: str = MINIMA_AND_MEDIANS, clock: str = "") -> Row:
    """Builds the header of a result, which says how, when and where it was made, and from which code.

    Args:
        command: the command that reproduces the result.
        statistics: says which columns are minima and which are medians.
        clock: `wall` or `cpu`, if the figures were not made with this process's clock.
    """
    changed = _git("status", "--porcelain", "--", *PACKAGES, "benchmarks/*.py")
    return {
        "command": command,
        "commit": _git("rev-parse", "--short=12", "HEAD"),
        "uncommitted": changed.splitlines(),
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "statistics": statistics,
        "machine": machine() | ({"clock": clock} if clock else {}),
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in ("torch", "nixl", "numpy")},
        },
        "measures": measured(),
    }


def machine() -> Row:
    """A description of the machine. `load` is its load in the minute before this process started."""
    cpu = _cpuinfo("model name")
    return {
        "cpu": cpu or platform.machine(),
        "cores": os.cpu_count(),
        "sha_extensions": bool({"sha_ni", "sha2"} & {*_cpuinfo("flags").split(), *_cpuinfo("Features").split()}),
        "clock": "cpu" if now is time.thread_time_ns else "wall",
        "pinned_to": sorted(os.sched_getaffinity(0)),
        "load": _LOAD_BEFORE,
    }


def report(name: str, rows: Sequence[Row], chosen: argparse.Namespace, statistics: str = MINIMA_AND_MEDIANS) -> None:
    """Prints the rows as a table, and writes them as JSON if an option says so."""
    print(f"\n{name}\n{table(rows)}", flush=True)
    if chosen.json:
        clock = f"{CLOCK_VARIABLE}=cpu " if now is time.thread_time_ns else ""
        command = f"{clock}python -m benchmarks.{name}" + (" --quick" if chosen.quick else "")
        write(chosen.json, {**header(command, statistics), "rows": list(rows)})


def write(path: Path, figures: Row) -> None:
    """Writes JSON with one row in each line, so that two results can be compared line by line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = [
        f" {json.dumps(key)}: "
        + ("[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]" if isinstance(value, list) else json.dumps(value))
        for key, value in figures.items()
    ]
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def table(rows: Iterable[Row]) -> str:
    """Formats rows as a table, with words aligned left and figures right."""
    listed = list(rows)
    columns = list(dict.fromkeys(key for row in listed for key in row))
    cells = [columns, *([_cell(row.get(column)) for column in columns] for row in listed)]
    widths = [max(len(line[at]) for line in cells) for at in range(len(columns))]
    words = {column for row in listed for column, value in row.items() if isinstance(value, str)}
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in words else cell.rjust(width)
            for column, cell, width in zip(columns, line, widths, strict=True)
        ).rstrip()
        for line in cells
    )


def clock_option(parser: argparse.ArgumentParser) -> None:
    """Adds `--clock` to a program that starts measuring processes. `os.environ[CLOCK_VARIABLE]` passes it to them."""
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu: measure processor time, for a busy machine"
    )


def progress(text: str) -> None:
    """Prints a line to standard error, because tables go to standard output."""
    print(text, file=sys.stderr, flush=True)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def _git(*arguments: str) -> str:
    run = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S603, S607 - git as the user has it
    return run.stdout.rstrip()


def _cpuinfo(field: str) -> str:
    """The kernel's description of the first core; empty if there is none."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(field)), "")
