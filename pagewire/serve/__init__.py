"""`pagewire serve`: starts the front and its processes, or only one of them, and ends them.

Imports `scheduler_adapters.front`, `scheduler_adapters.service`, `scheduler_adapters.hf`, `transfer.wire`, the values
of `kvcache`, the values of `transfer`, the values of `scheduler_adapters` and the values of `pagewire`. Start reading
at `command.py`.
"""
