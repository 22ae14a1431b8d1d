"""Every message between engines, the handshake that carries them, and the keys that protect it.

Imports `transfer.plan.plan` for the layouts that messages describe. Start reading at `messages.py`.
"""
