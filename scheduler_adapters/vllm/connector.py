"""`PagewireConnector`: vLLM's KV connector over our transfer.

The versions of vLLM that it supports are in `versions.py`.

vLLM imports the connector by its module path. No other package of pagewire imports vLLM:

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "PagewireConnector", "kv_role": "kv_producer",
      "kv_connector_module_path": "scheduler_adapters.vllm"}'

for prefill, and the same with `kv_consumer` for decode. Requests, proxies, `VLLM_NIXL_SIDE_CHANNEL_HOST` and
`VLLM_NIXL_SIDE_CHANNEL_PORT` work as with vLLM's own NIXL connector. `scheduler_adapters.vllm.options.Options` has the
other settings. Our `kv_transfer_params` have the keys of vLLM's NIXL connector that name the engine to ask, and the key
`lease_id`.

Ownership: vLLM keeps its blocks and its scheduler. One of our leases covers the blocks of a prefilled request; vLLM
keeps the blocks until every rank reports that the lease has ended. The two sides may differ in block size, memory
layout, tensor and pipeline parallelism. Only models with recurrent states need equal tensor parallelism.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from scheduler_adapters.vllm.config import read_options
from scheduler_adapters.vllm.metadata import RankHandshakeMetadata, StepMetadata, WorkersMetadata
from scheduler_adapters.vllm.options import check_options
from scheduler_adapters.vllm.scheduler import SchedulerSide
from scheduler_adapters.vllm.stats import PullMetrics, PullStats
from scheduler_adapters.vllm.versions import PEER
from scheduler_adapters.vllm.worker import WorkerSide
from transfer.errors import EngineClosedError

if TYPE_CHECKING:
    import torch
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import CopyBlocksOp
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


def log_as_vllm() -> None:
    """Gives our log lines vLLM's format, with time and process, unless the program has set a format of its own."""
    ours = logging.getLogger("pagewire")
    if not ours.hasHandlers():
        theirs = logging.getLogger("vllm")
        ours.handlers, ours.level = list(theirs.handlers), theirs.level


class PagewireConnector(KVConnectorBase_V1, SupportsHMA):
    """One half of the connector: vLLM creates one in its scheduler's process, and one in each worker's process.

    Its methods are vLLM's; see `KVConnectorBase_V1` for when each is called.

    Raises:
        InvalidEngineError: (a ValueError) the engine uses an unsupported feature; the message names it.
    """

    _cache_hit_source = PEER

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        log_as_vllm()
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(vllm_config, kv_cache_config)
        else:
            self._worker = WorkerSide(vllm_config, kv_cache_config)

    @property
    def _scheduling(self) -> SchedulerSide:
        if self._scheduler is None:
            raise EngineClosedError("the scheduler's side exists only in the scheduler, and not after shutdown")
        return self._scheduler

    @property
    def _working(self) -> WorkerSide:
        if self._worker is None:
            raise EngineClosedError("the worker's side exists only in a worker, and not after shutdown")
        return self._worker

    # vLLM calls these methods before it creates a connector, so invalid options already fail the startup here.

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Returns False, because this connector does nothing layer by layer.

        With full graphs, vLLM calls this method before it starts any process of the engine, so invalid options already
        fail the startup here.
        """
        check_options(extra_config)
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Returns the layout in which heads come before tokens, so that a rank's heads are one run of bytes in a page.

        For a model with latents it returns None, because any layout is suitable. vLLM calls this in the scheduler's
        process, before memory is measured and graphs are captured.
        """
        if vllm_config.kv_transfer_config is not None:
            read_options(vllm_config, listens=True)
        model: Any = vllm_config.model_config  # None by default, contrary to its declared type
        return None if model is None or model.use_mla else "LBHNC"

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:  # noqa: ARG003
        """Returns True. vLLM sleeps only when no block is in use, so no peer reads one."""
        return True

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        """Returns a stats object for the data that another process has sent."""
        return PullStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """Returns the metrics of all engines."""
        return PullMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # The scheduler's side

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """Whether a load brings the state of a prefix whose other blocks this engine has cached.

        Every load brings the state. It does not bring the earlier tokens of a window, however.
        """
        return not any(group.window for group in self._scheduling.groups)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Starts the handshake server, which answers readers."""
        ranks = {ranks: rank for ranks, rank in metadata.items() if isinstance(rank, RankHandshakeMetadata)}
        if len(ranks) != len(metadata):
            raise TypeError("the handshake metadata was made by another connector: all workers need PagewireConnector")
        self._scheduling.set_handshake_metadata(ranks)

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Starts the handshake server, for an engine without pipeline stages."""
        self.set_xfer_handshake_metadata_pp_aware({(0, rank): found for rank, found in metadata.items()})

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Sets the manager of vLLM's blocks."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self._scheduling.bind(kv_cache_manager)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:  # noqa: ARG002
        """Returns all transferred groups, because a load reads every one of them."""
        return self._kv_cache_config.transfer_group_ids

    def on_new_request(self, request: Request) -> None:
        """Handles a new request."""
        self._scheduling.add(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Returns how many tokens a load would add to the computed ones, and whether the load is asynchronous.

        Every load is asynchronous, so the second value is False only if there is nothing to load. If the first value is
        None, vLLM asks again in the next step.
        """
        count = self._scheduling.match(request, num_computed_tokens)
        return count, bool(count)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Handles the allocation of blocks to a request: starts its lease or its load."""
        self._scheduling.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Returns the work of a step for the workers."""
        return self._scheduling.step(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Handles the workers' reports on leases and loads."""
        metadata = connector_output.kv_connector_worker_meta
        if isinstance(metadata, WorkersMetadata):
            self._scheduling.update(metadata)
        for request_ids in (connector_output.finished_sending, connector_output.finished_recving):
            self._scheduling.freed(request_ids or ())

    def has_pending_block_frees(self) -> bool:
        """Whether blocks are about to be freed, so that vLLM waits for them instead of preempting a request.

        A lease that waits for its reader does not count, because it may last for half a minute.
        """
        return self._scheduling.frees_soon

    def has_pending_push_work(self) -> bool:
        """Whether vLLM must run a step although it has no request: a peer asks for blocks, or reads some."""
        return self._scheduling.lends

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Handles the end of a request of a model with one group."""
        return self._scheduling.ended(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Handles the end of a request.

        Returns whether its blocks must be kept for a reader, and the reader's params.
        """
        return self._scheduling.ended(request, block_ids)

    def reset_cache(self) -> bool:
        """Returns True, because the connector has no cache that could be out of date."""
        return True

    # The workers' side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Registers the tensors of this rank."""
        self._working.register(kv_caches)

    def unregister_kv_caches(self) -> None:
        """Unregisters the tensors of this rank before a sleep takes their memory."""
        self._working.unregister()

    def restore_kv_caches(self) -> None:
        """Registers them again after the sleep. vLLM then calls `set_xfer_handshake_metadata_pp_aware` again."""
        self._working.restore()

    def set_host_xfer_buffer_ops(self, copy_operation: CopyBlocksOp) -> None:
        """Sets the function that copies blocks to host buffers and back."""
        self._working.set_copy(copy_operation)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata:
        """Returns the metadata of this rank, which the scheduler's side serves to readers."""
        return self._working.handshake_metadata()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:  # noqa: ARG002
        """Starts a step's leases and loads."""
        self._working.start(self._metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: vLLM parks a request until its load has ended.

        A token must not be used before the fence of its load. The fence is a READ after the last layer, which shows
        that the pages were still leased. Running a request while its layers arrive could save at most one step, and
        would delay the steps of all other requests.
        """

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Does nothing, because readers read pages where the model has written them."""

    def wait_for_save(self) -> None:
        """Copies blocks that this step has computed to host buffers, if the engine uses any."""
        self._working.save(self._metadata())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:  # noqa: ARG002
        """Returns two sets: the requests whose lease has ended, and the requests whose load has ended."""
        sent, received, _ = self._working.results()
        return sent, received

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:  # noqa: ARG002
        """Returns three sets of requests: their lease has ended, their load has ended, or their load has failed.

        Failures name requests instead of blocks, because this works for any number of groups.
        """
        return KVConnectorTransferResults(*self._working.results())

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Returns this rank's output for the scheduler's side; None if there is none."""
        return self._working.take_report()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Returns the figures since the last call.

        At a rank, these are the figures of its pulls. At the scheduler, they are the counts of failed loads.
        """
        if self._scheduler is not None:
            counts = self._scheduler.take_counts()
            return PullStats(data=counts) if any(counts.values()) else None
        return None if self._worker is None else self._worker.stats()

    def _metadata(self) -> StepMetadata:
        metadata = self._get_connector_metadata()
        if not isinstance(metadata, StepMetadata):
            raise TypeError(f"got connector metadata of type {type(metadata).__name__}; StepMetadata is expected")
        return metadata

    def shutdown(self) -> None:
        """Ends every lease and load, and stops the handshake server. Safe to call twice."""
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()


# With a `MultiConnector`, the metrics process gets our stats as plain data, and looks up their class by connector name.
# An unknown name would crash that process.
with suppress(ValueError):  # the name is already registered
    KVConnectorFactory.register_connector(PagewireConnector.__name__, __name__, PagewireConnector.__name__)
