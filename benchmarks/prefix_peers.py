"""When is pulling a prefix from another prefill process quicker than computing it, and is the right way chosen?

`python -m benchmarks.prefix_peers` runs real processes: first two for prefill and two for decode, then four and one.
Then it runs two and one, each on a host of its own (a network namespace) with a slow link. The model is a small Llama,
pages go over NIXL, torch has one thread, and requests come one at a time, in pairs. The first request of a pair begins
with a part that no process has (its head), so a prefill process computes it. The second request has the same head and
another end. It goes to another prefill process, which pulls the head or computes it, whichever it estimates to be
quicker. In every other pair the second request always pulls (`benchmarks.prefix_worker`), so that both ways are
measured at every length. The seed determines the order of the lengths.

    computed_ms   time to the first token if no process has the head, as with a single process
    pulled_ms     time to the first token if the head was pulled
    noise_ms      twice the standard error of the difference of the two medians (robust, by absolute deviations)
    right         share of the `judged` second requests that took the quicker way: the one with the lower median at
                  this length
    right_clear   the same share of the `clear` requests, those at lengths whose medians differ by more than the noise
    regret_ms     mean loss of a judged request: the median of the chosen way minus the median of the quicker way
    regret_if_*   the same if every head were pulled, or every head computed

`hits` is the share of the heads' full pages that the second requests found cached.
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
from benchmarks.prefix_worker import PULLED
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
PAIRS = 10
_PAGE = 16
_END = 8  # tokens of a prompt after its head
_LONGEST_WAIT_S = 120.0
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


class Pair(NamedTuple):
    """Two requests with the same head.

    It has the times of both, and the outcome of asking other processes for the second one's head. The head has `length`
    tokens. `pulled` is the second request of another pair, whose head was always pulled; None if no source was asked.
    """

    length: int
    computed: tuple[Heard, ...]
    second: Heard
    outcome: str
    pulled: Heard | None


def ask(fleet: Fleet, decode: str, prefill: str, name: str, prompt: list[int]) -> Heard:
    """Have one request served by these processes. Raises `ServiceError` if that fails."""
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
    raise ServiceError(f"{name}: not served within {_LONGEST_WAIT_S:g} s")


def pairs_of(prefills: int, decodes: int, count: int, seed: int, link: str = "") -> list[Pair]:
    """Serve `count` pairs of each length, and check that nothing is held at the end."""
    numbers = random.Random(seed)  # noqa: S311  (guards nothing)
    names = [f"p{number}" for number in range(prefills)]
    configs = [msgspec.structs.replace(PAIR_CONFIG, name=name) for name in names]
    configs += [msgspec.structs.replace(PAIR_CONFIG, name=f"d{number}", role="decode") for number in range(decodes)]
    lengths = [length for length in LENGTHS for _ in range(count)]
    numbers.shuffle(lengths)
    found: list[Pair] = []
    with HostedFleet(configs, link) if link else Fleet(configs, WORKER) as fleet:

        def both(decode: str, length: int, first: str, second: str) -> tuple[Heard, Heard, str]:
            """Serves two requests with the same head at two prefill processes.

            Also returns the outcome of asking for the head.
            """
            owner, other = numbers.sample(names, 2)
            head = tokens(numbers, length)
            computed = ask(fleet, decode, owner, first, head + tokens(numbers, _END))
            before = Counter(fleet.stats()[other].prefixes)
            heard = ask(fleet, decode, other, second, head + tokens(numbers, _END))
            came = Counter(fleet.stats()[other].prefixes) - before
            return computed, heard, ", ".join(came) or "nobody asked"

        for decode in range(decodes):
            for name in names * 2:  # these requests make the first contacts, and are not measured
                ask(fleet, f"d{decode}", name, f"hello {decode} {name} {numbers.random()}", tokens(numbers, 48))
        for number, length in enumerate(lengths):
            decode = f"d{number % decodes}"
            computed, second, outcome = both(decode, length, f"first {number}", f"second {number}")
            again, pulled, came = both(decode, length, f"third {number}", f"{PULLED}{number}")
            found.append(Pair(length, (computed, again), second, outcome, pulled if came == "pulled" else None))
        settle(fleet)
    return found


def settle(fleet: Fleet) -> None:
    """Wait until no page is held, because a lease ends shortly after its request.

    Raises `ServiceError` after a time limit.
    """
    deadline = time.monotonic() + _LONGEST_WAIT_S
    while any(one.pages_held or one.open_requests for one in fleet.stats().values()):
        if time.monotonic() > deadline:
            raise ServiceError(f"something is held when all is served: {fleet.stats()}")
        time.sleep(0.05)


class Judged(NamedTuple):
    """The second requests of one length: which of them pulled, and the medians of both ways in milliseconds."""

    pulls: list[bool]
    pulling: float
    computing: float
    noise: float

    @property
    def is_clear(self) -> bool:
        """Whether the two ways differ by more than noise."""
        return abs(self.pulling - self.computing) > self.noise

    @property
    def right(self) -> list[bool]:
        """For each request, whether it took the quicker way."""
        return [pulls == (self.pulling < self.computing) for pulls in self.pulls]

    def regrets(self, pulls: Sequence[bool]) -> list[float]:
        """For each request, the milliseconds that its choice has lost."""
        least = min(self.pulling, self.computing)
        return [(self.pulling if one else self.computing) - least for one in pulls]


def judged_of(pairs: Sequence[Pair]) -> Judged | None:
    """The results for one length; None if its heads were not pulled at least twice."""
    pulled = _pulled_ms(pairs)
    computed = _computed_ms(pairs)
    if len(pulled) < 2:
        return None
    noise = 2.0 * math.hypot(_error_of_median(pulled), _error_of_median(computed))
    pulls = [pair.outcome == "pulled" for pair in pairs]
    return Judged(pulls, statistics.median(pulled), statistics.median(computed), noise)


def _pulled_ms(pairs: Sequence[Pair]) -> list[float]:
    chosen = [pair.second for pair in pairs if pair.outcome == "pulled"]
    return [1e3 * one.first_s for one in (*chosen, *(pair.pulled for pair in pairs if pair.pulled))]


def _computed_ms(pairs: Sequence[Pair]) -> list[float]:
    return [1e3 * one.first_s for pair in pairs for one in pair.computed]


def _error_of_median(times: Sequence[float]) -> float:
    """The standard error of a median, estimated from the median absolute deviation."""
    middle = statistics.median(times)
    deviation = 1.483 * statistics.median(abs(one - middle) for one in times)
    return 1.253 * deviation / math.sqrt(len(times))


def rows_of(fleet: str, pairs: list[Pair]) -> list[Row]:
    """A row for each length, and one for all lengths."""
    by_length: defaultdict[int, list[Pair]] = defaultdict(list)
    for pair in pairs:
        by_length[pair.length].append(pair)
    rows: list[Row] = []
    every: list[Judged] = []
    for length, some in sorted(by_length.items()):
        pulled, computed, judged = _pulled_ms(some), _computed_ms(some), judged_of(some)
        row: Row = {"fleet": fleet, "tokens": length, "n": len(some), **_percentiles("computed", computed)}
        row |= _percentiles("pulled", pulled) if pulled else {}
        row |= Counter(pair.outcome for pair in some)
        row["hits"] = round(sum(pair.second.cached for pair in some) / (len(some) * (length // _PAGE * _PAGE)), 3)
        if judged:
            every.append(judged)
            row |= {"noise_ms": round(judged.noise, 1), **shares([judged])}
        rows.append(row)
    heads = sum(pair.length // _PAGE * _PAGE for pair in pairs)
    hits = round(sum(pair.second.cached for pair in pairs) / heads, 3)
    rows.append({"fleet": fleet, "tokens": "all", "n": len(pairs), "hits": hits, **(shares(every) if every else {})})
    return rows


def shares(every: Sequence[Judged]) -> Row:
    """The share of requests that took the quicker way, and the loss of the others."""
    right = [one for judged in every for one in judged.right]
    clear = [one for judged in every if judged.is_clear for one in judged.right]
    lost = [one for judged in every for one in judged.regrets(judged.pulls)]
    row: Row = {"right": _share(right), "judged": len(right), "clear": len(clear)}
    row |= {"right_clear": _share(clear)} if clear else {}
    row |= {"regret_ms": round(statistics.fmean(lost), 2), "regret_total_ms": round(sum(lost), 1)}
    for way, pulls in (("pulled", True), ("computed", False)):
        fixed = [one for judged in every for one in judged.regrets([pulls] * len(judged.pulls))]
        row[f"regret_if_{way}_ms"] = round(statistics.fmean(fixed), 2)
    return row


def _share(of: list[bool]) -> float:
    return round(sum(of) / len(of), 3)


def _percentiles(name: str, times: list[float]) -> Row:
    return {f"{name}_ms_p{at}": round(float(np.percentile(times, at)), 1) for at in (50, 99)}


def tokens(numbers: random.Random, count: int) -> list[int]:
    """Returns random tokens."""
    return [numbers.randrange(256) for _ in range(count)]


def main() -> int:
    """Measure, print, and write. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prefix_peers", description=__doc__)
    parser.add_argument("--pairs", type=int, default=PAIRS, help=f"of each length ({PAIRS})")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts and their order (0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures and the machine")
    chosen = parser.parse_args()
    rows: list[Row] = []
    for prefills, decodes, link in FLEETS:
        name = f"{prefills} + {decodes}" + (f", {link}" if link else "")
        if link and (reason := why_not()):
            progress(f"prefix_peers: no {name}: {reason}")
            continue
        try:
            pairs = pairs_of(prefills, decodes, chosen.pairs, chosen.seed, link)
        except KVCacheError as error:
            progress(f"prefix_peers: {error}")
            return 1
        rows += rows_of(name, pairs)
        progress(f"prefix_peers: {name} is done")
    print(table(rows))
    if chosen.json:
        command = f"python -m benchmarks.prefix_peers --pairs {chosen.pairs} --seed {chosen.seed}"
        write(chosen.json, {**header(command, "columns *_p50 and *_p99: percentiles of n pairs"), "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
