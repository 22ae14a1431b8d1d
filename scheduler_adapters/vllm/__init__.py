"""Our transfer behind vLLM's connector interface. vLLM imports this package by name, and the package needs vLLM.

Imports `kvcache.tiers`, `kvcache.pool`, `kvcache.replica`, `transfer.wire`, `transfer.nixl`, `transfer.pull`,
`transfer.connector`, `scheduler_adapters.peers` and the shared modules of `kvcache`, `kvcache.endpoints`, `transfer`
and `scheduler_adapters`. Start reading at `connector.py` and `tiers.py`.
"""

from scheduler_adapters.vllm.versions import VLLM, check_methods

# isort: split
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from scheduler_adapters.vllm.connector import PagewireConnector

check_methods(PagewireConnector, KVConnectorBase_V1)

__all__ = ["VLLM", "PagewireConnector"]
