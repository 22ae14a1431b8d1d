"""`pagewire demo`: prompts served across processes, compared with the model's own output.

Imports `scheduler_adapters.service`, `scheduler_adapters.hf`, `kvcache`, the values of `kvcache`, the values of
`scheduler_adapters` and the values of `pagewire`. Start reading at `demo.py`.
"""
