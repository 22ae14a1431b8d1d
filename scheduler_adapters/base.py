"""The interfaces through which a scheduler uses the cache: for pages that it computes, and for pages read from a peer.

The table lists each task of a scheduler and the method that performs it:

    match     `Pages.get_or_recommend_replica`, `Pages.maybe_reserve`     cached pages of a prefix
    reserve   `Pages.external_claim`, `Pages.maybe_reserve`               a row, then pages
    table     `Pages.fetch` for the model, `Pages.block_table` for a peer
    commit    `Pages.step`, `PulledPages.commit_import`                   computed here, or read from a peer
    release   `Pages.release`                                             the end of a request
    abort     `Pages.release`, at any time; with an import pending also `PulledPages.cancel_import`, at any time
    offer     `PageExchange.offer`                                        a lease on the pages that a request computes
    accept    `PageExchange.open_pull`, `PageExchange.read`               a read of the pages that a peer offered
    poll      `PageExchange.poll`                                         the outcomes of both

`ServingLoop` needs `Pages`; `OverlappedLoop` needs `PagesAhead`; `PrefillScheduler` and `DecodeScheduler` need
`PulledPages`. A manager implements all three protocols. Each end of a transfer is a `PageExchange`
(`transfer.pull.exchange`). An engine that owns its pages (SGLang) has no use for `Pages`: its adapter follows the
engine's own interface. `tests/scheduler_adapters/contract.py` states the rules that every adapter must keep, however it
is built.

One thread, the scheduler's, makes all of these calls. Every error is a `KVCacheError` and leaves the state unchanged.
`PagedKVCacheManager` documents the arguments, results and errors of each call. The docstrings here say only what a
scheduler may rely on.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcache.layer_groups import LayerTables
from kvcache.replica.block_table import BlockTable, PageCopy, PendingImport
from kvcache.replica.contents import PageContents
from kvcache.replica.context import Context
from kvcache.replica.copier import ImportProof
from kvcache.steps_in_flight import StepInFlight
from kvcache.types import KVCacheMetrics, RaggedKVCacheInputs, RequestID


class RunTokens(Protocol):
    """The part of a request that a model reads: its tokens, and the range to run. Any `Context` satisfies it."""

    @property
    def request_id(self) -> RequestID: ...  # noqa: D102 - as in `Context`
    @property
    def tokens(self) -> NDArray[np.integer[Any]]: ...  # noqa: D102
    @property
    def start_idx(self) -> int: ...  # noqa: D102
    @property
    def active_idx(self) -> int: ...  # noqa: D102
    @property
    def active_length(self) -> int: ...  # noqa: D102


class Pages(Protocol):
    """Pages of one process, as seen by the loop that computes them.

    A request is claimed from the call to `external_claim` until the call to `release`. Each of its steps consists of
    `maybe_reserve`, `fetch`, the model, `context.update` and `step`, in this order. The request may be released between
    any two steps, whatever its state. Releasing it is also how it is aborted or preempted. A preempted request is
    claimed again later with the same context, and then runs from the end of its cached prefix.
    """

    @property
    def num_replicas(self) -> int:
        """The number of replicas. Each replica has its own rows and pages, and each request belongs to one replica."""
        ...

    @property
    def page_size(self) -> int:
        """The number of tokens in a page."""
        ...

    @property
    def layer_tables(self) -> LayerTables:
        """The block tables that each request has.

        If a request has several block tables, some of them hold pages only for the part of the prompt that runs next.
        """
        ...

    @property
    def longest_request(self) -> int:
        """The most tokens of a request whose KV a replica can hold if the request runs there alone."""
        ...

    @property
    def slab_pages(self) -> int:
        """The number of pages that a request takes for its recurrent state; 0 if states have separate memory."""
        ...

    @property
    def total_num_pages(self) -> int:
        """The number of pages of all replicas, whether in use or not."""
        ...

    @property
    def num_held_blocks(self) -> int:
        """The number of pages, over all replicas, that are held by a request or lease, or written by a transfer.

        Idle cached pages do not count.
        """
        ...

    @property
    def metrics(self) -> KVCacheMetrics:
        """A snapshot of the counters."""
        ...

    def get_or_recommend_replica(self, context: Context) -> int:
        """Returns the replica of a claimed request, or the best replica on which to claim an unclaimed one.

        For an unclaimed request, the result is only advice, and it is valid only until the next call.
        """
        ...

    def get_replica(self, context: Context) -> int:
        """Returns the replica of a claimed request."""
        ...

    def prefetch(self, context: Context) -> bool:
        """Starts to load a waiting request's cached pages from lower tiers. Returns whether any page is being loaded.

        The call reserves nothing, so nothing has to be released.
        """
        ...

    def external_claim(self, request_id: RequestID, replica_idx: int | None = None) -> None:
        """Gives a request a row (its index among the claimed requests of a replica), but no page, until `release`.

        Raises `NoFreeRowError` if every row is claimed.
        """

    def maybe_reserve(self, data: Context, num_steps: int = 1) -> bool:
        """Reserves the pages that the request's next `fetch` needs. They stay reserved until `release`.

        Must be called before each `fetch`. Returns False, and reserves no page, if too few pages are free.
        """
        ...

    def fetch(self, batch: Sequence[Context], num_steps: int = 1) -> list[RaggedKVCacheInputs]:
        """Returns the model's inputs: views that are valid until the next `maybe_reserve`, `step` or `release`."""
        ...

    def step(self, batch: Sequence[Context]) -> None:
        """Publishes the pages that have been computed so far. Must be called after the model and `context.update`.

        The ids of a request's pages may change.
        """

    def block_table(self, request_id: RequestID, *, full_pages: bool = False, first_page: int = 0) -> BlockTable:
        """Returns the pages that a claimed request had computed by its last `step`, for a peer that reads them.

        Pages before `first_page` may be left out, because the peer already knows them.
        """
        ...

    def release(self, request_id: RequestID) -> None:
        """Gives back the request's row and pages. May be called at any time between two steps.

        All known tokens of the request's context become active, so that it can be claimed again.
        A page that a lease or an import also holds stays allocated until that lease or import has ended.
        """

    def check(self) -> None:
        """Recounts all pages. Raises an `InvariantError` that names the first discrepancy.

        A discrepancy is a bug in the manager.
        """


class PagesAhead(Pages, Protocol):
    """Pages, as seen by a loop that plans one step while the model runs the previous one.

    Such a loop calls `fetch_ahead` instead of `fetch`, and `end_step` when the model has finished a step. Until the
    model returns a token, the request's context holds a placeholder, the future token, in its place.
    """

    def fetch_ahead(self, batch: Sequence[Context], num_steps: int = 1) -> StepInFlight:
        """Returns the model's inputs, valid until `end_step`. Until then no page of the step is reused."""
        ...

    def end_step(self, step: StepInFlight) -> None:
        """Reports that the model has finished the step that `fetch_ahead` prepared."""


class PulledPages(Pages, Protocol):
    """Pages that may also be read from another process.

    The request is claimed first. Then its pages are imported and read, and the import is committed. From then on the
    request runs like any other. An import never covers the request's last known token: decode runs that token itself to
    get its first logits. So the context must know at least one more token than the table covers, for example the one
    that prefill has sampled.
    """

    @property
    def contents(self) -> PageContents:
        """Answers queries about page contents: which pages a prompt needs, and whether they are cached."""
        ...

    def import_block_table(
        self,
        context: Context,
        table: BlockTable,
        num_steps: int = 1,
        *,
        partial: bool = False,
        others: Sequence[BlockTable] = (),
    ) -> PendingImport | None:
        """Reserves pages for the tokens of `table`. The returned import says which pages to read from the peer.

        Returns None if too few pages are free. Every import must end with `commit_import` or `cancel_import`.
        """
        ...

    def extend_import(self, context: Context, pending: PendingImport, table: BlockTable, *, last: bool) -> PageCopy:
        """Adds the pages that the source has computed by now to a `partial` import. Returns the pages to read now."""
        ...

    def commit_import(self, context: Context, pending: PendingImport, proof: ImportProof | None = None) -> None:
        """Commits an import after all of its pages were read under its lease.

        The pull's last event carries the `proof`.
        """

    def cancel_import(self, pending: PendingImport) -> None:
        """Gives up an import, at any time. No request gets its pages while a pull may still write them.

        Safe to call twice.
        """
