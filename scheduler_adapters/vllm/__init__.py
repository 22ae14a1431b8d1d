"""Our transfer behind vLLM's connector interface. vLLM imports this package by name, and the package needs vLLM.

Imports `transfer.wire`, `transfer.connector` and the shared modules of `transfer`. Start reading at `connector.py`.
"""

from scheduler_adapters.vllm.versions import VLLM

# isort: split
from scheduler_adapters.vllm.connector import PagewireConnector

__all__ = ["VLLM", "PagewireConnector"]
