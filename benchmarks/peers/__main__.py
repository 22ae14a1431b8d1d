"""Measures other KV cache managers beside ours: in turn, on the same core, in the same run; prints the ratios.

Each peer runs in a virtual environment of its own under `.venvs/`, made on the first run, by a script that is not part
of this project (`--scripts`). A ratio is the peer's figure over ours: above 1 ours is cheaper. Absolute figures drift
on a shared machine; the ratios of one run drift less.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.frame import CLOCK_VARIABLE, Row, clock_option, machine, pin, progress, table, write
from benchmarks.peers.environment import SCRIPTS_VARIABLE, PeerError, needed, python_of, scripts_folder
from benchmarks.peers.parse import Figure, Figures, Parser, rows_of_max, rows_of_vllm
from benchmarks.peers.questions import QUESTIONS

HERE = Path(__file__).resolve().parent
OURS = "ours"
_ON_CPU_TIME = (
    "import runpy, sys, time; time.perf_counter_ns = time.thread_time_ns; del sys.argv[0]; "
    "sys.path.insert(0, sys.argv[0].rpartition('/')[0]); runpy.run_path(sys.argv[0], run_name='__main__')"
)
"""Runs a script that measures with `perf_counter_ns` so that it measures processor time."""


class Peer(NamedTuple):
    """How a peer is installed, run and read.

    Attributes:
        script: of the scripts' folder.
        arguments: of the script.
        parsers: what reads its output: by the name that the figures go under.
        requirements: of the scripts' folder; installed without dependencies, for it names them all.
        packages: what to install where there is no such file.
    """

    script: str
    arguments: tuple[str, ...]
    parsers: dict[str, Parser]
    requirements: str = ""
    packages: tuple[str, ...] = ()


PEERS = {
    "max257": Peer(
        "bench_max257.py", (), {"max257": partial(rows_of_max, kind="v257")}, requirements="requirements-max257.txt"
    ),
    "vllm": Peer(
        "bench_vllm.py",
        ("hash", "mgr", "decode", "mem"),
        {"vllm": rows_of_vllm},
        requirements="requirements-vllm.txt",
    ),
    "max267": Peer(
        "bench_max.py",
        ("--parts", "prefill,decode"),
        {"max-legacy": partial(rows_of_max, kind="legacy"), "max-jenga": partial(rows_of_max, kind="jenga")},
        # Not `max[serve]`: that brings a whole server. These are what importing the managers takes.
        packages=("max==26.7.0", "av", "huggingface-hub", "pillow", "requests", "transformers"),
    ),
}


class Program(NamedTuple):
    """A command whose output is figures."""

    name: str
    command: list[str]
    parsers: dict[str, Parser]


def arguments() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--peers", default="max257,vllm", help=f"of {', '.join(PEERS)}, with commas between")
    parser.add_argument("--quick", action="store_true", help="fewer repeats, and one round")
    parser.add_argument("--rounds", type=int, metavar="N", help="how often all take their turn (3)")
    parser.add_argument("--scripts", type=Path, metavar="DIR", help=f"the peers' scripts (or {SCRIPTS_VARIABLE})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures of every round")
    clock_option(parser)
    chosen = parser.parse_args()
    chosen.peers = chosen.peers.split(",")
    chosen.rounds = chosen.rounds or (1 if chosen.quick else 3)
    unknown = [name for name in chosen.peers if name not in PEERS]
    if unknown:
        parser.error(f"no peer {unknown[0]!r}: there are {', '.join(PEERS)}")
    return chosen


def our_program(*, quick: bool) -> Program:
    """Ours, in a process of its own as the peers are."""
    command = [sys.executable, "-m", "benchmarks.peers.ours", *(["--quick"] if quick else [])]
    return Program(OURS, command, {OURS: rows_of_ours})


def peer_program(name: str, folder: Path, clock: str) -> Program:
    """A peer in its environment, which is made here where it is missing."""
    peer = PEERS[name]
    script = needed(folder, peer.script)
    if peer.requirements:
        path = needed(folder, peer.requirements)
        python = python_of(name, ["--no-deps", "--requirement", str(path)], path.read_bytes())
    else:
        python = python_of(name, list(peer.packages), " ".join(peer.packages).encode())
    started = [str(python), *(["-c", _ON_CPU_TIME] if clock == "cpu" else [])]
    return Program(name, [*started, str(script), *peer.arguments], peer.parsers)


def rows_of_ours(output: str) -> Figures:
    """What `benchmarks.peers.ours` prints."""
    rows: list[Row] = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return {row["name"]: Figure(row["min"], row["med"]) for row in rows}


def run(program: Program) -> dict[str, Figures]:
    """Run it on our core, which it inherits; its figures by program.

    Raises:
        PeerError: it failed, or printed no figures.
    """
    start = time.monotonic()
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(  # noqa: S603 - our own, or what the user pointed us to
        program.command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True, check=False
    )
    figures = {name: parser(done.stdout) for name, parser in program.parsers.items()}
    if done.returncode or not all(figures.values()):
        last = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise PeerError(f"{program.name} gave no figures (exit status {done.returncode}):\n{last}")
    progress(f"{program.name}: {time.monotonic() - start:.0f} s, load {os.getloadavg()[0]:.1f}")
    return figures


def over_rounds(rounds: Sequence[Figures]) -> Figures:
    """The least of the minima, and the median of the medians."""
    return {
        name: Figure(min(one[name].minimum for one in rounds), statistics.median(one[name].median for one in rounds))
        for name in rounds[0]
    }


def compare(figures: dict[str, Figures]) -> list[Row]:
    """A row for each question that we have a figure for."""
    ours = figures[OURS]
    rows: list[Row] = []
    for question in QUESTIONS:
        if question.ours not in ours:
            continue
        mine = ours[question.ours]
        row: Row = {"question": question.text, "target": question.target}
        row |= {
            "ours_min": round(mine.minimum / question.unit, 3),
            "ours_median": round(mine.median / question.unit, 3),
        }
        for peer, each in figures.items():
            if peer == OURS:
                continue
            theirs = each.get(question.of(peer))
            row |= {
                f"{peer}_min": theirs and round(theirs.minimum / question.unit, 2),
                f"{peer}_median": theirs and round(theirs.median / question.unit, 2),
                f"{peer}/ours_min": theirs and round(theirs.minimum / mine.minimum, 2),
                f"{peer}/ours_median": theirs and round(theirs.median / mine.median, 2),
            }
        rows.append(row)
    return rows


def take_turns(programs: Sequence[Program], rounds: int) -> dict[str, list[Figures]]:
    """Every program once a round; all figures by program."""
    every: dict[str, list[Figures]] = {}
    for _ in range(rounds):
        for program in programs:
            for name, figures in run(program).items():
                every.setdefault(name, []).append(figures)
    return every


def main(fail: Callable[[str], None] = progress) -> int:
    """Measure, print, write. Exit status 1 with one line where a peer cannot be run."""
    chosen = arguments()
    try:
        folder = scripts_folder(chosen.scripts)
        programs = [
            our_program(quick=chosen.quick),
            *(peer_program(name, folder, chosen.clock) for name in chosen.peers),
        ]
        os.environ[CLOCK_VARIABLE] = chosen.clock
        pin()
        before = {**machine(), "clock": chosen.clock}
        every = take_turns(programs, chosen.rounds)
    except PeerError as error:
        fail(str(error))
        return 1
    rows = compare({name: over_rounds(rounds) for name, rounds in every.items()})
    print(table({key: value for key, value in row.items() if not key.endswith("_median")} for row in rows))
    if chosen.json:
        options = f"--peers {','.join(chosen.peers)} --rounds {chosen.rounds} --clock {chosen.clock}" + (
            " --quick" if chosen.quick else ""
        )
        raw = [{"program": name, "round": at, **one} for name, each in every.items() for at, one in enumerate(each, 1)]
        write(
            chosen.json,
            {"command": f"python -m benchmarks.peers {options}", "machine": before, "rows": rows, "rounds": raw},
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
