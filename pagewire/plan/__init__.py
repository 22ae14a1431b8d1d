"""`pagewire plan`: what the KV cache of a model takes, and what more memory gives; arithmetic, and a trace replayed.

Imports `kvcache`, `kvcache.states`, `transfer.plan`, `scheduler_adapters.hf`, `pagewire.replay`, the values of
`kvcache`, the values of `scheduler_adapters` and the values of `pagewire`, and `transformers` where it is used. Start
reading at `layers.py`.
"""
