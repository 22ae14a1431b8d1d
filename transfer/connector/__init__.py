"""`NixlConnectorWorker` and its scheduler side: leases and pulls for engines that own their pages, such as vLLM.

Imports `transfer.plan`, `transfer.wire`, `transfer.pull`, the values of `kvcache` and the values of `transfer`.
Start reading at `worker.py`.
"""
