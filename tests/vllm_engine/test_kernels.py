"""vLLM's Triton kernels over our pages, in Triton's interpreter, compared with our own attention."""

from __future__ import annotations

from tests.kernel_errors import assert_within_tolerance, measured


def test_unified_attention_computes_what_our_attention_does_in_every_page_order() -> None:
    errors = measured("vllm_triton", page_size=16, dtypes="float32,float16", TRITON_INTERPRET="1")
    assert_within_tolerance(errors, orders=3)
