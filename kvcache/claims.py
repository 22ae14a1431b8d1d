"""Which replica and row each claimed request has."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvcache.batch import Batch, Gathered, Ints
from kvcache.context import Context
from kvcache.errors import AlreadyClaimedError, InvalidRequestError, InvariantError, UnknownRequestError
from kvcache.replica import Replica
from kvcache.types import RequestID


def refuse_other_context(reserved: Context, context: Context, call: str) -> None:
    """Raise unless `context` is the very object that the request's pages were reserved with.

    Another object of the same request id may have other tokens: its digests would name pages that hold something else.

    Raises:
        InvalidRequestError: (a ValueError) it is another one.
    """
    if context is not reserved:
        raise InvalidRequestError(
            f"request {reserved.request_id!r}: {call} with another context object than its pages were reserved with"
        )


class Claims:
    """Request id → place; a place is a row of a replica: `replica × rows_per_replica + row`."""

    def __init__(self, replicas: Sequence[Replica], rows_per_replica: int, page_size: int) -> None:
        self._replicas = replicas
        self._rows_per_replica = rows_per_replica
        self._page_size = page_size
        self._releases = 0
        self.places: dict[RequestID, int] = {}

    def claim(self, request_id: RequestID, replica_idx: int | None) -> None:
        """Bind a row of the replica. Raises as `PagedKVCacheManager.external_claim`."""
        count = len(self._replicas)
        if request_id in self.places:
            _, holder, _ = self.locate(request_id, "external_claim")
            raise AlreadyClaimedError(f"request {request_id!r}: claimed on replica {holder} already")
        if replica_idx is None and count == 1:
            replica_idx = 0
        if replica_idx is None or not 0 <= replica_idx < count:
            raise InvalidRequestError(
                f"request {request_id!r}: replica_idx is {replica_idx}, one of the {count} replicas is needed"
            )
        row = self._replicas[replica_idx].rows.claim(request_id)
        self.places[request_id] = replica_idx * self._rows_per_replica + row

    def locate(self, request_id: RequestID, call: str) -> tuple[Replica, int, int]:
        """The request's replica, that replica's index, and its row.

        Raises:
            UnknownRequestError: (a KeyError) not claimed.
        """
        try:
            replica_idx, row = divmod(self.places[request_id], self._rows_per_replica)
        except KeyError:
            raise _unknown(request_id, call) from None
        return self._replicas[replica_idx], replica_idx, row

    def gather(self, batch: Sequence[Context], call: str) -> Gathered:
        """The requests of a call as arrays; a `Batch` is that already.

        Raises:
            UnknownRequestError: (a KeyError) one is not claimed.
            InvalidRequestError: (a ValueError) one is named twice.
        """
        if isinstance(batch, Batch):
            self._refuse_stale(batch, call)
            batch.refresh()
            return batch
        return Gathered(batch, *self._bind(batch, call), starts_only=call == "step")

    def batch(self, contexts: Sequence[Context]) -> Batch:
        """Raises as `gather`."""
        return Batch(contexts, *self._bind(contexts, "batch"), self._page_size)

    def release(self, request_id: RequestID) -> None:
        """Give back the request's row and pages. Raises as `PagedKVCacheManager.release`."""
        replica, _, row = self.locate(request_id, "release")
        replica.release(row)
        del self.places[request_id]
        self._releases += 1

    def check(self) -> None:
        """Raise `InvariantError` unless these are the rows that the replicas have bound."""
        rows = {
            request_id: replica_idx * self._rows_per_replica + row
            for replica_idx, replica in enumerate(self._replicas)
            for request_id, row in replica.rows.row_of.items()
        }
        if rows != self.places:
            odd = min(request_id for request_id, _ in rows.items() ^ self.places.items())
            raise InvariantError(
                f"request {odd!r}: claimed at place {self.places.get(odd)}, but the replicas have {rows.get(odd)}"
            )

    def _bind(self, batch: Sequence[Context], call: str) -> tuple[Ints, Ints]:
        places = self.places
        try:
            found = [places[context.request_id] for context in batch]
        except KeyError as error:
            raise _unknown(error.args[0], call) from None
        if len(set(found)) != len(found):
            twice = next(at for at, place in enumerate(found) if place in found[:at])
            raise InvalidRequestError(f"request {batch[twice].request_id!r}: named twice in one {call}")
        bound = np.fromiter(found, np.int64, len(found))
        if len(self._replicas) == 1:
            return np.zeros_like(bound), bound
        return bound // self._rows_per_replica, bound % self._rows_per_replica

    def _refuse_stale(self, batch: Batch, call: str) -> None:
        if batch.checked_at == self._releases:
            return
        wanted = batch.replicas * self._rows_per_replica + batch.rows
        for context, place in zip(batch, wanted.tolist(), strict=True):
            if self.places.get(context.request_id) != place:
                raise InvalidRequestError(
                    f"request {context.request_id!r}: {call} of a batch made before its release; make a new one"
                )
        batch.checked_at = self._releases


def _unknown(request_id: RequestID, call: str) -> UnknownRequestError:
    return UnknownRequestError(f"request {request_id!r}: {call} of a request that is not claimed (or was released)")
