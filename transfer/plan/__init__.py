"""Turns the layouts of two shards and two lists of pages into the runs of bytes that a pull copies. Pure arithmetic.

Imports the values of `kvcache` (its page layouts), `kvcache.replica` (its block tables) and the values of `transfer`.
Start reading at `boxes.py`, then `plan.py`.
"""
