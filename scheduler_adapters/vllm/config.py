"""Derives the configuration of our workers from vLLM's own configs and from our options.

Anything unknown is refused when the engine starts, and the error names it. Otherwise a cache could be transferred with
a wrong shape without any error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvcache.endpoints.addresses import in_endpoint
from scheduler_adapters.vllm.groups import cache_group
from scheduler_adapters.vllm.options import Options, options_of
from scheduler_adapters.vllm.versions import TELLS_OF_SLEEP, VLLM
from transfer.connector.config import Timing, WorkerConfig
from transfer.errors import InvalidEngineError
from transfer.wire.allowed_peers import listed_peers

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def read_options(vllm_config: VllmConfig, *, listens: bool = False) -> Options:
    """Returns the options. Each data-parallel engine gets a separate port.

    `listens` is True in the scheduler's process, which answers readers if the engine serves any.
    """
    transfer = _transfer_config(vllm_config)
    index = int(getattr(vllm_config.parallel_config, "data_parallel_index", 0) or 0)
    extra = transfer.kv_connector_extra_config
    return options_of(extra, index, serves=transfer.is_kv_producer or bool(extra.get("lend")), resolves=listens)


def worker_config(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, kernel_block_sizes: Mapping[str, int] | None = None
) -> WorkerConfig:
    """Returns the config of one rank. The scheduler's side uses the config of rank 0.

    `kernel_block_sizes` maps a layer to the number of tokens in a page of its tensor. A layer that is not in the
    mapping has pages of the scheduler's block size. At the scheduler the mapping is None, because there are no layers,
    and the contents of pages are unknown.
    """
    parallel, options, transfer = vllm_config.parallel_config, read_options(vllm_config), _transfer_config(vllm_config)
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if (size := int(getattr(parallel, name, 1) or 1)) > 1:
            raise InvalidEngineError(f"{name} is {size}: context parallelism is not supported; set it to 1")
    if getattr(vllm_config.model_config, "enable_sleep_mode", False) and not TELLS_OF_SLEEP:
        raise InvalidEngineError(
            f"enable_sleep_mode is on: vLLM {VLLM} does not tell connectors when it sleeps; leave it off, or use 0.33"
        )
    rank = parallel.rank % (parallel.tensor_parallel_size * parallel.pipeline_parallel_size)
    # Changes with each start, and is the same in all processes of the engine.
    incarnation = f"{vllm_config.instance_id}-{transfer.engine_id}"
    return WorkerConfig(
        engine_id=str(transfer.engine_id),
        incarnation=incarnation[:64],
        groups=tuple(
            cache_group(f"cache group {number}", vllm_config, group, kernel_block_sizes)
            for number, group in enumerate(kv_cache_config.transfer_groups)
        ),
        model=options.model_id or str(vllm_config.model_config.model),
        compatibility={"cache dtype": str(vllm_config.cache_config.cache_dtype)},
        tp_rank=rank % parallel.tensor_parallel_size,
        tp_size=parallel.tensor_parallel_size,
        pp_rank=rank // parallel.tensor_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
        kv_buffer_device=str(transfer.kv_buffer_device),
        timing=Timing(lease=options.kv_lease_duration, load=options.load_timeout),
        secret=options.secret or "",
        allowed_peers=listed_peers(options.allowed_peers, f"tcp://{in_endpoint(options.host)}:0"),
    )


def _transfer_config(vllm_config: VllmConfig) -> Any:
    if vllm_config.kv_transfer_config is None:
        raise InvalidEngineError("the connector needs a kv_transfer_config")
    return vllm_config.kv_transfer_config
