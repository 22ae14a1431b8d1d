"""`NixlConnectorWorker` and its scheduler side: leases and pulls for engines that own their pages, vLLM for one.

Imports `transfer.pull.pull` and `transfer.plan.plan`. Start reading at `worker.py`.
"""
