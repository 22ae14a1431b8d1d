"""Which replica and row each claimed request has."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvcache.batch import Batch
from kvcache.context import Context
from kvcache.errors import AlreadyClaimedError, InvalidRequestError, InvariantError, UnknownRequestError
from kvcache.replica import Replica
from kvcache.types import RequestID

Bound = tuple[NDArray[np.int64], NDArray[np.int64]]


class Claims:
    """Request id → (replica, row), over all replicas."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        self._where: dict[RequestID, tuple[int, int]] = {}

    def __contains__(self, request_id: RequestID) -> bool:
        return request_id in self._where

    def claim(self, request_id: RequestID, replica_idx: int | None) -> None:
        """Bind a row of the replica. Raises as `PagedKVCacheManager.external_claim`."""
        if request_id in self._where:
            raise AlreadyClaimedError(
                f"request {request_id!r}: claimed on replica {self._where[request_id][0]} already"
            )
        count = len(self._replicas)
        if replica_idx is None and count == 1:
            replica_idx = 0
        if replica_idx is None or not 0 <= replica_idx < count:
            raise InvalidRequestError(
                f"request {request_id!r}: replica_idx is {replica_idx}, one of the {count} replicas is needed"
            )
        self._where[request_id] = (replica_idx, self._replicas[replica_idx].rows.claim(request_id))

    def locate(self, request_id: RequestID, call: str) -> tuple[Replica, int, int]:
        """The request's replica, that replica's index, and its row.

        Raises:
            UnknownRequestError: (a KeyError) not claimed.
        """
        replica_idx, row = self._place(request_id, call)
        return self._replicas[replica_idx], replica_idx, row

    def bind(self, batch: Sequence[Context], call: str) -> Bound:
        """Replica and row of each request: int64 `[len(batch)]` each.

        Raises:
            UnknownRequestError: (a KeyError) one is not claimed.
            InvalidRequestError: (a ValueError) one is named twice.
        """
        if isinstance(batch, Batch):
            self._refuse_stale(batch, call)
            return batch.replicas, batch.rows
        found = [self._place(context.request_id, call) for context in batch]
        if len(set(found)) != len(found):
            twice = next(at for at, where in enumerate(found) if where in found[:at])
            raise InvalidRequestError(f"request {batch[twice].request_id!r}: named twice in one {call}")
        bound = np.array(found, np.int64).reshape(-1, 2)
        return bound[:, 0], bound[:, 1]

    def each(self, batch: Sequence[Context], call: str) -> list[tuple[int, int, Context]]:
        """Replica, row and context of each request. Raises as `bind`."""
        replicas, rows = self.bind(batch, call)
        return list(zip(replicas.tolist(), rows.tolist(), batch, strict=True))

    def release(self, request_id: RequestID) -> None:
        """Give back the request's row and pages. Raises as `PagedKVCacheManager.release`."""
        replica_idx, row = self._place(request_id, "release")
        self._replicas[replica_idx].release(row)
        del self._where[request_id]

    def check(self) -> None:
        """Raise `InvariantError` unless these are the rows that the replicas have bound."""
        rows = {
            request_id: (replica_idx, row)
            for replica_idx, replica in enumerate(self._replicas)
            for request_id, row in replica.rows.row_of.items()
        }
        if rows != self._where:
            odd = min(request_id for request_id, _ in rows.items() ^ self._where.items())
            raise InvariantError(
                f"request {odd!r}: claimed at {self._where.get(odd)}, but the replicas have {rows.get(odd)}"
            )

    def _place(self, request_id: RequestID, call: str) -> tuple[int, int]:
        try:
            return self._where[request_id]
        except KeyError:
            raise UnknownRequestError(
                f"request {request_id!r}: {call} of a request that is not claimed (or was released)"
            ) from None

    def _refuse_stale(self, batch: Batch, call: str) -> None:
        for context, replica_idx, row in zip(batch, batch.replicas.tolist(), batch.rows.tolist(), strict=True):
            if self._place(context.request_id, call) != (replica_idx, row):
                raise InvalidRequestError(
                    f"request {context.request_id!r}: claimed anew since the batch was made; make a new one"
                )
