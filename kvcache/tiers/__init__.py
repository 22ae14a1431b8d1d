"""Where evicted pages go: host memory and files, and the copies between them and the devices.

Imports `kvcache.pool`, `kvcache.replica` and the values of `kvcache`. Start reading at `tiers.py`.
"""
