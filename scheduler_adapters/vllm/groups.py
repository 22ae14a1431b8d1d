"""Builds page groups from vLLM's cache specs: layers, the layout of their tensors, and the contents of a page.

The tensors are always [blocks, heads, tokens, content], and their strides give the layout in memory. How keys and
values lie in `content` depends on the backend's kernels: see `backends.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

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

from scheduler_adapters.vllm.backends import Contents, contents_of, layers_of
from scheduler_adapters.vllm.states import state_parts
from transfer.connector.config import GroupConfig, share
from transfer.errors import InvalidEngineError

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

_ATTENTION_AXES = "page,head,token,side,dim"
_LATENT_AXES = "page,head,token,dim"
_MOVED = {FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, SlidingWindowMLASpec, MambaSpec}


def cache_group(
    where: str, vllm_config: VllmConfig, group: KVCacheGroupSpec, kernels: Mapping[str, int] | None
) -> GroupConfig:
    """Returns one page group. `kernels` maps a layer to the tokens in a page of its tensor.

    `kernels` is None at the scheduler.
    """
    spec = one_spec(where, group)
    sizes = {kernels[name] for name in group.layer_names if name in kernels} if kernels else set[int]()
    if len(sizes) > 1:
        raise InvalidEngineError(f"{where}: its tensors have pages of {sorted(sizes)} tokens; one size is expected")
    page_size = sizes.pop() if sizes else 0
    layers = _layers(where, vllm_config, group.layer_names)
    if type(spec) not in _MOVED:
        raise InvalidEngineError(f"{where}: caches of type {type(spec).__name__} are not supported")
    kept_as = Contents("")
    if kernels is not None:
        kept_as = contents_of(where, vllm_config, group.layer_names, spec, page_size or spec.block_size)
    if type(spec) is MambaSpec:
        kept = _state(where, vllm_config, [] if kernels is None else group.layer_names, spec)
    else:
        kept = _attention(where, vllm_config, spec)
    return GroupConfig(
        layers=layers,
        block_size=spec.block_size,
        kernel_block_size=page_size,
        content=kept_as.text,
        whole_pages=kept_as.whole_pages,
        **kept,
    )


def one_spec(where: str, group: KVCacheGroupSpec) -> Any:
    """Returns the spec that all layers of a group share. Raises `InvalidEngineError` if they differ."""
    spec: Any = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        specs: list[KVCacheSpec] = list(spec.kv_cache_specs.values())
        if any(other != specs[0] for other in specs):
            raise InvalidEngineError(f"{where}: the caches of its layers differ in shape; the first is {specs[0]}")
        spec = specs[0]
    return spec


def _attention(where: str, vllm_config: VllmConfig, spec: Any) -> dict[str, Any]:
    if spec.tokens_per_state != 1 or spec.num_heads != spec.num_kv_heads:
        raise InvalidEngineError(
            f"{where}: a state has {spec.tokens_per_state} tokens, and {spec.num_kv_heads} heads have "
            f"{spec.num_heads} slots; "
            "one token in a state and one slot for each head are expected"
        )
    # The number of elements that a head keeps for a token. Except in a latent, half of them are described as the key
    # and half as the value, whatever the backend's own sizes are.
    content = spec.state_content_size_bytes // spec.dtype.itemsize
    if type(spec) is MLAAttentionSpec:
        return {"kind": "mla", "layout": _LATENT_AXES, "head_dim": content, "dtype": _name(spec.dtype)}
    if content % 2:
        raise InvalidEngineError(
            f"{where}: a head keeps {content} elements of a token; an even number (keys and values) is expected"
        )
    window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else 0
    return {
        "kind": "sliding_window" if window else "full",
        "layout": _ATTENTION_AXES,
        "num_kv_heads": _all_heads(where, vllm_config, spec.num_kv_heads),
        "head_dim": content // 2,
        "dtype": _name(spec.dtype),
        "window": window,
    }


def _all_heads(where: str, vllm_config: VllmConfig, here: int) -> int:
    """Returns the number of KV heads of the whole model. `here` is the number of heads on one rank.

    A rank has an even share of the heads, or the same heads as other ranks if there are more ranks than heads.
    """
    tp_size, total = vllm_config.parallel_config.tensor_parallel_size, vllm_config.model_config.get_total_num_kv_heads()
    if len(share(total, tp_size, 0)) == here:
        return total
    # the model's config gives a different number of heads for these layers, so an even share is assumed
    if here > 1 or tp_size == 1:
        return here * tp_size
    raise InvalidEngineError(
        f"{where}: each of {tp_size} ranks has {here} heads, which does not fit the {total} heads of the model"
    )


def _state(where: str, vllm_config: VllmConfig, names: Sequence[str], spec: MambaSpec) -> dict[str, Any]:
    if spec.num_speculative_blocks:
        raise InvalidEngineError(
            f"{where}: {spec.num_speculative_blocks} speculative blocks of a state are not supported; 0 is needed"
        )
    ranks = vllm_config.parallel_config.tensor_parallel_size
    layer = layers_of(where, vllm_config, names)[names[0]] if names else None
    return {"kind": "mamba", "state": state_parts(where, spec, ranks, layer)}


def _layers(where: str, vllm_config: VllmConfig, names: list[str]) -> dict[str, int]:
    """Returns each layer's index in the whole model, which is the number in the layer's name.

    If some names have no number, several numbers, or the same number, the index is the layer's position among the
    sorted names.
    """
    numbers = {name: [int(part) for part in name.split(".") if part.isdigit()] for name in names}
    pp_size = vllm_config.parallel_config.pipeline_parallel_size
    plain = all(len(found) == 1 for found in numbers.values()) and len({*map(tuple, numbers.values())}) == len(names)
    if not plain and pp_size > 1:
        raise InvalidEngineError(f"{where}: the name of layer {names[0]!r} does not contain its number in the model")
    if not plain:
        return {name: number for number, name in enumerate(sorted(names, key=_natural))}
    layers = {name: found[0] for name, found in numbers.items()}
    return layers if pp_size == 1 else _of_all_stages(where, vllm_config, layers)


def _of_all_stages(where: str, vllm_config: VllmConfig, layers: dict[str, int]) -> dict[str, int]:
    """Returns the layers of all pipeline stages. `layers` has the layers of this stage.

    A rank knows only its own layers. The names of all other layers are derived from the names of its own layers.
    Therefore all stages must have layers of one kind, named in the same way.
    """
    total = int(vllm_config.model_config.hf_text_config.num_hidden_layers)
    first, number = next(iter(layers.items()))
    named = {
        ".".join(str(other) if part == str(number) else part for part in first.split(".")): other
        for other in range(total)
    }
    if not set(layers) <= set(named):
        raise InvalidEngineError(
            f"{where}: layer {min(set(layers) - set(named))!r} is not named like {first!r}, so the names of "
            "the layers of other pipeline stages cannot be derived"
        )
    return named


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
