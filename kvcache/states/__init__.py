"""Recurrent states: their memory, their holders, and the copies that are kept for other requests.

Imports `kvcache.pool`, `kvcache.replica`, `kvcache.tiers` and the values of `kvcache`. Start reading at
`hybrid_replica.py`.
"""
