"""Checksums of pages: the source computes them when it leases pages, and the reader compares them after the copy.

A fence proves that a page was not written while it was read. It does not prove that the reader's bytes equal the
source's: NIXL reports a short read as done, and memory or a wire may corrupt data. Checksums rule that out, at the cost
of one pass over the bytes on each side. XXH3 detects accidental damage, but not changes by an attacker.
`benchmarks.verify_price` measures the cost.

The source keeps one word for each page, in memory that readers may READ, so that no message has to carry checksums.
Readers copy the words along with the pages. That is safe because the words of leased pages do not change while the
lease is open.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash
from numpy.typing import ArrayLike, NDArray

from kvcache.replica.block_table import PageCopy
from transfer.errors import HandshakeError, InvalidEngineError, InvalidTransferError, PullFailedError
from transfer.failures import FailureKind
from transfer.memory import MemoryType
from transfer.nixl.agent import WORD_BYTES, Agent
from transfer.plan.boxes import Box, Group, ShardLayout
from transfer.plan.plan import Plan
from transfer.plan.runs import concatenated
from transfer.pull.lease import make_words
from transfer.pull.parts import Part
from transfer.wire.messages import RankMetadata

ATTEMPTS = 3
"""A page is read this many times before it counts as bad at its source."""


class PageChecks:
    """The checksums of one shard's pages, and the words that hold them. Each box of a page must be one run of bytes.

    Attributes:
        words: uint64 `[num_pages]` for each group: the checksum of each page at its last call to `record`.
            The words must be registered.

    Raises:
        InvalidEngineError: the pages of a box have gaps.
    """

    def __init__(self, layout: ShardLayout, bases: Sequence[int]) -> None:
        self.words: list[NDArray[np.uint64]] = [make_words(group.num_pages) for group in layout.groups]
        self._views = [
            [_view(number, box, group, bases) for box in group.boxes] for number, group in enumerate(layout.groups)
        ]

    def record(self, group: int, pages: ArrayLike) -> None:
        """Records the checksums of pages, which must not be written after this call."""
        ids = self._ids(group, pages)
        self.words[group][ids] = self._sums(group, ids)

    def bad(self, group: int, pages: ArrayLike, expected: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Returns the index in `pages` of each arrived page whose checksum differs from `expected`."""
        return np.flatnonzero(self._sums(group, self._ids(group, pages)) != expected)

    def _ids(self, group: int, pages: ArrayLike) -> NDArray[np.int64]:
        ids = np.asarray(pages, np.int64)
        if ids.size and not 0 <= ids.min() <= ids.max() < len(self.words[group]):
            raise InvalidTransferError(
                f"group {group}: pages {ids.min()} to {ids.max()} are not within its {len(self.words[group])} pages"
            )
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
    """Returns a view of the bytes of a box in each page: uint8 `[num_pages, bytes]`."""
    num_bytes = int(np.prod(box.extent)) * box.itemsize
    if num_bytes != box.span:
        raise InvalidEngineError(
            f"group {number}: page checks need pages without gaps, but box {box.kind!r} has {num_bytes} bytes "
            f"spread over {box.span}"
        )
    end = (group.num_pages - 1) * box.page_stride + num_bytes
    memory: Any = (ctypes.c_uint8 * end).from_address(bases[box.region] + box.offset)
    flat: NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
    return np.lib.stride_tricks.as_strided(flat, (group.num_pages, num_bytes), (box.page_stride, 1))


def same_pages(local: ShardLayout, remote: ShardLayout) -> bool:
    """Returns whether two shards lay out their pages identically. Only such shards can compare checksums."""

    def shape(layout: ShardLayout) -> list[object]:
        return [
            (of.page_size, of.state, [(box.kind, box.dtype, box.first, box.extent, box.strides) for box in of.boxes])
            for of in layout.groups
        ]

    return shape(local) == shape(remote)


class Verifier:
    """Compares pages that came from one rank with that rank's checksums.

    All pulls share one local copy of the source's checksum words. Sharing is safe: the word of a page does not change
    while a lease of the page is open, and once the lease has ended, the fence fails the pull. `share` is the fraction
    of the pages that is compared; these pages are drawn at random. `repeated` counts the pages that were read again.

    Raises:
        HandshakeError: the source records no checksums, or its pages have another layout.
    """

    def __init__(self, checks: PageChecks, mine: RankMetadata, there: RankMetadata, share: float, agent: Agent) -> None:
        where = f"engine {there.engine_id!r} rank {there.rank} cannot be verified"
        if not there.checks_addrs:
            raise HandshakeError(f"{where}, because it keeps no page checks: turn on page_checks or verify there")
        if not same_pages(mine.layout, there.layout):
            raise HandshakeError(f"{where}, because its page layout differs from this engine's")
        if (mine.memory_type, there.memory_type) != (MemoryType.DRAM, MemoryType.DRAM):
            raise HandshakeError(f"{where}, because only pages in host memory are checked")
        self.repeated = 0
        self._checks = checks
        self._groups = mine.layout.groups
        self._there = there
        self._share = share
        self._random = np.random.default_rng()
        self._words = [make_words(group.num_pages) for group in there.layout.groups]
        agent.register([(words.ctypes.data, words.nbytes, 0) for words in self._words], MemoryType.DRAM)

    def part(self, key: str, plan: Plan, groups: Sequence[PageCopy]) -> Part | None:
        """Returns a `Part` that reads the pages of `groups` and their checksums, or None if no page is to be read."""
        read: list[PageCopy] = []
        for group, (local, remote, (start, stop)) in zip(self._groups, groups, strict=True):
            count = max(0, math.ceil(stop / group.page_size) - start // group.page_size)
            count = min(count, 1) if group.state else count
            here, there = np.asarray(local, np.int64)[:count], np.asarray(remote, np.int64)[:count]
            read.append(PageCopy(here, there, (start, stop)))
        return self._part(key, plan, read, ATTEMPTS)

    def _part(self, key: str, plan: Plan, groups: list[PageCopy], attempts: int) -> Part | None:
        """Like `part`, but the page arrays in `groups` must have no surplus pages."""
        runs = concatenated([plan.runs(group, *pages) for group, pages in enumerate(groups)])
        if not len(runs):
            return None
        spans = np.array([self._span(at, pages) for at, pages in enumerate(groups) if _count(pages)], np.uint64)
        local, remote = runs.descriptors(*plan.devices)
        return Part(
            plan.rank,
            np.concatenate([local, spans[:, [0, 2, 3]]]),
            np.concatenate([remote, spans[:, [1, 2, 3]]]),
            runs.num_bytes,
            lambda: self._compare(key, plan, groups, attempts - 1),
        )

    def _span(self, group: int, pages: PageCopy) -> tuple[int, int, int, int]:
        # One run has the words of all pages from the first to the last. Selecting only the needed words would take a
        # run for each page.
        first, last = int(np.min(pages.src_pages)), int(np.max(pages.src_pages))
        here, there = self._words[group].ctypes.data, self._there.checks_addrs[group]
        return here + WORD_BYTES * first, there + WORD_BYTES * first, WORD_BYTES * (last - first + 1), 0

    def _compare(self, key: str, plan: Plan, groups: list[PageCopy], attempts: int) -> Part | None:
        """Compares the pages that have arrived. Returns the part that must be read again, if any."""
        again: list[PageCopy] = []
        for at, (group, (local, remote, _)) in enumerate(zip(self._groups, groups, strict=True)):
            here, there = np.asarray(local), np.asarray(remote)
            if self._share < 1:
                drawn = self._random.random(len(here)) < self._share
                here, there = here[drawn], there[drawn]
            wrong = self._checks.bad(at, here, self._words[at][there])
            again.append(PageCopy(here[wrong], there[wrong], (0, len(wrong) * group.page_size)))
        count = sum(map(_count, again))
        if not count:
            return None
        if not attempts:
            group, pages = next((at, pages) for at, pages in enumerate(again) if _count(pages))
            raise PullFailedError(
                f"request {key!r}: {count} pages still differ from their source after {ATTEMPTS} reads, group {group} "
                f"page {np.asarray(pages.src_pages)[0]} of engine {self._there.engine_id!r} rank {plan.rank} among "
                "them",
                FailureKind.CHECKS,
            )
        self.repeated += count
        return self._part(key, plan, again, attempts)


def _count(pages: PageCopy) -> int:
    return len(np.asarray(pages.dst_pages))
