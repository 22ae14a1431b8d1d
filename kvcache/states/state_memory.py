"""The memory of recurrent states: the layout of a state in its page, on each shard, and the pages of one replica.

A recurrent layer keeps no keys and values. It keeps the last inputs of a convolution, and one matrix for each head.
Each token overwrites both. So the state of a request has the layout of a page of keys and values for a single token.
There are up to four kinds of state, and a request has one page of each kind:

    conv.x   a "head" for each channel of x: its last `kernel - 1` inputs, oldest first
    conv.B   a "head" for each channel of B: its last `kernel - 1` inputs, oldest first
    conv.C   a "head" for each channel of C: its last `kernel - 1` inputs, oldest first
    ssm      a head for each head of the model: its matrix of `head_dim × d_state` elements

The names x, B and C are Mamba-2's. In a gated delta network, x stands for values, B for queries and C for keys. Mamba-1
convolves only x, and each channel of x is a head. A layer that is only a short convolution has conv.x and no matrices.
Linear attention without a convolution has only matrices.

A shard holds a range of the heads, with the channels of x that belong to these heads. It also holds the channels of B
and C that belong to the groups of these heads. A page of a kind has the states of all layers. Its outermost axis is the
head, as in pages of keys and values. So any range of heads or channels is one run of bytes, and a transfer moves a
state in the same way as any page.

State pages have separate memory (`room_apart`), or share memory with token pages (`room_in_slabs`). With shared memory,
a state takes a slab: a run of consecutive token pages (`kvcache.pool.slabs`). A slab is large enough for a state on
every shard. State page s is slab s. The kinds of a state follow each other from the slab's first byte on, and the
beginning of each kind is aligned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from kvcache.copies import as_words
from kvcache.errors import InvalidParamsError, PoolTooSmallError
from kvcache.layout import KindPages, PageLayout, allocate_blocks
from kvcache.params import CONV_KINDS, SSM_KIND, KVCacheParams, StateShape
from kvcache.pool.pages import PagePool
from kvcache.pool.slabs import SlabPool, num_slabs

_ALIGNED = 16  # in bytes: the alignment of slabs, and of the kinds in them

StateLayouts = Sequence[Mapping[str, PageLayout]]


def state_layouts(shape: StateShape | None, shards: int) -> list[Mapping[str, PageLayout]]:
    """Returns the page layout of each kind of state on each of `shards` shards; no kinds without recurrent layers.

    Heads are split evenly over the shards, and so are groups. If there are fewer groups than shards, the same number of
    shards holds each group. Raises `InvalidParamsError` if an even division is impossible.
    """
    if shape is None:
        return [{} for _ in range(shards)]
    if shape.heads % shards or (shape.groups % shards and shards % shape.groups):
        raise InvalidParamsError(
            f"a state of {shape.heads} heads in {shape.groups} groups cannot be split or shared evenly by {shards} "
            "shards"
        )
    heads, groups = shape.heads // shards, max(1, shape.groups // shards)
    layouts: list[Mapping[str, PageLayout]] = []
    for shard in range(shards):
        first_head, first_group = shard * heads, shard * shape.groups // shards
        x = (first_head * shape.head_dim, heads * shape.head_dim)
        b = c = (first_group * shape.d_state, groups * shape.d_state)
        layout = {
            kind: _page(shape.layers, first, count, shape.kernel - 1, shape.conv_dtype)
            for kind, (first, count) in zip(CONV_KINDS, (x, b, c), strict=True)
            if kind in shape.conv_kinds
        }
        if shape.matrix:
            layout[SSM_KIND] = _page(shape.layers, first_head, heads, shape.head_dim * shape.d_state, shape.ssm_dtype)
        layouts.append(layout)
    return layouts


def page_bytes(layouts: list[Mapping[str, PageLayout]]) -> int:
    """Returns the bytes of a state on all shards together."""
    return sum(layout.page_bytes for kinds in layouts for layout in kinds.values())


def _page(layers: int, first: int, count: int, dim: int, dtype: torch.dtype) -> PageLayout:
    name = str(dtype).removeprefix("torch.")
    return PageLayout(name, dtype.itemsize, layers, 1, first, count, 1, dim, "head,layer,side,token,dim")


def slab_pages_of(params: KVCacheParams, layouts: Sequence[PageLayout]) -> int:
    """Returns how many token pages a request's state takes. 0 if states do not share memory with token pages.

    `layouts` has the layout of a token page on each shard.
    """
    if not params.has_states_in_pages:
        return 0
    return pages_of_slab(state_layouts(params.states, len(layouts)), layouts)


def pages_of_slab(states: StateLayouts, pages: Sequence[PageLayout]) -> int:
    """Returns the smallest number of token pages that can hold a state on each shard.

    The size of these pages in bytes is a multiple of the alignment.
    """
    count = max(-(-kind_offsets(kinds)[-1] // page.page_bytes) for kinds, page in zip(states, pages, strict=True))
    while any(count * page.page_bytes % _ALIGNED for page in pages):
        count += 1
    return count


def most_states(num_pages: int, slab_pages: int) -> int:
    """Returns the most states that fit into `num_pages` pages of a replica if no tokens are cached."""
    return num_slabs(num_pages, slab_pages)


class StateRoom(NamedTuple):
    """The memory for the states of one replica, and the pool of their state pages.

    Attributes:
        layouts: the page layout of each kind, per shard.
        blocks: the states, `[shard][kind]`: tensors `[pages + 1, ...]`. Page 0 is the null page.
        tensors: the tensors of `blocks` that do not lie in token pages, `[shard][kind]`.
        kinds: where each kind lies, `[shard][kind]`.
        pool: the holders of the pages, and the cached states, which are found by their digests. The least recently used
            state is evicted first.
    """

    layouts: StateLayouts
    blocks: list[list[torch.Tensor]]
    tensors: list[list[torch.Tensor]]
    kinds: list[list[KindPages]]
    pool: PagePool


def room_apart(
    shape: StateShape | None, num_pages: int, devices: Sequence[torch.device | str], digest_words: int
) -> StateRoom:
    """Returns separate memory for `num_pages` states on these devices, one for each shard.

    Raises `InvalidParamsError` if the heads cannot be divided among the devices, and `PoolTooSmallError` if a device is
    too small.
    """
    layouts = state_layouts(shape, len(devices))
    blocks = [
        [allocate_blocks(layout, num_pages + 1, torch.device(device)) for layout in kinds.values()]
        for kinds, device in zip(layouts, devices, strict=True)
    ]
    where = [
        [KindPages(kind, page, region, 0, page.page_bytes) for region, (kind, page) in enumerate(kinds.items())]
        for kinds in layouts
    ]
    return StateRoom(layouts, blocks, blocks, where, PagePool(num_pages, digest_words))


def room_in_slabs(shape: StateShape | None, slabs: SlabPool, rows: Sequence[torch.Tensor]) -> StateRoom:
    """Returns the memory for states in the slabs of a pool of token pages.

    `rows` has the token pages of each shard, `[pages, words]`. Raises the errors of `room_apart`, and
    `PoolTooSmallError` if the pool has no slab.
    """
    if slabs.num_slabs < 1:
        raise PoolTooSmallError(
            f"available_cache_memory holds {slabs.num_pages} pages, and a state takes {slabs.slab_pages} of them: "
            f"at least {2 * slabs.slab_pages - 1} pages are needed"
        )
    layouts = state_layouts(shape, len(rows))
    sizes = [slabs.slab_pages * row.shape[1] * row.element_size() for row in rows]
    blocks = [
        _views(kinds, shard, slabs.num_slabs + 1, size) for kinds, shard, size in zip(layouts, rows, sizes, strict=True)
    ]
    where = [
        [KindPages(kind, kinds[kind], None, at, size) for kind, at in zip(kinds, kind_offsets(kinds), strict=False)]
        for kinds, size in zip(layouts, sizes, strict=True)
    ]
    return StateRoom(layouts, blocks, [[] for _ in blocks], where, slabs.cached)


def kind_offsets(kinds: Mapping[str, PageLayout]) -> list[int]:
    """Returns the byte offset of each kind within a state. The last item is the end of the last kind in bytes."""
    at = [0]
    for page in kinds.values():
        at.append(-(-(at[-1] + page.page_bytes) // _ALIGNED) * _ALIGNED)
    return at


def _views(kinds: Mapping[str, PageLayout], rows: torch.Tensor, count: int, slab_bytes: int) -> list[torch.Tensor]:
    memory = rows.reshape(-1).view(torch.uint8)[: count * slab_bytes]
    views: list[torch.Tensor] = []
    for page, offset in zip(kinds.values(), kind_offsets(kinds), strict=False):
        dtype: torch.dtype = getattr(torch, page.dtype)
        items, first = memory.view(dtype), offset // page.itemsize
        strides = (slab_bytes // page.itemsize, *page.shape_strides)
        views.append(items[first:].as_strided((count, *page.shape), strides))
    return views


def state_rows(layouts: StateLayouts, blocks: Sequence[Sequence[torch.Tensor]]) -> list[Any]:
    """Returns views of states as rows of words, `[pages + 1, words]`, for each kind on each shard.

    On the CPU the views are numpy arrays, because torch takes longer than numpy to copy a row.
    """
    rows = list[Any]()
    for kinds, tensors in zip(layouts, blocks, strict=True):
        for layout, of_kind in zip(kinds.values(), tensors, strict=True):
            words = as_words(of_kind, layout.page_bytes // layout.itemsize)
            rows.append(words.numpy() if words.is_cpu else words)
    return rows


class StateViews:
    """Views of states in the form that a model's layers read and write, over any number of shards.

    `blocks` has the tensors of states, `[shard][kind]`. `matrix` is the shape of the matrix of one head.
    """

    def __init__(
        self,
        layouts: Sequence[Mapping[str, PageLayout]],
        blocks: Sequence[Sequence[torch.Tensor]],
        matrix: tuple[int, ...],
    ) -> None:
        # the tensors of each kind, one for each shard: `[pages + 1, layers, channels or heads, ...]`
        self.each: dict[str, list[tuple[PageLayout, torch.Tensor]]] = {}
        for kinds, tensors in zip(layouts, blocks, strict=True):
            for (kind, layout), of_kind in zip(kinds.items(), tensors, strict=True):
                view = of_kind[:, 0, :, 0]
                if kind == SSM_KIND:
                    view = view.view(*view.shape[:3], *matrix)
                self.each.setdefault(kind, []).append((layout, view))

    def read(self, layer: int, pages: torch.Tensor, kinds: Sequence[str]) -> torch.Tensor:
        """Returns a copy of the states of `kinds`, one kind after another: `[pages, channels or heads, ...]`."""
        found = list[torch.Tensor]()
        for kind in kinds:
            seen = 0
            for layout, view in self.each[kind]:
                if _end(layout) > seen:  # if there are more shards than groups, several shards hold the same group
                    found.append(view[pages, layer])
                    seen = _end(layout)
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)

    def write(self, layer: int, pages: torch.Tensor, kinds: Sequence[str], states: torch.Tensor) -> None:
        """Write states in the form that `read` returns, to every shard that holds them."""
        before = 0
        for kind in kinds:
            for layout, view in self.each[kind]:
                view[pages, layer] = states[:, before + layout.first_head : before + _end(layout)].to(view.dtype)
            before += _end(self.each[kind][-1][0])


def _end(layout: PageLayout) -> int:
    return layout.first_head + layout.num_heads
