"""Our prefix index behind SGLang's cache interface. SGLang calls `register` by its plugin entry point.

Importing it needs no SGLang; `cache.py` imports `kvcache` and SGLang. Start reading at `cache.py`.
"""

from scheduler_adapters.sglang.plugin import register

__all__ = ["register"]
