"""Runs every benchmark in a process of its own, one after another, prints the tables and draws the plots.

`python -m benchmarks [--quick] [--clock cpu] [--json-dir DIR] [NAME ...]`
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.frame import CLOCK_VARIABLE, clock_option, progress
from benchmarks.plots import draw_files
from scheduler_adapters.errors import MissingExtraError

HERE = Path(__file__).resolve().parent
NAMES = (
    "decode_step",
    "settings",
    "admission",
    "growing_conversation",
    "release",
    "evict",
    "events",
    "memory",
    "recommend",
    "waiting",
    "weights",
    "layer_groups",
    "growth",
    "overlap",
    "trace_replay",
    "trace_hints",
    "trace_routing",
)


def arguments() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which to run: {', '.join(available())} (all)")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repeats")
    parser.add_argument(
        "--json-dir", type=Path, metavar="DIR", help="where JSON and plots go (benchmarks/results, or out if quick)"
    )
    clock_option(parser)
    chosen = parser.parse_args()
    for name in chosen.names:
        if name not in available():
            parser.error(f"no benchmark {name!r}: there are {', '.join(available())}")
    return chosen


def available() -> list[str]:
    """The names of the benchmarks."""
    return [name for name in (*NAMES, "growth_transfer", "plan", "pull") if (HERE / f"{name}.py").exists()]


def run(name: str, path: Path, *, quick: bool) -> bool:
    """Runs one benchmark, which prints its table.

    Returns False if the benchmark failed. The last line that it has printed then says why.
    """
    command = [sys.executable, "-m", f"benchmarks.{name}", "--json", str(path), *(["--quick"] if quick else [])]
    start = time.monotonic()
    failed = subprocess.run(command, cwd=HERE.parent, check=False).returncode  # noqa: S603 - our own files
    progress(f"{name}: {'failed' if failed else 'done'} in {time.monotonic() - start:.0f} s")
    return not failed


def draw(folder: Path, names: list[str]) -> None:
    """Draws the results in `folder`."""
    try:
        for path in draw_files(folder, names):
            progress(f"drew {path}")
    except MissingExtraError as error:  # the tables need no matplotlib
        progress(f"no plots: {error}")


def main() -> int:
    """Run, print and draw. Returns exit status 1 if a benchmark failed."""
    chosen = arguments()
    os.environ[CLOCK_VARIABLE] = chosen.clock
    names: list[str] = chosen.names or available()
    folder: Path = (chosen.json_dir or HERE / ("out" if chosen.quick else "results")).resolve()
    passed = [run(name, folder / f"{name}.json", quick=chosen.quick) for name in names]
    draw(folder, names)
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
