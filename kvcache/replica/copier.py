"""The writer of an import's pages (`ImportCopier`), the proof of a copy (`ImportProof`), and the open imports.

`commit_import` publishes pages that hold another manager's content. Only the code that copied the pages knows whether
the copy is good: a READ may have failed, or the source may have given the pages to another request in the meantime.
Therefore each import has exactly one copier, and accepts the proof of this copier once.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from kvcache.errors import InvalidRequestError, InvariantError
from kvcache.pool.pages import PagePool
from kvcache.replica.block_table import BlockTable, PageCopy, PendingImport
from kvcache.replica.rows import BlockRows
from kvcache.uncopied import Uncopied
from kvcache.under_way import Call, UnderWay

_GIVE_UP = Call("give_up")
BEFORE_LAST = "came before the last block table of its prompt: call extend_import with last=True first"


@dataclass(frozen=True, eq=False, slots=True)
class ImportProof:
    """Proves that the pages of one import were copied while their source held them. Made by `ImportCopier.prove`.

    The proof can be used only once, only for this import, and only until the import is extended. A copy of the proof
    object is invalid.
    """

    request_id: str  # the id of the request whose import was copied
    num_tokens: int  # how many tokens of the prompt, counted from its first token, are in the copy


class ImportCopier(Uncopied):
    """Copies the pages of one import.

    Its user calls `take`, copies the returned pages, and repeats both as often as needed. At the end, the user calls
    `prove` if all copies succeeded, and otherwise `give_up`.

    Until `prove` or `give_up`, the pages are reserved for the copier: even after `cancel_import`, no other request gets
    any of these pages. The user of the copier is responsible for the copied bytes. For example, a pull that reads under
    a lease (`transfer.pull.exchange`) proves only the reads that passed its fence. A program that copies tensors within
    its own process proves its own copies.

    Made by `PagedKVCacheManager.copier`.
    """

    __slots__ = ("_ended", "_has_all", "_taken", "is_over", "pending", "proof", "tables")

    def __init__(self, pending: PendingImport, ended: Callable[[], None]) -> None:
        self.pending = pending
        self._ended = ended
        self._taken = pending.tokens[0]
        self._has_all = False
        self.is_over = False  # whether the copier has stopped writing
        self.proof: ImportProof | None = None
        # the block tables in which the source named the pages that the last `take` returned
        self.tables: tuple[BlockTable, ...] = ()

    def take(self, *, last: bool = True) -> list[PageCopy]:
        """Return the pages that can be copied now and that no earlier call has returned.

        There is one `PageCopy` for each group of layers. `last` says that this is the last call. A recurrent state
        covers all tokens of the request, so it is returned only by the last call. Raises `InvalidRequestError` if the
        import is closed, if this copier has ended, or if the last pages were already taken. Also raises it if `last` is
        set although `extend_import` must still bring the last table, which names the windows' pages and the state.
        """
        pending = self.pending
        if self.is_over or self._has_all or pending.closed:
            reason = "its import is closed" if pending.closed else "its copier has already taken the last ones"
            raise InvalidRequestError(
                f"request {pending.request_id!r}: there are no pages left to copy, because {reason}"
            )
        if last and pending.lacks_end:
            raise InvalidRequestError(f"request {pending.request_id!r}: take of the last pages {BEFORE_LAST}")
        copies = pending.take(last=last)
        self._taken, self._has_all = pending.tokens[1], last
        self.tables, pending.told = (*pending.told,), []
        return copies

    def from_others(self) -> list[tuple[BlockTable, list[PageCopy]]]:
        """Returns the copies that can be made from the managers whose block tables are in `PendingImport.others`.

        The result has each of these block tables, and the pages of the import that can be copied from its manager. A
        table may name only some of the pages that `take` returned.
        """
        return [(table, self.pending.copies_from(table)) for table in self.pending.others]

    def prove(self, num_tokens: int = 0) -> ImportProof:
        """Declare that every page taken was copied while its source held it. Returns the proof for `commit_import`.

        If `num_tokens` is given, only the tokens before token `num_tokens` were copied, and the import ends there.
        Raises `InvalidRequestError` if the import cannot end there, if this copier has ended, or if `take` was not yet
        called with `last`.
        """
        pending = self.pending
        if self.is_over or not self._has_all:
            reason = "has ended" if self.is_over else f"took tokens up to {self._taken}, but not yet the last ones"
            raise InvalidRequestError(f"request {pending.request_id!r}: the copier of its pages {reason}")
        if num_tokens:
            pending.shorten(num_tokens)
            self._taken = pending.tokens[1]
        self.proof = ImportProof(pending.request_id, self._taken)
        self.give_up()
        return self.proof

    def give_up(self) -> None:
        """Declare that this copier writes no more.

        If the import was cancelled, this frees its pages. Safe to call twice. If a call of the manager was interrupted,
        so that the manager needs `recover`, then `recover` frees the pages instead.
        """
        if not self.is_over:
            self._ended()


class ImportBook:
    """The imports of a replica. An import is listed until it is closed and no copier can write to its pages any more.

    `shares_ahead` is False if the replica has a single block table of full attention, and True otherwise. If it is
    True, an import may share cached pages from which the request could not resume by itself, because other pages are
    missing. If such an import is cancelled, the request must not run in the pages of the import. It would compute the
    tokens of the shared pages again, and overwrite pages that other requests read.
    """

    def __init__(self, pool: PagePool, rows: BlockRows, mark: UnderWay, *, shares_ahead: bool) -> None:
        self._mark = mark
        self._shares_ahead = shares_ahead
        # Rows of requests whose import was cancelled, if `shares_ahead` is True. Other requests may share the pages of
        # these rows. So each of these rows must give back its pages before its request runs.
        self.to_give_back: set[int] = set()
        # open imports, and cancelled imports to whose pages a copier may still write
        self.each: list[PendingImport] = []
        self.of_row: dict[int, PendingImport] = {}  # for each row, the pending import of its request
        # the copier of each import for which `make_copier` was called
        self.copiers: dict[PendingImport, ImportCopier] = {}
        # For each row whose import was cancelled, how many tokens of its request the metrics had counted at that time.
        # If the number is still the same, no model has run in the row's pages.
        self._given_up: dict[int, int] = {}
        self._pool = pool
        self._rows = rows

    def begin(self, pending: PendingImport, row: int | None = None) -> None:
        """Count the import's pages as being written from now on. `row` is None if no request waits for the import."""
        self._pool.add_writer(pending.written)
        if row is not None:
            self._rows.measure(row, usable=False)
            self.of_row[row] = pending
        self.each.append(pending)

    def refuse_taken(self, pending: PendingImport) -> None:
        """Raise `InvalidRequestError` if the copier of this import was already handed out."""
        if pending in self.copiers:
            raise InvalidRequestError(
                f"request {pending.request_id!r}: the copier of this import was already handed out; an import has one "
                "copier"
            )

    def make_copier(self, pending: PendingImport) -> ImportCopier:
        """Make the one copier that may write to the pages of an open import."""

        def ended() -> None:
            interrupted = self._mark.is_interrupted
            if not interrupted:
                self._mark.call = _GIVE_UP
            copier.is_over = True
            if not interrupted:
                if pending.closed and pending in self.copiers:
                    self._give_back(pending)
                self._mark.end()

        copier = self.copiers[pending] = ImportCopier(pending, ended)
        return copier

    @property
    def written_besides(self) -> list[int]:
        """The pages besides token pages to which transfers may write (`Kept`)."""
        return [int(page) for pending in self.each for part in pending.parts for page in part.besides]

    def make_private(self) -> None:
        """Let no import publish its pages that began before now. Called when the cache is reset."""
        for pending in self.each:
            pending.private = True

    def commit(self, pending: PendingImport) -> None:
        pending.closed = True
        self._free(pending, may_run=True)

    def cancel(self, pending: PendingImport) -> None:
        """Cancel the import.

        Until its copier has ended, its pages count as being written, and its request cannot run.
        """
        pending.closed = True
        row = self._rows.row_of.get(pending.request_id)
        if row is not None and self.of_row.get(row) is pending:
            self._given_up[row] = self._rows.counted.item(row)
        if not self._is_written(pending):
            self._give_back(pending)

    def is_given_up(self, row: int) -> bool:
        """Whether the row has only pages of a cancelled import, and no model has written to these pages."""
        return row not in self.of_row and self._given_up.get(row) == self._rows.counted.item(row)

    def leave(self, row: int) -> None:
        """Forget a released row."""
        self.of_row.pop(row, None)
        self._given_up.pop(row, None)
        self.to_give_back.discard(row)

    def refuse_unknown(self, pending: PendingImport) -> None:
        """Raise `InvalidRequestError` if `pending` is a copy of an open import instead of the object itself."""
        if not pending.closed and not any(one is pending for one in self.each):
            raise InvalidRequestError(
                f"request {pending.request_id!r}: got a copy of the import; pass the object that "
                "import_block_table returned"
            )

    def leave_all(self) -> None:
        """Forget all rows after an interrupt, and drop each closed import to whose pages no copier can write."""
        self.each[:] = [pending for pending in self.each if not pending.closed or self._is_written(pending)]
        for pending in self.copiers.keys() - {*self.each}:
            del self.copiers[pending]
        for of_rows in (self.of_row, self._given_up, self.to_give_back):
            of_rows.clear()

    def cancel_all_but(self, known: Collection[PendingImport]) -> None:
        """Cancel each open import that is not among `known`."""
        for pending in [*self.each]:
            if not (pending.closed or pending in known):
                self.cancel(pending)

    def _is_written(self, pending: PendingImport) -> bool:
        """Whether a copier may still write to the import's pages."""
        copier = self.copiers.get(pending)
        return copier is not None and not copier.is_over

    def check(self) -> None:
        for pending in self.each:
            if pending.closed and not self._is_written(pending):
                raise InvariantError(f"request {pending.request_id!r}: its import is closed, but still has its pages")
        for row in self.to_give_back:
            if self._rows.request_ids[row] is None or self._rows.capacity.item(row) >= 0:
                raise InvariantError(
                    f"row {row} may run in the pages of a cancelled import, which other requests may share"
                )
        for row, pending in self.of_row.items():
            if pending not in self.each or self._rows.request_ids[row] != pending.request_id:
                raise InvariantError(f"row {row} waits for an import of {pending.request_id!r} that is not its own")

    def _give_back(self, pending: PendingImport) -> None:
        self._free(pending, may_run=not self._shares_ahead)
        pending.on_free()

    def _free(self, pending: PendingImport, *, may_run: bool) -> None:
        """Forget the import. `may_run` says whether its request may run in the pages of the import."""
        self.each.remove(pending)
        self.copiers.pop(pending, None)
        row = self._rows.row_of.get(pending.request_id)
        if row is not None and self.of_row.get(row) is pending:
            del self.of_row[row]
            if may_run:
                self._rows.measure(row)
            else:
                self.to_give_back.add(row)
        self._pool.drop_writer(pending.written)
