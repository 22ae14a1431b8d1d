"""`pagewire demo`: serves prompts across processes, and compares the output with the model's own.

Imports `scheduler_adapters.service`, `scheduler_adapters.hf`, `kvcache`, the values of `kvcache`, the values of
`scheduler_adapters` and the values of `pagewire`. Start reading at `demo.py`.
"""
