"""Checksums of pages: made by the source as it leases them, compared by the reader after they have arrived.

A fence proves that nothing was written to a page while it was read. It does not prove that the bytes are those that the
source holds: NIXL reports a short read as done, and memory or a wire may corrupt. Who wants to rule that out pays for
one pass over the bytes on each side. XXH3 finds accidents, not attacks; see the benchmark for the price.

The source keeps a word for each page in memory that readers may READ, so no message grows. Readers copy the words along
with the pages: those of pages under a lease do not change while it stands.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash
from numpy.typing import ArrayLike, NDArray

from transfer.errors import InvalidEngineError, InvalidTransferError
from transfer.plan.boxes import Box, Group, ShardLayout
from transfer.pull.lease import make_words

ATTEMPTS = 3
"""How often a page is read until it is taken for bad at its source."""


class PageChecks:
    """The checksums of one shard's pages, and the words that hold them.

    Args:
        layout: the shard; each box of a page must be one dense run of bytes.
        bases: address of each region, in host memory of this process.

    Attributes:
        words: for each group uint64 `[num_pages]`, the checksum of each page that was sealed last. To be registered.

    Raises:
        InvalidEngineError: the pages of a box have gaps.
    """

    def __init__(self, layout: ShardLayout, bases: Sequence[int]) -> None:
        self.words: list[NDArray[np.uint64]] = [make_words(group.num_pages) for group in layout.groups]
        self._views = [
            [_view(number, box, group, bases) for box in group.boxes] for number, group in enumerate(layout.groups)
        ]

    def seal(self, group: int, pages: ArrayLike) -> None:
        """Takes down what pages hold now. Nothing may write to them any more."""
        ids = self._ids(group, pages)
        self.words[group][ids] = self._sums(group, ids)

    def bad(self, group: int, pages: ArrayLike, expected: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Returns the positions in `pages`, which have arrived, of those whose checksum is not the one expected."""
        return np.flatnonzero(self._sums(group, self._ids(group, pages)) != expected)

    def _ids(self, group: int, pages: ArrayLike) -> NDArray[np.int64]:
        ids = np.asarray(pages, np.int64)
        if ids.size and not 0 <= ids.min() <= ids.max() < len(self.words[group]):
            raise InvalidTransferError(f"group {group}: pages {ids.min()} to {ids.max()}, has {len(self.words[group])}")
        return ids

    def _sums(self, group: int, ids: NDArray[np.int64]) -> NDArray[np.uint64]:
        views = self._views[group]
        if len(views) == 1:
            view, digest = views[0], xxhash.xxh3_64_intdigest
            return np.array([digest(view[page].data) for page in ids.tolist()], np.uint64)
        return np.array([_sum_of(views, page) for page in ids.tolist()], np.uint64)


def _sum_of(views: list[NDArray[np.uint8]], page: int) -> int:
    digest = xxhash.xxh3_64()
    for view in views:
        digest.update(view[page].data)
    return digest.intdigest()


def _view(number: int, box: Box, group: Group, bases: Sequence[int]) -> NDArray[np.uint8]:
    """uint8 `[num_pages, bytes]`, the bytes of a box of each page, in place."""
    num_bytes = int(np.prod(box.extent)) * box.itemsize
    if num_bytes != box.span:
        raise InvalidEngineError(
            f"group {number}: page checks need pages without gaps, box {box.kind!r} spans {box.span} bytes for "
            f"{num_bytes}"
        )
    end = (group.num_pages - 1) * box.page_stride + num_bytes
    memory: Any = (ctypes.c_uint8 * end).from_address(bases[box.region] + box.offset)
    flat: NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
    return np.lib.stride_tricks.as_strided(flat, (group.num_pages, num_bytes), (box.page_stride, 1))


def same_pages(local: ShardLayout, remote: ShardLayout) -> bool:
    """Whether a page of one shard is, byte for byte, a page of the other: only then can a checksum be compared."""

    def shape(layout: ShardLayout) -> list[object]:
        return [
            (
                group.page_size,
                group.state,
                [(box.kind, box.dtype, box.first, box.extent, box.strides) for box in group.boxes],
            )
            for group in layout.groups
        ]

    return shape(local) == shape(remote)
