"""Models of Hugging Face `transformers` over our pages, those with recurrent layers too.

Imports `kvcache`, and `transformers` where it is used. Start reading at `runner.py`.
"""
