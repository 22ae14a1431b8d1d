"""Our transfer behind vLLM's connector interface. Needs vLLM, which imports this package by name.

Imports `transfer.wire`, `transfer.connector` and the values of `transfer`. Start reading at `connector.py`.
"""

from scheduler_adapters.vllm.versions import VLLM

# isort: split
from scheduler_adapters.vllm.connector import PagewireConnector

__all__ = ["VLLM", "PagewireConnector"]
