"""When is a prefix that another prefill process has computed better pulled than computed, and is that what is chosen?

`python -m benchmarks.prefix_peers`: real processes, two of prefill and two of decode, then four and one; a small Llama,
pages over NIXL, torch on one thread, one request at a time. In each pair of requests, the first one has a head that no
process has: a prefill process computes it. The second has the same head and another end, and goes to another prefill
process, which pulls the head or computes it, as it thinks is quicker. Lengths of heads in an order of the seed.

    computed_ms   until the first token of a prompt whose head nobody has: what one process alone takes, each time
    pulled_ms     until that of one whose head was pulled
    right         share of the second requests for which the quicker way was chosen, which is that of the lower median
                  at this length; of lengths that were pulled at least twice, `judged` requests in all
    no_loss       likewise, but the slower way is wrong only where its median is more than 5 % above the other's

Each second prompt also names what it found cached; `hits` is the share of the heads' whole pages.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from benchmarks.frame import Row, header, progress, table, write
from kvcache.errors import KVCacheError
from scheduler_adapters.errors import ServiceError
from scheduler_adapters.service import messages as msg
from scheduler_adapters.service.fleet import Fleet
from scheduler_adapters.service.server import ServerConfig

LENGTHS = (32, 64, 128, 256, 512, 1024, 2048, 3072)
FLEETS = ((2, 2), (4, 1))
PAIRS = 20
_TIE = 1.05
_PAGE = 16
_END = 8  # tokens of a prompt behind its head
_LONGEST_WAIT_S = 120.0
_CONFIG = ServerConfig(
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
    """The result of a request: seconds until its first token, and prompt tokens that were cached."""

    first_s: float
    cached: int


class Pair(NamedTuple):
    """A head of so many tokens: what both requests took, and what became of the second one's question."""

    length: int
    computed: Heard
    second: Heard
    outcome: str


def ask(fleet: Fleet, decode: str, prefill: str, name: str, prompt: list[int]) -> Heard:
    """Have one request served by these processes; `ServiceError` if that fails."""
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


def pairs_of(prefills: int, decodes: int, count: int, seed: int) -> list[Pair]:
    """Serve `count` pairs of each length, and see to it that nothing is held in the end."""
    numbers = random.Random(seed)  # noqa: S311  (guards nothing)
    names = [f"p{number}" for number in range(prefills)]
    configs = [msgspec.structs.replace(_CONFIG, name=name) for name in names]
    configs += [msgspec.structs.replace(_CONFIG, name=f"d{number}", role="decode") for number in range(decodes)]
    lengths = [length for length in LENGTHS for _ in range(count)]
    numbers.shuffle(lengths)
    found: list[Pair] = []
    with Fleet(configs) as fleet:
        for decode in range(decodes):
            for name in names * 2:  # the first contact is not meant
                ask(fleet, f"d{decode}", name, f"hello {decode} {name} {numbers.random()}", _tokens(numbers, 48))
        for number, length in enumerate(lengths):
            owner, other = numbers.sample(names, 2)
            decode, head = f"d{number % decodes}", _tokens(numbers, length)
            computed = ask(fleet, decode, owner, f"first {number}", head + _tokens(numbers, _END))
            before = Counter(fleet.stats()[other].prefixes)
            second = ask(fleet, decode, other, f"second {number}", head + _tokens(numbers, _END))
            came = Counter(fleet.stats()[other].prefixes) - before
            found.append(Pair(length, computed, second, ", ".join(came) or "nobody asked"))
        settle(fleet)
    return found


def settle(fleet: Fleet) -> None:
    """Wait until nothing is held: a lease ends a moment after its request. `ServiceError` if that does not come."""
    deadline = time.monotonic() + _LONGEST_WAIT_S
    while any(one.pages_held or one.open_requests for one in fleet.stats().values()):
        if time.monotonic() > deadline:
            raise ServiceError(f"something is held when all is served: {fleet.stats()}")
        time.sleep(0.05)


def rows_of(fleet: str, pairs: list[Pair]) -> list[Row]:
    """A row for each length, and one for all."""
    by_length: defaultdict[int, list[Pair]] = defaultdict(list)
    for pair in pairs:
        by_length[pair.length].append(pair)
    rows: list[Row] = []
    rights: list[bool] = []
    no_losses: list[bool] = []
    for length, some in sorted(by_length.items()):
        pulled = [1e3 * pair.second.first_s for pair in some if pair.outcome == "pulled"]
        computed = [1e3 * pair.computed.first_s for pair in some]
        row: Row = {"fleet": fleet, "tokens": length, "n": len(some), **_percentiles("computed", computed)}
        row |= _percentiles("pulled", pulled) if pulled else {}
        row |= Counter(pair.outcome for pair in some)
        row["hits"] = round(sum(pair.second.cached for pair in some) / (len(some) * (length // _PAGE * _PAGE)), 3)
        if len(pulled) > 1:
            pulling, computing = statistics.median(pulled), statistics.median(computed)
            right = [(pair.outcome == "pulled") == (pulling < computing) for pair in some]
            near = max(pulling, computing) <= _TIE * min(pulling, computing)
            no_loss = [one or near for one in right]
            row |= {"right": _share(right), "no_loss": _share(no_loss)}
            rights += right
            no_losses += no_loss
        rows.append(row)
    heads = sum(pair.length // _PAGE * _PAGE for pair in pairs)
    hits = round(sum(pair.second.cached for pair in pairs) / heads, 3)
    shares: Row = {"right": _share(rights), "no_loss": _share(no_losses), "judged": len(rights)} if rights else {}
    rows.append({"fleet": fleet, "tokens": "all", "n": len(pairs), "hits": hits, **shares})
    return rows


def _share(of: list[bool]) -> float:
    return round(sum(of) / len(of), 3)


def _percentiles(name: str, times: list[float]) -> Row:
    return {f"{name}_ms_p{at}": round(float(np.percentile(times, at)), 1) for at in (50, 99)}


def _tokens(numbers: random.Random, count: int) -> list[int]:
    return [numbers.randrange(256) for _ in range(count)]


def main() -> int:
    """Measure, print, and write; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prefix_peers", description=__doc__)
    parser.add_argument("--pairs", type=int, default=PAIRS, help=f"of each length ({PAIRS})")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts and their order (0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures and the machine")
    chosen = parser.parse_args()
    rows: list[Row] = []
    for prefills, decodes in FLEETS:
        try:
            pairs = pairs_of(prefills, decodes, chosen.pairs, chosen.seed)
        except KVCacheError as error:
            progress(f"prefix_peers: {error}")
            return 1
        rows += rows_of(f"{prefills} + {decodes}", pairs)
        progress(f"prefix_peers: {prefills} + {decodes} is done")
    print(table(rows))
    if chosen.json:
        command = f"python -m benchmarks.prefix_peers --pairs {chosen.pairs} --seed {chosen.seed}"
        write(chosen.json, {**header(command, "columns *_p50 and *_p99: percentiles of n pairs"), "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
