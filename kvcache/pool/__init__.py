"""Which pages there are, and which goes first: the pages of one replica, their prefix index, and the order of eviction.

Imports the values of `kvcache`. Start reading at `pages.py`, the only file that frees a page.
"""
