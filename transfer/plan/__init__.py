"""From the layouts of two shards and two lists of pages to the runs of bytes that a pull copies. Pure arithmetic.

Imports the values of `kvcache` (page layouts alone) and the values of `transfer`. Start reading at `boxes.py`, then
`plan.py`.
"""
