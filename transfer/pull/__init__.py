"""Leases, fences and pulls: what the ranks of one engine grant to readers and read from sources.

Imports `kvcache.replica`, `transfer.plan`, `transfer.wire`, `transfer.nixl`, the values of `transfer` and the values of
`kvcache`. Start reading at `exchange.py`, what a process has of all that, then `lease.py` and `pull.py`;
`docs/concepts/protocol.md` has the argument.
"""
