"""Every token's KV is what its own prefix gives, at every fetch, hit, fork, tier copy and hand-over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import kvcache.replica.replica
from kvcache import BlockTable, BlockTableMismatchError, KVCacheError, TextContext
from kvcache.replica import hashing
from kvcache.replica.replica import Replica
from kvcache.weights import Lineage, Segment, Segments, Weights
from tests.kvcache.contents_oracle import KINDS, Engine, HandOver, Pair, Request, WrongContentError


@pytest.mark.parametrize("kind", KINDS)
def test_each_request_sees_only_its_own_kv(kind: str, tmp_path: Path) -> None:
    events = ["hits", "forks", "imports", "leases", "preemptions", "steps of a batch", "resets", "bytes of objects"]
    events += ["switches", "recomputed", "stopped", "refused until they are reserved"]
    if "states" not in KINDS[kind]:
        events += ["steps in flight", "switches with steps in flight"]
    reached: Counter[str] = Counter()
    for seed in range(60):
        if seed >= 12 and all(reached[event] for event in events):
            break
        reached += Pair(kind, seed, tmp_path).run(300)  # whether an object comes in time depends on the machine
    assert min(reached[event] for event in events) > 0, reached


def without_version(algorithm: Any, page_size: int, salt: str | None, _weights: Any = None) -> Any:
    return SEEDED(algorithm, page_size, salt)


def stays_in_its_segment(replica: Replica, row: int | None) -> Lineage:
    return replica._lineages.get(row, replica.weights.now)


def lineage_of_new_pages(replica: Replica, _row: int | None) -> Lineage:
    return replica.weights.now


def goes_on_unmarked(weights: Weights, lineage: Lineage, _committed: int) -> Lineage:
    return Lineage(lineage.segments, weights.now.switches)


def forks_anew(replica: Replica, parent: int, row: int, end: int) -> Any:
    found = FORK(replica, parent, row, end)
    replica._lineages[row] = replica.weights.now
    return found


def follows_unnamed(segments: Segments, end: int, version: bytes | None) -> Segments:
    return tuple(segment for segment in segments if segment.first_page < end) or (Segment(0, version),)


def any_age(weights: Weights, _most: int) -> Iterator[bytes | None]:
    return RECENT(weights, 1 << 30)


SEEDED, FORK, RECENT = hashing._seeded, Replica.fork, Weights.recent
# Each entry takes the version of the weights out of one place.
VERSION_LEFT_OUT: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "of the chain": (hashing, "_seeded", without_version),
    "of what a running request fills": (Replica, "lineage", stays_in_its_segment),
    "of the request: it fills pages of the new version": (Replica, "lineage", lineage_of_new_pages),
    "of a segment: pages of both versions have names of the old one": (Weights, "gone_on", goes_on_unmarked),
    "of a fork": (Replica, "fork", forks_anew),
    "of what is computed behind pages of before": (kvcache.replica.replica, "followed_by", follows_unnamed),
    "of the limit of a request that allows old pages": (Weights, "recent", any_age),
}


def many_pairs(kind: str) -> None:
    for seed in range(60):
        Pair(kind, seed).run(300)


@pytest.mark.parametrize("left_out", VERSION_LEFT_OUT)
def test_a_version_that_is_left_out_is_noticed(left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, mutant = VERSION_LEFT_OUT[left_out]
    monkeypatch.setattr(owner, name, mutant)
    with pytest.raises((WrongContentError, KVCacheError)):
        many_pairs("full")


def tables_of(source: Engine, request: Request, length: int) -> Iterator[tuple[BlockTable, bool]]:
    """Run a claimed prompt in chunks. Yields the table after each chunk, and whether it is the last one."""
    context = request.context
    while context.end_idx == length:
        source.chunk(request)
        assert source.manager.reserve_batch([context]).all()
        source.run(source.runs_of([request]), source.manager.fetch([context]))
        context.update(9)
        source.manager.step([context])
        last = context.end_idx > length
        table = source.manager.block_table(request.name, full_pages=not last)
        if table.num_tokens:
            yield table, last


def handed_over(source: Engine, reader: Engine, request: Request, theirs: Request, length: int) -> int:
    """Let the reader import each table while the source runs the next chunk. Returns how many tables it took."""
    hand, pending, copier, count = None, None, None, 0
    for table, last in tables_of(source, request, length):
        if hand is None or pending is None or copier is None:
            hand = HandOver(source, reader, request, table)
            pending = reader.manager.import_block_table(theirs.context, table, partial=not last)
            assert pending is not None
            copier = reader.manager.copier(pending)
        else:
            reader.manager.extend_import(theirs.context, pending, table, last=last)
        hand.copy(pending, copier.take(last=last))
        reader.manager.check()
        count += 1
        if last:
            reader.manager.commit_import(theirs.context, pending, copier.prove())
            theirs.drafted = table.num_tokens
    return count


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_that_is_handed_over_chunk_by_chunk_arrives_whole(kind: str) -> None:
    """The reader begins with the table of the first chunk, and the source goes on in the meantime."""
    tables = Counter[int]()
    for seed in range(24):
        pair = Pair(kind, seed)
        source, reader = pair.engines
        for number in range(4):
            length = pair.random.randrange(2, 60)
            prompt = [(number % 2 * 31 + place * 7) % 251 for place in range(length)]
            request = Request(TextContext(prompt, 90, f"r{number}"), 0)
            theirs = Request(TextContext([*prompt, 9], 90, f"d{number}"), 0)
            assert source.claim(request)
            lease = source.manager.lease(request.name)
            reader.manager.external_claim(theirs.name, pair.random.randrange(reader.sizes.replicas))
            with suppress(BlockTableMismatchError):  # pages of some other sizes
                tables[handed_over(source, reader, request, theirs, length)] += 1
                reader.running.append(theirs)
            for _ in range(6):
                if theirs in reader.running:
                    reader.step()
            for one in [*reader.running]:
                reader.leave(one)
            source.leave(request)
            source.manager.end_lease(lease)
            for manager in (source.manager, reader.manager):
                manager.check()
    assert sum(tables[count] for count in range(2, 60)) > 20, tables
