"""torch's FlexAttention over pages of pagewire, compared with pagewire's own attention."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.kernel_errors import ROOT, assert_within_tolerance, measured


@pytest.mark.ci
def test_flex_attention_computes_what_our_attention_does_in_every_page_order() -> None:
    errors = measured("flex_attention", page_size=16, dtypes="float32,bfloat16")
    assert_within_tolerance(errors, orders=3)


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_its_fused_kernels_do_too() -> None:
    """A fused kernel is compiled for each dtype and stride."""
    done = subprocess.run(
        [sys.executable, "examples/kernels/flex_attention.py", "--compile"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=560,
        check=True,
    )
    lines = [line.split() for line in done.stdout.splitlines()]
    most = {"torch.float32": 2e-6, "torch.bfloat16": 2e-2}
    assert [line[:2] for line in lines if float(line[-1]) <= most[line[1]]] == [line[:2] for line in lines]
    assert len(lines) == 6
