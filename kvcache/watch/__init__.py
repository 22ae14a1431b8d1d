"""Shows watchers the state of every page when they ask. While no watcher asks, nothing is read or recorded.

Imports `kvcache`, `kvcache.pool`, `kvcache.replica` and the shared modules of `kvcache`. Start reading at `cells.py`
and `pools.py`, which read a pool. `book.py` makes snapshots of pools, as objects of the class `Look`. `messages.py`
has the requests and the answers. The thread in `kvcache/endpoints/watch.py` answers requests.
"""
