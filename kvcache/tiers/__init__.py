"""Host memory, files and objects for evicted pages, and the copies between them and the devices.

Imports `kvcache.pool`, `kvcache.states`, `kvcache.replica` and the shared modules of `kvcache`. Start reading at
`tiers.py`.
"""
