"""Allocates the page tensors of a shard, and the host memory of a tier."""

import mmap
import weakref
from typing import Any, cast

import numpy as np
import torch

from kvcache.errors import PoolTooSmallError
from kvcache.layout import PageLayout, as_blocks

HUGE_PAGE_BYTES = 2 << 20


def allocate_blocks(layout: PageLayout, num_pages: int, device: torch.device) -> torch.Tensor:
    """Zeroed pages of one shard, `[num_pages, sides, layers, page_size, heads, head_dim]`, strided by `layout`.

    If pages have scales, these follow the values in the same memory (`kvcache.layout.scales_of`).

    On the CPU the memory is private, anonymous, in huge pages, and touched here. A transfer that meets an untouched
    page or a 4 KiB page is much slower (measured: 0.4 to 8 GB/s instead of 15). Raises `PoolTooSmallError`.
    """
    elements = num_pages * layout.page_bytes // layout.itemsize
    dtype: torch.dtype = getattr(torch, layout.dtype)
    try:
        if device.type == "cpu":
            flat = _huge_pages(elements * layout.itemsize).view(dtype)[:elements]
        else:
            flat = torch.zeros(elements, dtype=dtype, device=device)
    except (OSError, OverflowError, ValueError, RuntimeError) as error:
        raise PoolTooSmallError(
            f"{device} cannot hold {num_pages} pages of {layout.page_bytes} bytes: {error}"
        ) from error
    return as_blocks(flat, layout, num_pages)


def allocate_host_rows(rows: int, row_bytes: int, pinned_for: object = None) -> torch.Tensor:
    """Zeroed host memory, uint8 `[rows, row_bytes]`, in huge pages; pinned while `pinned_for` exists, if it is given.

    Pinned memory is registered with the driver. torch does not allocate it, because torch rounds up to a power of two.
    Raises `PoolTooSmallError` if there is too little memory, or it cannot be pinned.
    """
    try:
        memory = _huge_pages(rows * row_bytes)[: rows * row_bytes]
        if pinned_for is not None:
            cudart = cast("Any", torch.cuda.cudart())
            torch.cuda.check_error(int(cudart.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)))
            weakref.finalize(pinned_for, _unpin, cudart, memory)
    except (OSError, OverflowError, ValueError, RuntimeError) as error:
        raise PoolTooSmallError(f"the host cannot hold {rows} pages of {row_bytes} bytes: {error}") from error
    return memory.view(rows, row_bytes)


def _unpin(cudart: Any, memory: torch.Tensor) -> None:
    """Unregister pinned memory. The argument keeps it mapped until then."""
    cudart.cudaHostUnregister(memory.data_ptr())


def _huge_pages(num_bytes: int) -> torch.Tensor:
    """Zeroed memory of `num_bytes`, rounded up to huge pages, as uint8. The tensor keeps the mapping alive."""
    size = -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    # Private, because shared mappings get no huge pages. One huge page is added so that the start can be aligned.
    mapping = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(mapping, np.uint8)
    skip = -memory.ctypes.data % HUGE_PAGE_BYTES
    memory = memory[skip : skip + size]
    memory[:: mmap.PAGESIZE] = 0
    return torch.as_tensor(memory)
