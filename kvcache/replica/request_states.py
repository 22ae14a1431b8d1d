"""`RequestStates`: what the requests of a replica keep beside the pages of their tokens.

Recurrent layers keep one state of all tokens so far. It is cached after some pages only, so a prefix is found as far as
the last of its pages after which there is one. Where there are several block tables that is the last of those after
which all of them can go on: a state is of no use where a window is gone, nor a window where there is no state.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from kvcache.pool.index import Digests
from kvcache.pool.quotas import TenantQuotas
from kvcache.replica.block_table import BlockTable, PendingImport
from kvcache.replica.context import Context
from kvcache.replica.hashing import PrefixHasher
from kvcache.replica.leases import HeldPages
from kvcache.replica.reservation import Reservation, StatePlan
from kvcache.replica.resume import Asked, Found, FromBelow
from kvcache.replica.tables import RowTables
from kvcache.retention import PageHints
from kvcache.types import RequestID


class StateCopy(NamedTuple):
    """A cached state as it lies on a device: the tensor of each shard and kind, and how many tokens it has taken up."""

    parts: Sequence[torch.Tensor]
    tokens: int


class RequestStates:
    """The states of one replica's requests. Here: none, as all that a request keeps is in its pages.

    `kvcache.states.replica_states` has those of recurrent layers. A replica does not know where states lie.
    """

    keeps = False  # whether states are cached, so that a request goes on only from a page after which there is one
    fetches = False  # whether some lie below the host
    groups = 0  # of a block table, behind those of the pages of tokens: each of one page

    # ---- claims

    def check_free(self, request_id: RequestID) -> None:
        """Raise `NoFreeStatePageError` if one more request has no room for its state."""

    @property
    def has_room(self) -> bool:
        """Whether one more request could have a state."""
        return True

    @property
    def may_lose_pages(self) -> bool:
        """Whether the next claim may evict pages or states, and it cannot be known which."""
        return False

    def claim(self, request_id: RequestID, row: int) -> None:
        """The request has this row: it has the state before its first token. There is room, as `check_free` says."""

    def release(self, request_id: RequestID) -> None:
        """The request is released: its state goes, unless a transfer still writes it or a lease holds it."""

    # ---- what is cached

    @property
    def generation(self) -> int:
        """Counts what has come and gone, on the device and below it."""
        return 0

    def there(self, digests: Digests) -> Asked:
        """After which of these pages there is a state, on any tier, as far as is known."""
        return np.ones(len(digests), np.bool_)

    def ask(self, digests: Digests, first: int) -> tuple[bool, Digests]:  # noqa: ARG002 - here nobody is to be asked
        """Ask for the last state after these pages, and for the pages up to it, as far as nothing is known of them.

        The caller has the `first` pages. Returns whether an answer is on its way, and the pages up to the known end.
        """
        return False, digests

    def bring_newest(self, digests: Digests, *, wait: bool) -> bool:  # noqa: ARG002 - as above
        """Have the state after the last of these pages, of those after which one lies below, where it is found.

        Whether it is on its way. `wait`: for a while.
        """
        return False

    def ends(self, request_id: RequestID | None, digests: Digests) -> Asked:  # noqa: ARG002 - after each for anybody
        """After which of these found pages, one after another, the request may go on, or any other for None."""
        return np.ones(len(digests), np.bool_)

    def run(self, tables: RowTables, first: int, digests: Digests) -> Found:
        """The published pages, behind the `first` columns, of which `up_to_state` takes a part."""
        return tables.find(first, digests)

    def up_to_state(self, found: Found, row: int | None, context: Context, hasher: PrefixHasher | None = None) -> Found:  # noqa: ARG002
        """The part of a published run with which the request goes on. `hasher`: the context's, if known."""
        return found

    def copies(self, digests: Digests) -> Asked | None:  # noqa: ARG002 - as above
        """The pages, of these, after which the device keeps the state; None if none is needed."""
        return None

    def bring_copy(self, wanted: FromBelow, digests: Digests) -> bool:  # noqa: ARG002 - as above
        """Have the state after the last of the `wanted` pages, all of which are there, kept on the device.

        Whether it is on its way from the host.
        """
        return False

    def copy_of(self, digest: Digests) -> StateCopy | None:  # noqa: ARG002 - as above
        """The state that the device keeps under this digest, `[1, words]`, for another replica to copy."""
        return None

    def take_copy(self, copy: StateCopy, digest: Digests) -> HeldPages | None:  # noqa: ARG002 - as above
        """Keep another replica's copy here, too. Its page, which the caller holds; None if no page is left."""
        return None

    def forget(self) -> None:
        """Give up every cached state without a holder."""

    # ---- reservations

    def planned(self, row: int, context: Context, plan: Reservation, reached: int) -> Reservation:  # noqa: ARG002 - of states
        """The reservation with the state that the request goes on from, and its chunk cut where one is to be kept.

        `reached`: columns whose pages were found, whether or not there is a state after the last of them.
        """
        return plan

    def reserved(self, row: int, plan: StatePlan, start: int) -> None:
        """The row's request is about to get its pages, and goes on from `start` with the state that was planned."""

    def refuse_fork(self, parent: int) -> None:
        """Raise `StatePageError` if the state of this row's request is not that after its computed tokens."""

    def fork(self, parent: int, row: int) -> None:
        """The row's request has the state of the one at the row `parent`, in a page of its own."""

    # ---- leases, and what other managers read and write

    def refuse_unbooked(self, request_id: RequestID) -> None:
        """Raise `StatePageError` if drafted tokens of the request ran, and no `step` has said which stay."""

    def held(self, row: int) -> list[HeldPages]:  # noqa: ARG002 - as above
        """What a lease of the row's request holds besides its pages: once a table names it, the request stays."""
        return []

    def held_copy(self, digest: Digests) -> list[HeldPages]:  # noqa: ARG002 - as above
        """What a lease holds besides the pages up to the one of this digest: the state that the device keeps there."""
        return []

    def name(self, table: BlockTable, *, full_pages: bool) -> BlockTable:  # noqa: ARG002 - there is none to name
        """The table of a request's pages, with its state as a further group."""
        return table

    def begin_import(self, context: Context, pending: PendingImport) -> None:
        """The import takes the state, too, that the last group of a block table names."""

    def commit_import(self, request_id: RequestID, tokens: int) -> None:
        """The request's state has arrived: it is that after `tokens` tokens."""

    # ---- hints and quotas of pages, which cached states follow

    def follow_hints(self, quotas: TenantQuotas | None) -> None:
        """There are hints, or these quotas of pages, from now on."""

    def clear_quotas(self) -> None:
        """After an interrupt: no state counts as a tenant's idle one, until the pool says which are idle."""

    def leave_hinted(
        self, row: int, digests: Digests, hints: PageHints | None, ends: Sequence[int], share: float
    ) -> None:
        """The row's request is about to be released, and says `hints` of its published columns, None for nothing.

        `digests`: of these columns. `ends`: of ranges that a hint is for, in columns. `share`: of what is cached, how
        much follows hints.
        """

    # ---- after an interrupt

    def mend(self, ended: Iterable[RequestID]) -> Iterable[RequestID]:  # noqa: ARG002 - their pages are enough
        """Rows, leases and imports are mended; what holds states follows. Returns requests that cannot go on.

        `ended`: requests whose imports were over.
        """
        return ()

    def goes_on(self, request_id: RequestID, start: int) -> bool:  # noqa: ARG002 - what is in pages says it
        """Whether the request's state is surely that after `start` tokens."""
        return True

    def check(self) -> None:
        """Recount. Raises `InvariantError` at the first discrepancy."""
