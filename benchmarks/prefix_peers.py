"""When is pulling a prefix from another prefill process quicker than computing it, and is the right way chosen?

`python -m benchmarks.prefix_peers` runs three fleets of real processes: two for prefill and two for decode, then four
and one, then two and one. In the last fleet each process has a host of its own (a network namespace) with a slow link.
The model is a small Llama, pages go over NIXL, torch has one thread, and requests come one at a time. Requests come in
pairs. The first request of a pair has a head that no process has cached, so a prefill process computes it. The second
request has the same head and another end, and goes to another prefill process. That process gets the head in the way
that it chooses itself, or in a way that the request prescribes (`benchmarks.prefix_worker`). A *round* of a length has
one pair for the process's choice and one for each prescribed way, in random order, so that all ways are measured at
every length. The order of the lengths follows from the seed.

    computed_ms   time to the first token if no process has the head, as with a single process
    pulled_ms     time to the first token if the head was pulled
    split_ms      time to the first token if the end of the head was pulled while its front was computed
    right         share of the `judged` choices that took the quickest way: the one with the least median at this length
    apart         choices whose way can be told from another way: the medians differ by more than twice the standard
                  error of their difference (robust, by absolute deviations)
    clear         choices whose way can be told from another way whose median differs by more than 10 %
    right_apart, right_clear    the share of these choices whose way is quicker than all ways that it can be told from
    regret_ms     mean loss of a choice: the median of its way minus the median of the quickest one
    regret_if_*   the same if every head were pulled, or every head computed

`hits` is the share of the heads' full pages that the chosen requests found cached when they began to run.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from benchmarks.frame import Row, header, progress, table, write
from benchmarks.prefix_hosts import WORKER, HostedFleet
from benchmarks.prefix_worker import PULLED, SPLIT
from kvcache.errors import KVCacheError
from scheduler_adapters.errors import ServiceError
from scheduler_adapters.service import messages as msg
from scheduler_adapters.service.fleet import Fleet
from scheduler_adapters.service.server import ServerConfig
from tests.hosts.network import why_not

LENGTHS = (32, 64, 128, 256, 512, 1024, 2048, 3072)
FLEETS = ((2, 2, ""), (4, 1, ""), (2, 1, "1gbit"), (2, 1, "100mbit"))
"""The number of prefill processes, of decode processes, and the rate of each host's link; empty if all run on one host.
"""
ROUNDS = 10
WAYS = ("pulled", "computed", "split")
CHOSEN = "chosen "
_PAGE = 16
_END = 8  # tokens of a prompt after its head
_LONGEST_WAIT_S = 120.0
_CLEAR = 0.1  # two ways differ clearly if one takes longer by this share
_LEAST = 2  # a way needs at least this many measurements for a median
PAIR_CONFIG = ServerConfig(
    model=None,
    seed=0,
    page_size=_PAGE,
    cache_bytes=64 << 20,
    max_seq_len=max(LENGTHS) + 2 * _END,
    max_requests=4,
    token_budget=256,
    tp=1,
    device="cpu",
)


class Heard(NamedTuple):
    """The result of a request: seconds until its first token, and cached prompt tokens."""

    first_s: float
    cached: int


class Round(NamedTuple):
    """The results of one round for one length of the head.

    Attributes:
        length: tokens of the head.
        chosen: the second request of the pair for which the process chose the way itself.
        outcome: the outcome of asking other processes for the head of the request `chosen`.
        times: the seconds until the first token of all requests of the round, by the way in which their head was got.
    """

    length: int
    chosen: Heard
    outcome: str
    times: dict[str, list[float]]


def ask(fleet: Fleet, decode: str, prefill: str, name: str, prompt: list[int]) -> Heard:
    """Has one request served by the decode process `decode` and the prefill process `prefill`.

    Raises `ServiceError` if the request fails.
    """
    begun, first = time.monotonic(), 0.0
    fleet.send(decode, msg.Submit(request_id=name, prompt=tuple(prompt), max_new_tokens=2, prefill=prefill))
    while time.monotonic() < begun + _LONGEST_WAIT_S:
        for message in fleet.receive(0.05):
            if not isinstance(message, msg.Tokens) or message.request_id != name:
                continue
            if message.error:
                raise ServiceError(f"{name}: {message.error}")
            if message.tokens and not first:
                first = time.monotonic() - begun
            if message.finished:
                return Heard(first, message.cached_tokens)
    raise ServiceError(f"request {name!r} was not served within {_LONGEST_WAIT_S:g} s")


def rounds_of(prefills: int, decodes: int, count: int, seed: int, link: str = "") -> list[Round]:
    """Serves `count` rounds of each length, and checks that nothing is held at the end."""
    numbers = random.Random(seed)  # noqa: S311  (guards nothing)
    names = [f"p{number}" for number in range(prefills)]
    configs = [msgspec.structs.replace(PAIR_CONFIG, name=name) for name in names]
    configs += [msgspec.structs.replace(PAIR_CONFIG, name=f"d{number}", role="decode") for number in range(decodes)]
    lengths = [length for length in LENGTHS for _ in range(count)]
    numbers.shuffle(lengths)
    found: list[Round] = []
    with HostedFleet(configs, link) if link else Fleet(configs, WORKER) as fleet:

        def both(decode: str, length: int, way: str) -> tuple[Heard, Heard, str]:
            """Serves the two requests of a pair, which have the same head, at two prefill processes.

            Returns the result of each request, and the outcome of asking for the second request's head.
            """
            owner, other = numbers.sample(names, 2)
            head = tokens(numbers, length)
            computed = ask(fleet, decode, owner, f"first {way}", head + tokens(numbers, _END))
            before = Counter(fleet.stats()[other].prefixes)
            heard = ask(fleet, decode, other, way, head + tokens(numbers, _END))
            came = Counter(fleet.stats()[other].prefixes) - before
            return computed, heard, ", ".join(came) or "nobody asked"

        for decode in range(decodes):
            for name in names * 2:  # these requests make the first contacts, and are not measured
                ask(fleet, f"d{decode}", name, f"hello {decode} {name} {numbers.random()}", tokens(numbers, 48))
        for number, length in enumerate(lengths):
            times: defaultdict[str, list[float]] = defaultdict(list)
            chosen, outcome = Heard(0.0, 0), ""
            for way in numbers.sample([CHOSEN, PULLED, SPLIT], 3):
                first, second, came = both(f"d{number % decodes}", length, f"{way}{number}")
                times["computed"].append(first.first_s)
                times[came].append(second.first_s)
                if way == CHOSEN:
                    chosen, outcome = second, came
            found.append(Round(length, chosen, outcome, dict(times)))
        settle(fleet)
    return found


def settle(fleet: Fleet) -> None:
    """Waits until no process holds a page or an open request. A lease ends only shortly after its request.

    Raises `ServiceError` after a time limit.
    """
    deadline = time.monotonic() + _LONGEST_WAIT_S
    while any(one.pages_held or one.open_requests for one in fleet.stats().values()):
        if time.monotonic() > deadline:
            raise ServiceError(f"pages or requests are still held when all requests are served: {fleet.stats()}")
        time.sleep(0.05)


class Way(NamedTuple):
    """The times of one way at one length, in milliseconds: their median, and its standard error."""

    median: float
    error: float


class Choice(NamedTuple):
    """Says how good it was to choose one way.

    Attributes:
        loss: the milliseconds by which the way is slower than the best other way; negative if it is quicker.
        told: for each other way whose time differs significantly, the share by which the chosen way takes longer. It is
            negative if the chosen way is quicker.
    """

    loss: float
    told: list[float]


class Judged(NamedTuple):
    """The times of every way at one length of the head, and the ways that the process chose there."""

    chosen: list[str]
    ways: dict[str, Way]

    def choice(self, way: str) -> Choice:
        """Compares the median time of `way` with the median time of each other way."""
        mine, others = self.ways[way], [other for name, other in self.ways.items() if name != way]
        told = [
            mine.median / other.median - 1.0
            for other in others
            if abs(mine.median - other.median) > 2.0 * math.hypot(mine.error, other.error)
        ]
        return Choice(mine.median - min(other.median for other in others), told)


def judged_of(rounds: Sequence[Round]) -> Judged | None:
    """Returns the times and choices for one length of the head.

    Returns None in two cases: the head was pulled or computed less than twice, or the process chose only ways that were
    measured less than twice.
    """
    times = _times_of(rounds)
    ways = {name: _way(times[name]) for name in WAYS if len(times[name]) >= _LEAST}
    chosen = [one.outcome for one in rounds if one.outcome in ways]
    return Judged(chosen, ways) if "pulled" in ways and "computed" in ways and chosen else None


def _times_of(rounds: Sequence[Round]) -> defaultdict[str, list[float]]:
    """Returns the milliseconds of all requests, by the way in which they got their head."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for one in rounds:
        for way, times in one.times.items():
            found[way] += [1e3 * time for time in times]
    return found


def _way(times: Sequence[float]) -> Way:
    """Returns the median, and its standard error, estimated from the median absolute deviation."""
    middle = statistics.median(times)
    deviation = 1.483 * statistics.median(abs(one - middle) for one in times)
    return Way(middle, 1.253 * deviation / math.sqrt(len(times)))


def rows_of(fleet: str, rounds: list[Round]) -> list[Row]:
    """Returns a row for each length, and one for all lengths."""
    by_length: defaultdict[int, list[Round]] = defaultdict(list)
    for one in rounds:
        by_length[one.length].append(one)
    rows: list[Row] = []
    every: list[Judged] = []
    for length, some in sorted(by_length.items()):
        times, judged = _times_of(some), judged_of(some)
        row: Row = {"fleet": fleet, "tokens": length, "n": len(some)}
        for way in (way for way in WAYS if times[way]):
            row |= _percentiles(way, times[way])
        row |= Counter(one.outcome for one in some)
        row["hits"] = _hits(some)
        if judged:
            every.append(judged)
            row |= {f"{name}_error_ms": round(way.error, 1) for name, way in judged.ways.items()} | shares([judged])
        rows.append(row)
    rows.append(
        {"fleet": fleet, "tokens": "all", "n": len(rounds), "hits": _hits(rounds), **(shares(every) if every else {})}
    )
    return rows


def _hits(rounds: Sequence[Round]) -> float:
    heads = sum(one.length // _PAGE * _PAGE for one in rounds)
    return round(sum(one.chosen.cached for one in rounds) / heads, 3)


def shares(every: Sequence[Judged]) -> Row:
    """Returns how often the quickest way was chosen, and how much the choices lose to it.

    `right` is the share of choices that took the quickest way. `right_apart` counts only choices whose way differs
    significantly from another way. `right_clear` counts only choices that also differ by more than `_CLEAR`.
    `regret_ms` is the average loss of a choice, and `regret_total_ms` the loss of all choices. `regret_if_*` is the
    average loss if that way were always chosen.
    """
    choices = [judged.choice(way) for judged in every for way in judged.chosen]
    apart = [one.told for one in choices if one.told]
    clear = [some for told in apart if (some := [share for share in told if abs(share) > _CLEAR])]
    row: Row = {"right": _share([one.loss <= 0.0 for one in choices]), "judged": len(choices)}
    row |= {"apart": len(apart), "clear": len(clear)}
    row |= {"right_apart": _share([max(told) < 0.0 for told in apart])} if apart else {}
    row |= {"right_clear": _share([max(told) < 0.0 for told in clear])} if clear else {}
    lost = [max(0.0, one.loss) for one in choices]
    row |= {"regret_ms": round(statistics.fmean(lost), 2), "regret_total_ms": round(sum(lost), 1)}
    for way in ("pulled", "computed"):
        fixed = [max(0.0, judged.choice(way).loss) for judged in every for _ in judged.chosen]
        row[f"regret_if_{way}_ms"] = round(statistics.fmean(fixed), 2)
    return row


def _share(of: Sequence[bool]) -> float:
    return round(sum(of) / len(of), 3)


def _percentiles(name: str, times: list[float]) -> Row:
    return {f"{name}_ms_p{at}": round(float(np.percentile(times, at)), 1) for at in (50, 99)}


def tokens(numbers: random.Random, count: int) -> list[int]:
    """Returns random tokens."""
    return [numbers.randrange(256) for _ in range(count)]


def main() -> int:
    """Runs the benchmark, prints its rows, and writes them. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prefix_peers", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"rounds of each length ({ROUNDS})")
    parser.add_argument("--seed", type=int, default=0, help="seed of the prompts and their order (0)")
    parser.add_argument("--only", help="run one fleet, for example '2 + 2' (all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures and the machine")
    chosen = parser.parse_args()
    rows: list[Row] = []
    for prefills, decodes, link in FLEETS:
        name = f"{prefills} + {decodes}" + (f", {link}" if link else "")
        if chosen.only not in (None, name):
            continue
        if link and (reason := why_not()):
            progress(f"prefix_peers: no {name}: {reason}")
            continue
        try:
            rounds = rounds_of(prefills, decodes, chosen.rounds, chosen.seed, link)
        except KVCacheError as error:
            progress(f"prefix_peers: {error}")
            return 1
        rows += rows_of(name, rounds)
        progress(f"prefix_peers: {name} is done")
    print(table(rows))
    if chosen.json:
        command = f"python -m benchmarks.prefix_peers --rounds {chosen.rounds} --seed {chosen.seed}"
        command += f" --only '{chosen.only}'" if chosen.only else ""
        statistic = "columns *_p50 and *_p99: percentiles over the requests of n rounds that took this way"
        write(chosen.json, {**header(command, statistic), "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
