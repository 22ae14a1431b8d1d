"""From the layouts of two shards and two lists of pages to the runs of bytes that a pull copies. Pure arithmetic.

Imports `transfer.errors` and `kvcache.layout`. Start reading at `boxes.py`, then `plan.py`.
"""
