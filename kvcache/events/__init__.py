"""KV events: a separate thread reports the contents of the caches to routers, in vLLM's wire format.

Imports `kvcache.pool` and the values of `kvcache`. Start reading at `log.py`, the record that the serving loop writes.
`book.py` makes events from that record: its `EventBook` remembers what subscribers were told. `publisher.py` sends the
events, and `wire.py` has the format.
"""
