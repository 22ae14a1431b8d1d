"""`pagewire replay`: a request trace over the manager, beside a reference LRU and the offline optimum.

Imports `kvcache`. Start reading at `replay.py`.
"""
