"""Says, for each of vLLM's attention backends, what its pages contain and where a head's keys and values lie.

vLLM's tensors do not show this. In the CPU backend, for example, the [tokens, content] part of a head has all keys
first, stored column by column, and then all values. Backends are therefore recognised by class, and an unknown one is
refused. `proof.py` tests on the tensors themselves that these layouts are right.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import MambaSpec, MLAAttentionSpec, SlidingWindowMLASpec

from scheduler_adapters.vllm.states import described
from transfer.errors import InvalidEngineError

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionBackend

# Backends are matched by class instead of by name, because two of vLLM's backends are named FLASH_ATTN.
_BACKENDS = "vllm.v1.attention.backends."
_BY_TOKEN = {
    "flash_attn.FlashAttentionBackend",
    "flash_attn_diffkv.FlashAttentionDiffKVBackend",
    "flashinfer.FlashInferBackend",
    "flex_attention.FlexAttentionBackend",
    "triton_attn.TritonAttentionBackend",
    "triton_attn_diffkv.TritonAttentionDiffKVBackend",
}
_LATENTS = {
    "mla.amx_mla.AMXMLABackend",
    "mla.cpu_mla.CPUMLABackend",
    "mla.cutlass_mla.CutlassMLABackend",
    "mla.flashattn_mla.FlashAttnMLABackend",
    "mla.flashinfer_mla.FlashInferMLABackend",
    "mla.flashmla.FlashMLABackend",
    "mla.triton_mla.TritonMLABackend",
}
_CPU = "cpu_attn.CPUAttentionBackend"
_KEYS_IN_COLUMNS = {"vec", "vec16"}
"""Instruction sets for which the CPU backend keeps keys as columns and values as rows.

For other instruction sets, such as AMX, it keeps both in tiles, whose layout only the backend knows.
"""


@dataclass(frozen=True)
class Contents:
    """The contents of the pages of some layers.

    Attributes:
        text: a name for the contents. It must be the same on both sides of a transfer.
        whole_pages: True if only the backend knows how the elements of a head lie in a page. The pages are then moved
            whole.
        columns: True if each head of a page has first all keys, one column per token, and then all values, one row per
            token.
        states: for pages with recurrent states, the shape and dtype of each state, in memory order.
    """

    text: str
    whole_pages: bool = False
    columns: bool = False
    states: tuple[tuple[tuple[int, ...], torch.dtype], ...] = ()

    def tensors(self, where: str, cache: torch.Tensor) -> torch.Tensor | list[torch.Tensor]:
        """Converts a layer's tensor `[pages, heads, tokens, content]` to the form that a transfer takes.

        With `columns`, the result is two tensors over the same memory, keys and values, each `[pages, heads, tokens,
        dim]`. With `states`, it is one tensor for each state, `[pages, *shape]`. vLLM registers states as bytes,
        `[pages, 1, 1, content]`: the states of a layer one after another, and then padding.
        """
        if self.states:
            return _cut_states(where, cache, self.states)
        if not self.columns:
            return cache
        pages, heads, tokens, content = cache.shape
        if cache.stride()[2:] != (content, 1) or content % 2:
            raise InvalidEngineError(
                f"{where}: a tensor of shape {list(cache.shape)} and strides {list(cache.stride())}; strides "
                f"that end in ({content}, 1) and an even content are needed for the CPU backend"
            )
        dim = content // 2
        shape, outer, start = (pages, heads, tokens, dim), cache.stride()[:2], cache.storage_offset()
        keys = cache.as_strided(shape, (*outer, 1, tokens), start)
        return [keys, cache.as_strided(shape, (*outer, dim, 1), start + tokens * dim)]


def _cut_states(
    where: str, cache: torch.Tensor, states: Sequence[tuple[tuple[int, ...], torch.dtype]]
) -> list[torch.Tensor]:
    ends = list(itertools.accumulate(math.prod(shape) * dtype.itemsize for shape, dtype in states))
    if cache.ndim != 4 or cache.shape[1:3] != (1, 1) or cache.element_size() != 1 or cache.shape[3] < ends[-1]:
        raise InvalidEngineError(
            f"{where}: a tensor of shape {list(cache.shape)} and {cache.dtype}; "
            f"{ends[-1]} bytes of states are expected in each page"
        )
    pages = cache[:, 0, 0]
    return [
        pages[:, begin:end].view(dtype).unflatten(1, shape)
        for (shape, dtype), begin, end in zip(states, [0, *ends], ends, strict=False)
    ]


def layers_of(where: str, vllm_config: VllmConfig, names: Sequence[str]) -> dict[str, Any]:
    """Returns the layers of vLLM's model with these names. Raises `InvalidEngineError` if one is missing."""
    layer_type: Any = AttentionLayerBase
    found: dict[str, Any] = get_layers_from_vllm_config(vllm_config, layer_type, list(names))
    if missing := set(names) - set(found):
        raise InvalidEngineError(f"{where}: vLLM's model has no layer {min(missing)!r}: its backend is not known")
    return found


def contents_of(where: str, vllm_config: VllmConfig, names: Sequence[str], spec: Any, page_size: int) -> Contents:
    """Returns the contents of the pages of some layers.

    Raises `InvalidEngineError` if the contents of the layers differ.
    """
    layers = layers_of(where, vllm_config, names).values()
    contents = {_contents(where, vllm_config, layer.get_attn_backend(), spec, page_size) for layer in layers}
    if len(contents) != 1:
        raise InvalidEngineError(
            f"{where}: its layers have different contents: {sorted(one.text for one in contents)}; one is needed"
        )
    return contents.pop()


def described_layer(vllm_config: VllmConfig, layer: Any, page_size: int) -> str:
    """Returns a string that differs if two layers keep other things in a page, or keep them in another order.

    In contrast to `contents_of`, it also serves backends whose order of bytes is not known here.
    """
    backend, spec = layer.get_attn_backend(), layer.get_kv_cache_spec(vllm_config)
    name = ".".join(backend.full_cls_name())
    packed = _instructions(vllm_config, spec, page_size) if name == _BACKENDS + _CPU and spec is not None else ""
    states = described(spec) if isinstance(spec, MambaSpec) else ""
    return f"{name} {packed} {spec!r} {states}"


def _contents(
    where: str, vllm_config: VllmConfig, backend: type[AttentionBackend], spec: Any, page_size: int
) -> Contents:
    name = ".".join(backend.full_cls_name())
    known = name.removeprefix(_BACKENDS)
    if type(spec) is MambaSpec:
        if backend.is_ssm():
            states = tuple((tuple(shape), dtype) for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True))
            return Contents(f"{described(spec)} of {backend.get_name()}", states=states)
    elif type(spec) in {MLAAttentionSpec, SlidingWindowMLASpec}:
        if known in _LATENTS:
            return Contents("a latent of each token")
    elif known in _BY_TOKEN:
        return Contents(_keys_and_values(spec))
    elif known == _CPU:
        instructions = _instructions(vllm_config, spec, page_size)
        if instructions in _KEYS_IN_COLUMNS:
            return Contents(_keys_and_values(spec), columns=True)
        return Contents(f"keys and values as CPU_ATTN packs them for {instructions}", whole_pages=True)
    raise InvalidEngineError(
        f"{where}: the page layout of attention backend {name} for {type(spec).__name__} is not known"
    )


def _keys_and_values(spec: Any) -> str:
    """Returns a string that describes the keys and values in a page, for comparison with the other side.

    The string includes the sizes of keys and values if these differ. Both sides then need the same sizes.
    """
    values = getattr(spec, "head_size_v", None) or spec.head_size
    return "keys and values" if values == spec.head_size else f"keys of {spec.head_size} and values of {values}"


def _instructions(vllm_config: VllmConfig, spec: Any, page_size: int) -> str:
    """Returns the instruction set for which the CPU backend packs keys and values."""
    from vllm.v1.attention.backends.cpu_attn import (  # noqa: PLC0415  (vLLM for other devices may lack it)
        _get_attn_isa,  # pyright: ignore[reportPrivateUsage] - there is no public way to get it
    )

    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    return _get_attn_isa(vllm_config.model_config.dtype, page_size, spec.head_size, cache_dtype)
