"""Our prefix index and our transfer for SGLang, which calls `register` through its plugin entry point.

Importing `plugin.py` needs no SGLang.

Imports `kvcache.pool`, `kvcache.replica`, `kvcache.endpoints`, `kvcache.watch`, `transfer.wire`, `transfer.pull`,
`transfer.connector`, `scheduler_adapters.service`, and the shared modules of `kvcache`, `kvcache.endpoints` and
`transfer`. Start reading at `cache.py` and `conn.py`.
"""

from scheduler_adapters.sglang.plugin import register

__all__ = ["register"]
