"""`RequestStates`: the interface to what the requests of a replica keep beside the pages of their tokens.

Recurrent layers keep one state for all tokens so far. It is cached after some pages only. So a hit ends at the last
page of the prefix after which there is a state. With several block tables, that is the last page after which all tables
can resume, too: a state is useless without the window before it, and a window without a state.
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
    """A cached state on a device: the tensor of each shard and kind, and the number of tokens that it covers."""

    parts: Sequence[torch.Tensor]
    tokens: int


class RequestStates:
    """The states of one replica's requests. This base has none: all that a request keeps is in its pages.

    `kvcache.states.replica_states` implements those of recurrent layers. A replica does not know where states lie.
    """

    keeps = False  # whether states are cached, so that a request resumes only after a page with a state
    fetches = False  # whether there are tiers below the host
    groups = 0  # groups of a block table in addition to those of token pages; each has one page

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
        """The request has this row, and gets the state before its first token. `check_free` must have found room."""

    def release(self, request_id: RequestID) -> None:
        """The request is released. Its state is freed, unless a transfer still writes it or a lease holds it."""

    # ---- cached states

    @property
    def generation(self) -> int:
        """Changes whenever a state comes or goes, on the device or below it."""
        return 0

    def there(self, digests: Digests) -> Asked:
        """After which of these pages there is a state in any tier, as far as is known: a mask."""
        return np.ones(len(digests), np.bool_)

    def ask(self, digests: Digests, first: int) -> tuple[bool, Digests]:  # noqa: ARG002 - all is known here
        """Ask for the last state after these pages, and for the pages up to it, if they are not known.

        The caller has the `first` pages. Returns whether an answer is on its way, and the pages up to the known end.
        """
        return False, digests

    def touch(self, digests: Digests) -> None:
        """Mark the host's copies of the states after these pages as just used."""

    def bring_newest(self, digests: Digests, *, wait: bool) -> bool:  # noqa: ARG002 - as above
        """Bring the last state that a lower tier has, after one of these pages, to the host.

        Returns whether it is on its way. `wait`: wait a while for it.
        """
        return False

    def ends(self, request_id: RequestID | None, digests: Digests) -> Asked:  # noqa: ARG002 - after every page
        """After which of these consecutive found pages the request, or with None another one, may resume: a mask."""
        return np.ones(len(digests), np.bool_)

    def run(self, tables: RowTables, first: int, digests: Digests) -> Found:
        """The published pages after the first `first` columns, to be shortened by `up_to_state`."""
        return tables.find(first, digests)

    def up_to_state(self, found: Found, row: int | None, context: Context, hasher: PrefixHasher | None = None) -> Found:  # noqa: ARG002
        """The part of a published run with which the request resumes. `hasher`: the context's, if known."""
        return found

    def copies(self, digests: Digests) -> Asked | None:  # noqa: ARG002 - as above
        """After which of these pages the device keeps the state, as a mask; None if none is needed."""
        return None

    def bring_copy(self, wanted: FromBelow, digests: Digests) -> bool:  # noqa: ARG002 - as above
        """Copy the state after the last of the `wanted` pages from the host to the device, which has all these pages.

        Returns whether it is on its way.
        """
        return False

    def copy_of(self, digest: Digests) -> StateCopy | None:  # noqa: ARG002 - as above
        """The state that the device keeps under this digest, `[1, words]`, for another replica to copy."""
        return None

    def take_copy(self, copy: StateCopy, digest: Digests) -> HeldPages | None:  # noqa: ARG002 - as above
        """Keep another replica's copy here, too. Returns its page, held for the caller; None if no page is left."""
        return None

    def forget(self) -> None:
        """Drop every cached state without a holder."""

    # ---- reservations

    def planned(self, row: int, context: Context, plan: Reservation, reached: int) -> Reservation:  # noqa: ARG002 - of states
        """The reservation plus the state from which the request resumes; its chunk ends where a state is to be kept.

        `reached`: columns whose pages were found, whether or not there is a state after the last of them.
        """
        return plan

    def reserved(self, row: int, plan: StatePlan, start: int) -> None:
        """The row's request is about to get its pages, and resumes from `start` with the planned state."""

    def refuse_fork(self, parent: int) -> None:
        """Raise `StatePageError` unless the state of this row's request covers exactly its computed tokens."""

    def fork(self, parent: int, row: int) -> None:
        """Copy the state of the request at row `parent` into the page of the request at `row`."""

    # ---- leases, block tables and imports

    def refuse_unbooked(self, request_id: RequestID) -> None:
        """Raise `StatePageError` if drafted tokens of the request ran and no `step` has said which of them stay."""

    def held(self, row: int) -> list[HeldPages]:  # noqa: ARG002 - as above
        """The pages that a lease of the row's request holds in addition to those of its tokens."""
        return []

    def held_copy(self, digest: Digests) -> list[HeldPages]:  # noqa: ARG002 - as above
        """The page that a lease of a prefix holds in addition: the device's state after the page of this digest."""
        return []

    def name(self, table: BlockTable, *, full_pages: bool) -> BlockTable:  # noqa: ARG002 - there is none to name
        """The table of a request's pages, with its state as a further group."""
        return table

    def begin_import(self, context: Context, pending: PendingImport) -> None:
        """Import also the state that the last group of a block table names."""

    def commit_import(self, request_id: RequestID, tokens: int) -> None:
        """The request's state has arrived. It covers `tokens` tokens."""

    # ---- hints and quotas of pages, which cached states follow

    def follow_hints(self, quotas: TenantQuotas | None) -> None:
        """From now on there are hints, or these quotas of pages."""

    def clear_quotas(self) -> None:
        """After an interrupt: clear the idle states of tenants, because the pool reports them next."""

    def leave_hinted(
        self, row: int, digests: Digests, hints: PageHints | None, ends: Sequence[int], share: float
    ) -> None:
        """The row's request is about to be released, with `hints` for its published columns, or None.

        `digests`: of these columns. `ends`: the end columns of hinted ranges. `share`: the share of cached pages that
        follows hints.
        """

    # ---- after an interrupt

    def mend(self, ended: Iterable[RequestID]) -> Iterable[RequestID]:  # noqa: ARG002 - pages alone hold all
        """Rows, leases and imports are mended: restore the holders of states. Returns requests that cannot continue.

        `ended`: requests whose imports are over.
        """
        return ()

    def goes_on(self, request_id: RequestID, start: int) -> bool:  # noqa: ARG002 - pages alone hold all
        """Whether the request's state surely covers exactly `start` tokens."""
        return True

    def check(self) -> None:
        """Recount. Raises `InvariantError` at the first discrepancy."""
