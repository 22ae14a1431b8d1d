"""Recurrent states: where they lie, who holds one, which are kept for others, and the manager that has them.

Imports `kvcache`, `kvcache.pool`, `kvcache.replica` and the values of `kvcache`. Start reading at `state_pages.py`.
"""
