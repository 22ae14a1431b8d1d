"""Recurrent states: their memory, their holders, and the cached copies from which other requests resume.

Imports `kvcache.pool`, `kvcache.replica`, `kvcache.tiers` and the values of `kvcache`. Start reading at
`hybrid_replica.py`.
"""
