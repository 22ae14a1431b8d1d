"""Models how vLLM (0.32 and 0.33) allocates blocks for the layers of a model. Pure arithmetic.

All layers draw blocks of equal size in bytes from one pool. Layers of different kinds form groups with equally many
layers; each group has its own block table. Groups are padded with unused layers. A window's blocks are freed when
nothing in flight needs them any more. The rules are in `vllm/v1/core`: `kv_cache_utils.py` of 0.32 and
`kv_cache_planning.py` of 0.33. `tests/vllm_engine/test_plan.py` compares this module with version 0.33.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagewire.plan.layers import AlikeLayers

# The kinds of layers are compared by their number of layers. If the largest number is less than `_MUCH_LARGER` times
# the smallest number, every kind is padded to the largest number. Otherwise, groups have the smallest number of layers.
_MUCH_LARGER = 1.5


@dataclass(frozen=True, slots=True)
class BlockTables:
    """The block tables for layers of one kind.

    Attributes:
        one: the layers, whose caches are equal.
        tables: number of block tables that these layers need.
        block_size: tokens of a block.
    """

    one: AlikeLayers
    tables: int
    block_size: int


@dataclass(frozen=True, slots=True)
class VllmBlocks:
    """The block pool that vLLM would create for a model.

    Attributes:
        block_bytes: bytes of one block on each rank.
        each: the block tables of a request, for each kind of layer.
    """

    block_bytes: int
    each: tuple[BlockTables, ...]

    def table_bytes(self, of: BlockTables, length: int, step_tokens: int) -> int:
        """Returns the bytes on each rank that a request of this length takes in the block tables `of`.

        `step_tokens` of its tokens may be in flight. A window's table has blocks for the window, and for these tokens.
        """
        return of.tables * _blocks(of, length, step_tokens) * self.block_bytes


def _blocks(of: BlockTables, length: int, step_tokens: int) -> int:
    kind, window = of.one.kind, of.one.window
    if kind == "window":  # one more block, because a window can begin within a block
        return -(-min(window - 1 + step_tokens, length) // of.block_size) + 1
    seen = min(window + step_tokens, length) if window else length
    return -(-seen // of.block_size)


def vllm_blocks(every: Sequence[AlikeLayers], token_bytes: Sequence[int], block_size: int) -> VllmBlocks | None:
    """Returns the pool that vLLM creates for these layers.

    `token_bytes` has, for each kind of layer, the bytes of a token on a rank in all layers of this kind.

    Returns None for a combination that this module does not cover: latents together with other layers.
    """
    of_layer = [size * block_size // one.layers for one, size in zip(every, token_bytes, strict=True)]
    alike = {(one.kind if one.window else "", one.window) for one in every}
    if len(alike) == 1:  # one table for all layers, although their pages differ in bytes
        return VllmBlocks(sum(token_bytes) * block_size, (BlockTables(every[0], 1, block_size),))
    if any(one.kind == "latent" for one in every):
        return None
    fewest, most = min(one.layers for one in every), max(one.layers for one in every)
    of_group = most if most < fewest * _MUCH_LARGER else fewest
    page = max(of_layer)  # layers whose pages are smaller get more tokens in a page, or their pages are padded
    each = tuple(
        BlockTables(one, -(-one.layers // of_group), block_size * (page // size if page % size == 0 else 1))
        for one, size in zip(every, of_layer, strict=True)
    )
    return VllmBlocks(page * of_group, each)
