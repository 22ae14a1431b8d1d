"""How vLLM (0.32 and 0.33) lays the layers of a model into blocks, said again in its terms. Pure arithmetic.

All its layers draw blocks of one size in bytes from one pool. Layers that differ in kind are cut into groups of equally
many layers, each with a block table of its own; a window's blocks go back once nothing in flight needs them. Groups are
filled up with layers that nobody uses. Which is which stands in `vllm/v1/core`: `kv_cache_utils.py` of 0.32,
`kv_cache_planning.py` of 0.33, which is run beside this in `tests/vllm_engine/test_plan.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagewire.plan.layers import AlikeLayers

_MUCH_LARGER = 1.5  # below that, the fewest layers of a kind are filled up to the most


@dataclass(frozen=True, slots=True)
class BlockTables:
    """The block tables that layers of one kind take.

    Attributes:
        one: the layers.
        tables: how many.
        block_size: tokens of a block.
    """

    one: AlikeLayers
    tables: int
    block_size: int


@dataclass(frozen=True, slots=True)
class VllmBlocks:
    """A pool of vLLM.

    Attributes:
        block_bytes: of one block on each rank.
        each: the block tables of a request.
        step_tokens: tokens in flight, which a window keeps beside itself.
    """

    block_bytes: int
    each: tuple[BlockTables, ...]
    step_tokens: int

    def request_blocks(self, length: int) -> int:
        """Blocks that a request of this length holds at most."""
        return sum(of.tables * self._blocks(of, length) for of in self.each)

    def table_bytes(self, of: BlockTables, length: int) -> int:
        """Bytes of those of them on each rank that these tables name."""
        return of.tables * self._blocks(of, length) * self.block_bytes

    def _blocks(self, of: BlockTables, length: int) -> int:
        kind, window = of.one.kind, of.one.window
        if kind == "window":  # one more: a window begins within a block
            return -(-min(window - 1 + self.step_tokens, length) // of.block_size) + 1
        seen = min(window + self.step_tokens, length) if window else length
        return -(-seen // of.block_size)


def vllm_blocks(
    every: Sequence[AlikeLayers], token_bytes: Sequence[int], block_size: int, step_tokens: int
) -> VllmBlocks | None:
    """The pool for these layers, of which all together take `token_bytes` of a token on a rank, kind by kind.

    None for what this does not say: latents beside other layers.
    """
    of_layer = [size * block_size // one.layers for one, size in zip(every, token_bytes, strict=True)]
    alike = {(one.kind if one.window else "", one.window) for one in every}
    if len(alike) == 1:  # one table for all, though their pages differ in bytes
        return VllmBlocks(sum(token_bytes) * block_size, (BlockTables(every[0], 1, block_size),), step_tokens)
    if any(one.kind == "latent" for one in every):
        return None
    fewest, most = min(one.layers for one in every), max(one.layers for one in every)
    of_group = most if most < fewest * _MUCH_LARGER else fewest
    page = max(of_layer)  # the others' pages hold more tokens, or are filled up
    each = tuple(
        BlockTables(one, -(-one.layers // of_group), block_size * (page // size if page % size == 0 else 1))
        for one, size in zip(every, of_layer, strict=True)
    )
    return VllmBlocks(page * of_group, each, step_tokens)
