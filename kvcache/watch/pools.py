"""Pools as the thread of `pagewire top`'s endpoint reads them: the cells of a pool, and the owners of its pages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvcache.pool.pages import PagePool
from kvcache.replica.replica import Replica
from kvcache.replicas import Replicas
from kvcache.watch.cells import Holding, OwnerNumbers, leased, pool_cells, quarantined, replica_cells
from kvcache.watched import Cells, Owners

OwnerColumns: TypeAlias = tuple[list[Any], ...]
"""The columns of an `Owners`, in the order of its fields."""


class WatchedPool(Protocol):
    """A pool that `pagewire top` shows. The endpoint's thread reads the pool while the loop changes it."""

    @property
    def name(self) -> str:
        """The index of the replica as text, or the name of the tier."""
        ...

    @property
    def pool(self) -> PagePool:
        """The pool that is watched. If another `PagePool` object takes its place, the endpoint records anew."""
        ...

    def cells(self) -> Cells:
        """Returns the state, age and owner of each page."""
        ...

    def owners(self, phases: Mapping[str, str]) -> OwnerColumns:
        """Returns the owners of pages, and the phase of each owner.

        `phases` has phases by request id. For other requests, the phase is derived from the rows.
        """
        ...

    def prefixes(self) -> Iterable[NDArray[np.int32]]:
        """Returns the published pages of each running request, from its first page on."""
        ...


def pools_of(all_of: Replicas) -> list[WatchedPool]:
    """Returns the pools of a manager: its replicas, then the host tier if it has one."""
    found: list[WatchedPool] = [ReplicaPool(str(at), replica) for at, replica in enumerate(all_of.each)]
    if all_of.tiers is not None:
        found.append(HostPool(all_of.tiers.host.pool))
    return found


class HostPool:
    """The host tier. Its pages have no owner."""

    name = "host"

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool

    def cells(self) -> Cells:
        return pool_cells(self.pool)

    def owners(self, phases: Mapping[str, str]) -> OwnerColumns:  # noqa: ARG002
        return tuple([] for _ in Owners.__struct_fields__)

    def prefixes(self) -> Iterable[NDArray[np.int32]]:
        return ()


class ReplicaPool:
    """A replica of a manager. The owners of its pages are requests, or leases and imports of released requests."""

    def __init__(self, name: str, replica: Replica) -> None:
        self.name, self.pool = name, replica.pool
        self._replica = replica
        self._numbers = OwnerNumbers(len(replica.rows.request_ids))

    def cells(self) -> Cells:
        return replica_cells(self._replica, self._numbers)

    def owners(self, phases: Mapping[str, str]) -> OwnerColumns:
        replica, rows = self._replica, self._replica.rows
        pairs = list(rows.row_of.items())
        at = np.array([row for _, row in pairs], np.int64)
        names = [request_id for request_id, _ in pairs]
        salts = [replica.salt(row) or "" for _, row in pairs]
        pages, tokens, prompts = rows.num_pages[at], rows.cached[at], np.maximum(rows.prompt[at], 0)
        own = np.where(pages == 0, "waiting", np.where(tokens < prompts, "prompt", "decoding")).tolist()
        pending = {one.request_id for one in list(replica.imports.of_row.values())}
        told = [
            phases.get(name) or ("importing" if name in pending else phase)
            for name, phase in zip(names, own, strict=True)
        ]
        kept: list[tuple[str, Holding]] = [(phases.get(one.request_id, "leased"), one) for one in leased(replica)]
        kept += [("quarantined", one) for one in quarantined(replica)]
        holdings = [one for _, one in kept]
        extra = len(kept)
        return (
            [*(at + 1).tolist(), *self._numbers.of(holdings)],
            [*names, *(one.request_id for one in holdings)],
            [*salts, *[""] * extra],
            [*told, *(phase for phase, _ in kept)],
            [self.name] * (len(names) + extra),
            [*pages.tolist(), *(len(one.pages) for one in holdings)],
            [*tokens.tolist(), *[0] * extra],
            [*prompts.tolist(), *[0] * extra],
        )

    def prefixes(self) -> Iterable[NDArray[np.int32]]:
        rows = self._replica.rows
        for row in np.flatnonzero(rows.committed).tolist():
            yield rows.table[0, row, : rows.committed[row]].copy()
