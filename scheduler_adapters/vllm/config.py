"""What our workers are told of a vLLM engine: its ranks, out of vLLM's own configs, and what we are asked for beside.

Whatever is not understood here is refused when the engine starts, with its name: a cache that is moved in a wrong shape
would be found by nobody.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from vllm import envs

from scheduler_adapters.vllm.groups import cache_group
from transfer.connector.config import Timing, WorkerConfig
from transfer.errors import InvalidEngineError
from transfer.wire.allowed_peers import listed_peers
from transfer.wire.keys import Keyring, load_keyring

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_TIMING = Timing()


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """`kv_connector_extra_config`.

    Attributes:
        host: name or address under which readers reach a source; vLLM's own setting for its NIXL connector by default.
        port: of the handshake; likewise.
        keyring: file with the keys of the side channel; none where there is a secret.
        secret: as `WorkerConfig` has it.
        allowed_peers: likewise, or one string with commas; the own host is among them.
        kv_lease_duration: seconds that a lease lasts without a word of its readers.
        load_timeout: seconds until a load fails by itself.
        model_id: name of the weights that both sides must agree on; vLLM's where empty.
    """

    host: str = msgspec.field(default_factory=lambda: envs.VLLM_NIXL_SIDE_CHANNEL_HOST)
    port: int = msgspec.field(default_factory=lambda: envs.VLLM_NIXL_SIDE_CHANNEL_PORT)
    keyring: str | None = None
    secret: str | None = None
    allowed_peers: str | tuple[str, ...] = ()
    kv_lease_duration: float = _TIMING.lease
    load_timeout: float = _TIMING.load
    model_id: str = ""

    @property
    def keys(self) -> Keyring | None:
        """Reads the keyring; None where none is named."""
        return load_keyring(Path(self.keyring)) if self.keyring else None


def read_options(vllm_config: VllmConfig) -> Options:
    """Returns the options, with a port of its own for each data-parallel engine."""
    extra: dict[str, Any] = _transfer_config(vllm_config).kv_connector_extra_config
    if strange := set(extra) - set(Options.__struct_fields__):
        raise InvalidEngineError(
            f"kv_connector_extra_config has {min(strange)!r}; the options are {', '.join(Options.__struct_fields__)}"
        )
    try:
        options = msgspec.convert(extra, Options, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidEngineError(f"kv_connector_extra_config: {error}") from error
    index = int(getattr(vllm_config.parallel_config, "data_parallel_index", 0) or 0)
    return msgspec.structs.replace(options, port=options.port + index)


def worker_config(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, kernel_block_sizes: Mapping[str, int] | None = None
) -> WorkerConfig:
    """Returns the config of one rank; the scheduler's side is told that of rank 0.

    `kernel_block_sizes` are the tokens of a page as the tensors have them, by layer, block sizes where a layer is not
    in it. None at the scheduler, which has no layers to ask what their pages keep.
    """
    parallel, options, transfer = vllm_config.parallel_config, read_options(vllm_config), _transfer_config(vllm_config)
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if (size := int(getattr(parallel, name, 1) or 1)) > 1:
            raise InvalidEngineError(f"{name} is {size}: tokens split over ranks are not moved, 1 is needed")
    rank = parallel.rank % (parallel.tensor_parallel_size * parallel.pipeline_parallel_size)
    # With each start another one, and the same in all processes of the engine.
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
        allowed_peers=listed_peers(options.allowed_peers, f"tcp://{options.host}:0"),
    )


def _transfer_config(vllm_config: VllmConfig) -> Any:
    if vllm_config.kv_transfer_config is None:
        raise InvalidEngineError("there is no kv_transfer_config: the connector is made by it")
    return vllm_config.kv_transfer_config
