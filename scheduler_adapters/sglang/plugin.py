"""SGLang's plugin: it makes the name of our cache known, and imports the cache where a scheduler asks for it.

SGLang calls `register` in each of its processes, and most of them have no cache: so this imports nothing by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

BACKEND = "pagewire"


def register() -> None:
    """Make `--radix-cache-backend pagewire` known. Safe twice: SGLang asks its plugins in every process."""
    from sglang.srt.mem_cache.registry import (  # noqa: PLC0415  (where SGLang is not, this can be imported)
        get_radix_cache_factory,
        register_radix_cache_backend,
    )

    if get_radix_cache_factory(BACKEND) is None:
        register_radix_cache_backend(BACKEND, _build)


def _build(context: TreeCacheBuildContext) -> BasePrefixCache:
    from scheduler_adapters.sglang.cache import build  # noqa: PLC0415  (heavy: torch and the whole index)

    return build(context)
