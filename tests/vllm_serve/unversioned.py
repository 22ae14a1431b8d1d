"""Our connector, without what tells it that weights have changed. Tests show with it what is then wrong.

`"kv_connector_module_path": "tests.vllm_serve.unversioned"` imports it in each process of an engine.
"""

from __future__ import annotations

from scheduler_adapters.vllm import weights
from scheduler_adapters.vllm.connector import PagewireConnector

__all__ = ["PagewireConnector"]

weights._wrap_worker = weights._wrap_engine = lambda: None
