"""Pages are copied from another replica. Their bytes are compared: a found page must hold the computed content."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from kvcache import PagedKVCacheManager, PromptTooLongError, Routing, TextContext
from kvcache.layer_groups import LayerGroup
from kvcache.pool.journal import PageReader
from tests.kvcache.build import manager_of, run_once

COPYING: dict[str, Any] = {"routing": Routing(copy_pages=True)}


def of(pages: int, dp: int = 2, **options: Any) -> PagedKVCacheManager:
    return manager_of(pages, dp=dp, tp=2, layers=2, params={**COPYING, **options.pop("params", {})}, **options)


def compute(manager: PagedKVCacheManager, context: TextContext) -> None:
    """Computes as the model: the KV of a token depends on the token, its position, and its place in the page."""
    replica = manager.get_replica(context)
    pages = manager.get_req_blocks(context.request_id)
    for shard, blocks in enumerate(manager.device_tensors[replica]):
        for place in range(context.start_idx, context.active_idx):
            page, offset = pages[place // 4], place % 4
            blocks[page, :, :, offset] = kv(context, place, shard)


def kv(context: TextContext, place: int, shard: int) -> float:
    return float(int(context.tokens[place]) * 1000 + place * 2 + shard)


def read(manager: PagedKVCacheManager, context: TextContext) -> None:
    """Checks that all computed or found pages have the KV that the model has written for these tokens."""
    replica, pages = manager.get_replica(context), manager.get_req_blocks(context.request_id)
    for shard, blocks in enumerate(manager.device_tensors[replica]):
        for place in range(context.active_idx):
            assert (blocks[pages[place // 4], :, :, place % 4] == kv(context, place, shard)).all()


def serve(manager: PagedKVCacheManager, tokens: list[int], replica: int, **options: Any) -> int:
    context = TextContext(tokens, 64, **options)
    with manager.claim(context, replica):
        assert manager.maybe_reserve(context)
        found = context.start_idx
        manager.fetch([context])
        compute(manager, context)
        read(manager, context)
        context.update(0)
        manager.step([context])
    return found


def test_pages_come_from_the_replica_that_has_most() -> None:
    manager = of(20, dp=3)
    prompt = [*range(1, 30)]
    serve(manager, prompt[:13], 1)
    assert serve(manager, prompt, 2) == 12  # from replica 1
    assert serve(manager, prompt, 0) == 28
    assert manager.metrics.d2d_blocks_copied == 3 + 7
    assert manager.metrics.cache_tokens == 12 + 28
    assert serve(manager, prompt, 0) == 28
    assert manager.metrics.d2d_blocks_copied == 3 + 7


def test_only_what_is_missing_is_copied() -> None:
    manager = of(20)
    serve(manager, [*range(1, 10)], 0)
    serve(manager, [*range(1, 30)], 1)
    before = manager.metrics.d2d_blocks_copied
    assert serve(manager, [*range(1, 30)], 0) == 28
    assert manager.metrics.d2d_blocks_copied == before + 5


def test_the_head_comes_from_one_replica_and_the_tail_from_another() -> None:
    manager, prompt = of(20, dp=3), [*range(1, 30)]
    serve(manager, prompt[:13], 1)
    serve(manager, prompt, 2)
    assert manager.metrics.d2d_blocks_copied == 3
    forget(manager, 2, prompt, slice(0, 3))
    assert serve(manager, prompt, 2) == 28
    forget(manager, 2, prompt, slice(0, 3))
    assert serve(manager, prompt, 0) == 28
    assert manager.metrics.d2d_blocks_copied == 3 + 3 + 7
    forget(manager, 0, prompt, slice(5, 6))
    manager._replicas.each[2].forget()
    assert serve(manager, prompt, 1) == 20  # No replica has the sixth page, so the request copies no later page.
    assert manager.metrics.d2d_blocks_copied == 3 + 3 + 7 + 2


def forget(manager: PagedKVCacheManager, replica: int, prompt: list[int], which: slice) -> None:
    """Removes some idle pages of a prompt from a replica.

    An eviction order that follows retention hints may also evict pages from the middle of a prompt.
    """
    pool = manager._replicas.each[replica].pool
    pages = manager._replicas.each[replica].find(TextContext(prompt, 64)).pages[0][which]
    pool.idle.remove(pages)
    pool.index.withdraw(pages)
    pool._push_fresh(pages)
    manager.check()


def test_copying_from_replicas_is_off_by_default_and_keeps_salts_apart() -> None:
    manager = manager_of(20, dp=2, tp=2, layers=2)
    serve(manager, [*range(1, 30)], 1)
    assert serve(manager, [*range(1, 30)], 0) == 0
    manager = of(20)
    serve(manager, [*range(1, 30)], 1, cache_salt="a")
    assert serve(manager, [*range(1, 30)], 0, cache_salt="b") == 0
    assert serve(manager, [*range(1, 30)], 0, cache_salt="a") == 28


def test_a_request_that_does_not_fit_changes_no_replica() -> None:
    manager = of(8)
    serve(manager, [*range(1, 29)], 1)
    serve(manager, [*range(101, 113)], 0)
    running = TextContext([*range(201, 208)], 64)
    manager.external_claim(running.request_id, 0)
    assert manager.maybe_reserve(running)
    waiting = TextContext([*range(1, 29)], 64)
    manager.external_claim(waiting.request_id, 0)
    before = manager.metrics
    assert not manager.maybe_reserve(waiting)
    assert manager.metrics == before
    assert waiting.start_idx == 0
    manager.release(running.request_id)
    assert manager.maybe_reserve(waiting)
    assert waiting.start_idx == 24
    manager.release(waiting.request_id)
    endless = TextContext([*range(1, 41)], 64)
    with pytest.raises(PromptTooLongError, match="40 tokens need 10 pages, but the pool has 8 pages of 4 tokens"):
        manager.get_or_recommend_replica(endless)
    manager.external_claim(endless.request_id, 0)
    with pytest.raises(PromptTooLongError, match="40 tokens need 10 pages, but the pool has 8 pages of 4 tokens"):
        manager.maybe_reserve(endless)


def test_a_prompt_that_no_pool_holds_is_refused_before_anything_is_copied() -> None:
    """With the pages of the other replica, the rest of the prompt would fit, because its window would need no earlier
    pages. Nevertheless, the prompt is refused before any page is copied.
    """
    groups = (LayerGroup("full", (0,)), LayerGroup("window", (1,), 8))
    manager = of(20, params={"groups": groups})
    run_once(manager, range(36), 1)
    longer = TextContext([*range(42)], 64)
    manager.external_claim(longer.request_id, 0)
    before = manager.metrics
    for call in (lambda: manager.maybe_reserve(longer), lambda: manager.reserve_batch([longer])):
        with pytest.raises(PromptTooLongError, match="42 tokens need 22 pages, but the pool has 20 pages of 4 tokens"):
            call()
    assert manager.metrics == before
    longer.set_token_indices(active_idx=8)
    assert manager.maybe_reserve(longer)
    assert manager.metrics.d2d_blocks_copied - before.d2d_blocks_copied == 11


def test_pages_that_a_window_drops_where_the_host_lets_the_request_resume_are_not_copied() -> None:
    groups = (LayerGroup("full", (0,)), LayerGroup("window", (1,), 8))
    host = {"enable_kvcache_swapping_to_host": True, "host_kvcache_swap_space_gb": 1e-5}
    manager, prompt = of(20, params={"groups": groups, **host}), [*range(1, 30)]
    run_once(manager, prompt, 1)
    manager.flush_tiers()
    manager._replicas.each[1].forget()
    # The request loads three pages of the full layer and two pages of the window from the host.
    assert run_once(manager, prompt[:13], 1) == 12
    before = manager.metrics
    assert (before.d2d_blocks_copied, before.h2d_blocks_copied) == (0, 5)
    # The request loads four more pages of the full layer, and the last two pages of the window.
    assert run_once(manager, prompt, 0) == 28
    assert manager.metrics.d2d_blocks_copied == 3
    assert manager.metrics.h2d_blocks_copied == 5 + 6
    manager.check()


def test_pages_behind_a_gap_are_kept_and_the_gap_is_filled() -> None:
    manager = of(20)
    prompt = [*range(1, 30)]
    for replica in (0, 1):
        serve(manager, prompt, replica)
    before = manager.metrics.d2d_blocks_copied
    forget(manager, 0, prompt, slice(2, 4))
    assert serve(manager, prompt, 0) == 28
    assert manager.metrics.d2d_blocks_copied == before + 2
    manager.check()


def test_idle_pages_behind_a_gap_are_no_room_for_what_is_missing() -> None:
    manager, prompt = of(8), [*range(1, 30)]
    for replica in (0, 1):
        serve(manager, prompt, replica)
    forget(manager, 0, prompt, slice(2, 4))
    manager.external_claim("other", 0)
    assert manager.maybe_reserve(TextContext([99], 64, "other"))
    assert manager._replicas.each[0].pool.free_count == 7
    waiting = TextContext(prompt, 64)
    manager.external_claim(waiting.request_id, 0)
    before = manager.metrics
    assert not manager.maybe_reserve(waiting)  # The request needs all eight pages of the pool.
    assert manager.metrics == before
    manager.check()


@pytest.mark.few(2)
@pytest.mark.parametrize("host_pages", [0, 30])
@pytest.mark.parametrize("seed", range(2))
def test_whatever_is_found_is_what_was_computed(seed: int, host_pages: int) -> None:
    """The pools are small, so copies evict pages. Several requests run on each replica, with and without a host
    tier.
    """
    rng = random.Random(seed)
    below: dict[str, Any] = {
        "enable_kvcache_swapping_to_host": True,
        "host_kvcache_swap_space_gb": host_pages * 256 / 2**30,
    }
    manager = of(12, dp=3, checks=False, params=below if host_pages else {})
    assert manager.total_num_host_pages == host_pages
    heads = [[rng.randint(1, 9) for _ in range(20)] for _ in range(4)]
    for _ in range(150):
        running = []
        for _ in range(rng.randint(1, 3)):
            head = rng.choice(heads)
            tokens = head[: rng.randint(1, 20)] + [rng.randint(1, 3) for _ in range(rng.randint(1, 4))]
            context = TextContext(tokens, 64)
            manager.external_claim(context.request_id, rng.randrange(3))
            if manager.maybe_reserve(context):
                running.append(context)
            else:
                manager.release(context.request_id)
            manager.check()
        running.sort(key=manager.get_replica)
        manager.fetch(running)
        for context in running:
            compute(manager, context)
            read(manager, context)
            context.update(0)
        manager.step(running)
        for context in running:
            manager.release(context.request_id)
    manager.check()
    assert manager.metrics.d2d_blocks_copied > 100
    assert manager.num_free_blocks == manager.total_num_pages


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
def test_pages_on_a_gpu_are_copied_there(dtype: torch.dtype) -> None:
    from kvcache import KVCacheParams

    params = KVCacheParams(
        dtype, 2, 64, enable_prefix_caching=True, page_size=16, n_devices=2, data_parallel_degree=2, **COPYING
    )
    memory = 2 * 64 * 16 * params.bytes_per_token(3)
    manager = PagedKVCacheManager(params, 4, 1024, 3, ["cuda:0", "cuda:0"], available_cache_memory=memory)
    tokens = np.arange(1, 400)
    first, second = TextContext(tokens, 1024), TextContext(tokens, 1024)
    manager.external_claim(first.request_id, 0)
    assert manager.maybe_reserve(first)
    blocks = manager.device_tensors[0][0]
    pages = torch.as_tensor(manager.get_req_blocks(first.request_id), device="cuda:0")
    written = torch.randint(0, 100, (len(pages), *blocks.shape[1:]), device="cuda:0").to(dtype)
    blocks[pages] = written
    first.update(0)
    manager.step([first])
    manager.external_claim(second.request_id, 1)
    assert manager.maybe_reserve(second)
    assert second.start_idx == 384
    mine = torch.as_tensor(manager.get_req_blocks(second.request_id), device="cuda:0")
    assert torch.equal(manager.device_tensors[1][0][mine[:24]], written[:24])


class BroughtMeanwhile(PageReader):
    """Publishes a page while another page is evicted. A tier does the same if its copy to the device ends at this
    moment.
    """

    def __init__(self, manager: PagedKVCacheManager, digest: Any) -> None:
        self.pool = manager._replicas.each[0].pool
        self.page, self.digest = self.pool.allocate(1), digest
        self.pool.journal.read(self, saves=True)

    def going(self, pages: Any) -> None:  # noqa: ARG002
        if self.page.size:
            self.pool.index.publish(self.page, self.digest)
            self.pool.release(self.page)
            self.page = self.page[:0]

    def came(self, pages: Any, digests: Any) -> None:
        assert (self.pool.index.find(digests) == pages).all(), "a page that is not published is about to be stored"


def test_a_page_that_arrives_while_room_is_made_for_its_copy_is_not_stored_twice() -> None:
    manager = of(8, checks=False)
    prompt = [*range(1, 21)]
    serve(manager, prompt, 1)
    serve(manager, [*range(101, 129)], 0)
    context = TextContext(prompt, 64)
    digests = manager._replicas.each[1].hasher(None, context).digests(context.tokens, 0, 1)
    BroughtMeanwhile(manager, digests)
    manager.external_claim(context.request_id, 0)
    assert manager.maybe_reserve(context)
    assert context.start_idx == 16
    manager.check()
    manager.release(context.request_id)
    assert manager.num_free_blocks == 16
