"""The disaggregated service: prefill and decode processes, their sockets and messages.

Imports `scheduler_adapters.base`, `.loop`, `.hf`, `transfer` and `kvcache`. Start reading at `prefill.py` and
`decode.py`.
"""
