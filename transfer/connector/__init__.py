"""`NixlConnectorWorker` and its scheduler side: leases and pulls for engines that own their pages, such as vLLM.

Imports `kvcache.replica`, `transfer.plan`, `transfer.wire`, `transfer.pull`, and the shared modules of `kvcache` and
`transfer`. Start reading at `worker.py`.
"""
