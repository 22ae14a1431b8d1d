"""Our prefix index and our transfer for SGLang, which calls `register` through its plugin entry point.

Importing `plugin.py` needs no SGLang.

Imports `kvcache.pool`, `kvcache.replica`, `kvcache.tiers`, `kvcache.endpoints`, `kvcache.watch`, `transfer.wire`,
`transfer.pull`, `transfer.connector`, `scheduler_adapters.service`, `scheduler_adapters.peers`, and the shared modules
of `kvcache`, `kvcache.endpoints`, `transfer` and `scheduler_adapters`. Start reading at `cache.py`, `conn.py` and
`storage.py`.
"""

from scheduler_adapters.sglang.plugin import register

__all__ = ["register"]
