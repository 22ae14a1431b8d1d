"""What our workers are told of a vLLM engine: its ranks, its page groups and their layers, out of vLLM's own configs.

Whatever is not understood here is refused when the engine starts, with its name: a cache that is moved in a wrong shape
would be found by nobody.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm import envs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from scheduler_adapters.vllm.backends import content_of
from transfer.connector.config import GroupConfig, StatePart, Timing, WorkerConfig, share
from transfer.errors import InvalidEngineError
from transfer.wire.allowed_peers import listed_peers
from transfer.wire.keys import Keyring, load_keyring

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

# vLLM's tensors are always [blocks, heads, tokens, content]; how they lie in memory their strides say.
_ATTENTION_AXES = "page,head,token,side,dim"
_LATENT_AXES = "page,head,token,dim"
_MOVED = {FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, SlidingWindowMLASpec, MambaSpec}
_OPTIONS = ("host", "port", "keyring", "secret", "allowed_peers", "kv_lease_duration", "load_timeout", "model_id")


class Options:
    """`kv_connector_extra_config`, checked.

    Attributes:
        host: name or address under which readers reach a source; vLLM's own setting for its NIXL connector by default.
        port: of the handshake; likewise, and one further for each data-parallel engine.
        keyring: keys of the side channel; None where there are none, or a shared secret.
        secret: as `WorkerConfig` has it.
        allowed_peers: likewise; the own host is among them.
        timing: limits of leases and loads.
        model: name of the weights that both sides must agree on.

    Raises:
        InvalidEngineError: an option that there is not, or a value that cannot be.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        extra: dict[str, Any] = _transfer_config(vllm_config).kv_connector_extra_config
        if strange := set(extra) - set(_OPTIONS):
            raise InvalidEngineError(
                f"kv_connector_extra_config has {min(strange)!r}; the options are {', '.join(_OPTIONS)}"
            )
        index = int(getattr(vllm_config.parallel_config, "data_parallel_index", 0) or 0)
        self.host = str(extra.get("host", envs.VLLM_NIXL_SIDE_CHANNEL_HOST))
        self.port = int(extra.get("port", envs.VLLM_NIXL_SIDE_CHANNEL_PORT)) + index
        self.keyring: Keyring | None = load_keyring(Path(extra["keyring"])) if extra.get("keyring") else None
        self.secret = _secret(extra.get("secret"))
        self.allowed_peers = listed_peers(_peers(extra.get("allowed_peers", ())), f"tcp://{self.host}:0")
        defaults = Timing()
        self.timing = Timing(
            lease=float(extra.get("kv_lease_duration", defaults.lease)),
            load=float(extra.get("load_timeout", defaults.load)),
        )
        self.model = str(extra.get("model_id", vllm_config.model_config.model))


def _secret(named: object) -> str:
    if not isinstance(named, str | None):
        raise InvalidEngineError(
            f"kv_connector_extra_config: secret is a {type(named).__name__}; 'file:PATH', 'env:NAME' or text may be"
        )
    return named or ""


def _peers(listed: object) -> str | list[str]:
    peers: list[Any] = listed if isinstance(listed, list) else list(listed) if isinstance(listed, tuple) else [listed]
    if wrong := [one for one in peers if not isinstance(one, str)]:
        raise InvalidEngineError(
            f"kv_connector_extra_config: allowed_peers names {wrong[0]!r}; addresses, networks and host names may be"
        )
    return listed if isinstance(listed, str) else peers


def worker_config(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, kernel_block_sizes: Mapping[str, int] | None = None
) -> WorkerConfig:
    """Returns the config of one rank; the scheduler's side is told that of rank 0.

    Args:
        vllm_config: of the engine, as the process of the rank has it.
        kv_cache_config: likewise.
        kernel_block_sizes: tokens of a page as the tensors have them, by layer; block sizes of those that are not in
            it. None at the scheduler, which has no layers to ask what their pages keep.

    Raises:
        InvalidEngineError: names what there is no support for.
    """
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if (size := int(getattr(parallel, name, 1) or 1)) > 1:
            raise InvalidEngineError(f"{name} is {size}: tokens split over ranks are not moved, 1 is needed")
    options, transfer = Options(vllm_config), _transfer_config(vllm_config)
    rank = parallel.rank % (parallel.tensor_parallel_size * parallel.pipeline_parallel_size)
    # With each start another one, and the same in all processes of the engine.
    incarnation = f"{vllm_config.instance_id}-{transfer.engine_id}"
    return WorkerConfig(
        engine_id=str(transfer.engine_id),
        incarnation=incarnation[:64],
        groups=tuple(
            _group(f"cache group {number}", vllm_config, group, kernel_block_sizes)
            for number, group in enumerate(kv_cache_config.transfer_groups)
        ),
        model=options.model,
        compatibility={"cache dtype": str(vllm_config.cache_config.cache_dtype)},
        tp_rank=rank % parallel.tensor_parallel_size,
        tp_size=parallel.tensor_parallel_size,
        pp_rank=rank // parallel.tensor_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
        kv_buffer_device=str(transfer.kv_buffer_device),
        timing=options.timing,
        secret=options.secret,
        allowed_peers=options.allowed_peers,
    )


def _transfer_config(vllm_config: VllmConfig) -> Any:
    if vllm_config.kv_transfer_config is None:
        raise InvalidEngineError("there is no kv_transfer_config: the connector is made by it")
    return vllm_config.kv_transfer_config


def _group(
    where: str, vllm_config: VllmConfig, group: KVCacheGroupSpec, kernels: Mapping[str, int] | None
) -> GroupConfig:
    spec = _one_spec(where, group)
    sizes = {kernels[name] for name in group.layer_names if name in kernels} if kernels else set[int]()
    if len(sizes) > 1:
        raise InvalidEngineError(f"{where}: its tensors have pages of {sorted(sizes)} tokens; one size is expected")
    page_size = sizes.pop() if sizes else 0
    common: dict[str, Any] = {
        "layers": _layers(where, vllm_config, group.layer_names),
        "block_size": spec.block_size,
        "kernel_block_size": page_size,
    }
    if type(spec) not in _MOVED:
        raise InvalidEngineError(f"{where}: caches of {type(spec).__name__} are not moved")
    if kernels is not None:
        content = content_of(where, vllm_config, group.layer_names, spec, page_size or spec.block_size)
        common |= {"content": content.text, "whole_pages": content.whole_pages}
    if type(spec) is MambaSpec:
        return GroupConfig(kind="mamba", state=_state(where, vllm_config, spec), **common)
    return _attention(where, vllm_config, spec, common)


def _one_spec(where: str, group: KVCacheGroupSpec) -> Any:
    spec: Any = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        specs: list[KVCacheSpec] = list(spec.kv_cache_specs.values())
        if any(other != specs[0] for other in specs):
            raise InvalidEngineError(f"{where}: its layers' caches differ in shape: {specs[0]} and others")
        spec = specs[0]
    return spec


def _attention(where: str, vllm_config: VllmConfig, spec: Any, common: dict[str, Any]) -> GroupConfig:
    if spec.tokens_per_state != 1 or spec.num_heads != spec.num_kv_heads:
        raise InvalidEngineError(
            f"{where}: {spec.tokens_per_state} tokens in a state, {spec.num_heads} slots for {spec.num_kv_heads} "
            "heads: one for each is expected"
        )
    # What a head keeps of a token, keys and values or whatever else: cut in two only because the axes have two sides.
    content = spec.state_content_size_bytes // spec.dtype.itemsize
    latent = type(spec) is MLAAttentionSpec
    if not latent and content % 2:
        raise InvalidEngineError(f"{where}: a head keeps {content} elements of a token; an even number is expected")
    window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else 0
    return GroupConfig(
        kind="mla" if latent else "sliding_window" if window else "full",
        layout=_LATENT_AXES if latent else _ATTENTION_AXES,
        num_kv_heads=1 if latent else _all_heads(where, vllm_config, spec.num_kv_heads),
        head_dim=content if latent else content // 2,
        dtype=_name(spec.dtype),
        window=window,
        **common,
    )


def _all_heads(where: str, vllm_config: VllmConfig, here: int) -> int:
    """Heads of the model, of which a rank has `here`: a share, or one of them that others have, too."""
    tp_size, total = vllm_config.parallel_config.tensor_parallel_size, vllm_config.model_config.get_total_num_kv_heads()
    if len(share(total, tp_size, 0)) == here:
        return total
    if here > 1 or tp_size == 1:  # layers that have other heads than most: an even share, if there is one
        return here * tp_size
    raise InvalidEngineError(f"{where}: {here} heads on each of {tp_size} ranks, the model has {total}")


def _state(where: str, vllm_config: VllmConfig, spec: MambaSpec) -> tuple[StatePart, ...]:
    """A unit for each rank: what a rank keeps is moved as it is, so both sides need as many ranks.

    A convolution's channels are x, B and C of the rank one after another, and which is which the spec does not say.
    """
    if spec.num_speculative_blocks:
        raise InvalidEngineError(f"{where}: {spec.num_speculative_blocks} speculative blocks of a state are not moved")
    units = 1 if spec.tp_replicated else vllm_config.parallel_config.tensor_parallel_size
    return tuple(
        StatePart(
            kind=f"state {number}",
            units=units,
            width=_elements(shape),
            dtype=_name(dtype),
            tensor=number,
            axes="page,head",
        )
        for number, (shape, dtype) in enumerate(zip(spec.shapes, spec.dtypes, strict=True))
    )


def _elements(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def _layers(where: str, vllm_config: VllmConfig, names: list[str]) -> dict[str, int]:
    """Numbers of layers in the whole model: those in their names, or their order where names have none."""
    numbers = {name: [int(part) for part in name.split(".") if part.isdigit()] for name in names}
    pp_size = vllm_config.parallel_config.pipeline_parallel_size
    plain = all(len(found) == 1 for found in numbers.values()) and len({*map(tuple, numbers.values())}) == len(names)
    if not plain and pp_size > 1:
        raise InvalidEngineError(f"{where}: layer {names[0]!r} does not say which of the model's it is")
    if not plain:
        return {name: number for number, name in enumerate(sorted(names, key=_natural))}
    layers = {name: found[0] for name, found in numbers.items()}
    return layers if pp_size == 1 else _of_all_stages(where, vllm_config, layers)


def _of_all_stages(where: str, vllm_config: VllmConfig, layers: dict[str, int]) -> dict[str, int]:
    """The layers of all pipeline stages, of which this rank knows its own: named alike, and all of one kind."""
    total = int(vllm_config.model_config.hf_text_config.num_hidden_layers)
    first, number = next(iter(layers.items()))
    named = {
        ".".join(str(other) if part == str(number) else part for part in first.split(".")): other
        for other in range(total)
    }
    if not set(layers) <= set(named):
        raise InvalidEngineError(
            f"{where}: {min(set(layers) - set(named))!r} is not named as {first!r} is: which layers the other "
            "pipeline stages have is not known"
        )
    return named


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
