"""`plan` reads from config.json what a model keeps in its cache. The tests use public models, every kind of layer, and
wrong configs.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcache.layout import PageLayout
from kvcache.states.state_memory import page_bytes, state_layouts
from pagewire.plan.layers import read_model
from scheduler_adapters.errors import MissingExtraError, PlanError
from scheduler_adapters.hf.recurrent import state_shape_of
from tests.scheduler_adapters.conftest import HYBRIDS

CONFIGS = Path(__file__).parent / "configs"
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "torch_dtype": "bfloat16",
}
BAMBA: dict[str, Any] = {
    "model_type": "bamba",
    "hidden_size": 64,
    "intermediate_size": 64,
    "vocab_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attn_layer_indices": [2],
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "dtype": "float32",
}


def written(folder: Path, config: object) -> Path:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("name", "kinds", "token_bytes"),
    [
        ("llama-3-70b", {("full", 80, 8, 256, 0)}, 327_680),
        ("qwen3-235b-a22b", {("full", 94, 4, 256, 0)}, 192_512),
        ("deepseek-v3", {("latent", 61, 1, 576, 0)}, 70_272),
        ("gemma-3-27b", {("window", 52, 16, 256, 1024), ("full", 10, 16, 256, 0)}, 507_904),
        ("gpt-oss-120b", {("window", 18, 8, 128, 128), ("full", 18, 8, 128, 0)}, 73_728),
        ("llama-4-scout", {("chunked", 36, 8, 256, 8192), ("full", 12, 8, 256, 0)}, 196_608),
    ],
)
def test_public_models(name: str, kinds: set[tuple[object, ...]], token_bytes: int) -> None:
    model = read_model(CONFIGS / name)
    assert {(one.kind, one.layers, one.heads, one.width, one.window) for one in model.each} == kinds
    # DeepSeek has weights in fp8, and gpt-oss has weights in mxfp4. The caches of both models are in bfloat16.
    assert model.dtype == torch.bfloat16
    assert sum(one.layers * one.heads * one.width for one in model.paged) * model.dtype.itemsize == token_bytes
    assert model.state_bytes(1) == 0


def test_heads_and_their_width_follow_from_what_is_left_out(tmp_path: Path) -> None:
    (one,) = read_model(written(tmp_path, LLAMA)).each
    assert (one.heads, one.width) == (2, 2 * 32)
    (one,) = read_model(written(tmp_path, {**LLAMA, "num_key_value_heads": None})).each
    assert one.heads == 8


def test_chunks_windows_and_layers_that_share(tmp_path: Path) -> None:
    chunked = {**LLAMA, "model_type": "llama4_text", "head_dim": 32, "attention_chunk_size": 64}
    kinds = {one.kind: one for one in read_model(written(tmp_path, chunked)).each}
    assert {kind: one.layers for kind, one in kinds.items()} == {"chunked": 3, "full": 1}
    assert kinds["chunked"].window == 64
    shared = {**LLAMA, "model_type": "gemma3n_text", "num_kv_shared_layers": 2, "sliding_window": 16, "head_dim": 32}
    each = read_model(written(tmp_path, shared)).each
    assert sum(one.layers for one in each) == 2, "layers that read the pages of another layer keep none of their own"


def test_recurrent_layers_keep_as_many_bytes_as_our_state_pages(tmp_path: Path) -> None:
    import transformers

    model = read_model(written(tmp_path, BAMBA))
    made: Any = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    shape = state_shape_of(made)
    assert {one.kind: one.layers for one in model.each} == {"state": 4, "full": 1}
    for tp in (1, 2, 4):  # With four ranks, two ranks share each group of heads.
        pages: list[PageLayout] = [layout for kinds in state_layouts(shape, tp) for layout in kinds.values()]
        assert model.state_bytes(tp) * tp == sum(page.page_bytes for page in pages)
    with pytest.raises(
        PlanError,
        match=r"tensor parallelism 3: a state of 8 heads in \d+ groups cannot be split or shared evenly by 3 shards",
    ):
        model.state_bytes(3)


@pytest.mark.parametrize(
    ("name", "kinds", "token_bytes", "state_bytes"),
    [  # The matrices are in float32, and the inputs of convolutions are in bfloat16.
        ("qwen3-next-80b", {"state": 36, "full": 12}, 24_576, 36 * (32 * 128 * 128 * 4 + (4096 + 2 * 2048) * 3 * 2)),
        ("nemotron-h-8b", {"state": 24, "full": 4}, 16_384, 24 * (128 * 64 * 128 * 4 + (8192 + 2 * 1024) * 3 * 2)),
        ("kimi-linear-48b-a3b", {"state": 20, "latent": 7}, 8_064, 20 * (32 * 128 * 128 * 4 + 3 * 4096 * 3 * 2)),
        ("bamba-9b", {"state": 29, "full": 3}, 12_288, 29 * (128 * 64 * 128 * 4 + (8192 + 2 * 128) * 3 * 2)),
    ],
)
def test_public_recurrent_models(name: str, kinds: dict[str, int], token_bytes: int, state_bytes: int) -> None:
    model = read_model(CONFIGS / name)
    assert {one.kind: one.layers for one in model.each} == kinds
    assert sum(one.layers * one.heads * one.width for one in model.paged) * 2 == token_bytes
    assert model.state_bytes(1) == state_bytes


@pytest.mark.parametrize("kind", HYBRIDS)
def test_recurrent_layers_of_each_model_keep_what_the_model_itself_does(
    kind: str, make_model: Callable[..., Any], tmp_path: Path
) -> None:
    made = make_model(kind)
    made.config.save_pretrained(tmp_path)
    (ours,) = (one.state for one in read_model(tmp_path, "float32").each if one.state)
    theirs = state_shape_of(made)
    assert ours is not None
    assert state_layouts(ours, 2)[1].keys() >= state_layouts(theirs, 2)[1].keys()
    assert page_bytes(state_layouts(ours, 2)) == page_bytes(state_layouts(theirs, 2))


def test_gated_delta_networks_and_short_convolutions(tmp_path: Path) -> None:
    delta = {**LLAMA, "model_type": "qwen3_next", "head_dim": 32, "full_attention_interval": 4}
    delta |= {"linear_num_value_heads": 4, "linear_value_head_dim": 8, "linear_num_key_heads": 2}
    delta |= {"linear_key_head_dim": 16, "linear_conv_kernel_dim": 4}
    model = read_model(written(tmp_path, delta))
    assert {one.kind: one.layers for one in model.each} == {"state": 3, "full": 1}
    matrices, inputs = 4 * 8 * 16 * 4, (4 * 8 + 2 * 2 * 16) * 3 * 2
    assert model.state_bytes(1) == 3 * (matrices + inputs)
    short = {
        **LLAMA,
        "model_type": "lfm2",
        "conv_L_cache": 3,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
    }
    model = read_model(written(tmp_path, short))
    assert {one.kind: one.layers for one in model.each} == {"conv": 3, "full": 1}
    assert model.state_bytes(1) == 3 * 256 * 2 * 2
    assert model.state_bytes(2) == 3 * 256 * 2


def test_linear_attention_keeps_matrices_in_the_models_own_type(tmp_path: Path) -> None:
    lightning = {**LLAMA, "model_type": "minimax", "head_dim": None}
    model = read_model(written(tmp_path, lightning))
    assert {one.kind: one.layers for one in model.each} == {"state": 2, "full": 2}
    assert model.state_bytes(1) == 2 * 8 * 32 * 32 * 2
    assert model.state_bytes(4) == 2 * 2 * 32 * 32 * 2


@pytest.mark.parametrize(
    ("quantised", "dtype"),
    [
        ({"quant_method": "fp8"}, torch.bfloat16),
        (
            {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
            torch.float8_e4m3fn,
        ),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": None}, torch.bfloat16),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, torch.float8_e4m3fn),
    ],
)
def test_the_checkpoint_says_how_keys_and_values_are_quantised(
    quantised: dict[str, object], dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = written(tmp_path, {**LLAMA, "quantization_config": quantised})
    assert read_model(folder).dtype == dtype
    assert read_model(folder, "float32").dtype == torch.float32
    assert read_model(folder, "fp8").dtype == torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ("{", "cannot read it"),
        ("[]", "cannot read it"),
        ({"hidden_size": 1}, "model_type"),
        ({**LLAMA, "model_type": "no-such-model"}, "no-such-model"),
        ({**LLAMA, "num_hidden_layers": "many"}, "num_hidden_layers"),
        ({**LLAMA, "num_key_value_heads": 0}, "num_key_value_heads is '0': a whole number from 1"),
        ({**LLAMA, "head_dim": -1}, "head_dim is '-1': a whole number from 1"),
        (
            {**LLAMA, "torch_dtype": None},
            "dtype is 'None': bfloat16, float16 or float32 is needed; --kv-dtype overrides it",
        ),
        ({**LLAMA, "layer_types": ["full_attention"]}, "layer"),
        ({**LLAMA, "layer_types": ["moe"] * 4}, "layer_types has no attention"),
        ({**LLAMA, "layer_types": ["indexed_attention"] * 4}, "layer_types[0] is 'indexed_attention': one of full_"),
        (
            {**LLAMA, "layer_types": ["sliding_attention"] * 4},
            "sliding_window is missing, and the kinds in layer_types need it",
        ),
        ({**LLAMA, "layer_types": ["linear_attention"] * 4}, "layer_types[0] is recurrent"),
        ({**BAMBA, "mamba_n_groups": 3}, "heads is 8: a multiple of the 3 groups is needed"),
        ({**LLAMA, "model_type": "gpt_bigcode", "multi_query": True}, "multi_query is true"),
        ({"model_type": "t5", "torch_dtype": "bfloat16"}, "is_encoder_decoder is true"),
        (
            {**LLAMA, "quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}},
            "quantization_config.kv_cache_quant_algo is 'NVFP4': only 8-bit floats are supported",
        ),
        (
            {**LLAMA, "quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": "any"}},
            "quantization_config.kv_cache_scheme is 'any': only 8-bit floats are supported",
        ),
    ],
)
def test_an_unknown_value_is_an_error_with_the_file_the_field_and_the_allowed_values(
    config: object, told: str, tmp_path: Path
) -> None:
    with pytest.raises(PlanError) as error:
        read_model(written(tmp_path, config))
    assert str(tmp_path / "config.json") in str(error.value)
    assert told in str(error.value)


def test_a_folder_without_a_config_and_no_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError, match=r"there is no config\.json"):
        read_model(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(MissingExtraError, match="pip install 'pagewire\\[plan\\]'"):
        read_model(written(tmp_path, LLAMA))
