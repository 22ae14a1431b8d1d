"""`pagewire serve`: starts and ends the HTTP front and its prefill and decode processes, or a single one of them.

Imports `scheduler_adapters.front`, `scheduler_adapters.service`, `scheduler_adapters.hf`, `transfer.wire`, the values
of `kvcache`, the values of `transfer`, the values of `scheduler_adapters` and the values of `pagewire`. Start reading
at `command.py`.
"""
