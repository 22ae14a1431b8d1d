"""`pagewire replay`: runs the manager on a request trace, and compares it with an LRU and the offline optimum.

Imports `kvcache`, `kvcache.watch`, the values of `kvcache`, the values of `scheduler_adapters` and the values of
`pagewire`. Start reading at `replay.py`.
"""
