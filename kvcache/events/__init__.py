"""KV events: what the caches hold, told to routers in vLLM's wire format by a thread of its own.

Imports `kvcache.pool` and the values of `kvcache`. Start reading at `log.py`, what the serving loop writes down,
`book.py`, what follows from it, and `publisher.py`, who sends it; `wire.py` is the format.
"""
