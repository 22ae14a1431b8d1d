"""Recurrent states: where they lie, who holds one, and which are kept for others.

Imports `kvcache.pool`, `kvcache.replica`, `kvcache.tiers` and the values of `kvcache`. Start reading at
`replica_states.py`.
"""
