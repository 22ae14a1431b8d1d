"""Leases, fences and pulls: what the ranks of one engine grant to readers and read from sources.

Imports `transfer.plan`, `transfer.wire`, `transfer.nixl` and the values of `transfer`. Start reading at `lease.py` and
`pull.py`; `docs/protocol.md` has the argument.
"""
