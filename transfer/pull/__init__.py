"""Leases, fences and pulls: the ranks of one engine grant leases to readers and read pages from sources.

Imports `kvcache.replica`, `transfer.plan`, `transfer.wire`, `transfer.nixl`, the values of `transfer` and the values of
`kvcache`. Start reading at `exchange.py`, the interface of a process, then `lease.py` and `pull.py`;
`docs/concepts/protocol.md` has the argument.
"""
