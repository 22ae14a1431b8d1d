from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcache import (
    InvalidParamsError,
    KVCacheParams,
    KVCacheQuantizationConfig,
    NoFreeStatePageError,
    PagedKVCacheManager,
    PoolTooSmallError,
    PromptTooLongError,
    StateShape,
    TextContext,
    UnknownArgumentError,
)
from kvcache.sizing import page_bytes


def params(**changes: Any) -> KVCacheParams:
    return KVCacheParams(**{"dtype": torch.float16, "n_kv_heads": 4, "head_dim": 8, "page_size": 16, **changes})


PAGE = 2 * 3 * 4 * 8 * 2 * 16  # The number of bytes of a page with 3 layers.


@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_pages_follow_from_the_budget_of_each_replica(dp: int, tp: int) -> None:
    made = params(n_devices=dp * tp, data_parallel_degree=dp)
    manager = PagedKVCacheManager(made, 8, 64, 3, ["cpu"] * (dp * tp), available_cache_memory=PAGE * 7 * dp + PAGE - 1)
    assert manager.total_num_pages == 7 * dp
    shard = manager.device_tensors[0][0]
    assert shard.shape[0] == 8  # The 8 pages include the null page.
    assert sum(tensor.nbytes for tensor in manager.device_tensors[0]) == 8 * PAGE


def test_longest_sequence_is_per_replica_and_whole_pages() -> None:
    longest = PagedKVCacheManager.max_supported_sequence_length
    assert longest(params(), 3, PAGE * 7 + PAGE // 2) == 7 * 16
    assert longest(params(n_devices=2, data_parallel_degree=2), 3, PAGE * 7) == 3 * 16
    assert longest(params(n_devices=2), 3, PAGE * 7) == 7 * 16
    assert longest(params(), 3, PAGE - 1) == 0


def test_estimate_is_the_budget_or_what_full_requests_take() -> None:
    estimate = PagedKVCacheManager.estimated_memory_size
    two = params(n_devices=2, data_parallel_degree=2)
    assert estimate(params(), 4, 33, 3, 1 << 40, ["cpu"]) == 4 * 3 * PAGE
    assert estimate(params(), 4, 33, 3, 1000, ["cpu"]) == 1000
    # Two replicas need no more memory than one, because the batch is divided between them.
    assert estimate(two, 4, 33, 3, 1 << 40, ["cpu"] * 2) == 4 * 3 * PAGE
    assert estimate(two, 5, 33, 3, 1 << 40, ["cpu"] * 2) == 6 * 3 * PAGE
    with pytest.raises(InvalidParamsError, match="1 devices given"):
        estimate(two, 4, 33, 3, 1 << 40, ["cpu"])


def test_batch_size_derives_from_the_budget() -> None:
    infer = PagedKVCacheManager.infer_optimal_batch_size
    assert infer(params(), 33, 3, PAGE * 3 * 5 + PAGE, ["cpu"]) == 5
    assert infer(params(), 33, 3, PAGE, ["cpu"]) == 1
    assert infer(params(), 33, 3, 1 << 50, ["cpu"]) == 512
    for degree in (1, 2, 4):  # Each replica gets one request, even with the smallest budget.
        many = params(n_devices=degree, data_parallel_degree=degree)
        for budget in (0, PAGE, PAGE * 3 * degree - 1, PAGE * 3 * degree):
            assert infer(many, 33, 3, budget, ["cpu"] * degree) == degree
    assert infer(params(n_devices=2, data_parallel_degree=2), 33, 3, PAGE * 3 * 5, ["cpu"] * 2) == 4


def test_a_budget_of_one_page_a_replica_is_enough_and_a_batch_of_fewer_requests_than_replicas_is_not() -> None:
    two = params(n_devices=2, data_parallel_degree=2)
    manager = PagedKVCacheManager(two, 2, 16, 3, ["cpu"] * 2, available_cache_memory=2 * PAGE)
    assert manager.total_num_pages == 2
    with pytest.raises(InvalidParamsError, match="max_batch_size is 1: an integer from 2 to"):
        PagedKVCacheManager(two, 1, 16, 3, ["cpu"] * 2, available_cache_memory=2 * PAGE)


STATE = StateShape(layers=2, heads=40, head_dim=1, groups=1, d_state=1, kernel=200, conv_dtype=torch.float32)


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("way", [{}, {"share_state_memory": False}, {"state_copies": 3}])
def test_states_are_counted_as_a_manager_has_them(way: dict[str, Any], dp: int) -> None:
    made = params(n_devices=dp, data_parallel_degree=dp, states=STATE, enable_prefix_caching=True, **way)
    devices, rows, length = ["cpu"] * dp, 3 * dp, 33
    memory = PagedKVCacheManager.estimated_memory_size(made, rows, length, 3, 1 << 40, devices)

    def holds(memory: int, rows: int, length: int) -> bool:
        """Returns whether this many requests of this length can run at the same time in this memory."""
        try:
            manager = PagedKVCacheManager(made, rows, length + 16, 3, devices, available_cache_memory=memory)
            for at in range(rows):
                context = TextContext(range(length), length + 16, f"r{at}")
                manager.external_claim(context.request_id, at % dp)
                if not manager.maybe_reserve(context):
                    return False
        except (PoolTooSmallError, PromptTooLongError, NoFreeStatePageError):
            return False
        return True

    assert holds(memory, rows, length)
    assert not holds(memory - dp, rows, length)
    infer = PagedKVCacheManager.infer_optimal_batch_size
    assert infer(made, length, 3, memory, devices) == rows
    assert infer(made, length, 3, memory - dp, devices) == rows - dp
    longest = PagedKVCacheManager.max_supported_sequence_length(made, 3, memory)
    assert longest % 16 == 0 < longest
    assert holds(memory, dp, longest)
    assert not holds(memory, dp, longest + 1)
    assert PagedKVCacheManager.max_supported_sequence_length(made, 3, PAGE) == 0


def test_a_page_takes_the_bytes_that_are_counted_if_all_its_tokens_share_a_scale() -> None:
    made = params(dtype=torch.int8, kvcache_quant_config=KVCacheQuantizationConfig(torch.float32, 2, "page"))
    manager = PagedKVCacheManager(made, 2, 64, 3, ["cpu"], available_cache_memory=1 << 20)
    assert manager.device_tensors[0][0].stride(0) == page_bytes(made, 3, 16)
    assert manager.total_num_pages == (1 << 20) // page_bytes(made, 3, 16)


def test_a_budget_of_fewer_pages_than_requests_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    for pages in (8, 7):
        caplog.clear()
        PagedKVCacheManager(params(), 8, 64, 3, ["cpu"], available_cache_memory=PAGE * pages)
        warned = [record.message for record in caplog.records]
        shortage = "7 pages a replica for up to 8 requests: not all of them can run at a time"
        assert (shortage in warned) == (pages == 7)


@pytest.mark.parametrize("call", ["estimated_memory_size", "infer_optimal_batch_size"])
def test_values_from_which_no_size_follows_are_refused(call: str) -> None:
    def ask(**changes: Any) -> object:
        asked: dict[str, Any] = {"params": params(), "max_seq_len": 33, "num_layers": 3, "devices": ["cpu"]}
        asked |= {"available_cache_memory": 1 << 20}
        asked |= {"max_batch_size": 4} if call == "estimated_memory_size" else {}
        return getattr(PagedKVCacheManager, call)(**{**asked, **changes})

    assert ask()
    with pytest.raises(InvalidParamsError, match="params is None: a KVCacheParams is needed"):
        ask(params=None)
    with pytest.raises(UnknownArgumentError, match=f"{call}: pages=3 is not a keyword of this call"):
        ask(pages=3)
    for wrong in ("cpu:x", "mps", 3):
        with pytest.raises(InvalidParamsError, match=f"device is {wrong!r}: a device of 'cpu' or 'cuda'"):
            ask(devices=[wrong])
