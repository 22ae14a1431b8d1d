"""Our connector, with requests that are pulled whatever their engine has estimated: `benchmarks.vllm_conversations`.

Give it as `kv_connector_module_path`. A request whose `kv_transfer_params` have `"way": "pulled "` is pulled, and all
others get what the engine chooses. It needs vLLM.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

from typing import Any

from benchmarks.prefix_worker import PULLED, OneWay
from scheduler_adapters.peers.peer_blocks import PeerBlocks
from scheduler_adapters.vllm import PagewireConnector, prefix_exchange

__all__ = ["PagewireConnector"]


class DirectedBlocks(PeerBlocks):
    """Pulls the blocks of a request that says so."""

    def _start(self, fetch: Any, computed: int) -> None:
        own, params = self.estimate, fetch.request.kv_transfer_params
        if isinstance(params, dict) and params.get("way") == PULLED:
            self.estimate = OneWay(own, PULLED)
        try:
            super()._start(fetch, computed)
        finally:
            self.estimate = own


prefix_exchange.PeerBlocks = DirectedBlocks  # type: ignore[misc]
