"""`Kept`: what each row keeps besides the pages of its block tables. Recurrent states are kept in this way."""

from collections.abc import Mapping, Sequence

import numpy as np

from kvcache.pool.index import Digests
from kvcache.pool.pages import HeldPages, HoldersOf, PagePool
from kvcache.pool.pages_below import Asked, PagesBelow
from kvcache.replica.block_table import PendingImport
from kvcache.replica.context import HasherOfRow, SafeContext
from kvcache.replica.hashing import PrefixHasher
from kvcache.replica.resume import Found, FromBelow, Reservation
from kvcache.replica.rows import Filled
from kvcache.replica.tables import RowTables
from kvcache.types import KVCacheMetrics, RequestID

_NOTHING: Mapping[str, int] = {}


class Kept:
    """Everything that each row of one replica keeps besides the pages of its block tables.

    This base class keeps nothing: a request may resume after any cached page, and pays for nothing else. It serves
    models whose layers all have block tables. The methods are in the order of a request's life.

    Attributes:
        resumes_anywhere: whether a request may resume after any cached page.
        num_lists: how many lists of pages a block table has for this, after the lists of the block tables' pages.
        told: what an error says about these lists.
        pools: the pools of pages besides the pool of token pages.
        drafted: the requests that have run drafted tokens for which no `step` has said which of them stay.
    """

    resumes_anywhere = True
    num_lists = 0
    told = ""
    pools: Sequence[PagePool] = ()
    drafted: Mapping[str, int] = _NOTHING

    def __init__(self, tables: RowTables, hasher_of: HasherOfRow) -> None:
        self._tables, self._hasher_of = tables, hasher_of

    @property
    def generation(self) -> int:
        """A number that changes whenever the answers of `ends` may change."""
        return 0

    @property
    def metrics(self) -> KVCacheMetrics:
        """The counters of these things."""
        return KVCacheMetrics()

    # ---- claims

    @property
    def has_room(self) -> bool:
        """Whether there is room for one more request."""
        return True

    @property
    def room_may_cost(self) -> bool:
        """Whether making room for one more request may evict token pages that the request would find."""
        return False

    def check_free(self, request_id: RequestID) -> None:
        """Raise `NoFreeRowError` if there is no room for one more request."""

    def claim(self, row: int) -> None:
        """Make room for the row's new request."""

    def release(self, request_id: RequestID | None) -> None:
        """Free what a released request has kept, as soon as no transfer writes it and no lease holds it."""

    # ---- lookups

    def shortened(self, run: Found, hasher: PrefixHasher, context: SafeContext, row: int | None) -> Found:  # noqa: ARG002 - any end is good
        """Returns the part of the found `run` of pages, at least one, after which the request can resume.

        `row` is None for a request without a row.
        """
        return run

    def ends(self, digests: Digests, row: int | None = None, *, anywhere: bool = False) -> Asked:  # noqa: ARG002 - as above
        """Returns a mask, bool `[pages]`, of the pages after which the row's request may resume.

        `digests` are the digests of consecutive pages. `row` is None for a request without a row. With `anywhere`, what
        only a tier below the host is known to have also counts.
        """
        return np.ones(len(digests), np.bool_)

    def lendable(self, digests: Digests) -> Asked | None:  # noqa: ARG002 - as above
        """Returns a mask, bool `[pages]`, of the pages after which a lease of published pages may end; None if any."""
        return None

    # ---- tiers

    @property
    def fetches(self) -> bool:
        """Whether there are tiers below the host."""
        return False

    def ask(
        self,
        tier: PagesBelow,  # noqa: ARG002 - there is nothing to ask for
        digests: Digests,
        first: int,  # noqa: ARG002 - as above
        *,
        coming: bool,
        wait: bool,  # noqa: ARG002 - as above
    ) -> tuple[bool, Digests | None]:
        """Ask remote stores for what the prompt with these digests needs besides pages.

        `tier` is asked for the pages. The caller already has the first `first` pages. `coming` says whether an answer
        about pages is on its way. Returns whether any answer is on its way, and the digests of the longest prefix that
        may exist; None if the caller must wait for the answer before it can decide which pages to load.
        """
        return coming, digests

    def to_host(self, digests: Digests, there: int, *, wait: bool) -> bool:  # noqa: ARG002 - there is nothing to load
        """Load into host memory what a request needs to resume after the latest possible page of `digests`.

        A request that does not wait resumes after `there` pages. Returns whether anything is on its way. With `wait`,
        the call waits a limited time.
        """
        return False

    def to_device(self, wanted: FromBelow, digests: Digests) -> bool:  # noqa: ARG002 - as above
        """Copy to the device what a reader needs to resume after the last of the `wanted` pages.

        The device already has the `wanted` pages. Returns whether anything is on its way.
        """
        return False

    def finish_loads(self) -> None:
        """Wait for all copies to the device."""

    # ---- reservations and steps

    def plan(self, row: int, context: SafeContext, plan: Reservation) -> Reservation:  # noqa: ARG002 - a chunk may end anywhere
        """Returns `plan`, with a shorter chunk if something must be kept after a token within the chunk."""
        return plan

    def take(self, row: int, plan: Reservation) -> None:
        """Let the row run as `plan` says.

        Called before the row gets its pages, because allocating pages may evict what it resumes from.
        """

    def refuse_overlap(self, requests: int) -> None:
        """Raise `InvalidRequestError` if a step of `requests` requests must not begin before the previous one ends."""

    def computed(self, full: Filled) -> None:
        """Keep what other requests need to resume after the `full` pages, which were just published."""

    def goes_on_from(self, request_id: RequestID, start: int) -> int:  # noqa: ARG002 - no drafted token ran
        """Returns the token from which a `drafted` request runs next if its first `start` tokens stay."""
        return start

    def settle(self, request_id: RequestID, start: int) -> None:
        """Record that a `drafted` request runs from token `start` next."""

    def check_fork(self, parent: int) -> None:
        """Raise `KVCacheError` if the row cannot be forked now."""

    def fork(self, parent: int, row: int) -> None:
        """Give `row` a copy of what row `parent` keeps."""

    # ---- leases, block tables and imports

    def held(self, row: int) -> Sequence[HeldPages]:  # noqa: ARG002 - nothing is held
        """Returns what a lease of the row must hold besides token pages. Raises `KVCacheError` if it cannot now."""
        return ()

    def held_copies(self, digest: Digests) -> Sequence[HeldPages]:  # noqa: ARG002 - as above
        """Returns what a lease of published pages must hold after the last of them, which has this `digest`."""
        return ()

    def named(self, row: int, num_tokens: int, *, full_pages: bool) -> tuple[tuple[int, ...], ...]:  # noqa: ARG002 - as above
        """Returns `num_lists` lists of pages for a block table of `num_tokens` tokens.

        With `full_pages`, the table is for a prompt that still runs, and a list is empty if the next chunk overwrites
        its pages.
        """
        return ()

    def refusal(self, lists: Sequence[tuple[int, ...]], num_tokens: int, *, last: bool) -> str:  # noqa: ARG002 - as above
        """Returns why a table of `num_tokens` tokens with these `num_lists` lists cannot be imported; empty if it can.

        `last` is False while the prompt still runs at the source.
        """
        return ""

    def begin_import(self, row: int, context: SafeContext, pending: PendingImport) -> None:
        """Add `num_lists` parts to the import `pending`."""

    def commit_import(self, row: int, context: SafeContext, tokens: int) -> None:
        """Record that everything in the parts of the row's import has arrived, and covers `tokens` tokens."""

    # ---- resets, recovery and checks

    def forget(self) -> None:
        """Let nobody find any cached copy of before."""

    def rebuild(self, written: Sequence[int], holders_of: HoldersOf) -> None:
        """Forget every request after an interrupt, and count everything anew. For the arguments, see `check`."""

    def check(self, requests: Mapping[RequestID, int], written: Sequence[int], holders_of: HoldersOf) -> None:
        """Recount everything. Raises `InvariantError` at the first discrepancy.

        `requests` has the row of each claimed request. `written` are the pages besides token pages to which transfers
        may write. `holders_of` counts the leases that hold each page of a pool.
        """
