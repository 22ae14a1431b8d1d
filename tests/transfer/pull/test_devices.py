"""Pages on GPUs move between processes, and between a GPU and host memory. Kernels read the pages directly
afterwards.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.pulls.devices import between

TRANSPORTS = "cuda_copy,cuda_ipc,posix,sysv,cma"
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
ON_GPU = [pytest.param(*devices, marks=gpu) for devices in [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")]]


@pytest.mark.parametrize(("source", "reader"), [pytest.param("cpu", "cpu", marks=pytest.mark.ci), *ON_GPU])
def test_every_page_arrives_and_a_kernel_reads_it_right_after_the_commit(
    monkeypatch: pytest.MonkeyPatch, source: str, reader: str
) -> None:
    if source != reader:  # The source and the reader need the same transports.
        monkeypatch.setenv("UCX_TLS", TRANSPORTS)
    found = between(source, reader, [1, 3, 300, 64])
    assert [(count, wrong) for count, _, wrong in found] == [(1, 0), (3, 0), (300, 0), (64, 0)]


@pytest.mark.parametrize(("source", "reader"), [ON_GPU[0]])
def test_pages_with_another_element_order_arrive_in_ours(source: str, reader: str) -> None:
    found = between(source, reader, [1, 40], source=False)
    assert [(count, wrong) for count, _, wrong in found] == [(1, 0), (40, 0)]
