"""Tells the connector when vLLM's prefix cache was reset, or could not be. vLLM does not say who holds blocks.

vLLM resets its cache only if no block is in use. Blocks that a peer reads or that a pull fills are in use although no
request of this engine runs. With `reset_running_requests` vLLM then raises a `RuntimeError`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager


def watch_resets(manager: KVCacheManager, done: Callable[[], object], failed: Callable[[], object]) -> None:
    """Calls `done` whenever `manager` has reset its prefix cache, and `failed` if it could not."""
    method = manager.reset_prefix_cache

    @functools.wraps(method)
    def reset() -> bool:
        is_reset = method()
        (done if is_reset else failed)()
        return is_reset

    given: Any = manager
    given.reset_prefix_cache = reset


def is_empty(manager: KVCacheManager) -> bool:
    """Whether vLLM's pool has no block that a request uses or could find."""
    pool: Any = manager.block_pool
    return pool.get_num_free_blocks() == pool.num_gpu_blocks - 1 and not len(pool.cached_block_hash_to_block)
