"""The protocols that a scheduler sees: pages of its own, and pages to fill from elsewhere.

Each task of a scheduler, and the method that performs it here:

    match     `Pages.get_or_recommend_replica`, `Pages.maybe_reserve`     cached pages of a prefix
    reserve   `Pages.external_claim`, `Pages.maybe_reserve`               a row, then pages
    table     `Pages.fetch` for the model, `Pages.block_table` for a peer
    commit    `Pages.step`, `PulledPages.commit_import`                   computed here, or read from a peer
    release   `Pages.release`                                             the end of a request
    abort     `Pages.release`, at any time; with an import pending also `PulledPages.cancel_import`, at any time
    offer     `PageExchange.offer`                                        a lease over what a request computes
    accept    `PageExchange.open_pull`, `PageExchange.read`               a read of the pages that a peer offered
    poll      `PageExchange.poll`                                         the outcome of both

`ServingLoop` needs `Pages`; `PrefillScheduler` and `DecodeScheduler` need `PulledPages`. A manager implements both.
Each end of a transfer is a `PageExchange` (`transfer.pull.exchange`). An engine that owns its pages (SGLang) has
no use for `Pages`: its adapter follows the engine's own interface. `tests/scheduler_adapters/contract.py` states the
rules that every adapter must keep, however it is built.

One thread, the scheduler's, makes all of these calls. Every error is a `KVCacheError` and leaves the state unchanged.
`PagedKVCacheManager` documents the arguments, results and errors of each call. The docstrings here say only what a
scheduler may rely on.
"""

from collections.abc import Sequence
from typing import Protocol

from kvcache.layer_groups import LayerTables
from kvcache.metrics import KVCacheMetrics
from kvcache.replica.block_table import BlockTable, PageCopy, PendingImport
from kvcache.replica.contents import PageContents
from kvcache.replica.context import Context
from kvcache.replica.copier import ImportProof
from kvcache.types import RaggedKVCacheInputs, RequestID


class Pages(Protocol):
    """Pages of one process, as the loop that computes them sees them.

    A request is claimed from `external_claim` to `release`. In each step of it: `maybe_reserve`, `fetch`, the model,
    `context.update`, `step`. Between two steps it may be released, in whatever state: that is also how it is aborted or
    preempted. A preempted request is claimed again with the same context, and runs from what is cached of it by then.
    """

    @property
    def num_replicas(self) -> int:
        """Replicas, each with rows and pages of its own. A request lives on one of them."""
        ...

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        ...

    @property
    def layer_tables(self) -> LayerTables:
        """Its block tables: with several, some have pages only for what of a prompt `maybe_reserve` is to let run."""
        ...

    @property
    def total_num_pages(self) -> int:
        """Pages of all replicas, in use or not."""
        ...

    @property
    def num_held_blocks(self) -> int:
        """Pages of all replicas that somebody holds or a transfer writes; idle cached ones not counted."""
        ...

    @property
    def metrics(self) -> KVCacheMetrics:
        """A snapshot of the counters."""
        ...

    def get_or_recommend_replica(self, context: Context) -> int:
        """Where the request is claimed, or best claimed: advice that is good until any call."""
        ...

    def get_replica(self, context: Context) -> int:
        """Where a claimed request is."""
        ...

    def prefetch(self, context: Context) -> bool:
        """Bring what is cached of a waiting request nearer; whether some of it is on its way. Nothing to give back."""
        ...

    def external_claim(self, request_id: RequestID, replica_idx: int | None = None) -> None:
        """Take a row, and no page, until `release`. `NoFreeRowError`: all are claimed, the request waits."""

    def maybe_reserve(self, data: Context, num_steps: int = 1) -> bool:
        """Pages before each `fetch`, until `release`. False: nothing was taken, try again after another's release."""
        ...

    def fetch(self, batch: Sequence[Context], num_steps: int = 1) -> list[RaggedKVCacheInputs]:
        """The model's inputs: views, valid until the next `maybe_reserve`, `step` or `release` of any request."""
        ...

    def step(self, batch: Sequence[Context]) -> None:
        """Publish what is computed by now, after the model ran and `context.update`. Page ids may change."""

    def block_table(self, request_id: RequestID, *, full_pages: bool = False, first_page: int = 0) -> BlockTable:
        """The pages of what a claimed request computed by its last `step`: for a peer to read under a lease.

        Those before `first_page` may be left out: the peer was told of them.
        """
        ...

    def release(self, request_id: RequestID) -> None:
        """Give row and pages back, at any time between two steps; leased and imported pages stay with lease, import."""

    def check(self) -> None:
        """Recount everything. `InvariantError` names the first discrepancy: a bug of ours."""


class PulledPages(Pages, Protocol):
    """Pages that may also be filled from another process: claim, import, read, commit; then as any other request.

    What is imported never covers the request's last known token: decode runs that one itself, and gets its first logits
    from it. So the context must know one token more than the table covers, the one that prefill has sampled, say.
    """

    @property
    def contents(self) -> PageContents:
        """Pages by what they hold: what a prompt needs, and what is cached of it."""
        ...

    def import_block_table(
        self, context: Context, table: BlockTable, num_steps: int = 1, *, partial: bool = False
    ) -> PendingImport | None:
        """Reserve pages, and say which to read; None: too few are free. `commit_import` or `cancel_import` must follow.

        Until then nobody finds these pages and nobody else gets them, also where the request is released meanwhile.
        """
        ...

    def extend_import(self, context: Context, pending: PendingImport, table: BlockTable, *, last: bool) -> PageCopy:
        """The pages to read in addition to those named before: the source of a `partial` import has computed more."""
        ...

    def commit_import(self, context: Context, pending: PendingImport, proof: ImportProof | None = None) -> None:
        """Commit an import: every page was read under its lease, as the `proof` of the pull's last event shows.

        If the request has been released in the meantime, call `cancel_import` instead.
        """

    def cancel_import(self, pending: PendingImport) -> None:
        """Give an import up, at any time. While a pull may still write to its pages nobody gets them. Safe twice."""
