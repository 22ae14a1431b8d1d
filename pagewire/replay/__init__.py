"""`pagewire replay`: a request trace over the manager, beside a reference LRU and the offline optimum.

Imports `kvcache`, `kvcache.watch`, the values of `kvcache`, the values of `scheduler_adapters` and the values of
`pagewire`. Start reading at `replay.py`.
"""
