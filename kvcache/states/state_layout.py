"""The layout of the states of recurrent layers in state pages, on each shard. Pure arithmetic.

A recurrent layer keeps no key and value per token. It keeps the last few inputs of a convolution and one matrix per
head, and overwrites both with every token. So a state is a page of one token, in four pools:

    conv.x   a "head" for each channel of x: its last `kernel - 1` inputs, oldest first
    conv.B   the same for the channels of B, conv.C for those of C
    ssm      a head for each head: `head_dim × d_state` elements

These are Mamba-2's names. In a gated delta network x stands for values, B for queries and C for keys. Mamba-1 convolves
only x, and each of its channels is a head. A short convolution does the same and has no matrices. Linear attention
without a convolution has only matrices.

A shard holds a range of the heads, the channels of x that belong to these heads, and the channels of B and C that
belong to their groups. All layers of a request lie in one page of each pool, head-major as pages of keys and values
do: a transfer moves a state as it moves any page, and any range of heads or channels is one run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kvcache.errors import InvalidParamsError
from kvcache.layout import PageLayout
from kvcache.state_shape import CONV_KINDS, SSM_KIND, StateShape


def state_layouts(shape: StateShape | None, shards: int) -> list[Mapping[str, PageLayout]]:
    """The page of each kind on each of `shards` shards. A model without recurrent layers has no kinds.

    Heads are split evenly, and so are groups. If there are fewer groups than shards, several shards hold the same
    group. Raises `InvalidParamsError` if the shards can neither split nor share them evenly.
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
    """The bytes of a state on all shards together."""
    return sum(layout.page_bytes for kinds in layouts for layout in kinds.values())


def _page(layers: int, first: int, count: int, dim: int, dtype: torch.dtype) -> PageLayout:
    name = str(dtype).removeprefix("torch.")
    return PageLayout(name, dtype.itemsize, layers, 1, first, count, 1, dim, "head,layer,side,token,dim")


class StateViews:
    """Views of states in the form that a model's layers read and write, over any number of shards.

    `blocks` are `[shard][kind]`; `matrix` is the shape of a head's matrix.
    """

    def __init__(
        self,
        layouts: Sequence[Mapping[str, PageLayout]],
        blocks: Sequence[Sequence[torch.Tensor]],
        matrix: tuple[int, ...],
    ) -> None:
        # The tensors of each kind, one per shard: `[pages + 1, layers, channels or heads, ...]`.
        self.each: dict[str, list[tuple[PageLayout, torch.Tensor]]] = {}
        for kinds, tensors in zip(layouts, blocks, strict=True):
            for (kind, layout), of_kind in zip(kinds.items(), tensors, strict=True):
                view = of_kind[:, 0, :, 0]
                if kind == SSM_KIND:
                    view = view.view(*view.shape[:3], *matrix)
                self.each.setdefault(kind, []).append((layout, view))

    def read(self, layer: int, pages: torch.Tensor, kinds: Sequence[str]) -> torch.Tensor:
        """A copy of the states of `kinds`, one after another, of all shards: `[pages, channels or heads, ...]`."""
        found = list[torch.Tensor]()
        for kind in kinds:
            seen = 0
            for layout, view in self.each[kind]:
                if _end(layout) > seen:  # with more shards than groups, several hold the same one
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
