"""Reads and writes a layer's pages through our boxes, element by element, to check that the boxes are right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from transfer.connector.cache_layout import Cache, tensors_of
from transfer.pull.rank import ShardMemory

_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _BoxView(NamedTuple):
    """A box as integers `[pages, sides, heads, tokens, dims]`, and its first element in a head's content."""

    first: int
    elements: torch.Tensor


class LayerView:
    """One attention layer of a rank, seen through its boxes.

    Args:
        memory: the rank's boxes.
        caches: the tensors that the boxes were made from.
        group: number of the layer's group.
        layer: number of the layer in the model.

    Attributes:
        num_pages: pages of the layer.
        page_size: tokens of a page.
        heads: heads of a token on this rank.
        content: elements of a head: keys and values, or a latent.
        itemsize: bytes of an element.
    """

    def __init__(self, memory: ShardMemory, caches: Mapping[str, Cache], group: int, layer: int) -> None:
        held = memory.layout.groups[group]
        tensors = [tensor for cache in caches.values() for tensor in tensors_of(cache)]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        boxes = [box for box in held.boxes if box.first[0] == layer]
        self.num_pages, self.page_size = held.num_pages, held.page_size
        self.itemsize, self.heads = boxes[0].itemsize, boxes[0].extent[2]
        self.content = sum(box.extent[1] * box.extent[4] for box in boxes)
        self._boxes: list[_BoxView] = []
        for box in boxes:
            raw = torch.empty(0, dtype=_RAW[box.itemsize], device=memory.device)
            steps = [step // box.itemsize for step in (box.page_stride, *box.strides[1:])]
            sizes, storage = (held.num_pages, *box.extent[1:]), storages[memory.bases[box.region]]
            view = raw.set_(storage, box.offset // box.itemsize, sizes, steps)
            self._boxes.append(_BoxView(box.first[1] * box.extent[4], view))

    def read(self, pages: Sequence[int]) -> torch.Tensor:
        """Returns the bits of some pages as integers `[pages * tokens, heads, content]`, in host memory."""
        shape = (len(pages) * self.page_size, self.heads, self.content)
        found = torch.empty(shape, dtype=_RAW[self.itemsize])
        for first, elements in self._boxes:
            held = elements[list(pages)].permute(0, 3, 2, 1, 4).reshape(*shape[:2], -1)
            found[..., first : first + held.shape[-1]] = held.cpu()
        return found

    def write(self, pages: Sequence[int], found: torch.Tensor) -> None:
        """Writes back what `read` returned."""
        for first, elements in self._boxes:
            _, sides, heads, tokens, dims = elements.shape
            held = found[..., first : first + sides * dims].reshape(len(pages), tokens, heads, sides, dims)
            elements[list(pages)] = held.permute(0, 3, 2, 1, 4).to(elements.device)
