"""The workers' side of our vLLM connector: one rank's caches, and what is told to vLLM of its leases and loads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from scheduler_adapters.vllm.config import Options, worker_config
from scheduler_adapters.vllm.metadata import RankHandshakeMetadata, StepMetadata
from transfer.connector.config import check_config
from transfer.connector.metadata import WorkerOutput
from transfer.connector.worker import NixlConnectorWorker
from transfer.errors import EngineClosedError
from transfer.stats import StatsSnapshot

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


class WorkerSide:
    """Of one rank. For the thread that runs its model."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._keyring = Options(vllm_config).keyring
        check_config(worker_config(vllm_config, kv_cache_config, {}))  # what cannot be is refused before caches come
        self._worker: NixlConnectorWorker | None = None
        self._copy: Any = None
        # What vLLM waits for, and what is over: it is told of what is in both.
        self._parked: set[str] = set()
        self._finished: set[str] = set()
        self._sent: set[str] = set()
        self._failures: dict[str, str] = {}
        self._refused: set[str] = set()
        self._output = WorkerOutput()

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """Takes the tensors of this rank's layers, and starts to serve and to read.

        Raises:
            InvalidEngineError: they do not fit vLLM's own description of them.
        """
        moved = self._kv_cache_config.transfer_group_index_by_layer
        caches = {name: cache for name, cache in kv_caches.items() if name in moved}  # others share one of these
        pages = {name: cache.shape[2] for name, cache in caches.items() if not isinstance(cache, (list, tuple))}
        self._worker = NixlConnectorWorker(
            worker_config(self._vllm_config, self._kv_cache_config, pages), self._keyring
        )
        if self._copy is not None:
            self._worker.set_host_xfer_buffer_ops(self._copy)
        self._worker.register_kv_caches(caches)

    def set_copy(self, copy_operation: Any) -> None:
        """Sets how blocks get to host buffers and back."""
        self._copy = copy_operation
        if self._worker is not None:
            self._worker.set_host_xfer_buffer_ops(copy_operation)

    @property
    def _running(self) -> NixlConnectorWorker:
        if self._worker is None:
            raise EngineClosedError("no caches are registered, or the connector was shut down")
        return self._worker

    @property
    def rank(self) -> int:
        """This one, of all of the engine."""
        return self._running.config.rank

    def handshake_metadata(self) -> RankHandshakeMetadata:
        """What the scheduler's side is to tell of this rank."""
        return RankHandshakeMetadata(self._running.get_handshake_metadata(), self._running.config.fingerprint())

    def start(self, metadata: StepMetadata) -> None:
        """Takes a step's work over."""
        self._running.start_load_kv(metadata.step)
        self._parked |= metadata.parked - metadata.refused.keys()
        self._finished |= metadata.finished
        self._refused |= metadata.refused.keys()

    def save(self, metadata: StepMetadata) -> None:
        """Copies blocks that a step has computed to host buffers, where there are any."""
        self._running.save_kv_to_host(metadata.step)

    def results(self) -> tuple[set[str], set[str], set[str]]:
        """Returns what vLLM waits for and is over now: sent, received, and of the latter those that failed.

        A failed load is told when nothing of it is in flight any more, not before: vLLM gives its blocks away at once.
        """
        self._output = output = self._running.take_output()
        self._sent |= output.sent.keys() | {request_id for request_id, error in output.offered.items() if error}
        sent = self._sent & self._finished
        self._sent -= sent
        self._finished -= sent
        self._failures |= output.failed
        failed = {request_id for request_id in output.received if self._failures.pop(request_id, None)}
        received, refused = output.received & self._parked, self._refused
        self._parked -= received
        self._refused = set()
        return sent, received | refused, (failed & received) | refused

    def take_output(self) -> WorkerOutput:
        """Returns, once, all that happened up to the last results: for the scheduler's side."""
        output, self._output = self._output, WorkerOutput()
        return output

    def stats(self) -> StatsSnapshot | None:
        """Returns counters, and the pulls since the last call; None where nothing has happened."""
        return None if self._worker is None else self._worker.get_kv_connector_stats()

    def close(self) -> None:
        """Ends every lease and load, and lets go of the caches. Safe to call twice."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.shutdown()
