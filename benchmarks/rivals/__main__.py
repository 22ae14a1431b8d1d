"""Fetches blocks of 64 KiB from another process with kvcr, Mooncake and our code alternately, and prints ratios.

Ours is measured as users call it: from `PageExchange.ask` until the reader's manager finds the pages. Two more rows are
the pull within that time, and plain pulls without managers, under a lease that exists already. kvcr is timed from
`deliver` to its result. For Mooncake only `batch_transfer_sync_read` is timed: its caller already knows the addresses,
nothing protects the memory, and nothing is published. A ratio is a program's time divided by ours, so ours is quicker
if the ratio is above 1.

Then each source is killed, or evicts pages, during a fetch of 2,048 blocks. The rows say after how many seconds the
reader is told, and with which error. `--link 1gbit` measures ours between two hosts, which are network namespaces of
this machine, alternating with a bare socket. `share` is the socket's time divided by ours. The first contact includes
metadata and connections.

Each rival runs in its own environment under `.venvs/`, which the first run makes. Its script is not part of this
project (folder `rivals` in `--scripts`).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from benchmarks.frame import Row, header, progress, table, write
from benchmarks.peers.environment import SCRIPTS_VARIABLE, PeerError, scripts_folder
from benchmarks.pulls.rates import SPUN
from benchmarks.rivals.hosts import over_link
from benchmarks.rivals.lender import Setting
from benchmarks.rivals.ours import ASKED, FIRST, PLAIN, PULLED, SOCKET
from benchmarks.rivals.programs import RIVALS, Program, output_of

BLOCKS = (1, 16, 256, 2048)
LINKED = {64 << 10: (1, 4, 16, 256, 1024), 1 << 20: (1, 16, 64)}
"""The fetches over a link, each as bytes of a page and number of pages."""
STATISTICS = (
    "us_min: least of the minima of all rounds; us_median: median of the medians of the rounds; cpu_s_per_gb: "
    "median of the rounds, both processes; /asked, /plain: us_min over that of ours from ask to published, and "
    "over that of our plain pulls"
)
_Order = tuple[str, int, int, str]


def arguments() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rivals", description=__doc__)
    parser.add_argument("--rivals", default=",".join(RIVALS), help=f"of {', '.join(RIVALS)}, or none (all)")
    parser.add_argument("--quick", action="store_true", help="half a second for each figure, and one round")
    parser.add_argument("--rounds", type=int, metavar="N", help="how often each program runs (3)")
    parser.add_argument(
        "--link",
        metavar="RATES",
        help="measure between two hosts, at rates in the notation of tc, for example 1gbit,5gbit",
    )
    parser.add_argument("--no-faults", action="store_true", help="leave out the faults: kill no source")
    parser.add_argument("--scripts", type=Path, metavar="DIR", help=f"the peers' scripts (or {SCRIPTS_VARIABLE})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures of every round")
    chosen = parser.parse_args()
    chosen.rivals = [name for name in chosen.rivals.split(",") if name not in ("", "none")]
    chosen.rounds = chosen.rounds or (1 if chosen.quick else 3)
    unknown = [name for name in chosen.rivals if name not in RIVALS]
    if unknown:
        parser.error(f"no rival {unknown[0]!r}: there are {', '.join(RIVALS)}")
    return chosen


def ours(*options: str, scattered: bool = True) -> list[Row]:
    """The rows of our program, which runs in its own process like the rivals."""
    setting = msgspec.json.encode(Setting(scattered=scattered)).decode()
    rows, error = output_of([sys.executable, "-m", "benchmarks.rivals.ours", "--setting", setting, *options])
    if error:
        raise PeerError(f"ours: {error}")
    return rows


def take_turns(programs: Sequence[Program], rounds: int, seconds: float) -> list[Row]:
    """Runs every program once in each round. Returns the rows of all rounds."""
    found: list[Row] = []
    for at in range(1, rounds + 1):
        turns: dict[str, Callable[[], list[Row]]] = {
            "ours, random": lambda: ours("--seconds", str(seconds), "--blocks", _listed(BLOCKS), "--plain"),
            **{one.title: lambda one=one: one.fetches(BLOCKS, seconds) for one in programs},
            "ours, contiguous": lambda: ours(
                "--seconds", str(seconds), "--blocks", _listed(BLOCKS[1:]), scattered=False
            ),
        }
        for name, turn in turns.items():
            load = os.getloadavg()[0]
            found += [{"round": at, **row} for row in turn()]
            progress(f"round {at}, {name}: load before {load:.1f}")
    return found


def compared(rows: Sequence[Row]) -> list[Row]:
    """Returns a row for each program and size, over all rounds.

    One ratio compares the program with our full fetch, and another with our plain pull.
    """
    every: dict[_Order, list[Row]] = {}
    for row in rows:
        every.setdefault((row["access"], row["block_bytes"], row["blocks"], row["program"]), []).append(row)
    merged = [_merged(key, found) for key, found in every.items()]
    mine = {(row["access"], row["blocks"], row["program"]): row["us_min"] for row in merged}
    for row in merged:
        for column, program in (("/asked", ASKED), ("/plain", PLAIN[SPUN])):
            base = mine.get((row["access"], row["blocks"], program))
            row[column] = base and round(row["us_min"] / base, 2)
    return sorted(merged, key=lambda row: (row["access"] != "random", row["blocks"]))


def _merged(key: _Order, rows: Sequence[Row]) -> Row:
    cpu = [row["cpu_s_per_gb"] for row in rows if row["cpu_s_per_gb"] is not None]
    return {
        "access": key[0],
        "blocks": key[2],
        "program": key[3],
        "us_min": min(row["us_min"] for row in rows),
        "us_median": round(statistics.median(row["us_median"] for row in rows), 1),
        "gbps": max(row["gbps"] for row in rows),
        "cpu_s_per_gb": round(statistics.median(cpu), 2) if cpu else None,
    }


def shares(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows of one link.

    `share` is the time of a bare socket divided by the time of a fetch. Both times are medians of one run.
    """
    through = {(row["block_bytes"], row["blocks"]): row["us_median"] for row in rows if row["program"] == SOCKET}
    columns = ("link", "block_bytes", "blocks", "program", "us_min", "us_median", "gbps", "cpu_s_per_gb", "n")
    return [
        {column: row.get(column) for column in columns}
        | {"share": round(through[row["block_bytes"], row["blocks"]] / row["us_median"], 3)}
        for row in rows
        if row["program"] in (ASKED, PULLED, FIRST, SOCKET)
    ]


def linked(rate: str, seconds: float) -> list[Row]:
    """Returns the rows over a link. If hosts cannot be created, prints why and returns no rows."""
    try:
        return shares(
            [
                row
                for size, blocks in LINKED.items()
                for row in over_link(rate, Setting(page_bytes=size), blocks, seconds)
            ]
        )
    except PeerError as error:
        progress(str(error))
        return []


def _listed(blocks: Sequence[int]) -> str:
    return ",".join(map(str, blocks))


def main(fail: Callable[[str], None] = progress) -> int:
    """Runs the benchmark, prints its rows and writes them.

    Exits with status 1 and one line if a rival cannot be run.
    """
    chosen = arguments()
    seconds = 0.5 if chosen.quick else 2.0
    try:
        programs = [Program(name, scripts_folder(chosen.scripts)) for name in chosen.rivals]
        before = header(_command(chosen), STATISTICS, "wall")
        rounds = take_turns(programs, chosen.rounds, seconds)
        rows = compared(rounds)
        print(table(rows), flush=True)
        faults: list[Row] = []
        if not chosen.no_faults:
            faults = ours("--faults", "--blocks", str(BLOCKS[-1]))
            faults += [row for one in programs for row in one.faults()]
            print(f"\n{table(faults)}", flush=True)
        links = [row for rate in filter(None, (chosen.link or "").split(",")) for row in linked(rate, seconds)]
        print(f"\n{table(links)}" if links else "", flush=True)
    except PeerError as error:
        fail(str(error))
        return 1
    if chosen.json:
        versions = {name: f"{RIVALS[name].package} {RIVALS[name].version}" for name in chosen.rivals}
        every = {"rivals": versions, "rows": rows, "faults": faults, "links": links, "rounds": rounds}
        write(chosen.json, {**before, **every})
    return 0


def _command(chosen: argparse.Namespace) -> str:
    options = f"--rivals {','.join(chosen.rivals) or 'none'} --rounds {chosen.rounds}"
    options += (f" --link {chosen.link}" if chosen.link else "") + (" --no-faults" if chosen.no_faults else "")
    return f"python -m benchmarks.rivals {options}" + (" --quick" if chosen.quick else "")


if __name__ == "__main__":
    sys.exit(main())
