"""Which pages there are, and which goes first: the pages of one replica, their prefix index, and the order of eviction.

Imports `kvcache.errors` and `kvcache.types`, and nothing else of the project. Start reading at `pages.py`, the only
file that frees a page.
"""
