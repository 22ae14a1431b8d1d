"""Recurrent states: their memory, their holders, and the cached copies from which other requests resume.

Imports `kvcache.pool` and the shared modules of `kvcache`. Start reading at `state_pages.py`.
"""
