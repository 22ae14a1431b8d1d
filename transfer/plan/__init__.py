"""Turns the layouts of two shards and two lists of pages into the runs of bytes that a pull copies. Pure arithmetic.

Imports `kvcache.replica` (for its block tables) and the shared modules of `transfer` and `kvcache` (for its page
layouts). Start reading at `boxes.py`, then `plan.py`.
"""
