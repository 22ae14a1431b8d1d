"""`pagewire plan`: computes the size of a model's KV cache, and replays a trace with less and with more memory.

Imports `kvcache`, `kvcache.states`, `transfer.plan`, `scheduler_adapters.hf`, `pagewire.replay`, the shared modules of
`kvcache`, `scheduler_adapters` and `pagewire`, and, where it is used, `transformers`. Start reading at `layers.py`.
"""
