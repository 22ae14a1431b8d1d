"""The pulls of a decode process, and the pages here that they fill.

A pull outlives the attempt that it is of: where that fails its import is cancelled at once, and the manager takes the
pages back when nothing of the pull is in flight (`PullEvent.safe`).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvcache.errors import NoFreeRowError
from kvcache.replica.context import TextContext
from scheduler_adapters.errors import WorkerError

if TYPE_CHECKING:
    from kvcache.replica.block_table import PendingImport
    from kvcache.replica.copier import ImportProof
    from scheduler_adapters.base import PulledPages, Reads
    from scheduler_adapters.service.rooms import DecodeRoom
    from transfer.pull.pull_state import PullEvent
    from transfer.pull.replica import Source


class Pulls:
    """Opens pulls for rooms, reserves pages for them, and gives those back when that is safe.

    Args:
        manager: whose pages are filled.
        exchange: pulls into them.

    Attributes:
        counts: pages "pulled", and pages "reused": cached here already, and not pulled.
    """

    def __init__(self, manager: PulledPages, exchange: Reads) -> None:
        self.counts: Counter[str] = Counter()
        self._manager = manager
        self._exchange = exchange
        self._open: dict[str, DecodeRoom] = {}
        self._proofs: dict[str, ImportProof] = {}  # of pulls that have passed, and are yet to be committed

    @property
    def num_left_over(self) -> int:
        """Pulls that have not ended, of attempts that are over."""
        return sum(room.phase == "over" or room.key != key for key, room in self._open.items())

    def open(self, room: DecodeRoom, source: Source, patience_s: float) -> None:
        """Keep the source's lease alive from now on, for at most `patience_s`."""
        # The replica is chosen now, as it is the one that renews the lease.
        room.replica = self._manager.get_or_recommend_replica(context_of(room))
        self._open[room.key] = room
        self._exchange.open_pull(room.replica, room.key, source, patience_s)

    def reserve(self, room: DecodeRoom) -> bool:
        """A row and pages for what the source has by now; False, and nothing taken, where one is short.

        Raises:
            BlockTableMismatchError, PromptTooLongError, SequenceTooLongError: it can never be taken over.
        """
        manager, context, table = self._manager, context_of(room), room.table
        if table is None:
            raise WorkerError(f"request {room.request_id!r} was offered without a table")
        try:
            manager.external_claim(room.request_id, room.replica)
        except NoFreeRowError:
            return False
        pending = None
        try:
            pending = manager.import_block_table(context, table, partial=room.token is None)
        finally:
            if pending is None:
                manager.release(room.request_id)
        if pending is None:
            return False
        room.context, room.pending = context, pending
        return True

    def begin(self, room: DecodeRoom) -> bool:
        """Read what the source has by now. Whether anything is left to come: False where all was cached here."""
        pending = _pending(room)
        self.counts["reused"] += pending.tokens[0] // self._manager.page_size
        return self._read(room, new=pending.tokens[0] < pending.tokens[1])

    def extend(self, room: DecodeRoom) -> bool:
        """Read what the source has beyond what it had; as `begin`.

        Raises:
            BlockTableMismatchError: its table does not continue the one before.
        """
        if room.context is None or room.table is None:
            raise WorkerError(f"request {room.request_id!r} pulls without a context or a table")
        last = room.token is not None
        start, stop = self._manager.extend_import(room.context, _pending(room), room.table, last=last).tokens
        return self._read(room, new=start < stop)

    def _read(self, room: DecodeRoom, *, new: bool) -> bool:
        pending, last = _pending(room), room.token is not None
        if last and not pending.needs_copy:
            return False
        if last or new:
            self._exchange.read(room.replica, room.key, pending, last=last)
        return True

    def commit(self, room: DecodeRoom) -> TextContext:
        """Every byte is here: the tokens count as cached. Gives the context, whose next token can run."""
        context = room.context
        if context is None:
            raise WorkerError(f"request {room.request_id!r} ends a pull without a context")
        self._manager.commit_import(context, _pending(room), self._proofs.pop(room.key, None))
        room.pending = room.context = None
        return context

    def cancel(self, room: DecodeRoom, reason: str) -> None:
        """Give the attempt's pull up, if it is open."""
        if room.key in self._open:
            self._exchange.cancel_pull(room.replica, room.key, reason)

    def release(self, room: DecodeRoom) -> None:
        """Give the attempt's row back now; the manager has its pages back when nothing writes to them."""
        pending, room.pending, room.context = room.pending, None, None
        if pending is not None:
            self._manager.release(room.request_id)
            self._manager.cancel_import(pending)

    def on_event(self, event: PullEvent, proof: ImportProof | None) -> DecodeRoom | None:
        """Book what became of a pull. The room, where it is of the attempt that its room is at, and no news else."""
        room = self._open[event.key]
        mine = room.key == event.key and room.phase in ("offered", "pulling")
        if event.safe:
            del self._open[event.key]
        if mine and not event.error:
            self.counts["pulled"] += len(_pending(room).dst_pages)
            if proof is not None:
                self._proofs[event.key] = proof
        return room if mine else None


def context_of(room: DecodeRoom) -> TextContext:
    """A context of all that is known of the request."""
    request = room.request
    limit = len(request.prompt) + request.max_new_tokens
    return TextContext(room.tokens, limit, request.request_id, request.cache_salt)


def _pending(room: DecodeRoom) -> PendingImport:
    if room.pending is None:
        raise WorkerError(f"request {room.request_id!r} has no pages to pull into")
    return room.pending
