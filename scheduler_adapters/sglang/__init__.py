"""Our prefix index behind SGLang's cache interface. SGLang calls `register` by its plugin entry point.

Imports `kvcache.pool`, `kvcache.replica` and the values of `kvcache`, and SGLang where it is used. Start reading at
`cache.py`.
"""

from scheduler_adapters.sglang.cache import register

__all__ = ["register"]
