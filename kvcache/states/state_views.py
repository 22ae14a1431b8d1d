"""`StateViews`: the states of some kinds in state pages, as layers of a model read and write them, on any shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kvcache.layout import PageLayout
from kvcache.state_shape import SSM_KIND


class StateViews:
    """Views of the blocks of each shard, `[shard][kind]`; `matrix` is the shape of a head's."""

    def __init__(
        self,
        layouts: Sequence[Mapping[str, PageLayout]],
        blocks: Sequence[Sequence[torch.Tensor]],
        matrix: tuple[int, ...],
    ) -> None:
        # Of each kind what every shard holds: `[pages + 1, layers, channels or heads, ...]`.
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
        """Put what `read` gives, changed, back in its place, on every shard that holds it."""
        before = 0
        for kind in kinds:
            for layout, view in self.each[kind]:
                view[pages, layer] = states[:, before + layout.first_head : before + _end(layout)].to(view.dtype)
            before += _end(self.each[kind][-1][0])


def _end(layout: PageLayout) -> int:
    return layout.first_head + layout.num_heads
