"""torch's FlexAttention over pagewire's pages, with torch's `PagedAttention`, which needs a flat buffer of blocks.

`PagedAttention` maps logical blocks to physical ones, and would allocate the physical ones itself. Here the manager
allocates them: the manager's block table is copied into `page_table`, and `PagedBatch.flat` gives the buffer. Every
page order works. With `--compile` torch generates fused kernels, which takes a minute. Without it, torch computes all
scores at once.

    python examples/kernels/flex_attention.py [--compile]
"""

import sys
import warnings
from collections.abc import Callable
from functools import partial

import torch
import torch._dynamo as dynamo
from paged_batch import DEVICE, PagedBatch, print_errors
from torch.nn.attention.experimental._paged_attention import PagedAttention
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

Attention = Callable[..., torch.Tensor]


def attend(batch: PagedBatch, layer: int, attention: Attention = flex_attention) -> torch.Tensor:
    """Writes the new tokens of a layer, then attends. Returns `[tokens, heads, head_dim]`."""
    batch.write(layer)
    keys, values, stride = batch.flat(layer)
    outputs: list[torch.Tensor] = []
    for row in range(len(batch.counts)):  # one request at a time, because their numbers of new tokens differ
        query = batch.query[batch.first_rows[row] : batch.first_rows[row + 1]]
        key, value = (states.transpose(0, 1)[None] for states in (keys, values))  # [1, kv_heads, slots, head_dim]
        mask = block_mask(batch, row, stride, slots=key.shape[2])
        found = attention(query.transpose(0, 1)[None], key, value, block_mask=mask, enable_gqa=True)
        outputs.append(found[0].transpose(0, 1))
    return torch.cat(outputs)


def block_mask(batch: PagedBatch, row: int, stride: int, slots: int) -> BlockMask:
    """Returns the mask of the slots that a request's new tokens see, from the pages of its block table."""
    size, start, end = batch.page_size, int(batch.starts[row]), int(batch.lengths[row])
    count = -(-end // size)
    blocks = -(-slots // size)  # the blocks of the flat buffer; a page is every `stride / size`th block
    device = batch.query.device
    paged = PagedAttention(blocks, size, max_batch_size=1, device=str(device))
    physical = batch.inputs.lookup_table[row, :count].long() * (stride // size)
    paged.page_table[0, :count] = physical
    paged.physical_to_logical[0, physical] = torch.arange(count, device=device)

    def sees(_batch: torch.Tensor, _head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return key <= query + start

    logical = create_block_mask(sees, 1, 1, end - start, count * size, device=str(device), BLOCK_SIZE=(size, size))
    return paged.convert_logical_block_mask(logical, kv_len=torch.tensor([end], device=device))


if __name__ == "__main__":
    if "--compile" in sys.argv:
        dynamo.config.recompile_limit = 32  # a separate kernel for each stride and dtype
        fused: Attention = torch.compile(flex_attention, dynamic=True)  # pyright: ignore[reportUnknownMemberType]
        if DEVICE == "cuda":  # a block of a compiled kernel must not be larger than a page
            fused = partial(fused, kernel_options={"BLOCK_M": 16, "BLOCK_N": 16})
        print_errors(partial(attend, attention=fused))
    else:
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        print_errors(attend)
