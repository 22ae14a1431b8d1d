"""The pages of one replica: their state, their prefix index, and the order in which they are evicted.

Imports the shared modules of `kvcache`. Start reading at `pages.py`, the only file that frees a page.
"""
