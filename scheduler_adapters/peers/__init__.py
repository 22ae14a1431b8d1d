"""Whom an engine asks for the beginning of a waiting prompt, and how it fetches what they have cached.

Imports `kvcache.replica`, `transfer.wire`, `transfer.pull`, `transfer.connector` and the shared modules of `kvcache`,
`transfer` and `scheduler_adapters`, and no engine. Start reading at `peer_blocks.py`.
"""
