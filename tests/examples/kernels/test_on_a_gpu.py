"""The installed kernels of `examples/kernels`, compiled for a GPU, and compared with pagewire's own attention on the
GPU.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tests.kernel_errors import assert_within_tolerance, measured

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),  # most compile first
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize(
    ("kernel", "package", "page_size", "dtypes"),
    [
        ("flex_attention", "torch", 16, "float32,bfloat16"),
        ("vllm_triton", "vllm", 16, "float16,bfloat16"),
        ("sglang_triton", "sglang", 16, "float16,bfloat16"),
        ("flash_infer", "flashinfer", 16, "bfloat16"),
        ("flash_attention", "flash_attn", 256, "bfloat16"),
    ],
)
def test_a_kernel_computes_what_our_attention_does_in_every_page_order(
    kernel: str, package: str, page_size: int, dtypes: str
) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    assert_within_tolerance(measured(kernel, page_size, dtypes), orders=3)
