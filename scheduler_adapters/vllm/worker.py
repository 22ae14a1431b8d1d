"""The worker's side of our vLLM connector: one rank's caches, and its reports to vLLM on leases and loads."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from scheduler_adapters.vllm.backends import contents_of, layers_of
from scheduler_adapters.vllm.config import read_options, worker_config
from scheduler_adapters.vllm.groups import one_spec
from scheduler_adapters.vllm.metadata import RankHandshakeMetadata, StepMetadata, WorkersMetadata
from scheduler_adapters.vllm.proof import prove
from scheduler_adapters.vllm.stats import PullStats, pull_stats
from scheduler_adapters.vllm.weights import WeightsWatch
from transfer.connector.cache_layout import Cache
from transfer.connector.config import WorkerConfig, check_config
from transfer.connector.metadata import WorkerOutput
from transfer.connector.worker import NixlConnectorWorker
from transfer.errors import EngineClosedError
from transfer.stats import StatsSnapshot

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger("pagewire.vllm")


def again(incarnation: str, sleeps: int) -> str:
    """Returns the name of an incarnation after the caches were unregistered `sleeps` times."""
    return f"{sleeps}-{incarnation}"[:64] if sleeps else incarnation


class WorkerSide:
    """The worker's side of one rank. Only the thread that runs its model may use it."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._keyring = read_options(vllm_config).keys
        # An unsupported config is refused before there are caches.
        check_config(worker_config(vllm_config, kv_cache_config, {}))
        self._worker: NixlConnectorWorker | None = None
        self._caches: Mapping[str, Any] = {}
        self._sleeps = 0  # how many times the caches were unregistered
        self._weights: WeightsWatch | None = None
        self._copy: Any = None
        self._waits = StepMetadata()  # the requests whose load or lease vLLM waits for
        self._sent: set[str] = set()  # requests whose lease ended before vLLM began to wait for its end
        self._failures: set[str] = set()
        self._output = WorkerOutput()
        self._marker = self._resets = 0
        self._changed_after = -1  # as in `WorkersMetadata`
        self._snapshot: StatsSnapshot | None = None

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """Registers the tensors of this rank's layers, and starts to serve and to read."""
        self._caches = kv_caches
        self._open(kv_caches)
        self._weights = WeightsWatch(self._on_weights)

    def unregister(self) -> None:
        """Ends every lease and load, because the tensors are about to lose their memory. Safe to call twice."""
        if self._worker is not None:
            self._worker.shutdown()
            self._worker, self._sleeps = None, self._sleeps + 1

    def restore(self) -> None:
        """Registers the same tensors again, which have memory again. A no-op unless they are unregistered.

        Readers take this for a restarted engine, because its memory is registered under other keys.
        """
        if self.is_asleep:
            self._open(self._caches)
            if self._weights is not None and self._weights.weights.named:
                self._set_weights(self._weights.weights.named)

    @property
    def is_asleep(self) -> bool:
        """Whether the tensors are unregistered. vLLM may run steps without requests meanwhile."""
        return self._worker is None and self._sleeps > 0 and bool(self._caches)

    def _on_weights(self, named: Mapping[str, str]) -> None:
        self._changed_after = self._resets
        self._set_weights(named)

    def _set_weights(self, named: Mapping[str, str]) -> None:
        if self._worker is not None:
            self._worker.set_weights(named)

    def _open(self, kv_caches: Mapping[str, Any]) -> None:
        moved = self._kv_cache_config.transfer_group_index_by_layer
        # Layers outside the transferred groups are left out, because they share the tensors of layers in these groups.
        caches = {name: cache for name, cache in kv_caches.items() if name in moved}
        pages = {name: cache.shape[2] for name, cache in caches.items()}
        config = worker_config(self._vllm_config, self._kv_cache_config, pages)
        config = msgspec.structs.replace(config, incarnation=again(config.incarnation, self._sleeps))
        moved_as = self._as_moved(caches, pages)
        self._prove(config, moved_as)
        self._worker = NixlConnectorWorker(config, self._keyring)
        if self._copy is not None:
            self._worker.set_host_xfer_buffer_ops(self._copy)
        self._worker.register_kv_caches(moved_as)
        for thread in self._worker.threads:
            thread.replica.timed = self._vllm_config.observability_config.otlp_traces_endpoint is not None

    def _as_moved(self, caches: Mapping[str, Any], pages: Mapping[str, int]) -> dict[str, Cache]:
        """Returns the layers' tensors in the form that a transfer takes: split into keys and values, or into states."""
        found: dict[str, Cache] = dict(caches)
        for number, group in enumerate(self._kv_cache_config.transfer_groups):
            where, names = f"cache group {number}", [name for name in group.layer_names if name in pages]
            if names:
                spec = one_spec(where, group)
                contents = contents_of(where, self._vllm_config, names, spec, pages[names[0]])
                found |= {name: contents.tensors(f"{where}, layer {name!r}", caches[name]) for name in names}
        return found

    def _prove(self, config: WorkerConfig, caches: Mapping[str, Cache]) -> None:
        """Raises an error if vLLM's kernels do not write to the addresses that a transfer reads (see `proof.py`).

        The check runs before any reader can ask for a page.
        """
        start = time.perf_counter()
        layers = layers_of(f"engine {config.engine_id!r}", self._vllm_config, list(caches))
        tried = prove(config, layers, caches, self._vllm_config.model_config.dtype)
        milliseconds = (time.perf_counter() - start) * 1e3
        logger.info(
            "rank %d: checked in %d layers that transfers read where vLLM writes (%.1f ms)",
            config.rank,
            tried,
            milliseconds,
        )

    def set_copy(self, copy_operation: Any) -> None:
        """Sets the function that copies blocks to host buffers and back."""
        self._copy = copy_operation
        if self._worker is not None:
            self._worker.set_host_xfer_buffer_ops(copy_operation)

    @property
    def running(self) -> NixlConnectorWorker:
        """The worker over the registered caches. Raises `EngineClosedError` if there is none."""
        if self._worker is None:
            raise EngineClosedError("register_kv_caches was not called, or the connector was shut down")
        return self._worker

    def handshake_metadata(self) -> RankHandshakeMetadata:
        """Returns the metadata of this rank, which the scheduler's side serves to readers."""
        worker, weights = self.running, {} if self._weights is None else self._weights.weights.named
        config = worker.config
        return RankHandshakeMetadata(worker.get_handshake_metadata(), config.fingerprint(), config.incarnation, weights)

    def start(self, metadata: StepMetadata) -> None:
        """Starts a step's work. Without memory there is none."""
        self._resets = metadata.resets
        if metadata.version and self._weights is not None:
            self._weights.weights.versioned(metadata.version)
            self._set_weights(self._weights.weights.named)
        if self.is_asleep:
            return
        self.running.start_load_kv(metadata.step)
        self._waits.parked |= metadata.parked
        self._waits.finished |= metadata.finished
        self._waits.refused |= metadata.refused
        self._marker = metadata.marker

    def save(self, metadata: StepMetadata) -> None:
        """Copies blocks that a step has computed to host buffers, if the engine uses any."""
        if not self.is_asleep:
            self.running.save_kv_to_host(metadata.step)

    def results(self) -> tuple[set[str], set[str], set[str]]:
        """Returns the finished requests for which vLLM waits.

        The result has three sets: the requests whose lease has ended, the requests whose load has ended, and the
        requests whose load has failed. The third set is part of the second set. A failed load is reported only when
        none of its transfers is in flight any more, because vLLM reuses its blocks at once.
        """
        if self.is_asleep:
            return set(), set(), set()
        self._output = output = self.running.take_output()
        self._sent |= output.sent.keys() | {request_id for request_id, error in output.offered.items() if error}
        self._failures |= output.failed.keys()
        waits = self._waits
        sent, received = self._sent & waits.finished, (output.received & waits.parked) | waits.refused
        failed = (self._failures & received) | waits.refused
        self._sent -= sent
        self._failures -= output.received
        self._waits = StepMetadata(parked=waits.parked - received, finished=waits.finished - sent)
        return sent, received, failed

    def take_report(self) -> WorkersMetadata | None:
        """Returns the events that the last call of `results` has seen, for the scheduler's side. None without any.

        Each event is returned once.
        """
        if self.is_asleep:
            return None
        output, self._output = self._output, WorkerOutput()
        marker, self._marker = self._marker, 0
        after, self._changed_after = self._changed_after, -1
        return WorkersMetadata([(self.running.config.rank, output)], marker, after) if output or marker else None

    def stats(self) -> PullStats | None:
        """Returns the figures since the last call; None if there was no event."""
        found = None if self._worker is None else self._worker.get_kv_connector_stats()
        if found is None:
            return None
        before, self._snapshot = self._snapshot, found
        stats = pull_stats(found, before)
        return None if stats.is_empty() else stats

    def close(self) -> None:
        """Ends every lease and load, and releases the caches. Safe to call twice."""
        worker, self._worker, self._weights, self._caches = self._worker, None, None, {}
        if worker is not None:
            worker.shutdown()
