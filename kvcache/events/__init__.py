"""KV events: what routers are told about the contents of the caches, in vLLM's wire format.

Imports `kvcache.pool` and the shared modules of `kvcache`. Start reading at `log.py`, the record that the serving loop
writes. `book.py` builds events from that record. Its `EventBook` remembers what subscribers have been told.
`wire.py` defines their format. The thread in `kvcache/endpoints/publisher.py` sends the events.
"""
