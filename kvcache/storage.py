"""Allocates the page tensors of one shard, and the host memory of a tier."""

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

    Where a page has scales they lie in the same memory behind its values (`kvcache.layout.scales_of`).

    On the CPU the memory is private, anonymous and in huge pages, touched here: a transfer that meets an untouched or
    4 KiB page runs at a fraction of the rate (measured: 0.4 to 8 GB/s in place of 15). Raises `PoolTooSmallError`.
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
    """Zeroed host memory, uint8 `[rows, row_bytes]`, in huge pages; pinned for the life of `pinned_for` where given.

    Pinned memory is registered with the driver and not allocated by torch, which rounds up to a power of two. Raises
    `PoolTooSmallError` if there is not that much, or it may not be pinned.
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
    """Unregister memory, which is mapped until here: the call holds it."""
    cudart.cudaHostUnregister(memory.data_ptr())


def _huge_pages(num_bytes: int) -> torch.Tensor:
    """`num_bytes`, rounded up to huge pages, of zeroed memory as uint8. The tensor keeps the mapping alive."""
    size = -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    # Private on purpose: shared mappings get no huge pages. One huge page more, so that the start can be aligned.
    mapping = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(mapping, np.uint8)
    skip = -memory.ctypes.data % HUGE_PAGE_BYTES
    memory = memory[skip : skip + size]
    memory[:: mmap.PAGESIZE] = 0
    return torch.as_tensor(memory)
