"""What every page is doing, told to who asks: nothing is looked at, and nothing written down, while nobody does.

Imports `kvcache`, `kvcache.pool`, `kvcache.replica` and the values of `kvcache`. Start reading at `cells.py` and
`pools.py`, what is read of a pool, `book.py`, what a look is made of, and `endpoint.py`, the thread that answers.
`follower.py` asks.
"""
