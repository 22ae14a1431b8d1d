"""Where evicted pages go: host memory and files, and the copies between them and the devices.

Imports `kvcache.pool` and the values at the root of `kvcache`. Start reading at `tiers.py`.
"""
