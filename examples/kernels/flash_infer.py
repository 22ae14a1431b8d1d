"""FlashInfer's paged attention over our pages: its kernel for prompts in chunks, and its kernel for decoding.

Both kernels need a GPU. They take keys and values as a pair of views with tokens first, which exist for every page
order. FlashInfer compiles the kernels when they are first used.

    python examples/kernels/flash_infer.py
"""

# pyright: basic, reportMissingImports=false

import torch
from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
from paged_batch import PagedBatch, print_errors

DTYPES = (torch.bfloat16,)
SHAPES = ((8, 2, 128), (4, 4, 128))  # heads, kv_heads and head_dim to test


def attend(batch: PagedBatch, layer: int) -> torch.Tensor:
    """Writes the new tokens of a layer, then attends. Returns `[tokens, heads, head_dim]`."""
    batch.write(layer)
    heads, head_dim = batch.query.shape[1:]
    ends, pages, last = page_lists(batch, range(len(batch.counts)))
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device=batch.query.device)
    prefill = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
    shape = (heads, batch.key.shape[2], head_dim, batch.page_size)
    dtypes = {"q_data_type": batch.query.dtype, "kv_data_type": batch.key.dtype}
    prefill.plan(batch.first_rows, ends, pages, last, *shape, causal=True, **dtypes)
    output = prefill.run(batch.query, batch.layer(layer))
    # The decoding kernel takes one token of each request, so only requests that decode go to it.
    rows = [row for row, count in enumerate(batch.counts) if count == 1]
    at = batch.first_rows[rows].long()
    decode = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
    decode.plan(*page_lists(batch, rows), *shape, **dtypes)
    decoded = decode.run(batch.query[at], batch.layer(layer))
    if not torch.allclose(decoded.float(), output[at].float(), atol=2e-2):
        raise SystemExit("the decoding kernel and the prompt kernel give different outputs")
    output[at] = decoded
    return output


def page_lists(batch: PagedBatch, rows: range | list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns where each request's pages end, the pages of all requests, and the tokens in each last page: int32."""
    lengths = batch.lengths[[*rows]]
    counts = -(-lengths // batch.page_size)
    pages = [batch.inputs.lookup_table[row, :count] for row, count in zip(rows, counts.tolist(), strict=True)]
    ends = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(torch.int32)
    return ends, torch.cat(pages), (lengths - 1) % batch.page_size + 1


if __name__ == "__main__":
    print_errors(attend, dtypes=DTYPES, head_dim=128)
