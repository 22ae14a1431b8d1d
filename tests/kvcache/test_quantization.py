"""Scales of quantised pages: their places, their sizes, and their moves together with their page."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcache import InvalidParamsError, KVCacheParams, KVCacheQuantizationConfig, PagedKVCacheManager, page_rows
from kvcache.layout import kv_kind, shard_layout, shard_layouts
from kvcache.params import ScaleOf
from tests.kvcache.build import manager_of
from tests.kvcache.random_model.run import Model
from tests.kvcache.served import SIZE, Served

KINDS: list[ScaleOf] = ["token and head", "page and head", "page"]


def config(scale_of: ScaleOf = "token and head", dtype: torch.dtype = torch.float32, granularity: int = 2) -> Any:
    return KVCacheQuantizationConfig(dtype, granularity, scale_of)


def params(**changes: Any) -> KVCacheParams:
    known: dict[str, Any] = {"dtype": torch.float8_e4m3fn, "n_kv_heads": 4, "head_dim": 6, "page_size": 16}
    return KVCacheParams(**known | {"kvcache_quant_config": config()} | changes)


@pytest.mark.parametrize(
    ("scale_of", "shape", "num_bytes"),
    [
        ("token and head", (2, 3, 16, 2, 3), 2 * 3 * 16 * 2 * (6 + 4 * 3)),
        ("page and head", (2, 3, 1, 2, 3), 2 * 3 * 2 * (16 * 6 + 4 * 3)),
        # The size is rounded up to a multiple of 16 bytes.
        ("page", (2, 3, 1, 1, 3), 2 * 3 * (16 * 2 * 6 + 4 * 3) + 8),
    ],
)
def test_the_scales_lie_at_the_end_of_each_page(scale_of: ScaleOf, shape: tuple[int, ...], num_bytes: int) -> None:
    cache = params(kvcache_quant_config=config(scale_of), n_devices=2)
    pages = 5
    assert [layout.page_bytes for layout in shard_layouts(cache, 3, 16)] == [num_bytes] * 2
    memory = 2 * num_bytes * pages + 7
    assert PagedKVCacheManager.estimated_memory_size(cache, 1, 64, 3, memory, ["cpu"] * 2) == 4 * 2 * num_bytes
    manager = PagedKVCacheManager(cache, 2, 64, 3, ["cpu"] * 2, available_cache_memory=memory)
    assert manager.total_num_pages == pages
    for entry in manager.fetch([]):
        blocks, scales = entry.blocks, entry.kv_scales
        assert scales is not None
        assert (blocks.shape, blocks.dtype) == ((6, 2, 3, 16, 2, 6), torch.float8_e4m3fn)
        assert (scales.shape, scales.dtype) == ((6, *shape), torch.float32)
        rows = page_rows(blocks).view(torch.uint8)
        assert rows.shape == (6, num_bytes)
        rows.zero_()
        blocks[3], before = 1.0, scales.clone()
        assert torch.equal(scales, before), "values and scales are apart"
        scales[3] = 2.0
        assert bool((blocks[3].float() == 1.0).all())
        assert not rows[[0, 1, 2, 4, 5]].any()
        assert int(rows[3].count_nonzero()) == blocks[3].numel() + scales[3].numel(), "0x38, and 0x40000000"
    for symbols, entry in zip(manager.input_symbols(), manager.fetch([]), strict=True):
        for meta, real in zip(symbols.inputs[::4], entry[::4], strict=True):
            assert (meta.shape, meta.stride(), meta.dtype) == (real.shape, real.stride(), real.dtype)
    manager.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": torch.float16}, "dtype is torch.float16: kvcache_quant_config needs an 8-bit type"),
        ({"head_dim": 7}, "quantization_granularity is 2: a divisor of head_dim 7 is needed"),
        ({"kvcache_quant_config": "fp8"}, "kvcache_quant_config is 'fp8'"),
    ],
)
def test_impossible_quantisations_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParamsError, match=message):
        params(**changes)


@pytest.mark.parametrize(
    "changes", [{"scale_dtype": torch.int8}, {"quantization_granularity": 0}, {"scale_of": "head"}]
)
def test_a_config_checks_its_values(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidParamsError, match=next(iter(changes))):
        KVCacheQuantizationConfig(**changes)


def test_layouts_with_different_scales_have_different_fingerprints_and_those_without_keep_theirs() -> None:
    plain = shard_layout(params(kvcache_quant_config=None), 3, 16, 0)
    assert plain.fingerprint() == "4efc377cf04ad244"
    kinds = [shard_layout(params(kvcache_quant_config=config(one)), 3, 16, 0) for one in KINDS]
    assert len({layout.fingerprint() for layout in (plain, *kinds)}) == 4
    assert len({kv_kind([layout]) for layout in (plain, *kinds)}) == 4
    for one, of in zip(KINDS, ("token and head", "page and head", "page"), strict=True):
        told = {
            kv_kind(shard_layouts(params(kvcache_quant_config=config(one), n_devices=tp), 3, 16)) for tp in (1, 2, 4)
        }
        assert len(told) == 1, "however heads are split"
        assert told.pop().endswith(f"elements of a {of}")
    assert kv_kind(kinds[:1]).endswith("float32 scales of 2 elements of a token and head")


@pytest.mark.parametrize("scale_of", KINDS)
def test_scales_move_with_their_page(scale_of: ScaleOf) -> None:
    """Pages are shared, copied, forked, evicted and loaded from the host. The scales of a page are compared whenever
    the page is read. In the KV of a token, each value has one byte, and the scale has 52 bits.
    """
    seen: Counter[str] = Counter()
    for number in range(18):
        chosen = {"kvcache_quant_config": config(scale_of, torch.float64), "dtype": torch.int8}
        moves = Model.of(number, ("forks", "preemption", "batches", *["host"] * (number % 3 > 0)), chosen)
        for _ in range(100):
            moves.move()
        moves.finish()
        seen += moves.seen
        seen["evicted"] += moves.manager.metrics.evictions
        seen["restored"] += moves.manager.metrics.h2d_blocks_copied
    least = {"hit": 15, "evicted": 30, "fork": 20, "restored": 2}
    assert {event: seen[event] for event, count in least.items() if seen[event] < count} == {}


@pytest.mark.parametrize("scale_of", KINDS)
def test_scales_come_back_from_the_host(scale_of: ScaleOf) -> None:
    served = Served(12, 40, params={"kvcache_quant_config": config(scale_of, torch.float64)}, dtype=torch.int8)
    prompt = range(6 * SIZE + 1)
    assert served.serve(prompt) == 0
    served.fill(11)
    assert served.serve(prompt) == 6 * SIZE
    assert served.manager.metrics.h2d_blocks_copied == 5, "one was never evicted"


@pytest.mark.parametrize("scale_of", KINDS)
def test_scales_come_back_from_files(scale_of: ScaleOf, tmp_path: Path) -> None:
    prompt = range(6 * SIZE + 1)

    def made(of: ScaleOf) -> Served:
        chosen = {"kvcache_quant_config": config(of, torch.float64)}
        files = {"file_tier_dir": str(tmp_path), "file_tier_max_gb": 0.01, "file_tier_key": "model"}
        return Served(12, 8, params=chosen | files, dtype=torch.int8)

    first = made(scale_of)
    assert first.serve(prompt) == 0
    first.fill(11)
    first.manager.close()
    second = made(scale_of)
    assert second.serve(prompt) > 0
    second.manager.close()
    other = made(next(one for one in KINDS if one != scale_of))
    assert other.serve(prompt) == 0, "pages with other scales are not this one's"
    other.manager.close()


def test_a_manager_without_scales_hands_none_out() -> None:
    assert [entry.kv_scales for entry in manager_of(8).fetch([])] == [None]
