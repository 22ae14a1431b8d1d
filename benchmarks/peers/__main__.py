"""Measures other KV cache managers and ours alternately on the same core in one run, and prints the ratios.

Each peer runs in its own virtual environment under `.venvs/`, which the first run makes. Its script is not part of this
project (`--scripts`). A ratio is the peer's figure divided by ours, so ours is cheaper if the ratio is above 1.
Absolute figures drift on a shared machine; the ratios of one run drift less.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.frame import CLOCK_VARIABLE, Row, clock_option, header, pin, progress, table, write
from benchmarks.peers import ours
from benchmarks.peers.environment import SCRIPTS_VARIABLE, PeerError, scripts_folder
from benchmarks.peers.parse import Figure, Figures, rows_of_json
from benchmarks.peers.peers import PEERS, Program, program
from benchmarks.peers.questions import QUESTIONS, Question

HERE = Path(__file__).resolve().parent
OURS = "ours"
DEFAULT = "max257,max267,vllm,sglang,nixl"
STATISTICS = (
    "columns *_min: least of the minima of all rounds; *_median: median of the medians of the rounds; PEER/ours: the "
    "peer's figure over ours, above 1 ours is cheaper; best: the peer whose minimum is the least"
)


def arguments() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--peers", default=DEFAULT, help=f"of {', '.join(PEERS)}, with commas between (all)")
    parser.add_argument("--quick", action="store_true", help="fewer repeats, and one round")
    parser.add_argument("--rounds", type=int, metavar="N", help="how often all take their turn (3)")
    parser.add_argument("--scripts", type=Path, metavar="DIR", help=f"the peers' scripts (or {SCRIPTS_VARIABLE})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures of every round")
    clock_option(parser)
    chosen = parser.parse_args()
    chosen.peers = [name for name in chosen.peers.split(",") if chosen.clock == "wall" or name != "nixl"]
    chosen.rounds = chosen.rounds or (1 if chosen.quick else 3)
    unknown = [name for name in chosen.peers if name not in PEERS]
    if unknown:
        parser.error(f"no peer {unknown[0]!r}: there are {', '.join(PEERS)}")
    return chosen


def our_program(*, quick: bool) -> Program:
    """Our own program, in its own process like the peers."""
    command = [sys.executable, "-m", ours.__name__, *(["--quick"] if quick else [])]
    return Program(OURS, command, {OURS: rows_of_json})


def run(one: Program) -> dict[str, Figures]:
    """Runs a program on our core, which it inherits. Returns its figures by program.

    Raises:
        PeerError: the program failed, or printed no figures.
    """
    start = time.monotonic()
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(  # noqa: S603 - our own, or what the user pointed us to
        one.command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True, check=False
    )
    figures = {name: parser(done.stdout) for name, parser in one.parsers.items()}
    if done.returncode or not all(figures.values()):
        last = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise PeerError(f"{one.name} gave no figures (exit status {done.returncode}):\n{last}")
    progress(f"{one.name}: {time.monotonic() - start:.0f} s, load {os.getloadavg()[0]:.1f}")
    return figures


def over_rounds(rounds: Sequence[Figures]) -> Figures:
    """Combines several rounds: the lowest of the minima, and the median of the medians."""
    return {
        name: Figure(min(one[name].minimum for one in rounds), statistics.median(one[name].median for one in rounds))
        for name in rounds[0]
    }


def compare(figures: dict[str, Figures]) -> list[Row]:
    """Returns a row for each question for which we have a figure."""
    return [_row(question, figures) for question in QUESTIONS if question.ours in figures[OURS]]


def _row(question: Question, figures: dict[str, Figures]) -> Row:
    mine = figures[OURS][question.ours]
    row: Row = {
        "question": question.text,
        "target": question.target,
        "ours_min": round(mine.minimum / question.unit, 3),
        "ours_median": round(mine.median / question.unit, 3),
    }
    found = {peer: each.get(question.of(peer)) for peer, each in figures.items() if peer != OURS}
    for peer, theirs in found.items():
        row |= {
            f"{peer}_min": theirs and round(theirs.minimum / question.unit, 2),
            f"{peer}_median": theirs and round(theirs.median / question.unit, 2),
            f"{peer}/ours_min": theirs and round(theirs.minimum / mine.minimum, 2),
            f"{peer}/ours_median": theirs and round(theirs.median / mine.median, 2),
        }
    minima = {peer: theirs.minimum for peer, theirs in found.items() if theirs}
    best = min(minima, key=lambda peer: minima[peer], default="")
    return row | {"best": best, "best/ours_min": round(minima[best] / mine.minimum, 2) if best else None}


def take_turns(programs: Sequence[Program], rounds: int) -> dict[str, list[Figures]]:
    """Runs every program once in each round. Returns all figures, by program."""
    every: dict[str, list[Figures]] = {}
    for _ in range(rounds):
        for one in programs:
            for name, figures in run(one).items():
                every.setdefault(name, []).append(figures)
    return every


def main(fail: Callable[[str], None] = progress) -> int:
    """Runs the benchmark, prints its rows and writes them. Exits with status 1 and one line if a peer cannot be run."""
    chosen = arguments()
    try:
        folder = scripts_folder(chosen.scripts)
        programs = [
            our_program(quick=chosen.quick),
            *(program(name, folder, chosen.clock, quick=chosen.quick) for name in chosen.peers),
        ]
        os.environ[CLOCK_VARIABLE] = chosen.clock
        pin()
        before = header(_command(chosen), STATISTICS, chosen.clock)
        every = take_turns(programs, chosen.rounds)
    except PeerError as error:
        fail(str(error))
        return 1
    rows = compare({name: over_rounds(rounds) for name, rounds in every.items()})
    print(table({key: value for key, value in row.items() if not key.endswith("_median")} for row in rows))
    if chosen.json:
        raw = [{"program": name, "round": at, **one} for name, each in every.items() for at, one in enumerate(each, 1)]
        peers = {name: f"{PEERS[name].package} {PEERS[name].version}" for name in chosen.peers}
        write(chosen.json, {**before, "peers": peers, "rows": rows, "rounds": raw})
    return 0


def _command(chosen: argparse.Namespace) -> str:
    peers = ",".join(chosen.peers)
    options = f"--peers {peers} --rounds {chosen.rounds} --clock {chosen.clock}" + (" --quick" if chosen.quick else "")
    return f"python -m benchmarks.peers {options}"


if __name__ == "__main__":
    sys.exit(main())
