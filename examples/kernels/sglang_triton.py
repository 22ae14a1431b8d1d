"""SGLang's Triton attention over our pages: decoding, and prompts in chunks.

SGLang's kernels do not know pages: they index a flat buffer by token. `PagedBatch.flat` creates such a view for every
page order. Without a GPU the kernels run in Triton's interpreter.

    [TRITON_INTERPRET=1] python examples/kernels/sglang_triton.py
"""

# pyright: basic, reportMissingImports=false

import torch
from paged_batch import DEVICE, PagedBatch, print_errors
from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd
from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd_unified

KV_SPLITS = 2  # number of parts into which decoding splits a context


def attend(batch: PagedBatch, layer: int) -> torch.Tensor:
    """Writes the new tokens of a layer, then attends. Returns `[tokens, heads, head_dim]`."""
    batch.write(layer)
    keys, values, stride = batch.flat(layer)
    output = torch.empty_like(batch.query)
    ends, indices = kv_indices(batch, stride)
    extend_attention_fwd_unified(
        batch.query,
        output,
        keys,
        values,
        k_scale=1.0,
        v_scale=1.0,
        qo_indptr=batch.first_rows,
        kv_indptr=ends,
        kv_indices=indices,
        prefix_lens=batch.starts,
        max_len_extend=int(batch.inputs.max_lengths[0, 0]),
    )
    # The decoding kernel takes one token of each request, so only requests that decode go to it.
    rows = [row for row, count in enumerate(batch.counts) if count == 1]
    at = batch.first_rows[rows].long()
    decoded = decode(batch, keys, values, rows, stride)
    if not torch.allclose(decoded.float(), output[at].float(), atol=2e-2):
        raise SystemExit("the decoding kernel and the prompt kernel give different outputs")
    output[at] = decoded
    return output


def decode(batch: PagedBatch, keys: torch.Tensor, values: torch.Tensor, rows: list[int], stride: int) -> torch.Tensor:
    """Returns the attention of one token of each request in `rows`: `[rows, heads, head_dim]`."""
    query = batch.query[batch.first_rows[rows].long()]
    count, heads, head_dim = query.shape
    ends, indices = kv_indices(batch, stride, rows)
    output = torch.empty_like(query)
    decode_attention_fwd(
        query,
        keys,
        values,
        output,
        ends,
        indices,
        attn_logits=torch.empty(count, heads, KV_SPLITS, head_dim, device=query.device),
        attn_lse=torch.empty(count, heads, KV_SPLITS, device=query.device),
        num_kv_splits=torch.full((count,), KV_SPLITS, dtype=torch.int32, device=query.device),
        max_kv_splits=KV_SPLITS,
        sm_scale=head_dim**-0.5,
        k_scale=1.0,
        v_scale=1.0,
    )
    return output


def kv_indices(batch: PagedBatch, stride: int, rows: list[int] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the slots of all tokens, one request after another, and where each request's slots end."""
    found: list[torch.Tensor] = []
    for row in range(len(batch.counts)) if rows is None else rows:
        at = torch.arange(int(batch.lengths[row]), device=batch.query.device)
        pages = batch.inputs.lookup_table[row].long()[at // batch.page_size]
        found.append(pages * stride + at % batch.page_size)
    ends = torch.tensor([0, *map(len, found)], device=batch.query.device).cumsum(0).to(torch.int32)
    return ends, torch.cat(found)


if __name__ == "__main__":
    # Triton 3.9's interpreter multiplies bfloat16 matrices as if their bits were integers, hence float16 on CPUs.
    print_errors(attend, dtypes=(torch.float32, torch.float16 if DEVICE == "cpu" else torch.bfloat16))
