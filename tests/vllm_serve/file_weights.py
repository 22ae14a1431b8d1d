"""A backend of vLLM's weight updates that reads a checkpoint's file, because vLLM's own backends need a GPU.

`vllm serve --weight-transfer-config '{"backend": "file"}' --worker-extension-cls tests.vllm_serve.file_weights.Worker`
registers it in each worker. All else of an update is vLLM's: its endpoints, its worker, and the reload of layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload


@dataclass
class Update(WeightTransferUpdateInfo):
    """`path` is the file of a checkpoint."""

    path: str


class FileEngine(WeightTransferEngine[WeightTransferInitInfo, Update]):
    """Loads the weights of a file into the worker's model."""

    init_info_cls = WeightTransferInitInfo
    update_info_cls = Update

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        """Needs no connection."""

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))  # vLLM's also waits for a GPU

    def receive_weights(self, update_info: Update) -> None:
        self.model.load_weights(iter(load_file(update_info.path).items()))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Has nothing to release."""


class Worker:
    """Adds nothing to vLLM's worker, which imports this file because of it."""


WeightTransferEngineFactory.register_engine("file", FileEngine)
