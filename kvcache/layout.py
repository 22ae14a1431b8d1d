"""`PageLayout`: where each element of a page lies in memory, on one shard. Pure arithmetic."""

import hashlib
import math
from collections.abc import Sequence

import msgspec
import torch

from kvcache.params import KVCacheParams

AXES = ("layer", "side", "head", "token", "dim")


class PageLayout(msgspec.Struct, frozen=True, tag="page_layout/1"):
    """The byte geometry of one page on one shard, and which part of the model's KV it holds.

    A page is a dense box of `layers × sides × heads × page_size × head_dim` elements. `order` says how the box lies in
    memory, outermost axis first. In the default order a page is one run of bytes, and so is any range of its heads:
    a transfer between different tensor-parallel splits still copies one run per page.
    """

    dtype: str  # of the elements, as torch spells it ("bfloat16")
    itemsize: int  # bytes of one element
    num_layers: int  # that contribute KV
    sides: int  # 2 for keys and values, 1 for a latent
    first_head: int  # the model's first head that this shard holds
    num_heads: int  # that this shard holds
    page_size: int  # tokens of a page
    head_dim: int  # elements of one head of one token
    order: str  # the axes, outermost first, comma-separated

    @property
    def extents(self) -> dict[str, int]:
        """Elements along each axis."""
        sizes = (self.num_layers, self.sides, self.num_heads, self.page_size, self.head_dim)
        return dict(zip(AXES, sizes, strict=True))

    @property
    def page_elements(self) -> int:
        """Elements of one page."""
        return math.prod(self.extents.values())

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.page_elements * self.itemsize

    @property
    def strides(self) -> dict[str, int]:
        """Elements between neighbours along each axis."""
        extents, step, found = self.extents, 1, dict[str, int]()
        for axis in reversed(self.order.split(",")):
            found[axis] = step
            step *= extents[axis]
        return found

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Logical shape of a page: `(sides, layers, page_size, heads, head_dim)`."""
        return (self.sides, self.num_layers, self.page_size, self.num_heads, self.head_dim)

    @property
    def shape_strides(self) -> tuple[int, int, int, int, int]:
        """Strides, in elements, of the logical shape."""
        at = self.strides
        return (at["side"], at["layer"], at["token"], at["head"], at["dim"])

    def fingerprint(self) -> str:
        """Names this geometry: two shards whose fingerprints agree may exchange pages byte for byte."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).hexdigest()[:16]


def shard_layout(params: KVCacheParams, num_layers: int, page_size: int, shard: int) -> PageLayout:
    """The layout of shard `shard` of each replica."""
    heads = params.heads_of_shard(shard)
    return PageLayout(
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


def shard_layouts(params: KVCacheParams, num_layers: int, page_size: int) -> list[PageLayout]:
    """The layouts of all shards of a replica."""
    return [shard_layout(params, num_layers, page_size, shard) for shard in range(params.tensor_parallel_degree)]


def replica_fingerprint(layouts: list[PageLayout], groups: str = "") -> str:
    """Names the geometry of all shards of a replica together, and its `groups` of layers, where there are several."""
    joined = ",".join(layout.fingerprint() for layout in layouts) + groups
    return hashlib.sha256(joined.encode()).hexdigest()[:16]


def kv_kind(layouts: Sequence[PageLayout]) -> str:
    """What the shards of a replica keep of a token, however its heads are split and its pages lie."""
    one, heads = layouts[0], max(layout.first_head + layout.num_heads for layout in layouts)
    return f"{one.dtype}, {one.num_layers} layers of {one.sides} x {heads} heads of {one.head_dim}"


def as_blocks(pages: torch.Tensor, layout: PageLayout, num_pages: int) -> torch.Tensor:
    """A flat tensor of `num_pages * layout.page_elements` elements as `[pages, sides, layers, page, heads, dim]`."""
    return pages.as_strided((num_pages, *layout.shape), (layout.page_elements, *layout.shape_strides))
