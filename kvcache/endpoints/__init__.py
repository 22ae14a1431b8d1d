"""Everything of the cache that other processes reach: sockets and their threads, and metrics for Prometheus.

Imports `kvcache`, `kvcache.events`, `kvcache.replica`, `kvcache.states`, `kvcache.tiers`, `kvcache.watch` and the
shared modules of `kvcache` and `kvcache.endpoints`. Start reading at `sockets.py`, which binds every
socket. The manager opens `reset.py`, on which other processes ask for a reset, and `publisher.py`, which sends KV
events. `watch.py` answers `pagewire top`, and `follower.py` is the viewer's side. `prometheus.py` has the metrics of a
manager. No other folder of `kvcache` imports zmq.
"""
