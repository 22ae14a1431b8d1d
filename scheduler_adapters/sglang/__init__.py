"""Our prefix index behind SGLang's cache interface. SGLang calls `register` by its plugin entry point.

Imports `kvcache.pool`, `kvcache.replica` and the values of `kvcache`. Start reading at `cache.py`, which alone needs
SGLang: to import this folder needs none.
"""

from scheduler_adapters.sglang.plugin import register

__all__ = ["register"]
