"""vLLM's CPU attention over pagewire's pages, from vLLM's wheel for CPUs: the C++ kernels of `vllm serve`.

The kernels store the tokens of one head of a page together, in a private order, so only vLLM's own kernel can write the
pages. The page order must have heads before tokens, and the page size must be a multiple of 32 tokens.

    python examples/kernels/vllm_cpu.py
"""

# pyright: basic, reportMissingImports=false

import torch
from paged_batch import PAGE_ORDERS, PagedBatch, print_errors
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

SERVED = PAGE_ORDERS[:2]


def attend(batch: PagedBatch, layer: int) -> torch.Tensor:
    """Writes the new tokens of a layer, then attends. Returns `[tokens, heads, head_dim]`."""
    keys, values = (states.transpose(1, 2) for states in batch.layer(layer))  # [pages, kv_heads, page_size, head_dim]
    if keys.stride(2) != keys.shape[3]:  # the kernels ignore this stride, and would give wrong results for any other
        raise SystemExit(f"the tokens of a head lie {keys.stride(2)} elements apart, expected {keys.shape[3]}")
    heads, head_dim = batch.query.shape[1:]
    # the instruction set of the kernels: "amx" for bfloat16 if the processor has it
    isa = _get_attn_isa(keys.dtype, batch.page_size, head_dim)
    schedule = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(batch.counts),
        num_heads=heads,
        num_kv_heads=keys.shape[1],
        head_dim=head_dim,
        seq_lens=batch.lengths,
        dtype=keys.dtype,
        query_start_loc=batch.first_rows,
        causal=True,
        sliding_window_size=-1,
        isa=isa,
        enable_kv_split=True,
    )
    write(batch, layer, keys, values, isa)
    output = torch.empty_like(batch.query)
    ops.cpu_attention_with_kv_cache(
        batch.query,
        keys,
        values,
        output,
        batch.first_rows,
        batch.lengths,
        scale=head_dim**-0.5,
        causal=True,
        alibi_slopes=None,
        sliding_window=-1,
        block_table=batch.inputs.lookup_table,
        softcap=0.0,
        scheduler_metadata=schedule,
        s_aux=None,
    )
    return output


def write(batch: PagedBatch, layer: int, keys: torch.Tensor, values: torch.Tensor, isa: str) -> None:
    """Writes all tokens to the pages.

    Earlier tokens are written again, because `make_batch` wrote them in plain order.
    """
    for row, (key, value) in enumerate(batch.known):
        ops.cpu_attn_reshape_and_cache(key[layer], value[layer], keys, values, batch.slots_of(row), isa)


if __name__ == "__main__":
    print_errors(attend, page_size=32, page_orders=SERVED)
