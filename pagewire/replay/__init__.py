"""`pagewire replay`: drives the manager with a request trace, compared with a reference LRU and the offline optimum.

Imports `kvcache`, `kvcache.watch`, the values of `kvcache`, the values of `scheduler_adapters` and the values of
`pagewire`. Start reading at `replay.py`.
"""
