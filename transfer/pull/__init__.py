"""Leases, fences and pulls: the ranks of one engine grant leases to readers and read pages from sources.

Imports `kvcache.replica`, `transfer.plan`, `transfer.wire`, `transfer.nixl`, and the shared modules of `transfer` and
`kvcache`. Start reading at `exchange.py`, which has the calls that a process makes. Then read `lease.py` and `pull.py`.
`docs/concepts/protocol.md` explains why a read under a lease is safe.
"""
