from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvcache import (
    InvalidParamsError,
    KVCacheParams,
    KVEvents,
    LayerGroup,
    PagedKVCacheManager,
    Routing,
    StateShape,
)
from kvcache.params import resolve_page_size, usable_hashes
from tests.kvcache.build import run_once

HOST = {"enable_prefix_caching": True, "enable_kvcache_swapping_to_host": True, "host_kvcache_swap_space_gb": 1}


def params(**changes: Any) -> KVCacheParams:
    return KVCacheParams(**{"dtype": torch.bfloat16, "n_kv_heads": 8, "head_dim": 64, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "bfloat16"}, "dtype is 'bfloat16'"),
        ({"n_kv_heads": 0}, "n_kv_heads is 0"),
        ({"head_dim": -1}, "head_dim is -1"),
        ({"head_dim": 1.5}, "head_dim is 1.5"),
        ({"n_devices": True}, "n_devices is True"),
        ({"n_devices": 1 << 11}, "n_devices is 2048: an integer from 1 to 1024"),
        ({"page_size": 0}, "page_size is 0"),
        ({"tenant_quota": 1.5}, "tenant_quota is 1.5: a number from 0.0 to 1.0"),
        ({"n_devices": 3, "data_parallel_degree": 2}, "n_devices is 3: not a multiple of data_parallel_degree 2"),
        ({"n_devices": 3}, "n_kv_heads is 8: 3 shards"),
        ({"hash_algorithm": "md5"}, "hash_algorithm is 'md5': one of sha256, blake3, xxh3_128"),
        ({"page_order": "dim,token"}, "page_order is 'dim,token'"),
        ({"enable_kvcache_swapping_to_host": True}, "needs enable_prefix_caching"),
        ({"file_tier_dir": "folder"}, "file_tier_dir needs enable_kvcache_swapping_to_host"),
        ({**HOST, "file_tier_dir": "folder", "file_tier_key": "k"}, "file_tier_max_gb is None"),
        ({**HOST, "file_tier_dir": "folder", "file_tier_max_gb": 0, "file_tier_key": "k"}, "file_tier_max_gb is 0"),
        ({**HOST, "file_tier_dir": "folder", "file_tier_max_gb": 1}, "file_tier_key is not given"),
        ({"object_tier_io": print}, "object_tier_io needs enable_kvcache_swapping_to_host"),
        ({**HOST, "object_tier_io": print}, "file_tier_key is not given"),
        ({"object_tier_io": "bucket"}, "object_tier_io is 'bucket'"),
        ({"object_tier_pages": 0}, "object_tier_pages is 0: an integer from 1 to 1024"),
        ({"object_tier_timeout_s": 0}, "object_tier_timeout_s is 0: a number from 0.01 to 60.0"),
        ({"object_tier_tokens_per_s": 0.5}, "object_tier_tokens_per_s is 0.5: a number from 1.0"),
        ({**HOST, "host_kvcache_swap_space_gb": 0}, "host_kvcache_swap_space_gb is 0"),
        ({**HOST, "file_tier_dir": ""}, "file_tier_dir is '': the name of a folder is needed"),
        ({**HOST, "file_tier_dir": "a\0b"}, "file_tier_dir is .*: the name of a folder is needed"),
        ({**HOST, "file_tier_key": "\ud800"}, "file_tier_key is .*: UTF-8 text is needed"),
    ],
)
def test_params_that_cannot_work_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        params(**changes)
    assert isinstance(caught.value, InvalidParamsError)


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (KVEvents, {"topic": 5}, "kv_events: topic is 5: text is needed"),
        (KVEvents, {"endpoint": "tcp://127.0.0.1\0:5557"}, "kv_events: endpoint is .*: an address of tcp://"),
        (KVEvents, {"replay_endpoint": "udp://a:1"}, "kv_events: replay_endpoint is 'udp://a:1': an address of tcp://"),
        (KVEvents, {"endpoint": "tcp://a:b"}, "kv_events: endpoint is 'tcp://a:b': an address with a port"),
        (KVEvents, {"buffer_steps": 0}, "kv_events: buffer_steps is 0"),
        (KVEvents, {"hwm": 0}, "kv_events: hwm is 0"),
        (KVEvents, {"topic": "\ud800"}, "kv_events: topic is .*: UTF-8 text is needed"),
        (KVEvents, {"endpoint": "ipc://\ud800"}, "kv_events: endpoint is .*: UTF-8 text is needed"),
        (KVEvents, {"secure": 5}, "kv_events: secure is 5: a function is needed"),
        (Routing, {"load_weight": -1}, "load_weight is -1"),
        (Routing, {"load_decay": 1.0}, "load_decay is 1.0: a number from 0.0 to 0.9"),
        (Routing, {"load_decay": -0.1}, "load_decay is -0.1"),
    ],
)
def test_params_of_events_and_routing_that_cannot_work_are_named(
    make: type[KVEvents | Routing], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidParamsError, match=message):
        make(**changes)


SHAPE = {"layers": 2, "heads": 4, "head_dim": 1, "groups": 1, "d_state": 2, "kernel": 4, "conv_dtype": torch.float32}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 0}, "layers is 0"),
        ({"heads": True}, "heads is True"),
        ({"kernel": 1}, "kernel is 1: at least 2 is needed"),
        ({"groups": 3}, "heads is 4: a multiple of the 3 groups is needed"),
        ({"conv_dtype": "float32"}, "conv_dtype is 'float32': a torch.dtype is needed"),
        ({"ssm_dtype": None}, "ssm_dtype is None: a torch.dtype is needed"),
        ({"form": "mamba3"}, "form is 'mamba3': one of mamba2, gated_delta, mamba1, short_conv, linear is needed"),
        ({"form": []}, "form is .*: one of mamba2"),
        ({"form": "mamba1", "head_dim": 2}, "head_dim is 2: with mamba1 it must be 1"),
    ],
)
def test_shapes_of_states_that_cannot_work_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParamsError, match=message):
        StateShape(**{**SHAPE, **changes})


@pytest.mark.parametrize("integer", [np.int64, np.int32, np.uint8])
@pytest.mark.parametrize("copies", [None, 2])
def test_numbers_of_numpy_serve_in_every_parameter(integer: type[np.integer[Any]], copies: int | None) -> None:
    """They are replaced by Python's numbers, so layouts can be encoded, and no result is rounded to half precision."""
    shape = StateShape(**{name: integer(one) if isinstance(one, int) else one for name, one in SHAPE.items()})
    groups = LayerGroup("full", (integer(0),)), LayerGroup("window", (integer(1),), integer(5))
    events = KVEvents("inproc://numpy", buffer_steps=integer(4), hwm=integer(5))
    made = KVCacheParams(
        torch.float16,
        n_kv_heads=integer(2),
        head_dim=integer(4),
        page_size=integer(4),
        groups=groups,
        states=shape,
        state_copies=None if copies is None else integer(copies),
        kv_events=events,
        tenant_quota=np.float16(0.5),
        host_kvcache_swap_space_gb=np.float16(0.001),
        enable_prefix_caching=np.bool_(1),
        enable_kvcache_swapping_to_host=np.bool_(1),
    )
    sizes = integer(4), integer(64), integer(2)
    manager = PagedKVCacheManager(made, *sizes, ["cpu"], available_cache_memory=np.int64(1 << 16))
    assert run_once(manager, [*range(9)]) == 0
    assert manager.total_num_host_pages > 0
    manager.check()
    manager.close()


def test_each_replica_has_the_port_or_the_name_after_that_of_the_replica_before() -> None:
    plain = KVEvents()
    assert [plain.addresses(rank) for rank in (0, 2)] == [
        ("tcp://127.0.0.1:5557", None),
        ("tcp://127.0.0.1:5559", None),
    ]
    both = KVEvents("ipc:///run/kv", "tcp://[::1]:0")
    assert [both.addresses(rank) for rank in (0, 2)] == [
        ("ipc:///run/kv", "tcp://[::1]:0"),
        ("ipc:///run/kv_dp2", "tcp://[::1]:0"),
    ]


def test_a_hash_whose_package_is_not_installed_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    assert params(hash_algorithm="blake3").hash_algorithm == "blake3"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    usable_hashes.cache_clear()
    try:
        assert usable_hashes() == ("sha256", "xxh3_128")
        with pytest.raises(InvalidParamsError, match=r"hash_algorithm is 'blake3': .*pip install 'pagewire\[blake3\]'"):
            params(hash_algorithm="blake3")
    finally:
        usable_hashes.cache_clear()


@pytest.mark.parametrize(
    ("heads", "tp", "shards"),
    [
        (8, 1, [range(8)]),
        (8, 2, [range(4), range(4, 8)]),
        (2, 4, [range(1), range(1), range(1, 2), range(1, 2)]),
        (1, 3, [range(1)] * 3),
    ],
)
def test_heads_are_split_or_shared(heads: int, tp: int, shards: list[range]) -> None:
    made = params(n_kv_heads=heads, n_devices=tp)
    assert [made.heads_of_shard(shard) for shard in range(tp)] == shards
    assert made.n_kv_heads_per_device == len(shards[0])


def test_bytes_count_all_shards_of_a_replica() -> None:
    assert params().bytes_per_token(10) == 2 * 10 * 8 * 64 * 2
    assert params(n_devices=4).bytes_per_token(10) == 2 * 10 * 8 * 64 * 2
    assert params(n_devices=4, data_parallel_degree=2).bytes_per_token(10) == 2 * 10 * 8 * 64 * 2
    assert params(n_kv_heads=1, n_devices=4, is_mla=True).bytes_per_token(10) == 10 * 4 * 64 * 2


def test_page_size_comes_from_the_params_then_the_call_then_the_default() -> None:
    assert resolve_page_size(params(), None) == 128
    assert resolve_page_size(params(page_size=16), None) == 16
    assert resolve_page_size(params(), 32) == 32
    with pytest.raises(InvalidParamsError, match="page_size is 0"):
        resolve_page_size(params(), 0)


CACHED = {"enable_prefix_caching": True}
STATES = StateShape(2, 4, 8, 1, 8, 4, torch.float32)


@pytest.mark.parametrize(
    ("changes", "shared", "apart"),
    [
        ({}, True, 0),
        ({"share_state_memory": False}, False, 5),
        ({**CACHED, "share_state_memory": False}, False, 15),
        ({**CACHED, "state_copies": 7}, False, 12),
        ({"states": None}, False, 0),
    ],
)
def test_states_share_memory_with_pages_or_have_their_own_with_two_copies_a_request_by_default(
    changes: dict[str, Any], shared: bool, apart: int
) -> None:
    made = params(**{"states": STATES, **changes})
    assert (made.has_states_in_pages, made.states_apart(5)) == (shared, apart)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"state_copies": 3},
            "state_copies is 3 and state_every_pages is 0: both need",
        ),
        ({"state_every_pages": 2}, "state_every_pages is 2: both need enable_prefix_caching"),
        (
            {"state_copies": 3, "share_state_memory": True, "enable_prefix_caching": True},
            "state_copies is 3: with share",
        ),
    ],
)
def test_params_that_states_exclude_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParamsError, match=message):
        params(states=STATES, **changes)


@pytest.mark.parametrize(
    ("given", "needed"),
    [
        ({"host_kvcache_swap_space_gb": 1.0}, ["enable_kvcache_swapping_to_host"]),
        ({"file_tier_max_gb": 1.0}, ["file_tier_dir"]),
        ({"file_tier_key": "m"}, ["file_tier_dir or object_tier_io"]),
        ({"file_tier_io": print}, ["file_tier_dir"]),
        ({"object_tier_tokens_per_s": 1e4}, ["object_tier_io"]),
        ({"tenant_quota": 0.5}, ["enable_prefix_caching"]),
        ({"tenant_quotas": {"a": 0.5}}, ["enable_prefix_caching"]),
        ({"kv_events": KVEvents()}, ["enable_prefix_caching"]),
        ({"eviction_order": print}, ["enable_prefix_caching"]),
        ({"state_copies": 0}, ["states"]),
        ({"state_every_pages": 1}, ["states"]),
        ({"share_state_memory": False}, ["states"]),
        ({"tier_state_share": 0.25}, ["states", "enable_kvcache_swapping_to_host"]),
        ({**HOST, "file_tier_key": "m", "object_tier_io": print}, []),
        ({"enable_prefix_caching": True, "tenant_quota": 0.5, "n_kv_heads": 4}, []),
    ],
)
def test_params_without_effect_are_named_with_what_would_give_them_one(
    given: dict[str, Any], needed: list[str]
) -> None:
    assert [sentence.split(" changes nothing without ")[1] for sentence in params(**given).without_effect()] == needed
