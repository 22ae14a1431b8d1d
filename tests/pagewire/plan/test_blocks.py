"""The blocks of vLLM's layout, for public models with known figures. `tests/vllm_engine/test_plan.py` compares the same
figures with vLLM.
"""

from pathlib import Path

import pytest

from pagewire.plan.blocks import VllmBlocks, vllm_blocks
from pagewire.plan.layers import AlikeLayers, read_model
from pagewire.plan.memory import choice
from pagewire.plan.ways import MemoryAsked

CONFIGS = Path(__file__).parent / "configs"
MEMORY, STEP, LENGTHS = 40 << 30, 8192, (8192, 65_536)

# For each model: the bytes of a block and the number of blocks in 40 GiB, on one of 8 ranks and on a single rank. Then,
# for two lengths of a request, the number of blocks that it takes.
PUBLIC = {
    "llama-3-70b": ((655_360, 65_536), (5_242_880, 8_192), (512, 4_096)),
    "qwen3-235b-a22b": ((770_048, 55_775), (3_080_192, 13_943), (512, 4_096)),
    "deepseek-v3": ((1_124_352, 38_199), (1_124_352, 38_199), (512, 4_096)),
    # A block has 10 layers. The full layers take one table, and the 52 layers with windows take 6 tables.
    "gemma-3-27b": ((163_840, 262_144), (1_310_720, 32_768), (512 + 6 * 513, 4_096 + 6 * 577)),
    "gpt-oss-120b": ((73_728, 582_542), (589_824, 72_817), (512 + 513, 4_096 + 521)),
}
# The pages of pagewire for models with several kinds of layers. Such a page holds all layers, while a block of vLLM
# holds the layers of one group.
WHOLE = {
    "gemma-3-27b": ((1_015_808, 42_281), (8_126_464, 5_285)),
    "gpt-oss-120b": ((147_456, 291_271), (1_179_648, 36_408)),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_models(name: str) -> None:
    *pools, requests = PUBLIC[name]
    for place, (tp, (block_bytes, blocks)) in enumerate(zip((8, 1), pools, strict=True)):
        rooms = choice(read_model(CONFIGS / name), tp, 1, MemoryAsked(MEMORY, 16, STEP, LENGTHS)).rooms
        ours, theirs = rooms[0], next(room for room in rooms if room.way == "vllm")
        assert (ours.way, theirs.page_bytes, theirs.pages) == ("pagewire", block_bytes, blocks)
        most = [theirs.request_bytes[length] + theirs.chunk_bytes[length] for length in LENGTHS]
        assert tuple(size // block_bytes for size in most) == requests
        # One request runs a chunk of its prompt, and each of the others decodes.
        decoding = [size // block_bytes for size in theirs.request_bytes.values()]
        at_a_time = [1 + (blocks - count) // one for count, one in zip(requests, decoding, strict=True)]
        assert [*theirs.requests.values()] == at_a_time
        assert (ours.page_bytes, ours.pages) == (WHOLE[name][place] if name in WHOLE else (block_bytes, blocks))


def full(layers: int, heads: int = 2, window: int = 0) -> AlikeLayers:
    return AlikeLayers("window" if window else "full", layers, heads=heads, width=32, window=window)


def request_blocks(found: VllmBlocks, length: int, step: int) -> int:
    """Returns the most blocks that a request of this length can hold, if `step` of its tokens may be in flight."""
    return sum(found.table_bytes(of, length, step) for of in found.each) // found.block_bytes


def test_groups_are_as_large_as_the_fewest_layers_or_filled_up_to_the_most() -> None:
    for layers, of_group, tables in (
        ((10, 20), 10, (1, 2)),
        ((10, 21), 10, (1, 3)),
        ((12, 13), 13, (1, 1)),
        ((4, 6), 4, (1, 2)),
    ):
        plain, windows = full(layers[0]), full(layers[1], window=64)
        found = vllm_blocks([plain, windows], [layers[0] * 128, layers[1] * 128], 16)
        assert found is not None
        assert found.block_bytes == of_group * 128 * 16
        assert tuple(of.tables for of in found.each) == tables


def test_layers_of_one_kind_have_one_table_though_their_pages_differ() -> None:
    found = vllm_blocks([full(3), full(2, heads=4)], [300, 400], 16)
    assert found is not None
    assert (found.block_bytes, request_blocks(found, 100, 100)) == (700 * 16, 7)


def test_smaller_pages_hold_more_tokens_or_are_filled_up() -> None:
    for of_token, block_size in (((256, 128), 32), ((256, 192), 16), ((256, 96), 16)):
        found = vllm_blocks([full(1, heads=4), full(1, window=64)], list(of_token), 16)
        assert found is not None
        assert found.block_bytes == 256 * 16
        assert [of.block_size for of in found.each] == [16, block_size]


def test_chunks_begin_where_blocks_do_and_windows_need_not() -> None:
    chunked = AlikeLayers("chunked", 1, heads=2, width=32, window=64)
    for other, more in ((full(1, window=65), 1), (chunked, 0)):
        found = vllm_blocks([full(1), other], [128, 128], 16)
        assert found is not None
        assert request_blocks(found, 1600, 32) == 100 + 6 + more


def test_latents_beside_other_layers_have_no_block_figures() -> None:
    latent = AlikeLayers("latent", 1, heads=1, width=64)
    assert vllm_blocks([latent, full(1, window=8)], [128, 128], 16) is None
