"""Tells the connector when vLLM's prefix cache could not be reset, because vLLM says neither who holds blocks nor when.

vLLM resets its cache only if no block is in use. Blocks that a peer reads or that a pull fills are in use although no
request of this engine runs. With `reset_running_requests` vLLM then raises a `RuntimeError`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager


def watch_resets(manager: KVCacheManager, failed: Callable[[], object]) -> None:
    """Calls `failed` whenever `manager` could not reset its prefix cache, before vLLM handles that."""
    method = manager.reset_prefix_cache

    @functools.wraps(method)
    def reset() -> bool:
        if not (is_reset := method()):
            failed()
        return is_reset

    given: Any = manager
    given.reset_prefix_cache = reset
