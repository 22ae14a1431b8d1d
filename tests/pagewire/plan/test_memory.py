"""Pages, requests and ranks of five public models with known figures. Small models are compared with a real manager."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from kvcache import KVCacheParams, LayerGroup, PagedKVCacheManager, TextContext
from kvcache.errors import NoFreeRowError, NoFreeStatePageError, PoolTooSmallError, PromptTooLongError
from kvcache.params import StateShape
from kvcache.sizing import max_supported_sequence_length
from pagewire.plan.layers import AlikeLayers, CachedModel, read_model
from pagewire.plan.memory import Choice, Room, choice, choices
from pagewire.plan.ways import MemoryAsked
from scheduler_adapters.errors import PlanError

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


# On one of eight ranks: the number of heads, the number of ranks that hold the same head, the bytes of a page, and the
# number of pages in 40 GiB.
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


def running(manager: PagedKVCacheManager, length: int, most: int = 60) -> int:
    """Returns the number of requests of this length for which a manager has pages. Each request runs token by token to
    its end.
    """
    for count in range(most):
        context = TextContext(range(length), 4096)
        try:
            manager.external_claim(context.request_id)
        except (NoFreeStatePageError, NoFreeRowError):
            return count
        while context.start_idx < length:
            context.set_token_indices(active_idx=context.start_idx + 1)
            if not manager.maybe_reserve(context):
                return count
            context.update(1)
            manager.step([context])
    return most


WINDOWS = AlikeLayers("window", 29, heads=2, width=32, window=6)
MANY = AlikeLayers("full", 10, heads=2, width=32)
FULL = AlikeLayers("full", 2, heads=2, width=32)


# The layers of small models, and how many tokens a step runs.
FILLED = {
    "full": ((FULL,), 128),
    "hybrid": ((AlikeLayers("window", 10, heads=2, width=32, window=100), FULL), 256),
    "hybrid, long steps": ((AlikeLayers("window", 10, heads=2, width=32, window=100), FULL), 8192),
    "hybrid, short steps": ((AlikeLayers("window", 6, heads=2, width=32, window=64), FULL), 16),
    "two windows": (
        (
            AlikeLayers("window", 2, heads=2, width=32, window=50),
            AlikeLayers("window", 4, heads=2, width=32, window=210),
            FULL,
        ),
        256,
    ),
    "windows alone": ((AlikeLayers("window", 4, heads=2, width=32, window=100),), 512),
}


def filled(manager: PagedKVCacheManager, length: int, step: int) -> int:
    """Fills a manager with requests of this length, and returns the number of requests that it holds at a time.

    The prompts run one after another, in chunks of `step` tokens. All other requests decode, and keep as many pages as
    their windows ever need.
    """
    tables, size = manager.layer_tables, manager.page_size

    def held(known: int, start: int, end: int) -> int:
        """Returns the pages of a request of `known` tokens whose step runs the tokens `start` to `end`."""
        lasts = [known if one.group.keeps_all else end for one in tables.tables]
        firsts = [one.group.first_seen(start) // size for one in tables.tables]
        return sum(-(-last // size) - first for last, first in zip(lasts, firsts, strict=True))

    # Where a decoding request holds the most pages; with chunked attention, this may be long before its end. Then the
    # length of the first chunk after which a chunk holds most.
    decodes_at = max(range(1, length), key=lambda at: held(at + 1, at, at + 1))
    offset = max(
        range(1, min(step, length) + 1),
        key=lambda first: max(held(length, at, min(length, at + step)) for at in (0, *range(first, length, step))),
    )
    for count in range(200):
        context = TextContext(range(length), 4096)
        manager.external_claim(context.request_id)
        if not prefilled(manager, context, offset, step):
            return count
        # The request is replaced by one that decodes, and gives back the pages of its last chunk.
        manager.release(context.request_id)
        context = TextContext(range(decodes_at), 4096)
        manager.external_claim(context.request_id)
        assert prefilled(manager, context, offset, step)
        assert manager.maybe_reserve(context)
    raise AssertionError("the manager is never full")


def prefilled(manager: PagedKVCacheManager, context: TextContext, offset: int, step: int) -> bool:
    """Runs a prompt: `offset` tokens, and then chunks of `step` tokens. Returns whether there are enough pages.

    A chunk that would not fit into an empty manager is shortened as far as necessary, as in `ServingLoop`.
    """
    length, end = context.end_idx, min(offset, context.end_idx)
    while context.start_idx < length:
        context.set_token_indices(active_idx=end)
        try:
            if not manager.maybe_reserve(context):
                return False
        except PromptTooLongError:
            if context.active_length == 1:
                return False
            end -= 1
        else:
            context.update(1)
            manager.step([context])
            end = min(length, context.start_idx + step)
    return True


def told_and_filled(
    each: Sequence[AlikeLayers],
    step: int,
    page_size: int = 16,
    lengths: Sequence[int] = (300, 1000, 2000),
    memories: Sequence[int] = (3_000_000, 5_555_555, 12_345_678),
) -> dict[tuple[int, int], tuple[int, int]]:
    """Returns how many requests fit by the plan, and in a real manager, for several memories and each length."""
    model = small(*each)
    groups, first = list[LayerGroup](), 0
    for one in each:
        layers = tuple(range(first, first := first + one.layers))
        kind = "chunked" if one.kind == "chunked" else "window" if one.window else "full"
        groups.append(LayerGroup(kind, layers, one.window))
    windows = any(one.window for one in each)
    params = KVCacheParams(torch.bfloat16, 2, 16, page_size=page_size, groups=tuple(groups) if windows else ())
    found = dict[tuple[int, int], tuple[int, int]]()
    for memory in memories:
        told = room(choice(model, 1, 1, asked(memory, page_size, step, lengths)), "groups" if windows else "pagewire")
        for length in told.requests:
            manager = PagedKVCacheManager(params, 400, 4096, first, ["cpu"], available_cache_memory=memory)
            found[memory, length] = told.requests[length], filled(manager, length, step)
            manager.close()
    return found


@pytest.mark.parametrize("name", FILLED)
def test_as_many_requests_fit_as_a_loop_gets_into_a_real_manager(name: str) -> None:
    found = told_and_filled(*FILLED[name])
    assert all(ours == real for ours, real in found.values()), found
    assert len({ours for ours, _ in found.values()}) > 4


def chunked(layers: int, window: int) -> AlikeLayers:
    return AlikeLayers("chunked", layers, heads=2, width=32, window=window)


# The layers of small models, how many tokens a step runs, and the page size. The lengths 384 and 1,920 end with a chunk
# of each of these models.
CHUNKED = {
    "as in Llama 4": ((chunked(6, 128), FULL), 256, 16),
    "long steps": ((chunked(6, 384), FULL), 8192, 16),
    "short steps": ((chunked(6, 128), FULL), 16, 16),
    "alone": ((chunked(4, 192),), 100, 16),
    "two lengths": ((chunked(4, 64), chunked(2, 384), FULL), 64, 16),
    "beside a window": ((chunked(4, 128), AlikeLayers("window", 2, heads=2, width=32, window=100), FULL), 100, 16),
    "pages larger than chunks": ((chunked(4, 16), FULL), 64, 32),
    "pages that do not divide a chunk": ((chunked(4, 24), FULL), 64, 16),
}


@pytest.mark.parametrize("name", CHUNKED)
def test_with_chunked_attention_at_least_as_many_requests_fit_as_planned(name: str) -> None:
    """All kinds of layers hold the most pages at the end of a chunk. A request that ends elsewhere holds at most what
    the plan counts, which takes each kind of layer at its own worst moment.
    """
    found = told_and_filled(*CHUNKED[name], (384, 1920), (1_111_111, 3_000_000))
    assert all(ours == real for ours, real in found.values()), found
    found = told_and_filled(*CHUNKED[name], (100, 500, 1000), (1_111_111, 3_000_000))
    assert all(real * 0.7 - 1 <= ours <= real for ours, real in found.values()), found


@pytest.mark.parametrize("tp", [1, 2])
def test_groups_hold_what_a_real_manager_of_them_holds(tp: int) -> None:
    model, memory = small(WINDOWS, MANY), 1_000_000 // tp
    ours = room(choice(model, tp, 3, asked(memory, 4, 1, lengths=(9, 29, 400))), "groups")
    params = KVCacheParams(
        torch.bfloat16,
        2,
        16,
        page_size=4,
        n_devices=tp,
        groups=(LayerGroup("window", tuple(range(29)), 6), LayerGroup("full", tuple(range(29, 39)))),
    )
    assert ours.longest == max_supported_sequence_length(params, 39, memory * tp)
    # At these lengths a window begins at the end of a page, so it touches the largest number of pages.
    for length in (9, 29):
        manager = PagedKVCacheManager(params, 60, 4096, 39, ["cpu"] * tp, available_cache_memory=memory * tp)
        assert (manager.num_free_blocks, manager.layer_tables.layers_per_page) == (ours.pages, 10)
        assert running(manager, length) == ours.requests[length] // 3
    page = 10 * 2 * 32 * 2 * 4 // tp
    parts = [(part.kind, part.layers, part.tables, part.request_bytes[29] // page) for part in ours.parts]
    assert parts == [("window 6", 29, 3, 9), ("full", 10, 1, 8)]
    assert ours.lost_bytes == dict.fromkeys((9, 29, 400), 3 * page // 10), (
        "of each of the three pages three tenths are lost"
    )


def test_only_models_with_windows_and_pages_of_one_size_have_groups() -> None:
    wide, state = AlikeLayers("full", 2, heads=4, width=32), AlikeLayers("conv", 3, state=CONVOLVED)
    longer = AlikeLayers("window", 29, heads=2, width=32, window=60)
    for model in (small(WINDOWS, longer), small(WINDOWS)):
        assert "groups" in {one.way for one in choice(model, 1, 1, asked()).rooms}
    for model in (small(FULL), small(WINDOWS, wide), small(WINDOWS, FULL, state)):
        assert "groups" not in {one.way for one in choice(model, 1, 1, asked()).rooms}
    (part,) = room(choice(small(FULL, wide), 1, 1, asked()), "vllm").parts
    assert (part.kind, part.layers, part.tables) == ("full", 4, 1)


CONVOLVED = StateShape(3, 40, 1, 1, 1, 3, torch.bfloat16, form="short_conv")
DELTA = StateShape(2, 4, 6, 2, 8, 4, torch.bfloat16, form="gated_delta")
# A state takes as much memory as 11 pages, so 40 pages have room for two slabs.
LARGE = StateShape(10, 4, 6, 2, 8, 4, torch.bfloat16, form="gated_delta")


@pytest.mark.parametrize("way", ["pagewire", "share_memory"])
@pytest.mark.parametrize("kind", ["full", "latent"])
@pytest.mark.parametrize(("shape", "tp"), [(CONVOLVED, 1), (CONVOLVED, 2), (DELTA, 1), (DELTA, 2), (LARGE, 1)])
def test_states_take_what_a_real_manager_of_them_gives_them(shape: StateShape, tp: int, kind: str, way: str) -> None:
    attention = FULL if kind == "full" else AlikeLayers("latent", 2, heads=1, width=64)
    model, memory = small(attention, AlikeLayers("state", shape.layers, state=shape)), 41_000
    ours = room(choice(model, tp, 2, asked(memory, 4, lengths=(1, 9, 30))), way)
    heads, dim = (2, 16) if kind == "full" else (1, 64)
    params = KVCacheParams(
        torch.bfloat16,
        heads,
        dim,
        is_mla=kind == "latent",
        page_size=4,
        n_devices=tp,
        states=shape,
        share_state_memory=way == "share_memory",
    )

    def made(rows: int, longest: int = 4096) -> PagedKVCacheManager:
        return PagedKVCacheManager(params, rows, longest, 2, ["cpu"] * tp, available_cache_memory=memory * tp)

    for length in (1, 9, 30):
        count = ours.requests[length] // 2
        assert running(made(count), length) == count
        try:
            assert running(made(count + 1), length) <= count
        except (PoolTooSmallError, PromptTooLongError):  # With one more state, too little memory is left for pages.
            assert way == "pagewire"
    manager, context = made(1), TextContext(range(ours.longest or 0), 4096)
    manager.external_claim(context.request_id)
    assert manager.maybe_reserve(context)
    manager.release(context.request_id)
    manager.external_claim("longer")
    with pytest.raises(PromptTooLongError, match="request 'longer': .* pages, but the pool has"):
        manager.maybe_reserve(TextContext(range((ours.longest or 0) + 1), 4096, "longer"))
    (part, state), page = ours.parts, ours.page_bytes or 1
    assert (part.kind, part.tables, state.kind, state.tables) == (kind, 1, "state", 0)
    assert ours.request_bytes[9] == 3 * page + state.request_bytes[9] == sum(one.request_bytes[9] for one in ours.parts)
    own = model.state_bytes(tp)
    assert ours.lost_bytes[9] == state.request_bytes[9] - own
    assert state.request_bytes[9] == (manager.slab_pages * page if way == "share_memory" else own)


def test_states_are_left_out_if_the_memory_is_too_small_for_them() -> None:
    model = small(FULL, AlikeLayers("state", 2, state=DELTA))
    two_slabs = 2 * (-(-model.state_bytes(1) // 1024)) * 1024
    # page 0 belongs to no request, so it is not counted
    for memory, there in ((two_slabs - 1024, True), (two_slabs - 1025, False)):
        ways = {one.way for one in choice(model, 1, 1, asked(memory, 4)).rooms}
        assert ways == {"pagewire", "least", *(["share_memory"] if there else [])}, (
            "vLLM's blocks of states are not said"
        )
    with pytest.raises(PlanError, match="one page of 4 tokens takes 3,232 on a rank"):
        choice(model, 1, 1, asked(3231, 4))
    twice = small(FULL, AlikeLayers("state", 2, state=DELTA), AlikeLayers("conv", 3, state=CONVOLVED))
    assert {one.way for one in choice(twice, 1, 1, asked()).rooms} == {"pagewire", "least"}


# On one rank with 40 GiB, for 8,192 and for 65,536 tokens: the number of requests, and the percentage of their bytes
# that is lost.
LAID = {
    ("gemma-3-27b", "groups"): ((34, 2.2), (6, 0.4)),
    ("gpt-oss-120b", "groups"): ((138, 0.0), (17, 0.0)),
    ("llama-4-scout", "groups"): ((26, 0.0), (9, 0.0)),
    ("qwen3-next-80b", "pagewire"): ((153, 0.0), (25, 0.0)),
    ("qwen3-next-80b", "share_memory"): ((154, 0.1), (25, 0.0)),
    ("nemotron-h-8b", "share_memory"): ((181, 0.0), (36, 0.0)),
    ("bamba-9b", "share_memory"): ((191, 0.1), (46, 0.0)),
    ("kimi-linear-48b-a3b", "share_memory"): ((392, 0.1), (75, 0.0)),
}


@pytest.mark.parametrize(("name", "way"), LAID)
def test_public_models_of_several_kinds_of_layers(name: str, way: str) -> None:
    found = room(choice(read_model(CONFIGS / name), 1, 1, asked()), way)
    lost = [round(100 * found.lost_bytes[length] / size, 1) for length, size in found.request_bytes.items()]
    assert (*zip(found.requests.values(), lost, strict=True),) == LAID[name, way]


def test_the_way_least_counts_only_the_pages_of_the_window() -> None:
    window = AlikeLayers("window", 2, heads=2, width=32, window=6)
    least = room(choice(small(window), 1, 1, asked(100_000, 4, lengths=(4, 8, 9, 1000))), "least")
    page = 2 * 2 * 32 * 2 * 4
    # A window needs six tokens, and the newest of them is not cached yet. The tokens are in at most three pages of four
    # tokens.
    assert least.request_bytes == {4: page, 8: 2 * page, 9: 3 * page, 1000: 3 * page}
    assert least.longest is None


def test_sizes_that_do_not_fit_are_refused_or_left_out() -> None:
    model = small(AlikeLayers("full", 1, heads=6, width=32))
    with pytest.raises(PlanError, match="tensor parallelism 4: n_kv_heads is 6: 4 shards"):
        choice(model, 4, 1, asked())
    assert [(one.tp, one.dp) for one in choices(model, 12, asked())] == [(12, 1), (6, 2), (3, 4), (2, 6), (1, 12)]
    with pytest.raises(PlanError, match="memory is 100 bytes: one page of 16 tokens takes 6,144 on a rank"):
        choice(model, 1, 1, asked(100))


def test_fp8_takes_half() -> None:
    found = choice(read_model(CONFIGS / "llama-3-70b", "fp8"), 8, 1, asked())
    assert room(found, "pagewire").page_bytes == PUBLIC["llama-3-70b"][2] // 2
