"""One data-parallel replica: block tables of its requests, prefix hashes, imports, and its pools on their devices.

Imports `kvcache.pool`, `kvcache.events`, `kvcache.states` and the shared modules of `kvcache`. Start reading at
`replica.py`, which holds the rules.
"""
