"""vLLM's Triton attention over our pages: `unified_attention`, and the kernel that writes the new tokens.

Without a GPU the kernels run in Triton's interpreter. Both kernels accept any strides, so every page order works.

    [TRITON_INTERPRET=1 CUDA_VISIBLE_DEVICES=] python examples/kernels/vllm_triton.py
"""

# pyright: basic, reportMissingImports=false

import torch
from paged_batch import DEVICE, PagedBatch, print_errors
from vllm.v1.attention.ops.triton_reshape_and_cache_flash import reshape_and_cache_kernel_flash
from vllm.v1.attention.ops.triton_unified_attention import unified_attention


def attend(batch: PagedBatch, layer: int) -> torch.Tensor:
    """Writes the new tokens of a layer, then attends. Returns `[tokens, heads, head_dim]`."""
    write(batch, layer)
    keys, values = batch.layer(layer)
    output = torch.empty_like(batch.query)
    unified_attention(
        batch.query,
        keys,
        values,
        output,
        cu_seqlens_q=batch.first_rows,
        max_seqlen_q=int(batch.inputs.max_lengths[0, 0]),
        seqused_k=batch.lengths,
        max_seqlen_k=int(batch.inputs.max_lengths[0, 1]),
        softmax_scale=batch.query.shape[-1] ** -0.5,
        causal=True,
        window_size=(-1, -1),
        block_table=batch.inputs.lookup_table,
        softcap=0.0,
        q_descale=None,
        k_descale=None,
        v_descale=None,
    )
    return output


def write(batch: PagedBatch, layer: int) -> None:
    """Writes the new tokens to the pages with vLLM's kernel.

    vLLM's own wrapper of the kernel, `triton_reshape_and_cache_flash`, refuses to run without a GPU.
    """
    (key, value), (keys, values) = (batch.key[layer], batch.value[layer]), batch.layer(layer)
    tokens, heads, head_dim = key.shape
    reshape_and_cache_kernel_flash[(tokens, 1)](
        key_ptr=key,
        value_ptr=value,
        key_cache_ptr=keys,
        value_cache_ptr=values,
        slot_mapping_ptr=batch.slots,
        k_scale=torch.ones(1, device=key.device),
        v_scale=torch.ones(1, device=key.device),
        key_stride=key.stride(0),
        value_stride=value.stride(0),
        block_stride=keys.stride(0),
        page_stride=keys.stride(1),
        head_stride=keys.stride(2),
        dim_stride_k=0,
        dim_stride_v=0,
        num_heads=heads,
        head_size=head_dim,
        block_size=batch.page_size,
        x=1,
        USE_HEAD_MAJOR_LAYOUT=False,
        INTERLEAVED_V_PACK_FACTOR=0,
        FP8_KV_CACHE=False,
        TILE_SIZE=heads * head_dim,  # must be a power of two
    )


if __name__ == "__main__":
    # Triton 3.9's interpreter multiplies bfloat16 matrices as if their bits were integers, hence float16 on CPUs.
    print_errors(attend, dtypes=(torch.float32, torch.float16 if DEVICE == "cpu" else torch.bfloat16))
