"""Every message between engines, the handshake that carries them, and the keys that protect it.

Imports `transfer.plan`, for the layouts that messages describe, the values of `kvcache` and the values of `transfer`.
Start reading at `messages.py`.
"""
