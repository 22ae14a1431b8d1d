"""Runs models of Hugging Face `transformers` over our pages, including those with recurrent layers.

Imports `kvcache`, `kvcache.replica`, `kvcache.states`, the values of `kvcache` and the values of
`scheduler_adapters`, and `transformers` where it is used. Start reading at `runner.py`.
"""
