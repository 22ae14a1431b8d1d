"""`ImportBook`: the imports of one replica that have not given their pages back, and who writes to each."""

from kvcache.errors import InvalidRequestError, InvariantError
from kvcache.pool.pages import PagePool
from kvcache.replica.block_table import PendingImport
from kvcache.replica.copier import ImportCopier
from kvcache.replica.rows import BlockRows


class ImportBook:
    """Imports from their beginning until nobody writes to their pages any more."""

    def __init__(self, pool: PagePool, rows: BlockRows) -> None:
        self.each: list[PendingImport] = []  # also those cancelled while their copier may still write
        self.of_row: dict[int, PendingImport] = {}  # of each claimed row that waits for one, and cannot run
        self.copiers: dict[PendingImport, ImportCopier] = {}  # those handed out
        self._pool = pool
        self._rows = rows

    def begin(self, row: int, pending: PendingImport) -> None:
        self._pool.add_writer(pending.dst_pages)
        self._rows.measure(row, usable=False)
        self.of_row[row] = pending
        self.each.append(pending)

    def make_copier(self, pending: PendingImport) -> ImportCopier:
        """Who writes to the pages of an open import. Raises `InvalidRequestError` where somebody does already."""
        if pending in self.copiers:
            raise InvalidRequestError(f"request {pending.request_id!r}: the copier of its import was handed out before")

        def ended() -> None:
            if pending.closed and pending in self.copiers:
                self._give_back(pending)

        copier = self.copiers[pending] = ImportCopier(pending, ended)
        return copier

    def commit(self, pending: PendingImport) -> None:
        """Every byte is there: the pages are the request's alone."""
        pending.closed = True
        self._free(pending)

    def cancel(self, pending: PendingImport) -> None:
        """The import is given up. Its pages have a writer, and its request cannot run, until its copier has ended."""
        pending.closed = True
        copier = self.copiers.get(pending)
        if copier is None or copier.is_over:
            self._give_back(pending)

    def check(self) -> None:
        """Raise `InvariantError` unless each import can still give its pages back, and rows name no other one."""
        for pending in self.each:
            copier = self.copiers.get(pending)
            if pending.closed and (copier is None or copier.is_over):
                raise InvariantError(f"request {pending.request_id!r}: its import is closed, but still has its pages")
        for row, pending in self.of_row.items():
            if pending not in self.each or self._rows.request_ids[row] != pending.request_id:
                raise InvariantError(f"row {row} waits for an import of {pending.request_id!r} that is not its own")

    def _give_back(self, pending: PendingImport) -> None:
        self._free(pending)
        if pending.on_free is not None:
            pending.on_free()

    def _free(self, pending: PendingImport) -> None:
        self.each.remove(pending)
        self.copiers.pop(pending, None)
        row = self._rows.row_of.get(pending.request_id)
        if row is not None and self.of_row.get(row) is pending:
            del self.of_row[row]
            self._rows.measure(row)
        self._pool.drop_writer(pending.dst_pages)
