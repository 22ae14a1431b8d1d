"""What every benchmark shares: one pinned core, a warm-up, minima and medians, and rows that say where they were made."""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from kvcache import KVCacheParams, PagedKVCacheManager

Row = dict[str, Any]


def pin() -> int:
    """Keep this process on one core, the last one that it may use, and torch on one thread. Returns the core."""
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    return core


def best_of(repeats: int, prepare: Callable[[], Any], measured: Callable[[Any], object]) -> Row:
    """Microseconds of `measured(prepare())`, the preparation not counted: the minimum and the median of `repeats`."""
    times: list[float] = []
    for _ in range(repeats + 2):
        given = prepare()
        gc.disable()  # a collection belongs to whoever made the garbage, not to the call that it interrupts
        start = time.perf_counter()
        measured(given)
        times.append(time.perf_counter() - start)
        gc.enable()
    kept = sorted(times[2:])  # the first two warm up
    return {"us_min": round(kept[0] * 1e6, 2), "us_median": round(statistics.median(kept) * 1e6, 2)}


def manager_of(pages: int, *, page_size: int = 16, rows: int = 64, max_seq_len: int = 1 << 17, algorithm: str = "sha256") -> PagedKVCacheManager:
    """A manager whose pages are as small as can be: its own cost is measured, not the memory's."""
    params = KVCacheParams(
        dtype=torch.uint8, n_kv_heads=1, head_dim=1, enable_prefix_caching=True, page_size=page_size, hash_algorithm=algorithm, is_mla=True
    )  # fmt: skip
    return PagedKVCacheManager(params, rows, max_seq_len, 1, ["cpu"], available_cache_memory=pages * page_size)


def options(description: str) -> argparse.Namespace:
    """The options of every benchmark."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repeats")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows, the machine and the commit")
    return parser.parse_args()


def machine() -> Row:
    """Where the figures were made."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)  # noqa: S607 - git as the user has it
    cpu = next((line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), platform.machine())
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit.stdout.strip(),
        "load": round(os.getloadavg()[0], 2),
    }


def report(name: str, rows: Sequence[Row], chosen: argparse.Namespace) -> None:
    """Print the rows as a table; write them as JSON where asked to."""
    print(f"\n{name}")
    print(table(rows))
    if chosen.json:
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        command = f"python -m benchmarks.{name}" + (" --quick" if chosen.quick else "")
        chosen.json.write_text(json.dumps({"command": command, "machine": machine(), "rows": list(rows)}, indent=1) + "\n")


def table(rows: Iterable[Row]) -> str:
    """The rows in columns."""
    listed = list(rows)
    columns = list(dict.fromkeys(key for row in listed for key in row))
    cells = [columns, *([_cell(row.get(column, "")) for column in columns] for row in listed)]
    widths = [max(len(line[at]) for line in cells) for at in range(len(columns))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)


def _cell(value: Any) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []
