"""Models how vLLM (0.32 and 0.33) allocates blocks for the layers of a model. Pure arithmetic.

All layers draw blocks of equal size in bytes from one pool. Layers of different kinds are divided into groups with
equally many layers, each with its own block table. A window's blocks are freed once nothing in flight needs them.
Groups are padded with unused layers. The rules are in `vllm/v1/core`: `kv_cache_utils.py` of 0.32 and
`kv_cache_planning.py` of 0.33. `tests/vllm_engine/test_plan.py` compares this module with version 0.33.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagewire.plan.layers import AlikeLayers

_MUCH_LARGER = 1.5  # below this ratio, all kinds are padded to the largest number of layers


@dataclass(frozen=True, slots=True)
class BlockTables:
    """The block tables for layers of one kind.

    Attributes:
        one: the layers, which have equal caches.
        tables: number of block tables.
        block_size: tokens of a block.
    """

    one: AlikeLayers
    tables: int
    block_size: int


@dataclass(frozen=True, slots=True)
class VllmBlocks:
    """A block pool of vLLM.

    Attributes:
        block_bytes: bytes of one block on each rank.
        each: the block tables of a request.
        step_tokens: tokens in flight, which a window holds in addition.
    """

    block_bytes: int
    each: tuple[BlockTables, ...]
    step_tokens: int

    def request_blocks(self, length: int) -> int:
        """Returns the most blocks that a request of this length holds."""
        return sum(of.tables * self._blocks(of, length) for of in self.each)

    def table_bytes(self, of: BlockTables, length: int) -> int:
        """Returns the bytes of a request's blocks in these tables, on each rank."""
        return of.tables * self._blocks(of, length) * self.block_bytes

    def _blocks(self, of: BlockTables, length: int) -> int:
        kind, window = of.one.kind, of.one.window
        if kind == "window":  # one more, because a window can begin within a block
            return -(-min(window - 1 + self.step_tokens, length) // of.block_size) + 1
        seen = min(window + self.step_tokens, length) if window else length
        return -(-seen // of.block_size)


def vllm_blocks(
    every: Sequence[AlikeLayers], token_bytes: Sequence[int], block_size: int, step_tokens: int
) -> VllmBlocks | None:
    """Returns the pool for these layers. `token_bytes` has the bytes of a token on a rank for all layers of each kind.

    Returns None for a combination that this does not model: latents together with other layers.
    """
    of_layer = [size * block_size // one.layers for one, size in zip(every, token_bytes, strict=True)]
    alike = {(one.kind if one.window else "", one.window) for one in every}
    if len(alike) == 1:  # one table for all, although their pages differ in bytes
        return VllmBlocks(sum(token_bytes) * block_size, (BlockTables(every[0], 1, block_size),), step_tokens)
    if any(one.kind == "latent" for one in every):
        return None
    fewest, most = min(one.layers for one in every), max(one.layers for one in every)
    of_group = most if most < fewest * _MUCH_LARGER else fewest
    page = max(of_layer)  # the pages of other kinds hold more tokens, or are padded
    each = tuple(
        BlockTables(one, -(-one.layers // of_group), block_size * (page // size if page % size == 0 else 1))
        for one, size in zip(every, of_layer, strict=True)
    )
    return VllmBlocks(page * of_group, each, step_tokens)
