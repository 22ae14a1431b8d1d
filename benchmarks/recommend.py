"""What does `get_or_recommend_replica` cost?

The prompt is hashed once and looked up in every replica. In the case `cold` no replica has a page of it. In the case
`one` a single replica has all of its full pages, and in the case `all` every replica has them. `again` is like `all`,
but the call is made a second time, as for a waiting request. Pages have 16 tokens. Each sample except those of `again`
is a new context, so the figure includes the hash. `hash_min` is the hash alone.
"""

from __future__ import annotations

import numpy as np

from benchmarks.frame import Row, options, pin, report, samples, summary
from benchmarks.pools import LONGEST, Prompts, expect, manager_of
from kvcache import PagedKVCacheManager, TextContext
from kvcache.params import HashAlgorithm
from kvcache.replica.context import hasher_of

PAGE = 16


def publish(manager: PagedKVCacheManager, tokens: np.ndarray, replica: int) -> None:
    """Makes the prompt's pages cached at one replica."""
    context = TextContext(tokens, LONGEST)
    with manager.claim(context, replica):
        expect(manager.maybe_reserve(context), "there is room")
        context.update(1)
        manager.step([context])


def measure(replicas: int, length: int, algorithm: HashAlgorithm, repeats: int) -> list[Row]:
    """The rows for one prompt length."""
    manager, prompts = manager_of(3 * length // PAGE, rows=8, algorithm=algorithm, replicas=replicas), Prompts()
    tokens, other = prompts.tokens(length), prompts.tokens(length)
    shape = {"replicas": replicas, "prompt": length, "hash": algorithm}

    def asked(wanted: np.ndarray) -> Row:
        return summary(samples(repeats, lambda: TextContext(wanted, LONGEST), manager.get_or_recommend_replica))

    def digests(context: TextContext) -> None:
        hasher_of(context, algorithm, PAGE).digests(context.tokens, 0, (length - 1) // PAGE)

    hashing = summary(samples(repeats, lambda: TextContext(other, LONGEST), digests))["us_min"]
    rows: list[Row] = [{**shape, "case": "cold", **asked(other)}]
    publish(manager, tokens, 0)
    rows.append({**shape, "case": "one", **asked(tokens)})
    for replica in range(1, replicas):
        publish(manager, tokens, replica)
    probe = TextContext(tokens, LONGEST)
    expect(manager.admission(probe).cached_pages == (length - 1) // PAGE, "every full page is found")
    rows.append({**shape, "case": "all", **asked(tokens)})
    rows.append(
        {**shape, "case": "again", **summary(samples(repeats, lambda: probe, manager.get_or_recommend_replica))}
    )
    return [{**row, "hash_min": hashing} for row in rows]


def main() -> None:
    """Runs the benchmark and reports its rows."""
    chosen = options(__doc__)
    pin()
    repeats = 15 if chosen.quick else 60
    algorithms: tuple[HashAlgorithm, ...] = ("sha256", "xxh3_128")
    rows = [
        row
        for algorithm in algorithms
        for replicas in (1, 8)
        for length in (4096, 32_768)
        for row in measure(replicas, length, algorithm, repeats)
    ]
    report("recommend", rows, chosen)


if __name__ == "__main__":
    main()
