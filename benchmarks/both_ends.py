"""How long is the time to the first token over a slow link, if a head is pulled, computed, or both at once?

"Head" is the first part of a prompt, which another prompt shares. `python -m benchmarks.both_ends` runs two prefill
processes and one decode process, each on a host of its own (a network namespace) behind a slow link. One prefill
process has computed a prompt, and the other gets a prompt with the same head. It serves this prompt in each way in
turn: it pulls the head, computes it, or pulls its end while it computes its beginning. A last way leaves the choice to
the process. The seed determines the order (`benchmarks.prefix_worker`). Pages go over NIXL, torch has one thread, and
requests come one at a time. For 100 Mbit/s the model is the small Llama. For 1 Gbit/s its keys and values are larger,
so that the model computes them about as quickly as the link brings them.

    pulled_ms     until the first token if the whole head is pulled
    computed_ms   if all of it is computed
    split_ms      if it is pulled from its end while it is computed from its front
    chosen_ms     in the way that the process chooses
    ideal_ms      1 / (1 / pulled + 1 / computed): if both ends, at these speeds, met without any loss
    of_best       median of split_ms over the least median of the first three ways
    chosen_of_best   likewise for chosen_ms
    pages         mean share of the head's pages that a split has pulled
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from benchmarks.frame import Row, header, progress, table, write
from benchmarks.prefix_hosts import HostedFleet
from benchmarks.prefix_peers import CHOSEN, PAIR_CONFIG, ask, settle, tokens
from benchmarks.prefix_worker import WAYS
from kvcache.errors import KVCacheError
from scheduler_adapters.hf.tiny import VOCAB_SIZE
from scheduler_adapters.service.fleet import Fleet
from scheduler_adapters.service.server import ServerConfig
from tests.hosts.network import why_not

ROUNDS = 12
_PAGE, _END = 16, 8
_LEARNT = (64, 256, 1024)
"""Lengths of the heads with which the processes first measure both speeds."""


class Link(NamedTuple):
    """A link's rate, whether the model's keys and values are wide, and the tokens of a head."""

    rate: str
    is_wide: bool
    length: int


LINKS = (Link("100mbit", False, 3072), Link("1gbit", True, 3072))


def wide_model(folder: Path) -> str:
    """Writes a random Llama with one layer whose keys and values take 8 KiB a token. Returns its directory."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415  (heavy, and of an optional extra)

    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=16,
        num_key_value_heads=16,
        head_dim=64,
        max_position_embeddings=1 << 16,
    )
    generator: Any = torch.random  # torch has no types for it
    with generator.fork_rng(devices=[]):
        generator.manual_seed(0)
        made: Any = LlamaForCausalLM(config)
        made.save_pretrained(folder)
    return str(folder)


def rounds_of(link: Link, model: str | None, rounds: int, seed: int) -> list[Row]:
    """Serves `rounds` prompts in each way. Checks after each prompt that no page is held. Returns a row."""
    numbers = random.Random(seed)  # noqa: S311  (guards nothing)
    length = link.length
    config = msgspec.structs.replace(PAIR_CONFIG, model=model, cache_bytes=192 << 20, max_seq_len=length + 2 * _END)
    roles: list[ServerConfig] = [msgspec.structs.replace(config, name=name) for name in ("p0", "p1")]
    roles.append(msgspec.structs.replace(config, name="d0", role="decode"))
    times: defaultdict[str, list[float]] = defaultdict(list)
    pages: list[float] = []
    with HostedFleet(roles, link.rate) as fleet:

        def served(way: str, number: int, size: int) -> tuple[float, int]:
            """Serves a prompt with a new head at p0, and another prompt with that head at p1.

            Returns the second prompt's seconds and pages.
            """
            head = tokens(numbers, size)
            ask(fleet, "d0", "p0", f"first {way}{number} {size}", head + tokens(numbers, _END))
            settle(fleet)
            before = pulled(fleet)
            heard = ask(fleet, "d0", "p1", f"{way}{number} {size}", head + tokens(numbers, _END))
            settle(fleet)
            return heard.first_s, pulled(fleet) - before

        for number in range(2):
            for size in (*(one for one in _LEARNT if one < length), length):
                for way in WAYS[:2]:
                    served(way, -1 - number, size)
        for number in range(rounds):
            ways = [*WAYS, CHOSEN]
            numbers.shuffle(ways)
            for way in ways:
                seconds, came = served(way, number, length)
                times[way].append(1e3 * seconds)
                if way == WAYS[2]:
                    pages.append(came / (length // _PAGE))
        outcomes = fleet.stats()["p1"].prefixes
    return [row_of(link, times, pages, outcomes)]


def pulled(fleet: Fleet) -> int:
    """The pages that p1 has pulled so far."""
    return fleet.stats()["p1"].pages_pulled


def row_of(link: Link, times: dict[str, list[float]], pages: Sequence[float], outcomes: dict[str, int]) -> Row:
    """The row of a link."""
    middle = {way: statistics.median(some) for way, some in times.items()}
    best = min(middle[way] for way in WAYS)
    row: Row = {"link": link.rate, "tokens": link.length, "n": len(pages)}
    for way, some in times.items():
        row[f"{way.strip()}_ms_min"], row[f"{way.strip()}_ms_median"] = round(min(some), 1), round(middle[way], 1)
    row["ideal_ms"] = round(1.0 / sum(1.0 / middle[way] for way in WAYS[:2]), 1)
    row["of_best"] = round(middle[WAYS[2]] / best, 3)
    row["chosen_of_best"] = round(middle[CHOSEN] / best, 3)
    row["pages"] = round(statistics.fmean(pages), 2)
    return row | {f"outcome_{outcome}": count for outcome, count in sorted(outcomes.items())}


def measure(rounds: int, seed: int, links: Sequence[Link] = LINKS) -> list[Row]:
    """The rows of all links."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="pagewire-both-") as folder:
        for link in links:
            rows += rounds_of(link, wide_model(Path(folder)) if link.is_wide else None, rounds, seed)
            progress(f"both_ends: {link.rate} is done")
    return rows


def main() -> int:
    """Runs the benchmark, prints its rows, and writes them. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.both_ends", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"prompts of each way ({ROUNDS})")
    parser.add_argument("--seed", type=int, default=0, help="seed of the prompts and their order (0)")
    parser.add_argument("--only", default="", help="run one link, by its rate (all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures and the machine")
    chosen = parser.parse_args()
    if reason := why_not():
        progress(f"both_ends: no hosts of their own: {reason}")
        return 1
    try:
        rows = measure(chosen.rounds, chosen.seed, [link for link in LINKS if chosen.only in ("", link.rate)])
    except KVCacheError as error:
        progress(f"both_ends: {error}")
        return 1
    print(table(rows))
    if chosen.json:
        command = f"python -m benchmarks.both_ends --rounds {chosen.rounds} --seed {chosen.seed}"
        write(chosen.json, {**header(command), "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
