from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.mamba import mamba_mixer2
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from scheduler_adapters.vllm.config import worker_config
from tests.vllm_engine.engine import Shape, add_layers, make_cache_config, make_config, model_dir
from tests.vllm_engine.states import States
from transfer.connector.config import check_config
from transfer.errors import InvalidEngineError

CHUNKED = ChunkedLocalAttentionSpec(
    block_size=16, num_kv_heads=4, head_size=16, dtype=torch.float16, attention_chunk_size=64
)


def configs(folder: Path, shape: Shape, rank: int = 0) -> tuple[Any, KVCacheConfig]:
    return make_config(model_dir(folder, shape.heads), "kv_producer", "engine", shape, rank), make_cache_config(shape)


def attention(**changes: Any) -> FullAttentionSpec:
    return FullAttentionSpec(
        **({"block_size": 16, "num_kv_heads": 4, "head_size": 16, "dtype": torch.float16} | changes)
    )


def groups_of(folder: Path, spec: Any, names: list[str], shape: Shape | None = None, **parallel: int) -> Any:
    config, caches = configs(folder, shape or Shape())
    for name, value in parallel.items():
        setattr(config.parallel_config, name, value)
    caches = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(names, spec)])
    return check_config(worker_config(config, caches)).groups


def test_groups_ranks_and_names_are_vllms(tmp_path: Path) -> None:
    found = check_config(worker_config(*configs(tmp_path, Shape(tp_size=2, windows=(0, 40)), rank=1)))
    assert (found.engine_id, found.tp_rank, found.tp_size, found.pp_size) == ("engine", 1, 2, 1)
    full, window = found.groups
    assert (full.kind, full.block_size, full.num_kv_heads, full.head_dim, full.dtype) == ("full", 16, 4, 16, "float16")
    assert (window.kind, window.window) == ("sliding_window", 40)
    assert list(full.layers.values()) == [0, 2]
    assert list(window.layers.values()) == [1, 3]


def test_a_restarted_engine_is_distinguished_from_the_earlier_one(tmp_path: Path) -> None:
    config, caches = configs(tmp_path, Shape())
    before = worker_config(config, caches).incarnation
    config.instance_id = "other"
    assert worker_config(config, caches).incarnation != before


def test_layers_without_numbers_are_taken_in_their_natural_order(tmp_path: Path) -> None:
    (group,) = groups_of(tmp_path, attention(), ["a.b10", "a.b9", "a.b1"])
    assert group.layers == {"a.b1": 0, "a.b9": 1, "a.b10": 2}


def test_a_pipeline_stage_names_the_layers_of_all(tmp_path: Path) -> None:
    (group,) = groups_of(tmp_path, attention(), ["model.layers.1.attn"], pipeline_parallel_size=2, rank=1)
    assert group.layers == {"model.layers.0.attn": 0, "model.layers.1.attn": 1}


def test_a_latent_is_one_head_on_every_rank(tmp_path: Path) -> None:
    spec = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    (group,) = groups_of(tmp_path, spec, ["model.layers.0.attn"])
    assert (group.kind, group.num_kv_heads, group.head_dim, group.dtype) == ("mla", 1, 576, "bfloat16")


def state(*shapes: tuple[int, ...], kind: str = "MAMBA2", **changes: Any) -> MambaSpec:
    dtypes = (torch.float16, torch.float32, torch.float32)[: len(shapes)]
    return MambaSpec(block_size=64, shapes=shapes, dtypes=dtypes, mamba_type=MambaAttentionBackendEnum[kind], **changes)


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        (
            state((3, 160), (8, 16, 16)),
            [("conv.x", 16, 16), ("conv.B", 2, 16), ("conv.C", 2, 16), ("ssm", 16, 1)],
        ),
        (
            state((3, 192), (8, 16, 16), kind="GDN_ATTN"),
            [("conv.q", 4, 16), ("conv.k", 4, 16), ("conv.v", 16, 16), ("ssm", 16, 1)],
        ),
        (state((3, 20), (20, 16), kind="MAMBA1"), [("conv.x", 40, 1), ("ssm", 40, 1)]),
        (state((2, 20), kind="SHORT_CONV"), [("conv.x", 40, 1)]),
        # A state of an unknown kind is moved unchanged. Either each rank has its own part of it, or all ranks have the
        # same.
        (state((8, 16, 16), kind="LINEAR"), [("state 0", 2, 2048)]),
        (state((3, 160), (8, 16, 16), (2, 4)), [("state 0", 2, 480), ("state 1", 2, 2048), ("state 2", 2, 8)]),
        (state((3, 20), kind="SHORT_CONV", tp_replicated=True), [("state 0", 1, 60)]),
    ],
    ids=["Mamba 2", "gated delta", "Mamba 1", "short convolution", "linear", "a ring beside it", "on all ranks"],
)
def test_a_state_is_cut_as_vllm_divides_it_over_ranks(
    tmp_path: Path, spec: MambaSpec, parts: list[tuple[str, int, int]]
) -> None:
    (group,) = groups_of(tmp_path, spec, ["model.layers.0.mixer"], Shape(tp_size=2))
    assert [(part.kind, part.units, part.width) for part in group.state] == parts
    assert [part.dtype for part in group.state][-1] == str(spec.dtypes[-1]).removeprefix("torch.")


@pytest.mark.parametrize(("ranks", "groups", "units"), [(2, 1, 1), (2, 2, 2), (1, 1, 1), (2, 4, 4), (1, 4, 4)])
def test_groups_of_a_mamba_2_layer_are_those_of_vllms(
    tmp_path: Path, ranks: int, groups: int, units: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If each of two ranks has one group, it may be one of two groups, or a copy of the model's only group. The layer's
    norm tells which.
    """
    of = States(groups=groups)
    for name, value in (("world_size", ranks), ("rank", 0)):
        monkeypatch.setattr(mamba_mixer2, f"get_tensor_model_parallel_{name}", lambda value=value: value)
    config, _ = configs(tmp_path, Shape(tp_size=ranks))
    caches = KVCacheConfig(
        num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layers.0.mixer"], of.spec(ranks))]
    )
    with set_current_vllm_config(config):
        norm = mamba_mixer2.Mixer2RMSNormGated(64, groups)
    add_layers(config, caches, states=of).compilation_config.static_forward_context["layers.0.mixer"].norm = norm
    ((_, b, c, _),) = (group.state for group in worker_config(config, caches, {}).groups)
    assert (b.units, c.units) == (units, units)


def test_channels_that_are_no_groups_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidEngineError, match="the convolution has 161 channels, 128 of them for 8 heads"):
        groups_of(tmp_path, state((3, 161), (8, 16, 16)), ["model.layers.0.mixer"])


@pytest.mark.parametrize(
    ("spec", "names", "parallel", "message"),
    [
        (attention(), ["layer.0"], {"decode_context_parallel_size": 2}, "decode_context_parallel_size is 2"),
        (attention(), ["a", "b"], {"pipeline_parallel_size": 2}, "does not contain its number"),
        (attention(), ["layers.0.a", "layers.1.b"], {"pipeline_parallel_size": 2}, "is not named like"),
        (attention(num_kv_heads=1), ["layer.0"], {"tensor_parallel_size": 2}, "each of 2 ranks has 1 heads"),
        (attention(head_size=3, head_size_v=4), ["layer.0"], {}, "7 elements"),
        (attention(tokens_per_state=2), ["layer.0"], {}, "a state has 2 tokens"),
        (state((3, 160), (8, 16, 16), num_speculative_blocks=3), ["layer.0"], {}, "3 speculative blocks of a state"),
        (CHUNKED, ["layer.0"], {}, "caches of type ChunkedLocalAttentionSpec are not supported"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_settings_are_refused_by_name(
    tmp_path: Path, spec: Any, names: list[str], parallel: dict[str, int], message: str
) -> None:
    with pytest.raises(InvalidEngineError, match=message):
        groups_of(tmp_path, spec, names, **parallel)


def test_layers_with_other_heads_than_the_model_have_an_even_share_of_them(tmp_path: Path) -> None:
    assert groups_of(tmp_path, attention(num_kv_heads=3), ["layer.0"], tensor_parallel_size=2)[0].num_kv_heads == 6


@pytest.mark.parametrize("listed", ["10.0.0.0/8, peer.example", ["10.0.0.0/8", "peer.example"]], ids=["text", "list"])
def test_peers_may_be_those_of_the_list_and_the_own_host(tmp_path: Path, listed: Any) -> None:
    extra = {"host": "10.1.0.1", "allowed_peers": listed}
    config = check_config(worker_config(*configs(tmp_path, Shape(extra=extra))))
    assert config.allowed_peers == ("10.1.0.1", "10.0.0.0/8", "peer.example")


@pytest.mark.parametrize("host", ["fd00::7", "[fd00::7]"])
def test_the_own_host_may_have_an_ipv6_address(tmp_path: Path, host: str) -> None:
    config = check_config(worker_config(*configs(tmp_path, Shape(extra={"host": host}))))
    assert config.allowed_peers == ("fd00::7",)


def test_the_window_of_a_layer_is_read(tmp_path: Path) -> None:
    spec = SlidingWindowSpec(block_size=16, num_kv_heads=4, head_size=16, dtype=torch.float16, sliding_window=33)
    (group,) = groups_of(tmp_path, spec, ["layer.0"])
    assert (group.kind, group.window) == ("sliding_window", 33)
