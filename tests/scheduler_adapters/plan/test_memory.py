"""Pages, requests and ranks: five public models by the numbers, and small ones beside a real manager."""

from pathlib import Path

import pytest
import torch

from kvcache import KVCacheParams, PagedKVCacheManager, TextContext
from kvcache.sizing import max_supported_sequence_length
from scheduler_adapters.errors import PlanError
from scheduler_adapters.plan.layers import AlikeLayers, CachedModel, read_model
from scheduler_adapters.plan.memory import Choice, MemoryAsked, Room, choice, choices

CONFIGS = Path(__file__).parent / "configs"
MEMORY = 40 << 30


def room(found: Choice, way: str) -> Room:
    return next(one for one in found.rooms if one.way == way)


def asked(
    memory: int = MEMORY, page_size: int = 16, step: int = 8192, lengths: tuple[int, ...] = (8192, 65_536)
) -> MemoryAsked:
    return MemoryAsked(memory, page_size, step, lengths)


def small(*each: AlikeLayers) -> CachedModel:
    return CachedModel("small", None, torch.bfloat16, each)


# Of one rank of eight: heads, copies, bytes of a page, and pages in 40 GiB.
PUBLIC = {
    "llama-3-70b": ((1,), 1, 655_360, 65_536),
    "qwen3-235b-a22b": ((1,), 2, 770_048, 55_775),
    "deepseek-v3": ((1,), 8, 1_124_352, 38_199),
    "gemma-3-27b": ((2, 2), 1, 1_015_808, 42_281),
    "gpt-oss-120b": ((1, 1), 1, 147_456, 291_271),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_models_on_eight_devices(name: str) -> None:
    model = read_model(CONFIGS / name)
    found = choice(model, 8, 1, asked())
    ours = room(found, "pagewire")
    assert (found.heads, found.copies, ours.page_bytes, ours.pages) == PUBLIC[name]
    assert ours.longest == PUBLIC[name][3] * 16
    assert ours.requests == {8192: PUBLIC[name][3] // 512, 65_536: PUBLIC[name][3] // 4096}
    assert [(one.tp, one.dp) for one in choices(model, 8, asked())] == [(8, 1), (4, 2), (2, 4), (1, 8)]


@pytest.mark.parametrize(("heads", "kind", "tp"), [(4, "full", 1), (4, "full", 2), (4, "full", 8), (1, "latent", 2)])
def test_a_rank_holds_what_a_real_manager_gives_it(heads: int, kind: str, tp: int) -> None:
    layers = AlikeLayers("latent" if kind == "latent" else "full", 3, heads=heads, width=32)
    memory = 10_000
    ours = room(choice(small(layers), tp, 1, asked(memory, 4, lengths=(9,))), "pagewire")
    params = KVCacheParams(
        torch.bfloat16, heads, 32 if kind == "latent" else 16, is_mla=kind == "latent", page_size=4, n_devices=tp
    )
    assert ours.longest == max_supported_sequence_length(params, 3, memory * tp)
    manager = PagedKVCacheManager(params, 40, 64, 3, ["cpu"] * tp, available_cache_memory=memory * tp)
    assert manager.num_free_blocks == ours.pages
    assert all(tensor.nbytes <= memory + (ours.page_bytes or 0) for tensor in manager.device_tensors[0])  # null page
    running = 0
    while running < 40:
        context = TextContext(range(9), 64)
        manager.external_claim(context.request_id)
        if not manager.maybe_reserve(context):
            break
        running += 1
    assert running == ours.requests[9]


def test_states_are_taken_out_of_the_memory_first() -> None:
    model = small(AlikeLayers("full", 2, heads=2, width=32), AlikeLayers("conv", 3, conv_bytes=1000))
    ours, least = choice(model, 1, 2, asked(12_000, 4, lengths=(8, 9))).rooms
    page = 2 * 2 * 32 * 2 * 4
    assert (ours.page_bytes, ours.request_bytes) == (page, {8: 2 * page + 1000, 9: 3 * page + 1000})
    assert ours.requests == {8: 12_000 // (2 * page + 1000) * 2, 9: 12_000 // (3 * page + 1000) * 2}
    assert ours.longest == (12_000 - 1000) // page * 4
    assert (least.way, least.request_bytes) == ("least", ours.request_bytes), "vLLM's blocks of states are not said"


def test_the_least_is_the_windows_pages_alone() -> None:
    window = AlikeLayers("window", 2, heads=2, width=32, window=6)
    least = room(choice(small(window), 1, 1, asked(100_000, 4, lengths=(4, 8, 9, 1000))), "least")
    page = 2 * 2 * 32 * 2 * 4
    # Six tokens, of which the newest is not cached yet, reach over three pages of four at most.
    assert least.request_bytes == {4: page, 8: 2 * page, 9: 3 * page, 1000: 3 * page}
    assert least.longest is None


def test_what_does_not_fit_is_said_or_left_out() -> None:
    model = small(AlikeLayers("full", 1, heads=6, width=32))
    with pytest.raises(PlanError, match="tensor parallelism 4: n_kv_heads is 6: 4 shards"):
        choice(model, 4, 1, asked())
    assert [(one.tp, one.dp) for one in choices(model, 12, asked())] == [(12, 1), (6, 2), (3, 4), (2, 6), (1, 12)]
    with pytest.raises(PlanError, match="memory is 100 bytes: one page of 16 tokens takes 6,144 on a rank"):
        choice(model, 1, 1, asked(100))


def test_fp8_takes_half() -> None:
    found = choice(read_model(CONFIGS / "llama-3-70b", "fp8"), 8, 1, asked())
    assert room(found, "pagewire").page_bytes == PUBLIC["llama-3-70b"][2] // 2
