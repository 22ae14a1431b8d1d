"""Runs Hugging Face `transformers` models on our pages, including those with recurrent layers.

Imports `kvcache`, `kvcache.replica`, `kvcache.states`, the shared modules of `kvcache` and `scheduler_adapters`,
and, where it is used, `transformers`. Start reading at `runner.py`.
"""
