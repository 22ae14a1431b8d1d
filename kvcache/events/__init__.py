"""KV events: a separate thread tells routers what the caches contain, in vLLM's wire format.

Imports `kvcache.pool` and the shared modules of `kvcache`. Start reading at `log.py`, the record that the serving loop
writes. `book.py` builds events from that record. Its `EventBook` remembers what subscribers have been told.
`publisher.py` sends the events, and `wire.py` defines their format.
"""
