"""Measures NIXL alone, for comparison with our pulls.

It reads the same pages between two processes, without lease and fence. It runs once `as shipped`, and once `as ours`,
in another process with the agents and the environment of our transfers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from benchmarks.frame import Row
from benchmarks.pulls.as_shipped import AS_OURS

SIZES = ((64 << 10, 1), (64 << 10, 256), (64 << 10, 2048))

WAYS: dict[str, list[str]] = {"as shipped": [], "as ours": [AS_OURS]}
"""The options of each of the two ways."""


def row(found: Row, way: str) -> Row:
    """A row, with the name of its figure added."""
    name = f"pull {found['page_bytes'] >> 10} {found['pages']}"
    return {"kind": way, "name": name, "min": found["us_min"], "med": found["us_median"]}


def main() -> None:
    """Runs the benchmark and prints its rows. Source and reader may use every core, as in `ours`."""
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("UCX_", "NIXL_"))}
    for way, option in WAYS.items():
        sizes = [f"{size},{pages}" for size, pages in SIZES]
        command = [
            sys.executable,
            "-m",
            "benchmarks.pulls.as_shipped",
            *option,
            *sizes,
        ]
        done = subprocess.run(command, env=clean, stdout=subprocess.PIPE, text=True, check=True)  # noqa: S603 - our own
        for line in done.stdout.splitlines():
            found: Row = json.loads(line) if line.startswith("{") else {}
            if found.get("access") == "random":
                print(json.dumps(row(found, way)), flush=True)


if __name__ == "__main__":
    main()
