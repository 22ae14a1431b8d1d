"""Pools as the thread of `pagewire top`'s endpoint reads them: the cells of a pool, and the owners of its pages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvcache.pool.pages import PagePool
from kvcache.replica.replica import Replica
from kvcache.replicas import Replicas
from kvcache.watch.cells import Holding, OwnerNumbers, leased, pool_cells, quarantined, replica_cells
from kvcache.watch.messages import Cells

OwnerRow: TypeAlias = tuple[int, str, str, str, str, int, int, int]
"""An owner of pages, with the fields of `Owners` in their order: its number first, its tenant as a salt."""


class WatchedPool:
    """A pool that `pagewire top` shows. The endpoint's thread reads the pool while the loop changes it.

    The pages of this base class have no owner, as in the host tier.

    Attributes:
        name: the index of the replica as a string, or the name of the tier.
    """

    def __init__(self, name: str, pool: PagePool) -> None:
        self.name, self._pool = name, pool

    @property
    def pool(self) -> PagePool:
        """The pool that is watched. If another `PagePool` object replaces it, the endpoint starts recording again."""
        return self._pool

    def cells(self) -> Cells:
        """Returns the state, age and owner of each page."""
        return pool_cells(self.pool)

    def owners(self, phases: Mapping[str, str]) -> list[OwnerRow]:  # noqa: ARG002 - there are no owners
        """Returns the owners of pages, and the phase of each owner.

        `phases` has phases by request id. For other requests, the phase is derived from the rows.
        """
        return []

    def prefixes(self) -> Iterable[NDArray[np.int32]]:
        """Returns the published pages of each running request, from its first page on."""
        return ()


def pools_of(all_of: Replicas) -> list[WatchedPool]:
    """Returns the pools of a manager: its replicas, then the host tier if it has one."""
    found: list[WatchedPool] = [ReplicaPool(str(at), replica) for at, replica in enumerate(all_of.each)]
    if all_of.tiers is not None:
        found.append(WatchedPool("host", all_of.tiers.host.pool))
    return found


class ReplicaPool(WatchedPool):
    """A replica of a manager. The owners of its pages are requests, or leases and imports of released requests."""

    def __init__(self, name: str, replica: Replica) -> None:
        super().__init__(name, replica.pool)
        self._replica = replica
        self._numbers = OwnerNumbers(len(replica.rows.request_ids))

    def cells(self) -> Cells:
        return replica_cells(self._replica, self._numbers)

    def owners(self, phases: Mapping[str, str]) -> list[OwnerRow]:
        replica, rows = self._replica, self._replica.rows
        pairs = list(rows.row_of.items())
        at = np.array([row for _, row in pairs], np.int64)
        pages, tokens, prompts = rows.num_pages[at], rows.cached[at], np.maximum(rows.prompt[at], 0)
        own = np.where(pages == 0, "waiting", np.where(tokens < prompts, "prompt", "decoding")).tolist()
        pending = {one.request_id for one in list(replica.imports.of_row.values())}
        figures = zip(own, pages.tolist(), tokens.tolist(), prompts.tolist(), strict=True)
        found: list[OwnerRow] = []
        for (name, row), (phase, *counts) in zip(pairs, figures, strict=True):
            told = phases.get(name) or ("importing" if name in pending else phase)
            found.append((row + 1, name, replica.salt(row) or "", told, self.name, *counts))
        kept: list[tuple[str, Holding]] = [(phases.get(one.request_id, "leased"), one) for one in leased(replica)]
        kept += [("quarantined", one) for one in quarantined(replica)]
        numbers = self._numbers.of([one for _, one in kept])
        return found + [
            (number, one.request_id, "", phase, self.name, len(one.pages), 0, 0)
            for number, (phase, one) in zip(numbers, kept, strict=True)
        ]

    def prefixes(self) -> Iterable[NDArray[np.int32]]:
        rows = self._replica.rows
        for row in np.flatnonzero(rows.committed).tolist():
            yield rows.table[0, row, : rows.committed[row]].copy()
