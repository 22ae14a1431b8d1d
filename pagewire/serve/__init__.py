"""`pagewire serve`: starts and stops the HTTP frontend and its prefill and decode processes, or one of them.

Imports `scheduler_adapters.front`, `scheduler_adapters.service`, `scheduler_adapters.hf`, `transfer.wire`, and the
shared modules of `kvcache`, `transfer`, `scheduler_adapters` and `pagewire`. Start reading at `command.py`.
"""
