"""Models of Hugging Face `transformers` over our pages, those with recurrent layers too.

Imports `kvcache`, `kvcache.replica`, `kvcache.states`, the values of `kvcache` and the values of `scheduler_adapters`,
and `transformers` where it is used. Start reading at `runner.py`.
"""
