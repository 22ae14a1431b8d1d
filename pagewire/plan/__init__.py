"""`pagewire plan`: computes the size of a model's KV cache, and replays a trace with more and less memory.

Imports `kvcache`, `kvcache.states`, `transfer.plan`, `scheduler_adapters.hf`, `pagewire.replay`, the values of
`kvcache`, the values of `scheduler_adapters` and the values of `pagewire`, and `transformers` where it is used. Start
reading at `layers.py`.
"""
