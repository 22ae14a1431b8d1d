"""The disaggregated service: prefill and decode processes, their sockets and messages.

Imports `kvcache`, `kvcache.replica`, `kvcache.endpoints`, `kvcache.watch`, `transfer`, `transfer.wire`,
`transfer.nixl`, `transfer.pull`, `scheduler_adapters.hf`, and the shared modules of `kvcache`, `kvcache.endpoints`,
`transfer` and `scheduler_adapters`. Start reading at `prefill.py` and `decode.py`.
"""
