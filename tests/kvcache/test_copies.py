"""Copies between a GPU and the host, and the order of their events. The tests delay either side, so that a wrong order
is noticed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvcache.copies import PageMover, copy_pages, page_rows
from kvcache.layout import allocate_host_rows
from tests.kvcache.summing_model import wait_on_device

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
COUNT = 64
TAKEN = np.array([3, 4, 5, 40, 9, 10, 63, 1], np.int32)  # Some of the pages are consecutive.
GIVEN = np.array([7, 8, 2, 50, 51, 52, 0, 33], np.int32)


class Pools:
    """Pages on a GPU, slots in pinned memory, and the copies between them. `main` is the model's stream."""

    def __init__(self, words: int = 512, *, own_stream: bool = False, dtype: torch.dtype = torch.int64) -> None:
        self.main: Any = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
        self.pages = torch.zeros((COUNT, words), dtype=dtype, device="cuda")
        self.slots = allocate_host_rows(COUNT, words * dtype.itemsize, self)
        self.mover = PageMover([(self.pages, self.slots)], self.main if own_stream else None)
        torch.cuda.synchronize()

    def values(self, first: int) -> torch.Tensor:
        """Returns contents for the pages. Each page is filled with its own number, counted from `first`."""
        return torch.arange(first, first + COUNT, device="cuda").to(self.pages.dtype)[:, None].expand_as(self.pages)

    def late(self, stream: Any, write: Callable[[], Any]) -> Any:
        """Launches work on a stream after a delay."""
        with torch.cuda.stream(stream):
            wait_on_device(self.pages.device, 400_000_000)
            return write()


@pytest.fixture(params=[False, True], ids=["current stream", "own stream"])
def pools(request: pytest.FixtureRequest) -> Pools:
    return Pools(own_stream=request.param)


def first_words(slots: torch.Tensor) -> list[int]:
    return slots.view(torch.int64)[:, 0].tolist()


def test_a_copy_to_the_host_waits_for_the_kernel_that_writes_the_page(pools: Pools) -> None:
    new = pools.values(100).clone()
    torch.cuda.synchronize()
    pools.late(pools.main, lambda: pools.pages.copy_(new))
    copy = pools.mover.store(TAKEN, GIVEN)
    assert not copy.over()
    copy.wait()
    assert copy.over()
    assert [first_words(pools.slots)[slot] for slot in GIVEN] == [100 + page for page in TAKEN]


def test_a_kernel_launched_after_a_load_reads_the_loaded_pages(pools: Pools) -> None:
    pools.slots.view(torch.int64)[:] = torch.arange(500, 500 + COUNT)[:, None]
    pools.late(pools.mover._sides[pools.pages.device], lambda: None)
    copy = pools.mover.load(TAKEN, GIVEN)
    assert not copy.over()
    copy.order()
    with torch.cuda.stream(pools.main):
        read = pools.pages.clone()
    torch.cuda.synchronize()
    assert read[GIVEN, 0].tolist() == [500 + slot for slot in TAKEN]


def test_a_load_waits_for_a_kernel_that_still_reads_the_pages(pools: Pools) -> None:
    pools.pages.copy_(pools.values(100))
    pools.slots.view(torch.int64)[:] = 7
    torch.cuda.synchronize()
    read = pools.late(pools.main, pools.pages.clone)
    copy = pools.mover.load(TAKEN, GIVEN)
    copy.wait()
    torch.cuda.synchronize()
    assert read[:, 0].tolist() == [*range(100, 100 + COUNT)]
    assert set(pools.pages[GIVEN].flatten().tolist()) == {7}


def test_the_staging_memory_of_a_copy_is_not_reused_before_the_copy_ends() -> None:
    """Several copies are larger than the staging memory. Kernels allocate and free memory meanwhile."""
    pools = Pools(words=1 << 20)  # A page has 8 MiB.
    pages, slots = np.arange(16, dtype=np.int32), np.arange(16, 32, dtype=np.int32)
    for round_ in range(3):
        pools.pages.copy_(pools.values(1000 * round_))
        pools.mover.store(pages, slots)
        noise = [torch.full((1 << 22,), -1, device="cuda") for _ in range(4)]
        copy = pools.mover.load(slots, pages + 40)
        del noise
        copy.order()
        assert torch.equal(pools.pages[40:56], pools.pages[:16])


@pytest.mark.parametrize(("dtype", "words"), [(torch.uint8, 37), (torch.bfloat16, 64), (torch.int64, 3)])
def test_every_byte_survives_a_copy_to_the_host_and_back(dtype: torch.dtype, words: int) -> None:
    pools = Pools(words, dtype=dtype)
    pools.pages.copy_(torch.randint(0, 100, pools.pages.shape, device="cuda"))
    wanted = pools.pages[TAKEN].clone()
    pools.mover.store(TAKEN, GIVEN)
    copy = pools.mover.load(GIVEN, GIVEN)
    copy.order()
    assert torch.equal(pools.pages[GIVEN], wanted)


def test_strided_rows_and_empty_lists_are_copied_too() -> None:
    pools = Pools(words=8)
    # The view has half as many slots. Each row is the second half of a slot.
    slots = pools.slots.view(COUNT // 2, -1)[:, 64:]
    mover = PageMover([(pools.pages, slots)], None)
    pools.pages.copy_(pools.values(100))
    taken, given = np.array([3, 4, 5], np.int32), np.array([7, 8, 9], np.int32)
    copy = mover.store(taken, given)
    copy.wait()
    copy = mover.load(taken[:0], given[:0])
    copy.wait()
    assert first_words(pools.slots)[14:20] == [0, 103, 0, 104, 0, 105]


def test_pages_are_copied_between_pools_of_a_gpu_and_of_the_host() -> None:
    there, here = torch.zeros((COUNT, 6), dtype=torch.int64, device="cuda"), torch.zeros((COUNT, 6), dtype=torch.int64)
    here[:] = torch.arange(COUNT)[:, None]
    copy_pages(page_rows(here), TAKEN, page_rows(there), GIVEN)
    torch.cuda.synchronize()
    assert there[GIVEN, 5].tolist() == TAKEN.tolist()
    here.zero_()
    copy_pages(page_rows(there), GIVEN, page_rows(here), TAKEN)
    torch.cuda.synchronize()
    assert here[TAKEN, 5].tolist() == TAKEN.tolist()
