"""`pagewire demo`: serves prompts across processes, and compares the output with the model's own.

Imports `scheduler_adapters.service`, `scheduler_adapters.hf`, `kvcache`, and the shared modules of `kvcache`,
`scheduler_adapters` and `pagewire`. Start reading at `demo.py`.
"""
