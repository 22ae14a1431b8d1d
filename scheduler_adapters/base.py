"""The protocols that a scheduler sees: pages of its own, pages to fill from elsewhere, and both ends of a transfer.

What a scheduler does, and what does it here:

    match     `Pages.get_or_recommend_replica`, `Pages.maybe_reserve`     cached pages of a prefix
    reserve   `Pages.external_claim`, `Pages.maybe_reserve`               a row, then pages
    table     `Pages.fetch` for the model, `Pages.block_table` for a peer
    commit    `Pages.step`, `PulledPages.commit_import`                   computed here, or read from a peer
    release   `Pages.release`                                             the end of a request
    abort     `Pages.release`, at any time; with an import pending also `PulledPages.cancel_import`, at any time
    offer     `Offers.offer`                                              a lease over what a request computes
    accept    `Reads.open_pull`, `Reads.read`                             of what a peer offered
    poll      `Offers.poll`, `Reads.poll`                                 what has become of both

`ServingLoop` needs `Pages`, `PrefillScheduler` also `Offers`, `DecodeScheduler` `PulledPages` and `Reads`. An engine
that owns its pages (SGLang) has no use for `Pages`: there an adapter follows the engine's own interface. What every
adapter must do, whatever it is built of, is in `tests/scheduler_adapters/contract.py`.

One thread, the scheduler's, calls all of these. Every error is a `KVCacheError` and leaves everything as it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache.manager import PagedKVCacheManager
    from kvcache.metrics import KVCacheMetrics
    from kvcache.replica.block_table import BlockTable, PageCopy, PendingImport
    from kvcache.replica.context import Context
    from kvcache.replica.copier import ImportProof
    from kvcache.types import RaggedKVCacheInputs, RequestID
    from scheduler_adapters.hf.hybrid import HybridKVCacheManager
    from scheduler_adapters.service.exchange import Exchange, ReplicaEvent
    from transfer.pull.pull_state import LeaseRef
    from transfer.pull.replica import Source


class Pages(Protocol):
    """Pages of one process, as the loop that computes them sees them.

    A request is claimed from `external_claim` to `release`. In each step of it: `maybe_reserve`, `fetch`, the model,
    `context.update`, `step`. Between two steps it may be released, in whatever state: that is also how it is aborted or
    preempted, and then runs again after `context.reset()`.
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
    def total_num_pages(self) -> int:
        """Pages of all replicas, in use or not."""
        ...

    @property
    def metrics(self) -> KVCacheMetrics:
        """What was done so far: a snapshot."""
        ...

    def get_or_recommend_replica(self, context: Context) -> int:
        """Where the request is claimed or, not claimed yet, best claimed. Takes nothing: advice, good until any call.

        Raises:
            PromptTooLongError, SequenceTooLongError: it fits nowhere, ever.
        """
        ...

    def get_replica(self, context: Context) -> int:
        """Where a claimed request is. Raises `UnknownRequestError` for others."""
        ...

    def prefetch(self, context: Context) -> bool:
        """Begin to bring what is cached of a waiting request nearer; whether some of it is on its way.

        For requests that are not claimed, as often as you like. Nothing has to be given back.
        """
        ...

    def external_claim(self, request_id: RequestID, replica_idx: int | None = None) -> None:
        """Take a row, and no page. Ended by `release`, also where no page ever comes.

        Raises:
            NoFreeRowError: all are claimed: the request waits.
            AlreadyClaimedError: an id is claimed once at a time.
        """

    def maybe_reserve(self, data: Context, num_steps: int = 1) -> bool:
        """Pages for all known tokens and `num_steps` more; cached ones where the prefix matches.

        For a claimed request, before each `fetch`. The pages are its until `release`; a hit has moved `start_idx`.
        False: too few are free. Nothing was taken, so try again when others have released theirs.

        Raises:
            PromptTooLongError, SequenceTooLongError: waiting will not help.
            UnknownRequestError, NotReservedError: not claimed; an import is pending.
        """
        ...

    def fetch(self, batch: Sequence[Context], num_steps: int = 1) -> list[RaggedKVCacheInputs]:
        """What the model reads: one entry for each device, replica by replica. Takes nothing.

        For requests that `maybe_reserve` gave pages. Good until the next `maybe_reserve`, `step` or `release`, of any
        request: the tensors are views. Raises `NotReservedError` where pages are short.
        """
        ...

    def step(self, batch: Sequence[Context]) -> None:
        """Publish what is computed by now, after the model ran and `context.update`. Page ids may change."""

    def block_table(self, request_id: RequestID, *, full_pages: bool = False) -> BlockTable:
        """The pages of what a claimed request computed by its last `step`: for a peer to read.

        Good while the request stays claimed or a lease over it stands (`Offers`), which holds the pages itself. While
        the prompt runs, only the full pages stay as they are. Raises `InvalidRequestError` where nothing is computed
        yet.
        """
        ...

    def release(self, request_id: RequestID) -> None:
        """Give row and pages back, at any time between two steps. Published pages stay findable while there is room.

        Leased pages stay with their lease, those of a pending import with the import.

        Raises:
            UnknownRequestError: not claimed, or released before.
        """

    def check(self) -> None:
        """Recount everything. Raises `InvariantError`, naming the first discrepancy: a bug of ours."""


class PulledPages(Pages, Protocol):
    """Pages that may also be filled from another process: claim, import, read, commit; then as any other request."""

    def import_block_table(
        self, context: Context, table: BlockTable, num_steps: int = 1, *, partial: bool = False
    ) -> PendingImport | None:
        """Reserve a claimed request's pages, and say which to read. None: too few are free, nothing was taken.

        The import is open until `commit_import` or `cancel_import`, one of which must follow. Until then nobody finds
        its pages and nobody else gets them, also where the request is released meanwhile.

        Raises:
            BlockTableMismatchError: a table of other tokens, or malformed.
            PromptTooLongError, SequenceTooLongError: as `maybe_reserve`.
        """
        ...

    def extend_import(self, context: Context, pending: PendingImport, table: BlockTable, *, last: bool) -> PageCopy:
        """What to read beyond what was named before, now that a `partial` import's source has computed more."""
        ...

    def commit_import(self, context: Context, pending: PendingImport, proof: ImportProof | None = None) -> None:
        """Every page was read, and under its lease, as `proof` says: the tokens count as cached, and can be found.

        The proof comes with the last event of a pull that passed; None where nothing was left to read. Raises
        `InvalidRequestError` without it, `UnknownRequestError` for a request that was released meanwhile:
        `cancel_import` is what remains.
        """

    def cancel_import(self, pending: PendingImport) -> None:
        """Give an import up, at any time. While a pull may still write to its pages nobody gets them. Safe twice."""


class Transfers(Protocol):
    """What both ends of a transfer have. No call waits, unless it says so."""

    @property
    def incarnation(self) -> str:
        """Random, new with each start: what peers tell a restarted process by."""
        ...

    @property
    def pages_held(self) -> int:
        """Pages that some request holds or a transfer writes; idle cached ones not counted."""
        ...

    def poll(self) -> list[ReplicaEvent]:
        """What has happened since the last call, in order; each event is given once. Call it every round.

        Raises:
            EngineClosedError: the transfer thread has died: this process cannot go on.
        """
        ...


class Offers(Transfers, Protocol):
    """The end that has the pages: `offer`, `Offered`, `start_clock`, `LeaseOver`.

    Between `Offered` and `start_clock` table and lease go to the peer. The request may be released at any time: its
    pages stay as they are until `LeaseOver`.
    """

    @property
    def address(self) -> str:
        """Where peers ask for what they need to know, as they connect to it."""
        ...

    def engine_id(self, replica: int) -> str:
        """What peers call a replica."""
        ...

    def offer(self, request_id: RequestID, duration_s: float) -> LeaseRef | None:
        """Ask for a lease. It may leave the process once `Offered` says that it stands. None: no word is free.

        For a claimed request; it covers what that has computed and will compute, whatever becomes of it. Ended by
        `LeaseOver`: its reader is done, or was silent for `duration_s` after `start_clock`, or `revoke` was called.

        Raises:
            UnknownRequestError, NotReservedError: not claimed; an import is pending.
        """
        ...

    def seal(self, replica: int, pages: Sequence[Sequence[int]]) -> None:
        """Make the page checks of computed pages, before the peer hears of them. Waits, where peers verify."""

    def start_clock(self, replica: int, lease: LeaseRef) -> None:
        """All is computed: from now on a silent reader ends the lease. Once for each lease."""

    def revoke(self, replica: int, lease: LeaseRef, reason: str) -> None:
        """End a lease that stands. Its pages go at `LeaseOver`, and no sooner."""

    def wait(self, replica: int, timeout_s: float) -> None:
        """Wait until something has happened on a replica, for at most `timeout_s`."""


class Reads(Transfers, Protocol):
    """The end that takes pages. A pull is open from `open_pull` to its last event, the one that is `safe`."""

    @property
    def pull_seconds(self) -> float:
        """Time in which at least one READ was under way, in seconds."""
        ...

    def open_pull(self, replica: int, key: str, source: Source, timeout_s: float) -> None:
        """Take an offer up: the source's lease is renewed from now on. Pages need not be there yet.

        `key` names the pull, and never another one. Raises `InvalidRequestError` where it names one that is open.
        """

    def read(self, replica: int, key: str, pending: PendingImport, *, last: bool) -> None:
        """Read what an open import lacks and was not read before, `last` with the fence behind it.

        The pages are the transfer's until `PullEvent.safe`: also after a failure or `cancel_pull` a READ may still
        write. Raises `InvalidRequestError` for an import that is not the pull's to fill.
        """

    def cancel_pull(self, replica: int, key: str, reason: str) -> None:
        """Give an open pull up. Its last event still comes, with an error."""

    def totals(self) -> tuple[int, int]:
        """Bytes that were pulled, and pulls that failed. Waits: for counters, not for serving."""
        ...


if TYPE_CHECKING:  # pyright refuses these where a class does not satisfy its protocol
    _MANAGERS: tuple[type[PulledPages], ...] = (PagedKVCacheManager, HybridKVCacheManager)
    _OFFERS: type[Offers] = Exchange
    _READS: type[Reads] = Exchange
