"""`PagewireTiers`: vLLM's KV blocks in our host slots, files and objects. They outlive the engine.

vLLM's own `OffloadingConnector` imports it by its module path, so that it stands beside `PagewireConnector`, or without
it. In contrast to vLLM's own spec, it also serves CPUs:

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
      "kv_connector_extra_config": {"spec_name": "PagewireTiers", "spec_module_path": "scheduler_adapters.vllm.tiers",
        "host_kvcache_swap_space_gb": 8, "file_tier_dir": "/var/kv", "file_tier_max_gb": 200,
        "file_tier_key": "MODEL and its weights"}}'

A block is named by its group of layers, the version of the weights, and vLLM's hash, which covers its tokens, salt,
adapter and images. Files and objects belong to a namespace: the key, the checkpoint of the engine's start, the model's
config, the version of vLLM, and for each rank and each layer the attention backend and what a block holds. If one of
these differs, nothing is found.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingManager, OffloadingSpec

from kvcache.layout import pin_rows
from kvcache.tiers.file_tier import FileTier
from kvcache.tiers.host_tier import HostTier
from kvcache.tiers.object_tier import ObjectFormat, ObjectTier
from kvcache.tiers.page_files import FileFormat, SystemIO
from kvcache.tiers.page_folder import PageFolder, namespace_of
from scheduler_adapters.checkpoints import digest_of_checkpoint
from scheduler_adapters.vllm.backends import described_layer, layers_of
from scheduler_adapters.vllm.shared_slots import SharedSlots, slots_path
from scheduler_adapters.vllm.tier_manager import COUNTED, DIGEST_WORDS, TierManager, metric_of
from scheduler_adapters.vllm.tier_worker import TierWorker, slot_bytes_of
from scheduler_adapters.vllm.versions import VLLM
from scheduler_adapters.vllm.weights import WeightsWatch
from transfer.errors import InvalidEngineError
from transfer.nixl.object_io import NixlObjects

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingMetricMetadata, OffloadingWorker
    from vllm.v1.kv_offload.config import OffloadingConfig

_GB = 2**30
_SECRETS = {"access_key", "secret_key", "session_token"}


class Objects(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A bucket of an S3 store, as in `NixlObjects`. It has no credentials, because vLLM logs its arguments."""

    bucket: str
    endpoint: str | None = None
    prefix: str = ""
    settings: dict[str, str] = {}


class TierOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options in `kv_connector_extra_config`. Other keys are vLLM's.

    Attributes:
        host_kvcache_swap_space_gb: host slots of all ranks together, in units of 2**30 bytes of shared memory.
        file_tier_dir: folder of this engine's user; None: no files.
        file_tier_max_gb: the most bytes of files with the same key and layout, in units of 2**30.
        file_tier_key: names the model and its weights, for files and objects.
        object_tier: the bucket; None: no objects.
        object_tier_timeout_s: how long a request waits for the store's answer, and again for its blocks.
    """

    host_kvcache_swap_space_gb: Annotated[float, Meta(gt=0)]
    file_tier_dir: str | None = None
    file_tier_max_gb: Annotated[float, Meta(gt=0)] | None = None
    file_tier_key: str = ""
    object_tier: Objects | None = None
    object_tier_timeout_s: Annotated[float, Meta(ge=0.01, le=60)] = 2.0


def read_tier_options(extra: Mapping[str, Any]) -> TierOptions:
    """Returns the options. Raises `InvalidEngineError` if they do not fit; the message names the option."""
    try:
        options = msgspec.convert(dict(extra), TierOptions, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidEngineError(f"kv_connector_extra_config: {error}") from error
    fault = ""
    if strange := [key for key in extra if key.startswith(("file_tier", "object_tier", "host_")) and key not in _NAMES]:
        fault = f"there is no option {', '.join(map(repr, strange))}; the options are {', '.join(_NAMES)}"
    elif int(extra.get("blocks_per_chunk", 1)) != 1 or "block_size" in extra:
        fault = "blocks_per_chunk and block_size are not used: each block is stored on its own; remove them"
    elif options.file_tier_dir is not None and options.file_tier_max_gb is None:
        fault = "file_tier_dir needs file_tier_max_gb"
    elif not options.file_tier_key and (options.file_tier_dir is not None or options.object_tier is not None):
        fault = "file_tier_key is not given: it must name the model and its weights"
    elif options.object_tier is not None and (found := _SECRETS & options.object_tier.settings.keys()):
        fault = (
            f"object_tier has {', '.join(sorted(found))}, and vLLM writes its arguments to its log: use the AWS SDK's"
        )
    if fault:
        raise InvalidEngineError(f"kv_connector_extra_config: {fault}")
    return options


_NAMES = TierOptions.__struct_fields__


class PagewireTiers(OffloadingSpec):
    """Our tiers for vLLM's `OffloadingConnector`. vLLM makes one in each process, and asks for one side.

    Raises:
        InvalidEngineError: (a ValueError) an option does not fit.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        if missing := [name for name in ("lock", "on_reset_flushed") if not hasattr(OffloadingManager, name)]:
            raise InvalidEngineError(
                f"this is vLLM {VLLM}: its OffloadingManager has no {', '.join(missing)}; PagewireTiers needs 0.33"
            )
        super().__init__(config)
        self._options = read_tier_options(config.extra_config)
        self._manager: TierManager | None = None
        self._worker: TierWorker | None = None

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """Returns the counters that `TierManager.get_stats` increases."""
        read_tier_options(extra_config)
        return {metric_of(name): OffloadingCounterMetadata(documentation=text) for name, text in COUNTED.items()}

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Returns the copies of this rank, after creating its slots."""
        if self._worker is None:
            config, parallel = get_current_vllm_config_or_none(), self.config.parallel
            if config is None:
                raise InvalidEngineError("PagewireTiers: vLLM did not say with which config its worker runs")
            size = slot_bytes_of(kv_caches)
            num_slots = int(self._options.host_kvcache_swap_space_gb * _GB / parallel.world_size) // size - 1
            if num_slots < 2:
                raise InvalidEngineError(
                    f"host_kvcache_swap_space_gb is {self._options.host_kvcache_swap_space_gb}: each of "
                    f"{parallel.world_size} ranks needs three slots of {size} bytes"
                )
            path = slots_path(self.config.engine_id, parallel.rank)
            weights = bytes.fromhex(digest_of_checkpoint(config.model_config.model))
            self._slots = SharedSlots.create(path, num_slots, size, self._described(config, kv_caches), weights)
            if any(tensor.tensor.is_cuda for tensor in kv_caches.tensors):
                pin_rows(self._slots.memory, self._slots)
            self._weights = WeightsWatch(self._on_weights)
            self._worker = TierWorker(kv_caches, self._slots.memory)
        return self._worker

    def _on_weights(self, _: Mapping[str, str]) -> None:
        self._slots.count_change(bytes.fromhex(self._weights.weights.checkpoint))

    def _described(self, config: VllmConfig, kv_caches: CanonicalKVCaches) -> str:
        """Returns text that differs if a block of this rank means something else."""
        model, parallel, speculative = config.model_config, self.config.parallel, config.speculative_config
        draft = None if speculative is None else speculative.draft_model_config
        groups = [
            {
                "tokens": group.tokens_per_block,
                "window": group.sliding_window_size_in_chunks,
                "parts": [ref.page_size_bytes for ref in refs],
                "layers": {
                    name: described_layer(config, layer, group.tokens_per_block)
                    for name, layer in layers_of("PagewireTiers", config, group.layer_names).items()
                },
            }
            for group, refs in zip(self.config.groups, kv_caches.group_data_refs, strict=True)
        ]
        described = {
            "vllm": VLLM,
            "models": [
                [one.compute_hash(), digest_of_checkpoint(one.model)] for one in (model, draft) if one is not None
            ],
            "dtype": self.config.model.dtype,
            "layout": self.config.kv_cache_layout,
            "ranks": [parallel.rank, parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size],
            "tokens per hash": self.config.cache.tokens_per_hash,
            "groups": groups,
        }
        return json.dumps(described, sort_keys=True)

    def get_manager(self) -> OffloadingManager:
        """Returns the manager, which joins the slots of all ranks. The workers must have registered their caches."""
        if self._manager is None:
            ranks = range(self.config.parallel.world_size)
            shared = [SharedSlots.join(slots_path(self.config.engine_id, rank)) for rank in ranks]
            count = min(rank.num_slots for rank in shared)
            memory = [rank.memory[: count + 1] for rank in shared]
            sizes = [part.shape[1] for part in memory]
            host = HostTier(sizes, count, DIGEST_WORDS, pinned=False, memory=memory)
            self._add_tiers(
                host, namespace_of("vllm", self._options.file_tier_key, *(one.digest.hex() for one in shared))
            )
            wait_s = 1.0 + 2 * self._options.object_tier_timeout_s
            self._manager = TierManager(host, shared, wait_s, _sources())
            _bind_managers()
        return self._manager

    def _add_tiers(self, host: HostTier, namespace: bytes) -> None:
        options, layout = (
            self._options,
            FileFormat(namespace, sum(part.shape[1] for part in host.memory), 8 * DIGEST_WORDS),
        )
        if options.file_tier_dir is not None:
            folder = PageFolder(Path(options.file_tier_dir), layout)
            most = int((options.file_tier_max_gb or 0) * _GB)
            host.lower.append(FileTier(folder, most, host, lambda _: SystemIO()))
        if (store := options.object_tier) is not None:
            io = NixlObjects(store.bucket, store.endpoint, store.prefix, store.settings)
            # Each block is an object of its own: vLLM looks up single blocks.
            host.lower.append(ObjectTier(ObjectFormat(layout, 1), host, io, options.object_tier_timeout_s, apart=True))


def _bind_managers() -> None:
    """Makes vLLM's offloading connector give its block manager to ours, which it keeps to itself."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (  # noqa: PLC0415  (it imports this)
        OffloadingConnector,
    )

    method: Any = OffloadingConnector.bind_kv_cache_manager
    if hasattr(method, "__wrapped__"):
        return

    @functools.wraps(method)
    def bind(connector: Any, kv_cache_manager: Any) -> None:
        method(connector, kv_cache_manager)
        if isinstance(ours := connector.connector_scheduler.manager, TierManager):
            ours.bind(kv_cache_manager)

    given: Any = OffloadingConnector
    given.bind_kv_cache_manager = bind


def _sources() -> tuple[Any, Any] | None:
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource  # noqa: PLC0415  (older versions lack it)
    except ImportError:
        return None
    return CacheHitSource.HOST, CacheHitSource.DISK
