"""Policies: the orders in which idle pages are evicted beyond plain LRU, and what chooses among them.

Imports `kvcache.pool`, `kvcache.replica`, `kvcache.states` and the shared modules of `kvcache`. No other room imports a
policy by name: the manager's placement asks `factory.py` for what the parameters say. Start reading at `factory.py`.
`hinted_order.py` and `quotas.py` are orders. `hints.py` tells them what a replica's requests say, and `baseline.py` and
`hint_share.py` measure whether that gains hits.
"""
