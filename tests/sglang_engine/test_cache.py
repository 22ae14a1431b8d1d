"""Tests the cache alone, with SGLang's real requests, rows and allocators. Random moves look for rare faults."""

from __future__ import annotations

import dataclasses
import random
from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvcache.errors import InvalidParamsError, InvariantError

PAGES, ROWS = 24, 6


class Pools:
    """A cache with its own pools.

    For each token slot it records the content of the slot, as a digest of all tokens up to the slot's own.
    """

    def __init__(self, page_size: int) -> None:
        from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

        from scheduler_adapters.sglang.cache import PagewireCache

        size = PAGES * page_size
        if page_size == 1:
            self.allocator: Any = TokenToKVPoolAllocator(size, torch.float32, "cpu", None, False)
        else:
            self.allocator = PagedTokenToKVPoolAllocator(size, page_size, torch.float32, "cpu", None, False)
        self.rows = ReqToTokenPool(ROWS, size, "cpu", False)
        self.params = CacheInitParams(False, self.rows, self.allocator, page_size)
        self.cache = PagewireCache(self.params)
        self.page_size = page_size
        self.slots = torch.zeros(size + page_size, dtype=torch.int64)

    def request(self, tokens: list[int], **fields: Any) -> Any:
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        return Req("r", "", array("q", tokens), SamplingParams(max_new_tokens=1), **fields)

    def contents(self, request: Any, count: int) -> torch.Tensor:
        seed = (request.cache_salt, request.extra_key)
        tokens = request.origin_input_ids.tolist()
        return torch.tensor([hash((seed, tuple(tokens[: place + 1]))) for place in range(count)])

    def admit(self, request: Any) -> bool:
        """Matches, locks, allocates and computes a prompt as the scheduler does.

        Returns False if there is no room for it.
        """
        from sglang.srt.mem_cache.common import evict_from_tree_cache

        request.init_next_round_input(self.cache)
        lock = self.cache.lock(request.last_node)
        size, page = len(request.origin_input_ids), self.page_size
        needed = (-(-size // page) - request.prefix_len // page) * page
        evict_from_tree_cache(self.cache, needed)
        if self.allocator.available_size() < needed or not self.rows.available_size():
            self.cache.unlock(lock)
            return False
        prefix = self.cache.prefix_device_indices(request)
        assert torch.equal(self.slots[prefix], self.contents(request, request.prefix_len)), "a page of another prompt"
        request.lock = lock
        self.rows.alloc([request])
        row = torch.cat([prefix, self.allocator.alloc(needed)])[:size]
        self.rows.write((request.kv.req_pool_idx, slice(0, size)), row.to(torch.int32))
        request.kv.kv_allocated_len = request.kv.kv_committed_len = request.extend_end = size
        self.slots[row[request.prefix_len :]] = self.contents(request, size)[request.prefix_len :]
        return True

    def check(self, running: list[Any]) -> None:
        self.cache.check()
        private = 0
        for request in running:
            size = request.kv.kv_allocated_len
            row = self.rows.req_to_token[request.kv.req_pool_idx, :size].long()
            assert torch.equal(self.slots[row], self.contents(request, size)), "a running request lost a page"
            private += -(-size // self.page_size) - request.kv.cache_protected_len // self.page_size
        known = self.allocator.available_size() + self.cache.total_size() + private * self.page_size
        assert known == self.allocator.size


@pytest.fixture
def pools(the_engine: Any, page_size: int) -> Pools:  # noqa: ARG001
    """Returns the pools of a test. They need an engine only because SGLang's functions read its settings."""
    return Pools(page_size)


def release(pools: Pools, request: Any, *, publish: bool) -> None:
    from sglang.srt.mem_cache.common import release_kv_cache

    release_kv_cache(request, pools.cache, checkpoint=publish)


def cached(pools: Pools, tokens: list[int]) -> Any:
    request = pools.request(tokens)
    assert pools.admit(request)
    release(pools, request, publish=True)
    return request


def match(pools: Pools, tokens: list[int], **fields: Any) -> Any:
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    return pools.cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens), **fields)))


@pytest.mark.parametrize("seed", range(6))
def test_random_moves_never_show_a_page_of_another_prompt(pools: Pools, seed: int) -> None:
    from sglang.srt.mem_cache.common import checkpoint_kv_cache

    chance = random.Random(seed)
    running: list[Any] = []
    counts = dict.fromkeys(("admitted", "refused", "hits"), 0)
    for _ in range(400):
        move = chance.choice(("admit", "admit", "admit", "checkpoint", "finish", "retract", "evict", "flush"))
        if move == "admit":
            # Few different contents let requests share many pages.
            pages = [chance.randrange(2) for _ in range(chance.randrange(1, 7))]
            tokens = [token for token in pages for _ in range(pools.page_size)]
            tokens = tokens[: len(tokens) - chance.randrange(pools.page_size)]
            fields = {"extra_key": chance.choice((None, "class"))} | {"cache_salt": chance.choice((None, "salt"))}
            request = pools.request(tokens, **fields)
            admitted = pools.admit(request)
            counts["admitted" if admitted else "refused"] += 1
            if admitted:
                counts["hits"] += request.prefix_len > 0
                running.append(request)
        elif move == "evict":
            from sglang.srt.mem_cache.base_prefix_cache import EvictParams

            wanted, free = chance.randrange(40), pools.allocator.available_size()
            done = pools.cache.evict(EvictParams(num_tokens=wanted)).num_tokens_evicted
            assert pools.allocator.available_size() == free + done
            assert done < wanted + pools.page_size
        elif move == "flush":
            if not running:
                pools.cache.reset()
                pools.allocator.clear()
        elif running:
            request = running[chance.randrange(len(running))]
            if move == "checkpoint":
                checkpoint_kv_cache(request, pools.cache)
            else:
                running.remove(request)
                release(pools, request, publish=move == "finish")
        pools.check(running)
    for request in running:
        release(pools, request, publish=True)
    pools.check([])
    assert pools.cache.protected_size() == 0
    assert counts["admitted"] > 80
    assert min(counts.values()) > 5, counts


def test_eviction_takes_the_requested_number_of_pages_tails_first(pools: Pools, page_size: int) -> None:
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    tokens = [*range(4 * page_size)]
    cached(pools, tokens)
    assert match(pools, tokens).device_prefix_len == 4 * page_size
    for left in (3, 2):
        assert pools.cache.evict(EvictParams(num_tokens=1)).num_tokens_evicted == page_size
        assert match(pools, tokens).device_prefix_len == left * page_size
    assert pools.cache.evict(EvictParams(num_tokens=100 * page_size)).num_tokens_evicted == 2 * page_size
    assert pools.cache.evict(EvictParams(num_tokens=1)).num_tokens_evicted == 0
    assert pools.allocator.available_size() == pools.allocator.size


def test_the_page_that_was_used_last_is_evicted_last(pools: Pools, page_size: int) -> None:
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    old, new = [1] * 2 * page_size, [2] * 2 * page_size
    cached(pools, old)
    cached(pools, new)
    pools.cache.touch_prefix(RadixKey(array("q", old)))
    pools.cache.evict(EvictParams(num_tokens=2 * page_size))
    assert match(pools, old).device_prefix_len == 2 * page_size
    assert match(pools, new).device_prefix_len == 0


def test_a_lock_keeps_a_prefix_and_a_stale_or_missing_one_is_an_error(pools: Pools, page_size: int) -> None:
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    tokens = [*range(2 * page_size)]
    cached(pools, tokens)
    node = match(pools, tokens).last_device_node
    lock = pools.cache.lock(node)
    assert pools.cache.evictable_size() == 0
    assert pools.cache.evict(EvictParams(num_tokens=100)).num_tokens_evicted == 0
    pools.cache.unlock(lock)
    with pytest.raises(InvariantError, match="unlocked more often than locked"):
        pools.cache.unlock(lock)
    pools.cache.evict(EvictParams(num_tokens=1))
    with pytest.raises(InvariantError, match="2 pages is locked after some of them were evicted"):
        pools.cache.lock(node)
    pools.check([])


def test_a_request_that_is_given_other_tokens_is_not_found_by_the_old_ones(pools: Pools, page_size: int) -> None:
    tokens = [*range(2 * page_size)]
    cached(pools, tokens)
    request = pools.request([*tokens, 5])
    request.init_next_round_input(pools.cache)
    assert request.prefix_len == 2 * page_size
    request.origin_input_ids = array("q", [7] * (2 * page_size + 1))  # An abort in the queue leaves such a request.
    request.full_untruncated_fill_ids = array("q")
    request.init_next_round_input(pools.cache)
    assert request.prefix_len == 0


def test_tokens_that_are_no_int32_end_the_cached_prefix(pools: Pools, page_size: int) -> None:
    tokens = [*range(2 * page_size), 1 << 31, *range(2 * page_size)]
    request = cached(pools, tokens)
    assert pools.cache.total_size() == 2 * page_size
    assert match(pools, tokens).device_prefix_len == 2 * page_size
    assert match(pools, [*tokens[:-1], 0]).device_prefix_len == 2 * page_size
    assert request.kv.cache_protected_len == 2 * page_size
    wrapped = [*tokens[: 2 * page_size], -(1 << 31), *tokens[2 * page_size + 1 :]]
    assert match(pools, wrapped).device_prefix_len == 2 * page_size
    pools.check([])


def test_keys_of_pairs_are_refused(pools: Pools) -> None:
    with pytest.raises(InvalidParamsError, match="pairs"):
        match(pools, [1, 2, 3], is_bigram=True)


def test_settings_that_need_unsupported_features_are_refused_by_name(pools: Pools, page_size: int) -> None:
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

    from scheduler_adapters.sglang.cache import PagewireCache, build

    context = TreeCacheBuildContext(
        server_args=None,
        params=pools.params,
        is_hybrid_swa=False,
        is_hybrid_ssm=False,
        enable_hierarchical_cache=False,
        disable_radix_cache=False,
        tp_worker=None,
        model_config=None,
        tp_size=1,
        tp_rank=0,
        tp_group=None,
    )
    assert type(build(context)) is PagewireCache
    params = pools.params
    other = SimpleNamespace(page_size=page_size, size=PAGES * page_size, device="cpu")
    wide = SimpleNamespace(page_size=2 * page_size, size=PAGES * page_size, device="cpu")
    for changes, message in (
        ({"is_hybrid_swa": True}, "sliding-window"),
        ({"is_hybrid_ssm": True}, "recurrent state"),
        ({"enable_hierarchical_cache": True}, "hierarchical"),
        ({"params": dataclasses.replace(params, is_eagle=True)}, "EAGLE"),
        ({"params": dataclasses.replace(params, enable_session_radix_cache=True)}, "sessions"),
        ({"params": dataclasses.replace(params, token_to_kv_pool_allocator=other)}, "the pool SimpleNamespace"),
        ({"params": dataclasses.replace(params, token_to_kv_pool_allocator=wide)}, f"pages of {2 * page_size} tokens"),
    ):
        with pytest.raises(InvalidParamsError, match=f"pagewire does not support.*{message}"):
            build(dataclasses.replace(context, **changes))


def test_registering_twice_is_fine() -> None:
    from sglang.srt.mem_cache.registry import registered_radix_cache_backends

    from scheduler_adapters.sglang import register

    register()
    register()
    assert registered_radix_cache_backends().count("pagewire") == 1


@pytest.mark.usefixtures("the_engine")
def test_check_notices_inconsistent_books(page_size: int) -> None:
    def broken() -> Any:
        fresh = Pools(page_size)
        cached(fresh, [*range(3 * page_size)])
        fresh.cache.check()
        return fresh.cache

    cache = broken()
    cache._published -= 1
    with pytest.raises(InvariantError, match="3 pages are published, but 2 are counted"):
        cache.check()
    cache = broken()
    cache.pool.holders[1] += 1
    with pytest.raises(InvariantError, match="page 1 has"):
        cache.check()
    cache = broken()
    page = int(np.flatnonzero(cache.pool.index.published)[0])
    cache.token_to_kv_pool_allocator.free(torch.tensor([page * page_size]))
    with pytest.raises(InvariantError, match=f"page {page} is cached here, but free in SGLang's allocator"):
        cache.check()
