"""Compares boxes with the bytes that vLLM's own kernels write in this process. The kernels are those of the CPU
backend, with and without latents.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

from scheduler_adapters.vllm.backends import Contents
from scheduler_adapters.vllm.proof import prove
from transfer.connector.config import GroupConfig, WorkerConfig
from transfer.errors import InvalidEngineError

DIM, HEADS, PAGES = 64, 2, 7
COLUMNS = Contents("keys and values", columns=True)
ROWS = Contents("keys and values")


def impl_of(cls: type[Any], **known: Any) -> Any:
    """Returns the class that writes pages, without the parts that only attention needs."""
    found = cls.__new__(cls)
    vars(found).update(known)
    return found


def cpu_layer(cache: torch.Tensor, isa: str, kept: str = "auto", scales: tuple[float, float] = (1.0, 1.0)) -> Any:
    impl = impl_of(CPUAttentionBackendImpl, attn_type="decoder", kv_cache_dtype=kept)
    return SimpleNamespace(
        kv_cache=cache, impl=impl, isa=isa, head_size=DIM, _k_scale_float=scales[0], _v_scale_float=scales[1],
        _k_scale=torch.tensor(scales[0]), _v_scale=torch.tensor(scales[1]),
    )  # fmt: skip


def config_of(group: GroupConfig) -> WorkerConfig:
    return WorkerConfig(engine_id="engine", incarnation="1", groups=(group,), model="m")


def attention(page_size: int, dtype: torch.dtype, *, whole_pages: bool = False) -> WorkerConfig:
    return config_of(
        GroupConfig(
            layers={"0.attn": 0}, block_size=page_size, layout="page,head,token,side,dim", num_kv_heads=HEADS,
            head_dim=DIM, dtype=str(dtype).removeprefix("torch."), whole_pages=whole_pages,
        )
    )  # fmt: skip


def random_cache(page_size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(PAGES, HEADS, page_size, 2 * DIM).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("page_size", "isa"), [(32, "vec"), (96, "vec"), (16, "vec16"), (48, "vec16")])
def test_the_cpus_kernel_writes_columns_of_keys_and_rows_of_values(
    page_size: int, isa: str, dtype: torch.dtype
) -> None:
    assert CPUAttentionBackend.get_impl_cls() is CPUAttentionBackendImpl
    cache = random_cache(page_size, dtype)
    before, layer = cache.clone(), cpu_layer(cache, isa)
    assert prove(attention(page_size, dtype), {"0.attn": layer}, {"0.attn": COLUMNS.tensors("", cache)}, dtype) == 1
    assert torch.equal(cache, before), "the proof must leave the cache as it was"


@pytest.mark.skipif(
    "AVX512" not in torch.backends.cpu.get_cpu_capability(), reason="vLLM writes fp8 pages on CPUs with AVX-512 alone"
)
@pytest.mark.parametrize("kept", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.004, 0.5), (30.0, 0.01)], ids=str)
def test_a_cache_of_eight_bits_is_read_whatever_its_scales(kept: str, scales: tuple[float, float]) -> None:
    cache = torch.randint(0, 100, (PAGES, HEADS, 32, 2 * DIM), dtype=torch.uint8)
    before, layer = cache.clone(), cpu_layer(cache, "vec", kept, scales)
    caches = {"0.attn": COLUMNS.tensors("", cache)}
    assert prove(attention(32, torch.uint8), {"0.attn": layer}, caches, torch.bfloat16) == 1
    assert torch.equal(cache, before)
    rows = {"0.attn": ROWS.tensors("", cache)}
    with pytest.raises(InvalidEngineError, match="differ"):
        prove(attention(32, torch.uint8), {"0.attn": layer}, rows, torch.bfloat16)


def test_boxes_that_are_elsewhere_are_refused() -> None:
    cache = random_cache(32, torch.float32)
    before, layer = cache.clone(), cpu_layer(cache, "vec")
    with pytest.raises(
        InvalidEngineError, match=r"CPUAttentionBackendImpl writes to other offsets in a page than .* differ"
    ):
        prove(attention(32, torch.float32), {"0.attn": layer}, {"0.attn": ROWS.tensors("", cache)}, torch.float32)
    assert torch.equal(cache, before)


@pytest.mark.parametrize("swapped", ["sides", "heads", "pages", "tokens"])
def test_boxes_that_hold_the_same_bytes_in_another_order_are_refused(swapped: str) -> None:
    cache = random_cache(32, torch.float32)
    keys, values = COLUMNS.tensors("", cache)
    tensors = {
        "sides": [values, keys],
        "heads": [keys.as_strided(keys.shape, (keys.stride(0), DIM * 32, 1, 32)), values],
        "pages": [keys.as_strided(keys.shape, (keys.stride(0) - 32, *keys.stride()[1:])), values],
        "tokens": [keys.as_strided(keys.shape, (*keys.stride()[:2], DIM, 1)), values],
    }[swapped]
    with pytest.raises(InvalidEngineError):
        prove(attention(32, torch.float32), {"0.attn": cpu_layer(cache, "vec")}, {"0.attn": tensors}, torch.float32)


def test_a_format_that_only_the_kernel_knows_is_moved_as_whole_pages() -> None:
    cache = random_cache(32, torch.float32)
    config = attention(32, torch.float32, whole_pages=True)
    assert prove(config, {"0.attn": cpu_layer(cache, "vec")}, {"0.attn": cache}, torch.float32) == 1
    # The config says that a page has half the size that the kernel writes.
    half = attention(16, torch.float32, whole_pages=True)
    cut = {"0.attn": cache.view(2 * PAGES, HEADS, 16, 2 * DIM)}
    with pytest.raises(InvalidEngineError, match="do not change when all of its tokens are written"):
        prove(half, {"0.attn": cpu_layer(cache, "vec")}, cut, torch.float32)


@pytest.mark.parametrize("page_size", [16, 64])
def test_latents_are_stored_as_rows(page_size: int) -> None:
    cache = torch.randn(PAGES, 1, page_size, 576)
    layer = SimpleNamespace(
        kv_cache=cache.squeeze(1), impl=impl_of(CPUMLAImpl), kv_lora_rank=512, kv_cache_dtype="auto", _k_scale=None
    )
    group = GroupConfig(
        layers={"0.attn": 0}, kind="mla", block_size=page_size, layout="page,head,token,dim", head_dim=576,
        dtype="float32",
    )  # fmt: skip
    assert prove(config_of(group), {"0.attn": layer}, {"0.attn": cache}, torch.float32) == 1
    layer.impl.do_kv_cache_update = lambda latents, rotary, cache, slots, *_: None
    with pytest.raises(InvalidEngineError, match="elements differ"):
        prove(config_of(group), {"0.attn": layer}, {"0.attn": cache}, torch.float32)


def test_a_kernel_that_cannot_write_is_named() -> None:
    cache = random_cache(32, torch.float32)
    layer = cpu_layer(cache, "of tomorrow")
    with pytest.raises(InvalidEngineError, match=r"'0\.attn': the test write by CPUAttentionBackendImpl"):
        prove(attention(32, torch.float32), {"0.attn": layer}, {"0.attn": COLUMNS.tensors("", cache)}, torch.float32)
