"""KV events: a thread of its own reports the contents of the caches to routers, in vLLM's wire format.

Imports `kvcache.pool` and the values of `kvcache`. Start reading at `log.py`, the record of the serving loop; `book.py`
derives the events from it, `publisher.py` sends them, and `wire.py` has the format.
"""
