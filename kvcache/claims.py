"""Keeps the replica and row of each claimed request."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from operator import is_
from typing import cast

import numpy as np

from kvcache.arguments import check_request_id, integer, shown
from kvcache.errors import AlreadyClaimedError, InvalidRequestError, InvariantError, UnknownRequestError
from kvcache.replica.batch import Batch, Gathered
from kvcache.replica.context import Context, ReadContext, TextContext, check_context, read_context
from kvcache.replica.replica import Replica
from kvcache.replica.rows import NEVER, AllRows, Rows, as_rows
from kvcache.steps_in_flight import StepInFlight
from kvcache.types import RequestID


class Claims:
    """Maps request ids to places. A place numbers the rows of all replicas: `replica × rows_per_replica + row`.

    When a place gets its first pages, it is bound to the context for which they were reserved. From then on, another
    context object with the same request id is refused: its tokens could differ, and would be published as the content
    of these pages. A serving loop that builds new contexts for a running request has two options. It can release the
    request and claim it again. Or it can always pass one object, which reads from the newest context.

    The methods raise the errors that are documented at the `PagedKVCacheManager` methods that call them.
    """

    def __init__(self, replicas: Sequence[Replica], rows: AllRows, steps: Sequence[StepInFlight]) -> None:
        self._replicas = replicas
        self._rows = rows
        self._steps = steps  # the steps in flight
        self._rows_per_replica = len(replicas[0].rows.request_ids)
        self._releases = 0
        self.places: dict[RequestID, int] = {}
        # The place of each bound context. If the class of the context compares and hashes by identity, the key is the
        # context itself, which is thereby kept alive. Otherwise the key is a tuple with the context's `id`.
        self.bound: dict[object, int] = {}
        self._contexts: dict[int, Context] = {}  # by place
        # The requests of the last list, and `_releases` at that time. Loops often pass the same contexts again, and
        # comparing two lists object by object takes a fraction of the time of one lookup an object.
        self._listed: tuple[Gathered, int] | None = None
        # By place, the list of the request there alone. It has no context from the request's release to the next list.
        self._alone: dict[int | None, Gathered] = {}

    def free_at(self, request_id: RequestID, replica_idx: int | None) -> int:
        """Returns the index of the replica on which to claim a new request. Raises if that replica has no free row.

        Changes nothing.
        """
        count = len(self._replicas)
        check_request_id(request_id, "external_claim")
        if request_id in self.places:
            _, holder, _ = self.locate(request_id, "external_claim")
            raise AlreadyClaimedError(f"request {request_id!r}: is already claimed on replica {holder}")
        chosen = 0 if replica_idx is None and count == 1 else integer(replica_idx)
        if chosen is None or not 0 <= chosen < count:
            raise InvalidRequestError(
                f"request {request_id!r}: replica_idx is {shown(replica_idx)}: 0 to {count - 1} is needed"
            )
        self._replicas[chosen].check_free(request_id)
        return chosen

    def claim(self, request_id: RequestID, replica_idx: int, row: int | None = None) -> int:
        """Bind a free row of the replica to the request, and return the row. `row`, if given, must be free.

        `free_at` must have returned the replica.
        """
        row = self._replicas[replica_idx].claim(request_id, row)
        self.places[request_id] = replica_idx * self._rows_per_replica + row
        return row

    def locate(self, request_id: RequestID, call: str) -> tuple[Replica, int, int]:
        """Returns the request's replica, that replica's index, and the request's row."""
        return self._at(self._place(request_id, call))

    def own(self, context: Context, call: str) -> tuple[Replica, int, int]:
        """Do the same as `locate`, for a call that reads or changes the context.

        Raises if another context is bound to the row.
        """
        place = self.bound.get(context if type(context) is TextContext else _key(context))
        if place is None:
            place = self._unbound(context, call)
        replica_idx, row = divmod(place, self._rows_per_replica)
        return self._replicas[replica_idx], replica_idx, row

    def bind(self, context: Context, replica_idx: int, row: int) -> None:
        """Bind the row to the context for which its pages were reserved."""
        place = replica_idx * self._rows_per_replica + row
        if place not in self._contexts:
            self._contexts[place] = context
            self.bound[context if type(context) is TextContext else _key(context)] = place

    def gather(self, batch: Sequence[Context], call: str) -> Gathered:
        """Returns the requests of a call as arrays. If `batch` is a `Batch`, refreshes `batch` and returns it."""
        kind: type = type(batch)  # checked exactly, because a subclass could return another item at each access
        last = self._listed
        # The objects are compared, because the `__eq__` of a caller's subclass may call other requests equal.
        if (
            kind is list
            and last is not None
            and last[1] == self._releases
            and len(contexts := last[0].contexts) == len(batch)
            and (contexts[0] is batch[0] if len(batch) == 1 else all(map(is_, contexts, batch)))
        ):
            gathered = last[0]
        elif kind is not list and isinstance(batch, Batch):
            if batch.checked_at != self._releases or batch.unbound or batch.owner is not self:
                self._refuse_stale(batch, call)
            gathered = batch
        # Making a `Gathered` takes a tenth of the first `fetch` of a request, so the requests of a row share one.
        elif (
            kind is list
            and len(batch) == 1
            and type(batch[0]) is TextContext
            and (one := self._alone.get(self.bound.get(batch[0]))) is not None
        ):
            one.contexts = (batch[0],)
            self._listed, gathered = (one, self._releases), one
        else:
            contexts, places, unbound = self._bind(batch, call)
            gathered = Gathered(tuple(contexts), places, self._rows, unbound=unbound)
            if not unbound:
                self._listed = gathered, self._releases
                if len(contexts) == 1:
                    self._alone[as_rows(places).item()] = gathered
        is_step = call == "step"
        gathered.refresh(is_step)
        if is_step and self._steps and not (gathered.is_counted or gathered is batch):
            gathered.read_computed()
        return gathered

    def batch(self, contexts: Sequence[Context]) -> Batch:
        """Look up the requests of a `Batch` once."""
        listed, places, unbound = self._bind(contexts, "batch")
        return Batch(tuple(listed), places, self._rows, self, unbound=unbound)

    def leaving(self, request_id: RequestID) -> tuple[int, TextContext | ReadContext | None]:
        """Returns the place of a request that is about to be released, and its context, whose hints `release` reads."""
        place = self._place(request_id, "release")
        context = self._contexts.get(place)
        try:
            return place, context if context is None or type(context) is TextContext else read_context(context)
        except Exception:  # noqa: BLE001 - the caller's code: a release must not fail because of a context
            return place, None

    def release(self, request_id: RequestID, place: int, context: TextContext | ReadContext | None) -> None:
        """Free the request's row and pages. `place` and `context` are the results of `leaving`.

        Nothing of the request is cached for its context any more. So all its known tokens become active, whatever chunk
        was chosen before.
        """
        if context is not None:
            context.reset()
        self._free(request_id, place, context)

    def _free(self, request_id: RequestID, place: int, context: TextContext | ReadContext | None) -> None:
        replica_idx, row = divmod(place, self._rows_per_replica)
        self._replicas[replica_idx].release(row, context)
        del self.places[request_id]
        if (bound := self._contexts.pop(place, None)) is not None:
            del self.bound[bound if type(bound) is TextContext else _key(bound)]
            if place in self._alone:
                self._alone[place].contexts = ()
        self._releases += 1

    def claim_anew(self, request_id: RequestID, replica_idx: int) -> int:
        """Free the pages of a request, and claim the request again. Returns its row, which stays the same.

        Leases of the request keep the pages that they hold. They are not leases of the new claim.
        """
        # a copy of a state to the device may hold the state page that the new claim needs
        self._replicas[replica_idx].kept.finish_loads()
        place, context = self.leaving(request_id)
        if context is not None:
            context.leave()  # a batch that it follows has hashers of its pages of before
        self._free(request_id, place, context)
        return self.claim(request_id, replica_idx, place % self._rows_per_replica)

    def look_again(self) -> None:
        """Let every batch look at its requests again, because some of them must do something else next."""
        self._releases += 1

    def clear(self) -> None:
        """Forget every request after an interrupt, when the rows are free. As in `release`, contexts start anew."""
        for context in self._contexts.values():
            with suppress(Exception):  # the caller's code
                read_context(context).reset()
        self._listed = None
        self._alone.clear()
        self.places.clear()
        self._contexts.clear()
        self.bound.clear()
        self._releases += 1

    def context_at(self, place: int) -> Context | None:
        """Returns the context to which the row at `place` is bound. Returns None if the row is not bound."""
        return self._contexts.get(place)

    def check(self) -> None:
        """Raise `InvariantError` unless `places` agrees with the replicas' rows, and `bound` with their contexts."""
        rows = {
            request_id: replica_idx * self._rows_per_replica + row
            for replica_idx, replica in enumerate(self._replicas)
            for request_id, row in replica.rows.row_of.items()
        }
        if rows != self.places:
            odd = min(request_id for request_id, _ in rows.items() ^ self.places.items())
            raise InvariantError(
                f"request {odd!r}: is claimed at place {self.places.get(odd)}, but at {rows.get(odd)} in the replicas"
            )
        if {_key(context): place for place, context in self._contexts.items()} != self.bound:
            raise InvariantError(
                f"{len(self.bound)} contexts are bound, but {len(self._contexts)} other contexts are kept alive"
            )
        for place in (self._rows.starts < NEVER).nonzero()[0].tolist():
            context, start = self._contexts.get(place), self._rows.start_of[place]
            if not isinstance(context, TextContext) or context.indices != (start, start + 1, start + 1):
                raise InvariantError(f"place {place}: start {start} is counted for {context!r}")
        with_pages = {place for place in rows.values() if self._at(place)[0].rows.num_pages[self._at(place)[2]]}
        for place in with_pages ^ self._contexts.keys():
            raise InvariantError(f"place {place}: its row must have both pages and a bound context, or neither")

    def _place(self, request_id: RequestID, call: str) -> int:
        try:
            return self.places[request_id]
        except (KeyError, TypeError):  # TypeError: an id that is not a string may not be hashable
            raise UnknownRequestError(
                f"request {shown(request_id)}: {call}: the request was never claimed, or was released"
            ) from None

    def _at(self, place: int) -> tuple[Replica, int, int]:
        replica_idx, row = divmod(place, self._rows_per_replica)
        return self._replicas[replica_idx], replica_idx, row

    def _unbound(self, context: Context, call: str) -> int:
        """Returns the place of an unbound context. Raises if another context is bound to the request's place."""
        if type(context) is not TextContext:  # a `TextContext` has checked its own fields
            check_context(context, call)
        place = self._place(context.request_id, call)
        if place in self._contexts:
            raise InvalidRequestError(
                f"request {context.request_id!r}: {call} got another context object than the one that its pages were "
                "reserved for: pass that object, or release the request and claim it again"
            )
        return place

    def _bind(self, batch: Sequence[Context], call: str) -> tuple[Sequence[Context], Rows, bool]:
        """Returns the contexts of a call, and their places.

        The last item of the result says whether some of the contexts are not bound to a row yet.
        """
        # checked exactly, because a subclass could return another item at each access
        is_listed = type(batch) in (list, tuple)
        contexts = batch if is_listed else _listed(batch, call)
        bound, unbound = self.bound, False
        try:
            found = [*map(bound.__getitem__, contexts)]
        except (KeyError, TypeError):  # TypeError: a context is not hashable
            at = [bound.get(_key(context)) for context in contexts]
            unbound = None in at
            found = [
                self._unbound(context, call) if place is None else place
                for context, place in zip(contexts, at, strict=True)
            ]
        first, count = (found[0], len(found)) if found else (0, 0)
        if count <= 1 or found == [*range(first, first + count)]:
            return contexts, slice(first, first + count), unbound
        if len(set(found)) != len(found):
            twice = next(at for at, place in enumerate(found) if place in found[:at])
            raise InvalidRequestError(f"request {contexts[twice].request_id!r}: is named twice in one {call}")
        return contexts, np.fromiter(found, np.int64, count), unbound

    def _refuse_stale(self, batch: Batch, call: str) -> None:
        if batch.owner is not self:
            raise InvalidRequestError(f"{call}: another manager made this batch of {len(batch)} requests")
        unbound = False
        for context, place in zip(batch, as_rows(batch.places).tolist(), strict=True):
            at = self.bound.get(_key(context))
            if at is None:
                if context.request_id in self.places:
                    at = self._unbound(context, call)
                unbound = True
            if at != place:
                raise InvalidRequestError(
                    f"request {context.request_id!r}: {call}: it was released after the batch was made; make a new "
                    "batch"
                )
        batch.found_right(self._releases, unbound=unbound)


def _key(context: object) -> object:
    kind = type(context)
    if kind is TextContext:
        return context
    by_identity = kind.__hash__ is object.__hash__ and kind.__eq__ is object.__eq__
    return context if by_identity else (id(context),)


def _listed(batch: object, call: str) -> list[Context]:
    try:
        return list(cast("Iterable[Context]", batch))
    except TypeError:
        raise InvalidRequestError(f"{call} got {shown(batch)}: a sequence of request contexts is needed") from None
