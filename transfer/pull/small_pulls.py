"""Pulls of few pages: which they are, and the short way of those that are over as soon as they are posted.

A page is copied in 10 µs, and what a pull of any size needs around it takes five times as long. So one of few pages,
between two engines of one rank each, is read and fenced at once. Where that does not end it, because bytes go over a
wire, say, or the lease is over, it goes on as any other, from where it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from transfer.memory import MemoryType
from transfer.plan.page_lists import PageLists
from transfer.pull.directory import Directory, Peer
from transfer.pull.pull_state import PullEvent
from transfer.pull.rank import RankTransfer
from transfer.pull.source import Source
from transfer.wire.messages import Wanted

if TYPE_CHECKING:
    from kvcache.replica.block_table import BlockTable

_SMALL_BYTES = 1 << 20
"""A pull of so many bytes takes 0.1 to 0.3 ms. On a busy machine the thread, woken for it, takes twice that."""


class SmallPulls:
    """The pulls of few pages, by the ranks of one replica from the sources of its directory."""

    def __init__(self, ranks: Sequence[RankTransfer], directory: Directory) -> None:
        self._rank = ranks[0] if len(ranks) == 1 else None
        self._directory = directory
        self._page_bytes = _page_bytes(ranks)

    def is_small(self, source: Source | Wanted | None, groups: PageLists) -> bool:
        """Whether reading these pages, into host memory and from a known source, is quicker than waking a thread."""
        sizes, num_bytes = self._page_bytes, 0
        if sizes is None or not isinstance(source, Source) or len(groups) != len(sizes):
            return False
        for group, size in zip(groups, sizes, strict=True):
            local: Any = group[0]
            num_bytes += len(local) * size
        return num_bytes <= _SMALL_BYTES and self._directory.ready(source.place) is not None

    def pull(
        self, key: str, source: Source | Wanted, timeout_s: float, groups: PageLists, tables: Sequence[BlockTable]
    ) -> tuple[bool, PullEvent | None]:
        """Begins a pull the short way, if that is one for it.

        Returns:
            Whether it has begun, and its event if it is over by now; else it goes on, and the rank has its events.

        Raises:
            TransferError: as `Puller.open`, or the source has not made one of the `tables`; nothing has begun.
        """
        if self._rank is None or not isinstance(source, Source):
            return False, None
        peer = self._directory.use(source.place)
        remote = self._rank.remote(source.engine_id)
        if peer is None or remote is None or is_of_other_start(source, peer):
            return False, None
        part = remote.small_part(groups)
        if part is None:
            return False, None
        remote.check_tables(key, source.lease, tables)
        return True, self._rank.puller.pull_at_once(key, remote, source.lease, timeout_s, part)


def is_of_other_start(source: Source | Wanted, peer: Peer) -> bool:
    """Whether another start of the engine has granted the lease than the one that is known."""
    return isinstance(source, Source) and source.incarnation not in (peer.incarnation, "")


def _page_bytes(ranks: Sequence[RankTransfer]) -> list[int] | None:
    """The bytes of a page of each group on all ranks; None if they are not in host memory."""
    if any(rank.memory_type is not MemoryType.DRAM for rank in ranks):
        return None
    every = zip(*(rank.layout.groups for rank in ranks), strict=True)
    return [sum(box.itemsize * math.prod(box.extent) for one in of for box in one.boxes) for of in every]
