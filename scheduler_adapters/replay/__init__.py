"""`pagewire replay`: a request trace over the manager, beside a reference LRU and the offline optimum.

Imports `kvcache`, `kvcache.watch`, the values of `kvcache` and the values of `scheduler_adapters`. Start reading at
`replay.py`.
"""
