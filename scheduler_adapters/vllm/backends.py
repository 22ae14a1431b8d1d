"""What the attention backend that vLLM selected keeps in a page: known by its class, and refused where that is not.

vLLM's tensors are always [blocks, heads, tokens, content], but what lies there is a matter of the backend's kernels:
the one for CPUs takes a head of a block for all keys, then all values, and packs them as its instructions like it best.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import MambaSpec, MLAAttentionSpec, SlidingWindowMLASpec

from transfer.errors import InvalidEngineError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionBackend

# Classes and not names: two backends of vLLM's have the name FLASH_ATTN.
_ROOM = "vllm.v1.attention.backends."
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


class Content(NamedTuple):
    """What pages keep.

    Attributes:
        text: names it on both sides.
        whole_pages: only the backend knows what lies where in a head of a page.
    """

    text: str
    whole_pages: bool = False


def content_of(where: str, vllm_config: VllmConfig, layers: Sequence[str], spec: Any, page_size: int) -> Content:
    """Returns what the pages of some layers keep.

    Args:
        where: the layers, for messages.
        vllm_config: of a worker, whose model is loaded.
        layers: names.
        spec: of their cache.
        page_size: tokens of a page as the tensors have them.

    Raises:
        InvalidEngineError: a layer that the model does not have, or a backend that is not known, by name.
    """
    layer_type: Any = AttentionLayerBase
    found: dict[str, Any] = get_layers_from_vllm_config(vllm_config, layer_type, layers)
    if missing := set(layers) - set(found):
        raise InvalidEngineError(f"{where}: vLLM's model has no layer {min(missing)!r}: its backend is not known")
    contents = {_content(where, vllm_config, layer.get_attn_backend(), spec, page_size) for layer in found.values()}
    if len(contents) != 1:
        raise InvalidEngineError(f"{where}: its layers keep {sorted(one.text for one in contents)}; one is expected")
    return contents.pop()


def _content(
    where: str, vllm_config: VllmConfig, backend: type[AttentionBackend], spec: Any, page_size: int
) -> Content:
    name = ".".join(backend.full_cls_name())
    known = name.removeprefix(_ROOM)
    if type(spec) is MambaSpec:
        if backend.is_ssm():
            shapes = " and ".join("x".join(map(str, shape)) for shape in spec.shapes)
            return Content(f"states {shapes} of {backend.get_name()}")
    elif type(spec) in {MLAAttentionSpec, SlidingWindowMLASpec}:
        if known in _LATENTS:
            return Content("a latent of each token")
    elif known in _BY_TOKEN:
        return Content("keys, then values, of each token")
    elif known == _CPU:
        return Content(
            f"keys and values as CPU_ATTN packs them for {_instructions(vllm_config, spec, page_size)}", True
        )
    raise InvalidEngineError(
        f"{where}: what the attention backend {name} keeps in a page of {type(spec).__name__} is not known"
    )


def _instructions(vllm_config: VllmConfig, spec: Any, page_size: int) -> str:
    """The set of instructions that the CPU backend has chosen, and packs keys for."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # noqa: PLC0415  (for CPUs alone)

    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    return _get_attn_isa(vllm_config.model_config.dtype, page_size, spec.head_size, cache_dtype)
