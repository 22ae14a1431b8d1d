"""The HTTP front of the service, with OpenAI's API, on one host or on several.

Imports `kvcache.events`, `kvcache.replica`, `transfer.wire`, `scheduler_adapters.hf`,
`scheduler_adapters.service`, and the values of `kvcache`, the values of `transfer` and the values of
`scheduler_adapters`. Start reading at `frontend.py`.
"""
