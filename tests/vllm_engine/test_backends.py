"""Tests the content that vLLM's own backend classes keep in a page."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.flash_attn_diffkv import FlashAttentionDiffKVBackend
from vllm.v1.attention.backends.flex_attention import FlexAttentionBackend
from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend
from vllm.v1.attention.backends.hpc_attn import HpcAttentionBackend
from vllm.v1.attention.backends.mamba1_attn import Mamba1AttentionBackend
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionBackend
from vllm.v1.attention.backends.mla.amx_mla import AMXMLABackend
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend
from vllm.v1.attention.backends.mla.flashmla import FlashMLABackend
from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.attention.backends.turboquant_attn import TurboQuantAttentionBackend
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
)

from scheduler_adapters.vllm.backends import contents_of
from scheduler_adapters.vllm.config import worker_config
from tests.vllm_engine import engine
from tests.vllm_engine.engine import Engine, Kernel, Layer, Shape, expected_tokens, make_config, model_dir, run_until
from tests.vllm_engine.test_engine import PROMPT, assert_empty, prefilled, served
from transfer.errors import InvalidEngineError

Make = Callable[..., Engine]
FULL = FullAttentionSpec(block_size=32, num_kv_heads=4, head_size=32, dtype=torch.float16)
LATENT = MLAAttentionSpec(block_size=32, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
STATE = MambaSpec(block_size=64, shapes=((3, 160), (8, 16, 16)), dtypes=(torch.float16, torch.float32))


class Theirs(TritonAttentionBackend):
    """A backend that subclasses a backend of vLLM. A third party has changed it, so its page format is unknown."""


def config_of(folder: Path, spec: KVCacheSpec, *backends: Any, page_size: int = 32) -> Any:
    names = [f"layers.{number}.attn" for number in range(len(backends))]
    config = make_config(model_dir(folder, 4), "kv_producer", "engine", Shape(), 0)
    config.compilation_config.static_forward_context |= dict(zip(names, map(Layer, backends), strict=True))
    caches = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(names, spec)])
    return worker_config(config, caches, dict.fromkeys(names, page_size))


@pytest.mark.parametrize(
    ("spec", "backends", "text", "whole"),
    [
        (FULL, (FlashAttentionBackend,), "keys and values", False),
        (FULL, (FlashAttentionDiffKVBackend,), "keys and values", False),
        (FULL, (FlexAttentionBackend, TritonAttentionBackend), "keys and values", False),
        (FULL, (CPUAttentionBackend,), "keys and values", False),
        (LATENT, (TritonMLABackend, CPUMLABackend), "a latent of each token", False),
        (LATENT, (FlashMLABackend, AMXMLABackend), "a latent of each token", False),
        (STATE, (Mamba1AttentionBackend,), "states of 3 columns and 16x16 of MAMBA1_ATTN", False),
        (STATE, (Mamba2AttentionBackend,), "states of 3 columns and 16x16 of MAMBA2_ATTN", False),
        (STATE, (GDNAttentionBackend,), "states of 3 columns and 16x16 of GDN_ATTN", False),
    ],
    ids=lambda value: value[0].__name__ if isinstance(value, tuple) else "",
)
def test_the_class_of_a_backend_determines_the_page_layout(
    tmp_path: Path, spec: KVCacheSpec, backends: tuple[Any, ...], text: str, whole: bool
) -> None:
    config = config_of(tmp_path, spec, *backends)
    (group,) = config.groups
    assert group.content.startswith(text)
    assert group.whole_pages == whole
    assert text in config.fingerprint()["group 0"]


@pytest.mark.parametrize(
    ("spec", "backends", "message"),
    [
        (FULL, (TurboQuantAttentionBackend,), "turboquant_attn.TurboQuantAttentionBackend for FullAtt"),
        (FULL, (HpcAttentionBackend,), "layout of attention backend .*HpcAttentionBackend .* is not known"),
        (FULL, (Theirs,), "test_backends.Theirs for .* is not known"),
        (FULL, (TritonMLABackend,), "TritonMLABackend for FullAttentionSpec"),
        (FULL, (Mamba2AttentionBackend,), "Mamba2AttentionBackend for FullAttentionSpec"),
        (LATENT, (FlashAttentionBackend,), "FlashAttentionBackend for MLAAttentionSpec"),
        (STATE, (FlashAttentionBackend,), "FlashAttentionBackend for MambaSpec"),
        (FULL, (CPUAttentionBackend, FlashAttentionBackend), "layers have different contents"),
    ],
    ids=lambda value: value[0].__name__ if isinstance(value, tuple) else "",
)
def test_a_backend_that_is_not_known_is_refused_by_name(
    tmp_path: Path, spec: KVCacheSpec, backends: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(InvalidEngineError, match=message) as error:
        config_of(tmp_path, spec, *backends)
    assert "\n" not in str(error.value)


def test_a_worker_is_refused_when_it_is_made(tmp_path: Path) -> None:
    config = make_config(model_dir(tmp_path, 4), "kv_producer", "engine", Shape(), 0)
    caches = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layers.0"], FULL)])
    with pytest.raises(InvalidEngineError, match=r"no layer 'layers\.0'"):
        KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, caches)
    config.compilation_config.static_forward_context["layers.0"] = Layer(Theirs)
    with pytest.raises(InvalidEngineError, match="test_backends.Theirs for .* is not known"):
        KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, caches)


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates a CPU whose kernels store keys and values in their own tiles."""
    monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda *_: "amx")


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("size", [16, 32])
def test_tiled_keys_and_values_are_moved_as_whole_pages(tmp_path: Path, size: int) -> None:
    config = config_of(tmp_path, FULL, CPUAttentionBackend, page_size=size)
    assert config.groups[0].whole_pages
    text = config.fingerprint()["group 0"]
    assert f"whole pages of {size} tokens" in text
    assert "keys and values as CPU_ATTN packs them for amx" in text


@pytest.mark.parametrize("length", [1, 16, 97, 103])
@pytest.mark.parametrize(
    ("left", "right"),
    [
        ({}, {}),
        ({"tp_size": 2}, {}),
        ({}, {"tp_size": 2}),
        ({"block_size": 8}, {}),
        ({}, {"block_size": 8}),
        ({"tp_size": 2}, {"block_size": 48}),
        ({}, {"backend": FlashAttentionBackend}),
        ({"backend": FlashAttentionBackend}, {"block_size": 32}),
    ],
    ids=["16 to 16", "TP 2 to 1", "TP 1 to 2", "8 to 16", "16 to 8", "TP 2 to 1 of 48", "to rows", "from rows to 32"],
)
def test_a_cpus_columns_of_keys_are_moved_to_pages_of_any_kind(
    make: Make, left: dict[str, Any], right: dict[str, Any], length: int
) -> None:
    prefill = make("kv_producer", Shape(**{"backend": CPUAttentionBackend} | left))
    decode = make("kv_consumer", Shape(**{"backend": CPUAttentionBackend} | right))
    prompt = PROMPT[:length] if length < 100 else [*PROMPT, *PROMPT[: length - 100]]
    tokens = served([prefill, decode], "d", prompt, 3, prefilled(prefill, "p", prompt))
    assert tokens == expected_tokens(prompt, 3, decode.shape)
    assert sum(sum(step.values()) for step in decode.scheduled) == 3, "decode must not compute any token of the prompt"
    assert_empty(prefill, decode)


@pytest.mark.parametrize(
    ("liar", "where"), [(1, "rank 0: .*layers.0"), (2, "rank 0: .*layers.1"), (4, "rank 1: .*layers.1")]
)
@pytest.mark.parametrize("backend", [CPUAttentionBackend, FlashAttentionBackend])
def test_a_layer_whose_kernel_writes_elsewhere_is_refused(
    make: Make, monkeypatch: pytest.MonkeyPatch, backend: Any, liar: int, where: str
) -> None:
    made = itertools.count()  # The counter numbers the engine, and each layer of each rank.

    def kernel(*, in_columns: bool) -> engine.Kernel:
        return Kernel(in_columns=in_columns != (next(made) == liar))

    monkeypatch.setattr(engine, "Kernel", kernel)
    with pytest.raises(InvalidEngineError, match=f"{where}.*Kernel writes to other offsets in a page than") as error:
        make("kv_producer", Shape(backend=backend, tp_size=2))
    assert "\n" not in str(error.value)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize(
    ("left", "right", "differ"),
    [
        ({"block_size": 8}, {}, ("whole pages of 8 tokens", "whole pages of 16 tokens")),
        ({}, {"block_size": 8}, ("whole pages of 16 tokens", "whole pages of 8 tokens")),
        ({}, {"backend": FlashAttentionBackend}, ("as CPU_ATTN packs them", "keys and values")),
    ],
    ids=["8 to 16", "16 to 8", "to a GPU's"],
)
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_tiles_are_not_moved_to_other_pages(
    make: Make,
    caplog: pytest.LogCaptureFixture,
    left: dict[str, Any],
    right: dict[str, Any],
    differ: tuple[str, str],
    policy: str,
) -> None:
    extra = {"host": "127.0.0.1", "port": 0, "kv_lease_duration": 1}
    prefill = make("kv_producer", Shape(**{"backend": CPUAttentionBackend, "extra": extra} | left))
    decode = make("kv_consumer", Shape(**{"backend": CPUAttentionBackend, "policy": policy} | right))
    decode.add("d", PROMPT, 3, prefilled(prefill, "p", PROMPT))
    with caplog.at_level(logging.WARNING, "pagewire.vllm"):
        run_until([prefill, decode], lambda: decode.finish_reason("d"))
    assert decode.tokens("d") == ([] if policy == "fail" else expected_tokens(PROMPT, 3, decode.shape))
    (message,) = {record.getMessage() for record in caplog.records if "'d'" in record.getMessage()}
    assert all(text in message for text in differ), "the values of both sides are named"
    assert_empty(prefill, decode)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((4, 1, 1, 9151), torch.int8),
        ((4, 1, 2, 9152), torch.int8),
        ((4, 9152), torch.int8),
        ((4, 1, 1, 9152), torch.half),
    ],
    ids=["too short", "of two tokens", "no axes", "no bytes"],
)
def test_bytes_that_do_not_hold_the_states_are_refused(
    tmp_path: Path, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    config = make_config(model_dir(tmp_path, 4), "kv_producer", "engine", Shape(), 0)
    config.compilation_config.static_forward_context["layers.0"] = Layer(Mamba2AttentionBackend)
    contents = contents_of("group 0", config, ["layers.0"], STATE, 64)
    whole = torch.arange(4 * 9200, dtype=torch.int32).to(torch.int8).view(4, 1, 1, 9200)
    conv, state = contents.tensors("group 0", whole)
    assert (conv.shape, state.shape) == ((4, 3, 160), (4, 8, 16, 16))
    assert torch.equal(state[1].reshape(-1).view(torch.int8), whole[1, 0, 0, 960:9152])
    with pytest.raises(InvalidEngineError, match="9152 bytes of states are expected"):
        contents.tensors("group 0", torch.zeros(shape, dtype=dtype))
