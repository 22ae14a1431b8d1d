"""`pagewire replay`: runs the manager on a request trace, and compares it with an LRU and the offline optimum.

Imports `kvcache`, `kvcache.endpoints`, `kvcache.watch`, and the shared modules of `kvcache`, `scheduler_adapters` and
`pagewire`. Start reading at `replay.py`.
"""
