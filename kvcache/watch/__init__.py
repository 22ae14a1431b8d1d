"""Reports the state of every page to watchers on request. Without watchers nothing is read or recorded.

Imports `kvcache`, `kvcache.pool`, `kvcache.replica` and the values of `kvcache`. Start reading at `cells.py` and
`pools.py`, which read a pool. `book.py` makes snapshots of pools, each of them a `Look`, and the thread of
`endpoint.py` answers questions. `follower.py` is the watcher's side.
"""
