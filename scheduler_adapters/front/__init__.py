"""The HTTP frontend of the service, with OpenAI's API, for processes on one host or on several.

Imports `kvcache.events`, `kvcache.replica`, `transfer.wire`, `scheduler_adapters.hf`, `scheduler_adapters.service`, and
the shared modules of `kvcache`, `kvcache.endpoints`, `transfer` and `scheduler_adapters`. Start reading at
`frontend.py`.
"""
