"""`pagewire demo`: prompts served across processes, compared with the model's own output.

Imports `scheduler_adapters.service`, `scheduler_adapters.hf`, `kvcache`, the values of `kvcache` and the values of
`scheduler_adapters`. Start reading at `demo.py`.
"""
