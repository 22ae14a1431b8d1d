"""Every message between engines, the handshake that carries them, and the keys that protect it.

Imports `transfer.plan`, for the layouts that messages describe, and the shared modules of `kvcache.endpoints` and
`transfer`. Start reading at `messages.py`.
"""
