"""New leases of an engine: an id and a slot, which are the same on every rank."""

from __future__ import annotations

import heapq

from transfer.pull.lease import LeaseRef, new_lease_id

LEASE_SLOTS = 4096
"""Leases of our own requests that can stand at a time."""
LENT_SLOTS = 1024
"""Leases of pages that readers asked for by what they hold: their words follow those of our own requests. So nobody
who asks can take a word that a request of ours needs."""


class LeaseSlots:
    """The free slots. The grantor of leases on several ranks takes slots here, so that the ranks agree.

    Args:
        slots: those that may be taken.
    """

    def __init__(self, slots: range = range(LEASE_SLOTS)) -> None:
        self.slots = slots
        self._free = list(slots)

    def take(self, duration_s: float, lease_id: int | None = None) -> LeaseRef | None:
        """A lease in the lowest free slot, with a new id or the given one; None if as many stand as can."""
        if not self._free:
            return None
        return LeaseRef(new_lease_id() if lease_id is None else lease_id, heapq.heappop(self._free), duration_s)

    def give_back(self, lease: LeaseRef) -> None:
        """The word of a lease is cleared on every rank, or it never stood: the slot may be another's."""
        heapq.heappush(self._free, lease.slot)
