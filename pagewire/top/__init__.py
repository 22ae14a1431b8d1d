"""`pagewire top`: shows every page, its owner, and why it was evicted, in a terminal or a browser, live or recorded.

Imports `kvcache.endpoints`, `kvcache.watch`, `transfer.wire`, and the shared modules of `kvcache`, `scheduler_adapters`
and `pagewire`. Start reading at `view.py`: keys and snapshots change the state there. `pagemap.py` turns pages into
colours, and `app.py` draws them.
"""
