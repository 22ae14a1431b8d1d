"""`BlockLending`: an engine's cached blocks for readers that ask for them by hash, whichever request computed them.

The engine's block pool belongs to the engine's thread. A query therefore waits until that thread calls `poll`, and the
blocks that it finds stay held until `update` is told that their lease has ended on every rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from kvcache.replica.block_table import BlockTable, PageDigests
from transfer.connector.metadata import Progress
from transfer.connector.scheduler import NixlConnectorScheduler
from transfer.pull.lease import LeaseRef
from transfer.pull.lending import LENT_S, LendingLimits, PageLending
from transfer.pull.replica import LeaseOver, Offered
from transfer.pull.seals import TableSeals, new_table_key
from transfer.pull.source import OfferedPages, Source
from transfer.wire.messages import ContentQuery, LeaseReply
from transfer.wire.prompt import HashedPages

KIND = "cached blocks"
"""The `kind` of queries for the blocks of an engine. The config's fingerprint describes their KV further."""


class HeldBlocks(NamedTuple):
    """Cached blocks that nothing else can evict.

    Attributes:
        num_pages: how many consecutive pages of the prompt they hold, from the first wanted one on.
        block_ids: the blocks of each group. Each list ends with the block of the last page; groups with a window may
            lack the earlier ones.
    """

    num_pages: int
    block_ids: tuple[tuple[int, ...], ...]


class BlockSource(Protocol):
    """An engine's block pool. Only the engine's thread may use it."""

    @property
    def hash_bytes(self) -> int:
        """Bytes of a hash."""
        ...

    def hold(self, wanted: PageDigests, most: int) -> HeldBlocks | None:
        """Holds the longest cached run of the wanted pages, at most `most` blocks. Returns None if there is none.

        Raises:
            BlockTableMismatchError: pages of this kind are not cached here, or must not be lent.
        """
        ...

    def free(self, held: HeldBlocks) -> None:
        """Gives up the blocks of `hold`."""


class _LentBlocks(NamedTuple):
    """Held blocks, and what they hold."""

    held: HeldBlocks
    content: HashedPages


class BlockLending:
    """Leases cached blocks of one engine. `answer` may be called on any thread, the other methods on the engine's.

    Args:
        connector: grants the leases.
        blocks: the engine's blocks.
        limits: how many blocks and leases may be lent at the same time.
        tables: the number of groups.
        kinds: the kind of each group, as in a `BlockTable`.
        ring: called when a query has come, on the handshake server's thread. The engine's thread must then call `poll`
            and run a step.
        kind: what the blocks hold, in words that a query must repeat.
        table_key: the key with which the ranks' metadata say that block tables are sealed. Only a `PageExchange` needs
            it, because it pulls by block tables.
    """

    slab_pages = 0

    def __init__(
        self,
        connector: NixlConnectorScheduler,
        blocks: BlockSource,
        limits: LendingLimits,
        tables: int,
        kinds: tuple[str, ...],
        ring: Callable[[], None],
        *,
        kind: str = KIND,
        table_key: bytes = b"",
    ) -> None:
        self.contents = self
        self._connector, self._blocks, self._kinds = connector, blocks, kinds
        self._names = (f"lent {number}" for number in itertools.count())
        self._leases: dict[str, tuple[LeaseRef, HeldBlocks]] = {}
        self._lending = PageLending(
            self,
            self._grant,
            ring,
            limits=limits,
            kind=kind,
            tables=tables,
            key=connector.key,
            seals=TableSeals(table_key or new_table_key()),
        )

    def answer(self, query: ContentQuery) -> LeaseReply:
        """Returns the current answer to a query."""
        return self._lending.answer(0, replace(query, engine_id=self._connector.config.engine_id))

    @property
    def is_asked(self) -> bool:
        """Whether a query waits for `poll`, or for its lease."""
        return self._lending.is_asked

    @property
    def num_leases(self) -> int:
        """How many leases have not ended."""
        return len(self._leases)

    @property
    def blocks_lent(self) -> int:
        """How many blocks have been lent so far."""
        return self._lending.pages_lent

    def poll(self) -> None:
        """Looks up the blocks of the queries that wait, and asks for leases in the next step."""
        if self._lending.is_asked:
            self._lending.poll()
            self._tell()

    def update(self, progress: Progress) -> None:
        """Takes granted and ended leases out of a report. Frees the blocks of ended ones."""
        for name in progress.offered & self._leases.keys():
            progress.offered.remove(name)
            self._lending.settle(Offered(name, self._leases[name][0].lease_id, ""))
        for name in progress.sent.keys() & self._leases.keys():
            lease, held = self._leases.pop(name)
            self._lending.settle(LeaseOver(name, lease.lease_id, progress.sent.pop(name)))
            self._blocks.free(held)
        self._tell()

    def end_all(self, reason: str) -> None:
        """Ends all leases, also those that no rank has granted yet. `update` frees their blocks."""
        for name in self._leases:
            self._connector.abort(name, reason)

    def _tell(self) -> None:
        if self._lending.take_answers():
            self._connector.look_again()

    # ---- the part of a manager's interface that `PageLending` calls

    def bring(self, *_: object) -> bool:
        """Returns False, because all blocks are on the device."""
        return False

    def lease(self, name: str, replica: int, wanted: PageDigests, most: int) -> tuple[_LentBlocks, BlockTable] | None:
        """Holds wanted blocks, and describes them."""
        held = self._blocks.hold(wanted, most)
        if held is None:
            return None
        width = self._blocks.hash_bytes
        size, algorithm, digests, first, named = wanted
        digests = digests[: held.num_pages * width]
        table = BlockTable(
            request_id=name,
            replica_idx=replica,
            num_tokens=(first + held.num_pages) * size,
            page_size=size,
            groups=held.block_ids,
            fingerprint="",
            hash_algorithm=algorithm,
            digests=digests,
            kinds=self._kinds,
            first_page=first,
        )
        return _LentBlocks(held, HashedPages(size, algorithm, digests, width, first, named)), table

    def end_lease(self, lease: _LentBlocks) -> None:
        """Gives up the blocks of a lease that was not asked for."""
        self._blocks.free(lease.held)

    def _grant(self, lent: _LentBlocks, table: BlockTable) -> Source | None:
        name, config = next(self._names), self._connector.config
        lease = self._connector.lend(name, OfferedPages(lent.content, table.num_tokens, table.groups), LENT_S)
        if lease is None:
            self.end_lease(lent)
            return None
        self._leases[name] = (lease, lent.held)
        return Source(self._connector.address, config.engine_id, lease, config.incarnation)
