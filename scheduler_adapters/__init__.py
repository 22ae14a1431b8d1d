"""The layer between a model, a scheduler and the cache: a runner, a loop, prefill and decode servers.

Imports `kvcache` and `transfer`. Start reading at `base.py`, the protocols that a scheduler sees, and `loop.py`.
"""
