"""Derives the configuration of our workers from an SGLang scheduler. Unsupported features are refused at startup."""

from __future__ import annotations

import os
import uuid
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.base.conn import StateType
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_disagg, get_exec, get_parallel

from kvcache.endpoints.addresses import in_endpoint
from scheduler_adapters.sglang.pools import Caches, caches_of
from scheduler_adapters.sglang.settings import Settings
from transfer.connector.config import WorkerConfig
from transfer.errors import InvalidEngineError
from transfer.wire.allowed_peers import listed_peers

if TYPE_CHECKING:
    from sglang.srt.disaggregation.base.conn import KVArgs

building: ContextVar[Any] = ContextVar("building")
"""The SGLang queue that is creating its manager now. SGLang passes only pointers to a manager.

The manager takes the pools from this queue.
"""


def check_supported(queue: Any, args: KVArgs) -> None:
    """Refuses settings that the transfer does not support.

    Args:
        queue: SGLang's bootstrap queue, which has the pools and the scheduler.
        args: the description of the pools that SGLang passes to its backends.

    Raises:
        InvalidEngineError: a setting is not supported; the message names the first such setting, in one line.
    """
    parallel, disagg = get_parallel(), get_disagg()
    states = [state.value for state in args.state_types if state != StateType.SWA]
    refused = {
        f"--pp-size {parallel.pp_size}": parallel.pp_size > 1,
        f"context parallelism of {parallel.attn_cp_size}": parallel.attn_cp_size > 1,
        f"decode context parallelism of {parallel.attn_dcp_size}": parallel.attn_dcp_size > 1,
        "--enable-kv-cache-sharding": parallel.enable_kv_cache_sharding,
        f"the state {states[:1]}": bool(states),
        "a draft model with a cache of its own": queue.draft_token_to_kv_pool is not None,
        "--enable-pd-role-switch": queue.scheduler.server_args.enable_pd_role_switch,
        "--enable-memory-saver, which takes the memory of the registered pool away": (
            get_exec().features.enable_memory_saver
        ),
        "HiSparse": getattr(queue.scheduler, "enable_hisparse", False),
        "SGLANG_DISAGG_STAGING_BUFFER": envs.SGLANG_DISAGG_STAGING_BUFFER.get(),
        "decode host buffers": disagg.disaggregation_decode_host_receive_threshold < 1,
        "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE=0, which gives pages away while they are written": (
            not envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE.get()
        ),
        "rows of metadata on a device": queue.metadata_buffers.output_ids.device.type != "cpu",
    }
    for what, asked in refused.items():
        if asked:
            raise InvalidEngineError(f"--disaggregation-transfer-backend pagewire does not support {what}")


def caches(queue: Any, tp_size: int) -> Caches:
    """Returns the groups and tensors of this rank's pool."""
    scheduler = queue.scheduler
    return caches_of(
        queue.token_to_kv_pool,
        tp_size=tp_size,
        total_kv_heads=scheduler.model_config.get_total_num_kv_heads(),
        window=scheduler.sliding_window_size or 0,
    )


def worker_config(
    queue: Any, found: Caches, settings: Settings, engine: tuple[str, int, int], host: str
) -> WorkerConfig:
    """Returns the config of one rank.

    Args:
        queue: as in `check_supported`.
        found: the rank's caches.
        settings: our settings, from environment variables.
        engine: `(id of the engine, index of this rank, number of ranks)`.
        host: address of this host.
    """
    scheduler = queue.scheduler
    return config_of(found, model_name(scheduler.server_args, scheduler.model_config), settings, engine, host)


def model_name(server_args: Any, model_config: Any) -> str:
    """Returns the name that both sides must have given to the model."""
    return str(server_args.served_model_name or model_config.model_path)


def config_of(found: Caches, model: str, settings: Settings, engine: tuple[str, int, int], host: str) -> WorkerConfig:
    """Returns the config of one rank of a model with this name. The other arguments are as in `worker_config`."""
    engine_id, rank, ranks = engine
    return WorkerConfig(
        engine_id=engine_id,
        incarnation=engine_id,
        groups=found.groups,
        model=model,
        tp_rank=rank,
        tp_size=ranks,
        timing=settings.timing,
        secret=settings.secret,
        allowed_peers=listed_peers(settings.allowed_peers, f"tcp://{in_endpoint(host)}:0"),
    )


def new_engine_id(role: str, host: str) -> str:
    """Returns an id that no other engine has. It contains this host and process."""
    return f"{role}-{host}-{os.getpid()}-{uuid.uuid4().hex[:12]}"
