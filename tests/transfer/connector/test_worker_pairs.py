"""Tests pairs of engines of every kind, in several processes. `make pairs` runs 300 pairs. This file runs one pair of
each of some families.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.transfer.pair_model import RankCaches, Side, group_config
from tests.transfer.pair_ranks import ChildRank, children
from tests.transfer.pairs import FAMILIES, MOST_RANKS, draw, run, vllm_refusal

HERE = (
    "replicated at the source 4->2",
    "tp 3->2",
    "pp 3->2 and tp",
    "pages that do not divide",
    "mla 2->1",
    "sliding window, pages differ",
    "hybrid of three kinds",
    "host buffers",
)


@pytest.fixture(scope="module")
def ranks() -> Iterator[list[ChildRank]]:
    processes = children(2 * MOST_RANKS)
    yield processes
    for process in processes:
        process.stop()


@pytest.mark.slow
@pytest.mark.parametrize("family", HERE)
def test_every_byte_arrives_between_processes(family: str, ranks: list[ChildRank]) -> None:
    (row,) = run(0, 7, ranks, FAMILIES.index(family))
    assert row["problem"] == ""
    assert row["bytes"]


def test_the_drawn_pairs_have_everything_that_was_asked_for() -> None:
    pairs = [draw(number)[1] for number in range(300)]
    ratios = Counter((pair.source.tp, pair.reader.tp) for pair in pairs)
    assert {(1, 2), (2, 1), (1, 4), (4, 1), (2, 4), (4, 2), (2, 3), (3, 2), (4, 3), (3, 4)} <= set(ratios)
    replicated = {
        (pair.source.tp > spec.heads, pair.reader.tp > spec.heads)
        for pair in pairs
        for spec in pair.groups
        if spec.kind == "full"
    }
    assert len(replicated) == 4
    assert {(1, 2), (2, 1), (3, 2)} <= {(pair.source.pp, pair.reader.pp) for pair in pairs}
    sizes = [
        tuple(group_config(pair.groups[0], side).page_size for side in (pair.source, pair.reader)) for pair in pairs
    ]
    assert sum(one > other for one, other in sizes) > 30
    assert sum(one < other for one, other in sizes) > 30
    assert any(one % other and other % one for one, other in sizes)
    layouts = Counter((pair.source.layout, pair.reader.layout) for pair in pairs)
    assert len(layouts) > 60
    assert {spec.kind for pair in pairs for spec in pair.groups} == {"full", "mla", "sliding_window", "mamba"}
    assert {(pair.source.tp, pair.reader.tp) for pair in pairs if pair.groups[0].kind == "mla"} >= {(1, 2), (2, 1)}
    assert {(pair.source.tp, pair.reader.tp) for pair in pairs if pair.groups[0].kind == "mamba"} >= {(1, 2), (2, 1)}
    assert sum(pair.computed >= pair.num_tokens for pair in pairs) > 5
    assert sum(0 < pair.computed < pair.num_tokens for pair in pairs) > 20
    assert all(pair.source.tp * pair.source.pp <= MOST_RANKS >= pair.reader.tp * pair.reader.pp for pair in pairs)
    refused = Counter(bool(vllm_refusal(pair)) for pair in pairs)
    assert refused[True] > refused[False] > 30


def test_the_comparison_sees_one_wrong_element() -> None:
    _, pair = draw(FAMILIES.index("hybrid of three kinds"))
    here, there = (RankCaches(pair.groups, Side(), 0) for _ in range(2))
    for caches in (here, there):
        for number, blocks in enumerate(pair.reader_blocks):
            caches.write(number, blocks + tuple(range(20, 24)), 0, (0, 1))
    assert here.differences(there, there) == []
    for cache in here.tensors.values():
        for tensor in (cache,) if not isinstance(cache, tuple) else cache:
            kept = tensor.flatten()[-1].item()
            tensor[tuple(size - 1 for size in tensor.shape)] = 7
            assert len(here.differences(there, there)) == 1
            tensor[tuple(size - 1 for size in tensor.shape)] = kept


def test_each_value_identifies_one_element() -> None:
    _, pair = draw(FAMILIES.index("hybrid of three kinds"))
    seen: Counter[int] = Counter()
    caches = RankCaches(pair.groups, Side(block_size=8), 0)
    for number in range(3):
        caches.write(number, (0, 1, 2), 0, (0, 24))
    for cache in caches.tensors.values():
        for tensor in (cache,) if not isinstance(cache, tuple) else cache:
            seen.update(tensor.flatten().tolist())
    del seen[-1]
    assert set(seen.values()) == {1}
