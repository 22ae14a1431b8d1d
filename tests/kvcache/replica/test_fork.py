from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcache import (
    AlreadyClaimedError,
    InvalidRequestError,
    LayerGroup,
    NoFreeRowError,
    PagedKVCacheManager,
    TextContext,
    UnknownRequestError,
)
from tests.kvcache.build import run_once


def parent_of(manager: PagedKVCacheManager, tokens: Any = range(10), **options: Any) -> TextContext:
    context = TextContext(tokens, 256, "parent", **options)
    manager.external_claim("parent", 0)
    assert manager.maybe_reserve(context)
    manager.fetch([context])
    context.update(50)
    manager.step([context])
    return context


@pytest.mark.parametrize("caching", [True, False])
def test_full_pages_are_shared_and_the_last_one_is_copied(make: Any, caching: bool) -> None:
    manager = make(32, page_size=4, tp=2, heads=2, caching=caching)
    parent = parent_of(manager)
    for shard in manager.device_tensors[0]:
        shard.copy_(torch.rand(shard.shape))
    free = manager.num_free_blocks
    children = [parent.fork() for _ in range(3)]
    assert all(manager.fork(parent, child) for child in children)
    mine = manager.get_req_blocks("parent")
    for child in children:
        pages = manager.get_req_blocks(child.request_id)
        assert pages[:2] == mine[:2]
        assert pages[2] != mine[2]
        for shard in manager.device_tensors[0]:
            assert torch.equal(shard[pages[2]], shard[mine[2]])
        assert (child.start_idx, child.active_idx, child.end_idx) == (10, 11, 11)
    assert manager.num_free_blocks == free - 3


def test_a_fork_on_another_replica_copies_the_page_there(make: Any) -> None:
    manager = make(32, page_size=4, dp=2)
    parent = TextContext(range(10), 256, "parent")
    manager.external_claim("parent", 1)
    assert manager.maybe_reserve(parent)
    manager.fetch([parent])
    parent.update(50)
    manager.step([parent])
    for (blocks,) in manager.device_tensors:
        blocks.copy_(torch.rand(blocks.shape))
    child = parent.fork()
    assert manager.fork(parent, child)
    mine, its = manager.get_req_blocks("parent"), manager.get_req_blocks(child.request_id)
    assert manager.get_replica(child) == 1
    blocks = manager.device_tensors[1][0]
    assert torch.equal(blocks[mine], blocks[its])
    assert mine[2] != its[2]


def test_a_page_is_copied_where_it_is_partly_filled_and_only_there(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    manager, copied = make(32, page_size=4), list[tuple[int, int]]()
    monkeypatch.setattr(manager._replicas.placed[0].memory, "copy_page", lambda *pages: copied.append(pages))
    for tokens, copies in ((3, 1), (8, 1), (10, 2)):  # `tokens` counts the computed tokens, without the next token.
        parent = parent_of(manager, range(tokens))
        assert manager.fork(parent, parent.fork("child"))
        assert len(copied) == copies
        for name in ("parent", "child"):
            manager.release(name)


def test_forks_diverge_and_later_share_equal_pages(make: Any) -> None:
    manager = make(32, page_size=4)
    parent = parent_of(manager)
    twin, other = parent.fork(), parent.fork()
    family = [parent, twin, other]
    assert manager.fork(parent, twin)
    assert manager.fork(parent, other)
    for step in range(8):
        assert manager.reserve_batch(family).all()
        manager.fetch(family)
        for context, token in zip(family, (1, 1, 2), strict=True):
            context.update(token)
        manager.step(family)
        assert manager.metrics.input_tokens == 10, step
    blocks = [manager.get_req_blocks(context.request_id) for context in family]
    # The tokens of both requests are equal, so `step` makes the two share pages that they have computed separately.
    assert blocks[0][:4] == blocks[1][:4]
    assert blocks[0][:2] == blocks[2][:2]
    assert blocks[0][2] != blocks[2][2]
    for context in family:
        manager.release(context.request_id)
    assert manager.num_free_blocks == 32


def test_a_parent_may_be_released_before_its_fork(make: Any) -> None:
    manager = make(32, page_size=4, caching=False)
    parent = parent_of(manager)
    child = parent.fork("child")
    assert manager.fork(parent, child)
    manager.release("parent")
    assert manager.num_free_blocks == 32 - 3
    assert manager.maybe_reserve(child)
    assert manager.fetch([child])[0].cache_lengths.tolist() == [10]


def test_a_fork_without_enough_free_pages_changes_nothing(make: Any) -> None:
    manager = make(4, page_size=4)
    parent = parent_of(manager)
    first, second = parent.fork("a"), parent.fork("b")
    assert manager.fork(parent, first)
    assert not manager.fork(parent, second)
    assert not manager.contains("b")
    assert second.start_idx == 10
    manager.release("a")
    assert manager.fork(parent, second)


def test_an_invalid_fork_is_refused_by_name(make: Any) -> None:
    manager = make(32, page_size=4, rows=2)
    parent = parent_of(manager, cache_salt="tenant")
    with pytest.raises(InvalidRequestError, match="'x', fork of 'parent': its first 10 tokens are not"):
        manager.fork(parent, TextContext(range(1, 12), 64, "x", cache_salt="tenant"))
    with pytest.raises(InvalidRequestError, match="has 10 tokens, but needs more than the 10 that the parent"):
        manager.fork(parent, TextContext(range(10), 64, "x", cache_salt="tenant"))
    with pytest.raises(InvalidRequestError, match="its cache_salt is not the parent's"):
        manager.fork(parent, TextContext([*range(10), 50], 64, "x"))
    with pytest.raises(InvalidRequestError, match="its extra_keys is not the parent's"):
        manager.fork(parent, TextContext([*range(10), 50], 64, "x", "tenant", extra_keys=[(0, b"lora")]))
    with pytest.raises(AlreadyClaimedError, match="request 'parent': is already claimed on replica 0"):
        manager.fork(parent, parent)
    with pytest.raises(UnknownRequestError, match="ghost"):
        manager.fork(TextContext([1], 8, "ghost"), parent.fork())
    assert manager.fork(parent, parent.fork())
    with pytest.raises(NoFreeRowError, match="all 2 rows of the replica are claimed"):
        manager.fork(parent, parent.fork())


def test_a_fork_copies_what_a_batch_has_not_told_the_context_yet(make: Any) -> None:
    manager = make(32, page_size=4)
    parent = parent_of(manager)
    batch = manager.batch([parent])
    for token in (1, 2, 3):
        assert manager.reserve_batch(batch).all()
        batch.update([token])
        manager.step(batch)
    child = parent.fork()
    assert child.tokens.tolist() == [*range(10), 50, 1, 2, 3]
    assert manager.fork(parent, child)
    assert child.start_idx == 13


def test_adapters_and_images_keep_pages_apart(make: Any) -> None:
    manager = make(32, page_size=4)
    parent_of(manager, range(12), extra_keys=[(0, b"lora-a")])
    for keys, start in (([(0, b"lora-b")], 0), ([], 0), ([(0, b"lora-a")], 8), ([(0, b"lora-a"), (4, b"image")], 4)):
        context = TextContext(range(12), 64, extra_keys=keys)
        manager.external_claim(context.request_id)
        assert manager.maybe_reserve(context)
        assert context.start_idx == start, keys
        manager.release(context.request_id)


def test_a_waiting_request_is_looked_up_again_only_if_the_index_changed(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = make(32, page_size=4, rows=16)
    parent_of(manager, range(20))
    index_type, calls = type(manager._replicas.each[0].pool.index), list[int]()
    original = index_type.match
    monkeypatch.setattr(index_type, "match", lambda self, digests: calls.append(1) or original(self, digests))
    waiting = TextContext(range(20), 64)
    for _ in range(5):
        assert manager.get_or_recommend_replica(waiting) == 0
    assert len(calls) == 1
    run_once(manager, range(30, 40))
    before = len(calls)
    manager.get_or_recommend_replica(waiting)
    assert len(calls) == before + 1


@pytest.mark.parametrize(("kind", "caching"), [("window", True), ("window", False), ("chunked", False)])
def test_a_fork_is_refused_where_the_parent_has_freed_pages_that_the_child_sees(
    make: Any, kind: Any, caching: bool
) -> None:
    """A step is skipped, and a later reservation has already freed pages behind the window or chunk."""
    groups = LayerGroup("full", (0,)), LayerGroup(kind, (1,), 8)
    manager = make(80, page_size=4, layers=2, caching=caching, params={"groups": groups})
    parent = parent_of(manager)
    for _ in range(14):
        assert manager.maybe_reserve(parent)
        manager.fetch([parent])
        parent.update(7)
    assert manager.maybe_reserve(parent)
    free = manager.num_free_blocks
    with pytest.raises(InvalidRequestError, match=f"'parent': fork after 10 .* kind {kind} .* call step first"):
        manager.fork(parent, parent.fork("child"))
    assert manager.num_free_blocks == free
    manager.step([parent])
    assert manager.fork(parent, parent.fork("child"))


def test_a_parent_that_has_computed_nothing_is_named_as_the_reason(make: Any) -> None:
    manager = make(32, page_size=4, rows=2)
    parent = TextContext(range(10), 64, "p")
    manager.external_claim("p")
    assert manager.maybe_reserve(parent)
    with pytest.raises(InvalidRequestError, match="'c', fork of 'p': the parent has computed no token yet"):
        manager.fork(parent, parent.fork("c"))
    assert not manager.contains("c")
