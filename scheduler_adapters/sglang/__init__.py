"""Our prefix index behind SGLang's cache interface. SGLang calls `register` by its plugin entry point.

Imports `kvcache.pool`, `kvcache.replica` and the values of `kvcache`, and SGLang in `cache.py` alone: importing the
plugin needs none. Start reading at `cache.py`.
"""

from scheduler_adapters.sglang.plugin import register

__all__ = ["register"]
