"""`PageLayout`: where each element of a page lies in memory, on one shard. Also allocates the memory of pages."""

import hashlib
import math
import mmap
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from kvcache.errors import PoolTooSmallError
from kvcache.params import KVCacheParams

AXES = ("layer", "side", "head", "token", "dim")
HUGE_PAGE_BYTES = 2 << 20
_ALIGNED = 16  # in bytes: the alignment of pages with scales, and of the scales in them

from_numpy = cast("Callable[[NDArray[Any]], torch.Tensor]", torch.from_numpy)  # pyright: ignore[reportUnknownMemberType]
"""torch's own function, with types added. It takes a third of the time of `torch.as_tensor`."""


class PageLayout(msgspec.Struct, frozen=True, omit_defaults=True, tag="page_layout/1"):
    """How the bytes of one page lie in memory on one shard, and which part of the model's KV the page holds.

    A page is a dense box of `layers × sides × heads × page_size × head_dim` elements. `order` lists its axes in memory,
    outermost first. In the default order a page is one run of bytes, and so is any range of its heads. Therefore a
    transfer between different tensor-parallel splits still copies one run per page.

    If values are quantised, their scales follow them in the page, as a dense box in the same order. `scales` describes
    that box. It has fewer tokens, heads or dims than the values if several values share a scale.

    A page of two layers and two heads in the default order, with scales:

        ┌── head 0 ───────────────────┐┌── head 1 ───────────────────┐┌ scales ┐
        │ layer 0      │ layer 1      ││ layer 0      │ layer 1      ││        │
        │ keys  values │ keys  values ││ keys  values │ keys  values ││        │
                ▲ page_size × head_dim elements, token by token

    Examples:
        >>> sizes = {"num_layers": 2, "sides": 2, "first_head": 0, "num_heads": 2, "page_size": 16, "head_dim": 64}
        >>> layout = PageLayout("float16", itemsize=2, order="head,layer,side,token,dim", **sizes)
        >>> layout.page_bytes
        16384
        >>> layout.strides
        {'dim': 1, 'token': 64, 'side': 1024, 'layer': 2048, 'head': 4096}
    """

    dtype: str  # the element type, as torch spells it ("bfloat16")
    itemsize: int  # bytes of one element
    num_layers: int  # layers that contribute KV
    sides: int  # the number of sides: 2 for keys and values, 1 for a latent
    first_head: int  # the index of this shard's first head among the heads of the model
    num_heads: int  # heads on this shard
    page_size: int  # tokens in a page
    head_dim: int  # the number of elements of one head of one token
    order: str  # the axes, outermost first, comma-separated
    scales: "PageLayout | None" = None  # the layout of the scales in a page; None if values are not quantised

    @property
    def extents(self) -> dict[str, int]:
        """The number of elements along each axis."""
        sizes = (self.num_layers, self.sides, self.num_heads, self.page_size, self.head_dim)
        return dict(zip(AXES, sizes, strict=True))

    @property
    def page_elements(self) -> int:
        """The number of elements of one page, without its scales."""
        return math.prod(self.extents.values())

    @property
    def scales_offset(self) -> int:
        """The number of bytes of a page that come before its scales. Without scales: the number of all its bytes."""
        values = self.page_elements * self.itemsize
        return _aligned(values) if self.scales else values

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, including its scales."""
        return self.scales_offset + (_aligned(self.scales.page_bytes) if self.scales else 0)

    @property
    def strides(self) -> dict[str, int]:
        """The distance between neighbours along each axis, in elements."""
        extents, step, found = self.extents, 1, dict[str, int]()
        for axis in reversed(self.order.split(",")):
            found[axis] = step
            step *= extents[axis]
        return found

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """The logical shape of a page: `(sides, layers, page_size, heads, head_dim)`."""
        return (self.sides, self.num_layers, self.page_size, self.num_heads, self.head_dim)

    @property
    def shape_strides(self) -> tuple[int, int, int, int, int]:
        """The strides of the logical shape, in elements."""
        at = self.strides
        return (at["side"], at["layer"], at["token"], at["head"], at["dim"])

    def fingerprint(self) -> str:
        """Returns a digest of this layout. Shards with the same fingerprint may exchange pages byte for byte."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).hexdigest()[:16]


class KindPages(NamedTuple):
    """The location, on one shard, of pages that are not token pages, such as parts of recurrent states."""

    kind: str  # the name of the logical tensor, such as "ssm"
    layout: PageLayout  # the layout of one page
    # The index of the tensor of this kind among the tensors of all kinds. None if the pages lie in token pages.
    region: int | None
    offset: int  # the number of bytes from the start of the tensor to page 0
    stride: int  # the number of bytes from the start of one page to the start of the next page


def shard_layout(params: KVCacheParams, num_layers: int, page_size: int, shard: int) -> PageLayout:
    """Returns the layout of shard `shard`, which is the same for each replica."""
    heads = params.heads_of_shard(shard)
    values = PageLayout(
        dtype=str(params.dtype).removeprefix("torch."),
        itemsize=params.dtype.itemsize,
        num_layers=num_layers,
        sides=params.sides,
        first_head=heads.start,
        num_heads=len(heads),
        page_size=page_size,
        head_dim=params.head_dim,
        order=params.page_order,
    )
    quantised = params.kvcache_quant_config
    if quantised is None:
        return values
    of_page, of_all_heads = quantised.scale_of != "token and head", quantised.scale_of == "page"
    scales = msgspec.structs.replace(
        values,
        dtype=str(quantised.scale_dtype).removeprefix("torch."),
        itemsize=quantised.scale_dtype.itemsize,
        first_head=0 if of_all_heads else heads.start,
        num_heads=1 if of_all_heads else len(heads),
        page_size=1 if of_page else page_size,
        head_dim=params.head_dim // quantised.quantization_granularity,
    )
    return msgspec.structs.replace(values, scales=scales)


def shard_layouts(params: KVCacheParams, num_layers: int, page_size: int) -> list[PageLayout]:
    """Returns the layouts of all shards of a replica."""
    return [shard_layout(params, num_layers, page_size, shard) for shard in range(params.tensor_parallel_degree)]


def replica_fingerprint(layouts: list[PageLayout], groups: str = "") -> str:
    """Returns a digest of the layouts of all shards, and of the `groups` of layers if there are several."""
    joined = ",".join(layout.fingerprint() for layout in layouts) + groups
    return hashlib.sha256(joined.encode()).hexdigest()[:16]


def kv_kind(layouts: Sequence[PageLayout]) -> str:
    """Returns a string that describes what a replica keeps for each token.

    The string does not depend on the split of heads or the page layout.
    """
    one, heads = layouts[0], max(layout.first_head + layout.num_heads for layout in layouts)
    kind = f"{one.dtype}, {one.num_layers} layers of {one.sides} x {heads} heads of {one.head_dim}"
    return ", ".join(filter(None, (kind, scales_kind(layouts))))


def scales_kind(layouts: Sequence[PageLayout]) -> str:
    """Returns a string that says which values share a scale. Empty if there are no scales."""
    layout = layouts[-1]
    scales = layout.scales
    if scales is None:
        return ""
    of_token = scales.page_size == layout.page_size
    of_head = (scales.first_head, scales.num_heads) == (layout.first_head, layout.num_heads)
    shared = f"a {'token' if of_token else 'page'}{' and head' if of_head else ''}"
    return f"{scales.dtype} scales of {layout.head_dim // scales.head_dim} elements of {shared}"


def as_blocks(pages: torch.Tensor, layout: PageLayout, num_pages: int) -> torch.Tensor:
    """Returns a view of a flat tensor of pages, `[pages, sides, layers, page, heads, dim]`, without their scales."""
    return pages.as_strided((num_pages, *layout.shape), (layout.page_bytes // layout.itemsize, *layout.shape_strides))


def scales_of(rows: torch.Tensor, layout: PageLayout) -> torch.Tensor | None:
    """Returns a view of the scales in `rows`, which are whole pages, `[pages, words]`. None if pages have no scales.

    The shape is `[pages, sides, layers, tokens, heads, dims]`. An axis has size 1 if one scale covers all of it.
    """
    scales = layout.scales
    if scales is None:
        return None
    dtype: torch.dtype = getattr(torch, scales.dtype)
    words = rows.view(torch.uint8).view(dtype)
    first = words.storage_offset() + layout.scales_offset // scales.itemsize
    return words.as_strided((len(rows), *scales.shape), (words.stride(0), *scales.shape_strides), first)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED) * _ALIGNED


def allocate_blocks(layout: PageLayout, num_pages: int, device: torch.device) -> torch.Tensor:
    """Returns zeroed pages of one shard, `[num_pages, sides, layers, page_size, heads, head_dim]`.

    The tensor has the strides of `layout`. If pages have scales, the scales follow the values in the same memory
    (`scales_of`).

    CPU memory is private and anonymous, lies in huge pages, and has been written to when this function returns. A
    transfer is much slower from memory that was never written to, or in pages of 4 KiB (measured: 0.4 to 8 GB/s instead
    of 15). Raises `PoolTooSmallError` if the memory cannot be allocated.
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
    """Returns zeroed host memory, uint8 `[rows, row_bytes]`, in huge pages.

    If `pinned_for` is given, the memory stays pinned as long as that object exists.

    Pinned memory is registered with the driver. torch is not used for it, because torch rounds sizes up to a power of
    two. Raises `PoolTooSmallError` if there is too little memory, or if it cannot be pinned.
    """
    try:
        memory = _huge_pages(rows * row_bytes)[: rows * row_bytes]
        if pinned_for is not None:
            pin_rows(memory, pinned_for)
    except (OSError, OverflowError, ValueError, RuntimeError) as error:
        raise PoolTooSmallError(f"the host cannot hold {rows} pages of {row_bytes} bytes: {error}") from error
    return memory.view(rows, row_bytes)


def pin_rows(memory: torch.Tensor, owner: object) -> None:
    """Pin contiguous host memory for as long as `owner` exists. Raises `RuntimeError` if the driver refuses it."""
    cudart = cast("Any", torch.cuda.cudart())
    torch.cuda.check_error(int(cudart.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)))
    weakref.finalize(owner, _unpin, cudart, memory)


def _unpin(cudart: Any, memory: torch.Tensor) -> None:
    """Unregister pinned memory. The argument `memory` keeps the memory mapped until it is unregistered."""
    cudart.cudaHostUnregister(memory.data_ptr())


def _huge_pages(num_bytes: int) -> torch.Tensor:
    """Returns at least `num_bytes` of zeroed memory in huge pages, as uint8. The tensor keeps the mapping alive."""
    size = -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    # The mapping is private, because shared mappings get no huge pages. It has one more huge page than needed, so that
    # the tensor can begin at a multiple of the huge page size.
    mapping = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(mapping, np.uint8)
    skip = -memory.ctypes.data % HUGE_PAGE_BYTES
    memory = memory[skip : skip + size]
    memory[:: mmap.PAGESIZE] = 0
    return torch.as_tensor(memory)
