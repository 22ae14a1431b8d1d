"""What does disaggregation add to the time to the first token, and in which part?

`make first-token` compares two ways to serve. The first way is a prefill process and a decode process. The second way
is one process that runs the same loop for both. The two ways alternate, in rounds with new processes. The requests come
from the scaled-down conversation trace (`fleet_trace`). They arrive by a Poisson process, whether or not earlier
requests have finished. The model is the small Llama, pages are pulled over NIXL, and torch has one thread. The prefill
process sends the first token at once. The decode process computes the second token. All processes use the machine's
monotonic clock.

The parts of the time, in order:

    asked         the first part of `queue`: from the arrival until the decode process has asked the prefill process
    queue         from the arrival until the prompt has a row and pages and starts to run
    prefill       from the end of `queue` until the last chunk has run and the offer is sent
    hand-over     from the end of `prefill` until the decode process has the offer and has forwarded the first token
    delivery      from the end of `hand-over` until the client has the first token
    first token   from the arrival until the client has the first token
    pull          from the end of `hand-over` until decode has the last chunk's pages, and so all pages of the prompt
    join          from the end of `pull` until the first decode step has ended
    second token  from the arrival until the client has the second token

One process alone has no hand-over and no pull. Its `join` is the step after the prompt's last chunk. Percentiles of
parts do not add up to the percentile of their sum. `added` is the difference between the percentiles of the two ways.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.fleet_client import Asked, Client
from benchmarks.fleet_trace import PAGE, TraceError, TraceRequest, read_requests, synthetic_requests
from benchmarks.fleet_worker import Stamp, read_stamps
from benchmarks.frame import Row, header, progress, table, write
from benchmarks.trace_replay import FOLDER, TRACES
from kvcache.errors import KVCacheError
from scheduler_adapters.errors import ServiceError
from scheduler_adapters.service import messages as msg
from scheduler_adapters.service.fleet import Fleet
from scheduler_adapters.service.server import ServerConfig

PROGRAM = (sys.executable, "-m", "benchmarks.fleet_worker")
REQUESTS = 300
RATE = 4.0
ROUNDS = 3
PARTS = ("asked", "queue", "prefill", "hand-over", "delivery", "first token", "pull", "join", "second token")
_WARM_UP = 12
_CACHE_BYTES = 48 << 20
_MAX_REQUESTS = 16


class Way(NamedTuple):
    """One way to serve: the roles of its processes, and their program's arguments."""

    name: str
    roles: tuple[msg.Role, ...]
    arguments: tuple[str, ...]


WAYS = (Way("disaggregated", ("prefill", "decode"), ()), Way("one process", ("decode",), ("alone",)))


class Served(NamedTuple):
    """The result of one way to serve.

    It has the milliseconds of each part of each request, and the final counters of each process.
    """

    parts: dict[str, list[float]]
    stats: list[msg.Stats]


def configs(way: Way, requests: list[TraceRequest]) -> list[ServerConfig]:
    """The settings of a way's processes, with room for the longest of these requests."""
    return [
        ServerConfig(
            model=None,
            seed=0,
            page_size=PAGE,
            cache_bytes=_CACHE_BYTES,
            max_seq_len=max(len(one.prompt) + one.new for one in requests),
            max_requests=_MAX_REQUESTS,
            token_budget=256,
            tp=1,
            device="cpu",
            role=role,
        )
        for role in way.roles
    ]


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """The times at which requests arrive, in seconds from the start: a Poisson process."""
    rng, at, found = random.Random(seed), 0.0, list[float]()  # noqa: S311  (guards nothing)
    for _ in range(count):
        at += rng.expovariate(rate)
        found.append(at)
    return found


def serve(way: Way, requests: list[TraceRequest], times: list[float]) -> Served:
    """Submits each request at its time, and checks that all requests end.

    Raises:
        ServiceError: a process died, a request failed or needed a second attempt, or something is held at the end.
    """
    with tempfile.TemporaryDirectory(prefix="pagewire-first-") as folder:
        warm_up = synthetic_requests(_WARM_UP, seed=1)
        with Fleet(configs(way, [*requests, *warm_up]), (*PROGRAM, folder, *way.arguments)) as fleet:
            client = Client(fleet)
            for number, request in enumerate(warm_up):
                client.submit(f"warm-up-{number}", request)
                while client.open:
                    client.hear(0.01)
            start = time.monotonic()
            for number, (request, after) in enumerate(zip(requests, times, strict=True)):
                hear_until(client, start + after)
                client.submit(f"r{number}", request, start + after)
            while client.open:
                client.hear(0.01)
            client.settle()
            stamps = read_stamps(Path(folder))
        asked = [client.asked[f"r{number}"] for number in range(len(requests))]
    check(asked, stamps, client.stats)
    measured = [parts_of(one, stamps[one.request_id]) for one in asked]
    parts = {part: [1e3 * one[part] for one in measured if part in one] for part in PARTS}
    return Served(parts, list(client.stats.values()))


def hear_until(client: Client, at: float) -> None:
    """Handle messages until the time `at`."""
    while (left := at - time.monotonic()) > 0:
        client.hear(min(left, 0.05))


def check(asked: list[Asked], stamps: dict[str, list[Stamp]], stats: dict[str, msg.Stats]) -> None:
    """Checks that the run measured what it was meant to measure.

    Raises:
        ServiceError: the check failed.
    """
    failed = [f"{one.request_id}: {one.error}" for one in asked if one.finished not in ("eos", "length")]
    if failed:
        raise ServiceError(f"{len(failed)} requests failed; the first failure: {failed[0]}")
    if any(stamp.what == "waiting" for every in stamps.values() for stamp in every):
        raise ServiceError("an attempt failed and was repeated, so its times are not those of a hand-over")
    if any(one.pages_held or one.open_requests for one in stats.values()):
        raise ServiceError(f"pages or requests are still held when all requests are served: {stats}")


def parts_of(one: Asked, stamps: list[Stamp]) -> dict[str, float]:
    """The seconds of each part of a request. A request for a single token has no pull and no second token."""
    first_at = {(stamp.role, stamp.what): stamp.at for stamp in reversed(stamps)}
    sent = [stamp.at for stamp in stamps if stamp.what == "token"]
    begins = first_at["prefill", "leasing"]
    asked, computed = first_at.get(("decode", "asked")), first_at.get(("prefill", "held"))
    found = {
        "queue": begins - one.submitted,
        "prefill": (sent[0] if computed is None else computed) - begins,
        "delivery": one.times[0] - sent[0],
        "first token": one.times[0] - one.submitted,
    }
    if asked is not None:
        found["asked"] = asked - one.submitted
    if computed is not None:
        found["hand-over"] = sent[0] - computed
    if len(sent) > 1:
        joined = first_at.get(("decode", "decoding"))
        if joined is not None:
            found["pull"] = joined - sent[0]
        found["join"] = sent[1] - (sent[0] if joined is None else joined)
        found["second token"] = one.times[1] - one.submitted
    return found


def rows_of(ways: dict[str, Served]) -> list[Row]:
    """A row for each part: p50 and p99 of both ways in milliseconds, and how much disaggregation adds."""
    two, one = (ways[way.name].parts for way in WAYS)
    rows: list[Row] = []
    for part in PARTS:
        row: Row = {"part": part, "n": len(two[part])}
        for at in (50, 99):
            ours = float(np.percentile(two[part], at)) if two[part] else None
            theirs = float(np.percentile(one[part], at)) if one[part] else None
            row[f"disaggregated_ms_p{at}"] = None if ours is None else round(ours, 2)
            row[f"one_process_ms_p{at}"] = None if theirs is None else round(theirs, 2)
            row[f"added_ms_p{at}"] = None if ours is None else round(ours - (theirs or 0.0), 2)
        rows.append(row)
    return rows


def counters(served: Served) -> Row:
    """Returns all figures of a way that are not times."""
    prompt_tokens = sum(one.prompt_tokens for one in served.stats)
    return {
        "hit_rate": round(sum(one.cached_tokens for one in served.stats) / max(1, prompt_tokens), 4),
        "preemptions": sum(one.preemptions for one in served.stats),
    }


def measure(requests: list[TraceRequest], rate: float, seed: int, rounds: int) -> dict[str, Served]:
    """Runs both ways alternately, in several rounds.

    Each round serves a part of the requests. They arrive at the same times in both ways.

    Raises as `serve`.
    """
    found = {way.name: Served({part: [] for part in PARTS}, []) for way in WAYS}
    for number in range(rounds):
        some = requests[number * len(requests) // rounds : (number + 1) * len(requests) // rounds]
        times = arrivals(len(some), rate, seed + number)
        for way in WAYS if number % 2 == 0 else WAYS[::-1]:
            served = serve(way, some, times)
            for part in PARTS:
                found[way.name].parts[part].extend(served.parts[part])
            found[way.name].stats.extend(served.stats)
            typical = float(np.median(served.parts["first token"]))
            progress(f"first_token: round {number + 1}, {way.name}: {typical:.1f} ms to the first token in the median")
    return found


def main() -> int:
    """Runs the benchmark, prints its rows, and writes them. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_token", description=__doc__)
    parser.add_argument("--requests", type=int, default=REQUESTS, help=f"of the trace ({REQUESTS})")
    parser.add_argument("--rate", type=float, default=RATE, help=f"requests that arrive in a second ({RATE})")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"of both ways in turn ({ROUNDS})")
    parser.add_argument("--seed", type=int, default=0, help="seed of the arrival times (0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures and the machine")
    chosen = parser.parse_args()
    if not 1 <= chosen.rounds <= chosen.requests or not chosen.rate > 0:
        parser.error("--rounds must be at least 1, --requests at least as many, and --rate more than 0")
    try:
        requests = read_requests(FOLDER / TRACES[0], chosen.requests)
    except TraceError as error:
        progress(
            f"first_token: {error}. The trace is no part of the project; PAGEWIRE_TRACES names a folder that has it"
        )
        return 2
    try:
        ways = measure(requests, chosen.rate, chosen.seed, chosen.rounds)
    except KVCacheError as error:
        progress(f"first_token: {error}")
        return 1
    rows = rows_of(ways)
    print(table(rows))
    if chosen.json:
        options = " ".join(f"--{name} {getattr(chosen, name):g}" for name in ("requests", "rate", "rounds", "seed"))
        served = {way: counters(one) for way, one in ways.items()}
        command = f"python -m benchmarks.first_token {options}"
        figures = {**header(command, "columns *_p50 and *_p99: median and 99th percentile of n requests"), **served}
        write(chosen.json, {**figures, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
