"""Compares the attention kernels of vLLM's CPU wheel over our pages with our own attention."""

from __future__ import annotations

import sys

import pytest

from tests.kernel_errors import ROOT, assert_within_tolerance, measured


def test_vllms_attention_equals_ours_if_heads_come_before_tokens() -> None:
    errors = measured("vllm_cpu", page_size=32, dtypes="float32,bfloat16")
    assert_within_tolerance(errors, orders=2)


def test_a_layout_with_tokens_before_heads_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels would not notice the wrong order, and would compute wrong results."""
    monkeypatch.syspath_prepend(str(ROOT / "examples/kernels"))
    import paged_batch
    import vllm_cpu

    batch = paged_batch.make_batch("layer,side,token,head,dim", page_size=32)
    with pytest.raises(SystemExit, match="the tokens of a head lie 128 elements apart, expected 64"):
        vllm_cpu.attend(batch, 0)
    for name in ("paged_batch", "vllm_cpu"):
        del sys.modules[name]
