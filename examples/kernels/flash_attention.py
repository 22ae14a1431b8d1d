"""FlashAttention 2 over pagewire's pages: `flash_attn_with_kvcache`, which also writes the new tokens.

The kernel needs a GPU, and a page size that is a multiple of 256 tokens. It reads views with tokens first, which exist
for every page order.

    python examples/kernels/flash_attention.py
"""

# pyright: basic, reportMissingImports=false

import torch
from flash_attn import flash_attn_with_kvcache
from paged_batch import PagedBatch, print_errors

DTYPES = (torch.bfloat16,)
SHAPES = ((8, 2, 128), (4, 4, 128))  # heads, kv_heads and head_dim to test
PAGE_SIZE = 256


def attend(batch: PagedBatch, layer: int) -> torch.Tensor:
    """Writes the new tokens of a layer, then attends. Returns `[tokens, heads, head_dim]`."""
    keys, values = batch.layer(layer)
    outputs: list[torch.Tensor] = []
    for row, (first, last) in enumerate(zip(batch.first_rows[:-1], batch.first_rows[1:], strict=True)):
        new = slice(int(first), int(last))  # one request at a time, because their numbers of new tokens differ
        found = flash_attn_with_kvcache(
            batch.query[None, new],
            keys,
            values,
            k=batch.key[layer, None, new],
            v=batch.value[layer, None, new],
            cache_seqlens=batch.starts[row : row + 1],
            block_table=batch.inputs.lookup_table[row : row + 1],
            causal=True,
        )
        outputs.append(found[0])
    return torch.cat(outputs)


if __name__ == "__main__":
    print_errors(attend, PAGE_SIZE, DTYPES, head_dim=128)
