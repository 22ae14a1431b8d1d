"""What a manager has for both ends of a transfer: leases of its pages, and who may copy into an import's."""

from __future__ import annotations

from kvcache.claims import Claims
from kvcache.replica.context import Context
from kvcache.replica.copier import ImportCopier, ImportProof
from kvcache.replica.imports import finish_import, open_import, own_import
from kvcache.replica.leases import PageLease, books_of
from kvcache.replica.pending import PendingImport
from kvcache.replicas import Replicas
from kvcache.types import RequestID


class PageHandover:
    """Leases and imports of a manager, over all its replicas."""

    _replicas: Replicas
    _claims: Claims

    def lease(self, request_id: RequestID) -> PageLease:
        """Hold what a claimed request computes, until `end_lease`; also what it will compute while it stays claimed.

        While the request is claimed this changes nothing. When it is released, for whatever reason, its row is free,
        but its pages stay as they are for as long as one of its leases is open. They stay findable by their prefix.

        Raises:
            UnknownRequestError: (a KeyError) not claimed.
            NotReservedError: (a RuntimeError) an import of its pages is pending.
        """
        replica, replica_idx, row = self._claims.locate(request_id, "lease")
        replica.refuse_pending(row, "lease")
        return replica.leases.grant(request_id, replica_idx, row)

    def end_lease(self, lease: PageLease) -> None:
        """Nobody reads under the lease any more: pages that nobody else holds are free. Safe twice.

        Whoever tells readers that the lease stands (a lease word) has told them otherwise before.

        Raises:
            InvalidRequestError: (a ValueError) no lease of this manager.
        """
        books_of(lease, [replica.leases for replica in self._replicas.each]).end(lease)

    def copier(self, pending: PendingImport) -> ImportCopier:
        """The right to copy into an open import's pages, and to prove that it was done: handed out once.

        Raises:
            InvalidRequestError: (a ValueError) the import is closed or another manager's, or its copier was handed out.
        """
        return open_import(self._replicas.each, pending, "copier").imports.make_copier(pending)

    def commit_import(self, context: Context, pending: PendingImport, proof: ImportProof | None = None) -> None:
        """Every page has been copied, as `proof` says: the tokens count as cached, the full pages are published.

        The proof is what the import's copier gives: with the event of a pull that passed, where an endpoint reads. None
        where nothing was to be copied (`pending.needs_copy`).

        Raises:
            UnknownRequestError: (a KeyError) released meanwhile: `cancel_import`.
            InvalidRequestError: (a ValueError) the import is closed, another request's or another manager's; no proof,
                or one of another import, or of fewer tokens than the table covers; another context object.
        """
        own_import(self._replicas.each, pending, "commit_import")
        replica, _, _ = self._claims.own(context, "commit_import")
        finish_import(replica, context, pending, proof)

    def cancel_import(self, pending: PendingImport) -> None:
        """The import is given up. Safe twice.

        Its pages are handed out to nobody, and its request cannot run, while its copier may still write to them. Where
        they are written by somebody who has not taken the copier, this call says that nothing writes any more.

        Raises:
            InvalidRequestError: (a ValueError) another manager's import.
        """
        replica = own_import(self._replicas.each, pending, "cancel_import")
        if not pending.closed:
            replica.imports.cancel(pending)
