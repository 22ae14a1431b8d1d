"""`recover`: repairs a manager's state after a call was interrupted in the middle of a change.

Rows, leases and imports are trusted. All other state of pages is computed from them: which pages have holders and
writers, which are idle or fresh, the links of the index, quotas, and copies between tiers. A page stays published if a
row counts it as committed. It also stays published if it has no holder, because pages are published only when their
content is complete.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

from kvcache.claims import Claims
from kvcache.replica.block_table import PendingImport
from kvcache.replica.context import Context, computed_of
from kvcache.replica.copier import ImportCopier
from kvcache.replica.leases import PageLease
from kvcache.replica.replica import Replica
from kvcache.replica.rows import Rows, as_rows
from kvcache.replicas import Replicas
from kvcache.steps_in_flight import StepInFlight
from kvcache.types import RequestID
from kvcache.under_way import UnderWay

_OF_A_REQUEST = {"external_claim", "release", "fork", "extend_import", "commit_import"}
"""If one of these calls was interrupted, its request is released, because the caller did not get the call's result."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """The result of `PagedKVCacheManager.recover`, and the state after it.

    The interrupted call has returned nothing. If the interrupt came while the call was returning, the manager cannot
    know that the result was lost. So the other fields list everything that is open. End every listed object that you do
    not recognise.
    """

    call: str | None
    """The call that was interrupted while it changed the state. None if there was none; then nothing was repaired."""
    released: tuple[RequestID, ...]
    """Requests that are no longer claimed, as after `release`."""
    claimed: tuple[RequestID, ...]
    """All requests that are claimed."""
    leases: tuple[PageLease, ...]
    """All leases that are open."""
    imports: tuple[PendingImport, ...]
    """All imports to whose pages a copier may still write."""
    copiers: tuple[ImportCopier, ...]
    """The copiers of these imports, except those that were never handed out or have ended."""
    steps: tuple[StepInFlight, ...]
    """All steps in flight, oldest first."""


def recover(replicas: Replicas, claims: Claims, mark: UnderWay) -> Recovered:
    """Repair the state if `mark` says that it may be half changed. See `PagedKVCacheManager.recover`."""
    if not mark.is_interrupted:
        mark.leaving.clear()
        return _report(replicas, claims, None, ())
    call, about = mark.call or ("", None)
    replicas.stop()
    claims.mend()
    _close_unknown(replicas, claims, mark, call, about)
    lost = replicas.mend(about)
    # All requests are recorded before the first one is released. So if this `recover` is interrupted, the next one
    # releases the remaining requests.
    mark.leaving += sorted({*lost, *_doubtful(claims, call, about)} - {*mark.leaving})
    for request_id in mark.leaving:
        if request_id in claims.places:
            claims.unclaim(request_id)
    if call == "reset_prefix_cache":
        replicas.forget()
    replicas.check()
    claims.check()
    report = _report(replicas, claims, call, tuple(mark.leaving))
    mark.context = None
    mark.end()
    mark.leaving.clear()
    return report


def _close_unknown(replicas: Replicas, claims: Claims, mark: UnderWay, call: str, about: object) -> None:
    """Close an import, or forget a copier, that the interrupted call has made.

    The caller has not received the import or the copier, and so cannot end it.
    """
    if call == "import_block_table" and (request_id := cast("RequestID", about)) in claims.places:
        replica, _, row = claims.locate(request_id, call)
        if (pending := replica.imports.of_row.get(row)) is not None:
            pending.closed = True
            mark.leaving.append(request_id)
    if call == "contents.import_pages":
        cast("PendingImport", about).closed = True
    if call == "copier":
        for replica in replicas.each:
            replica.imports.copiers.pop(cast("PendingImport", about), None)


def _doubtful(claims: Claims, call: str, about: object) -> Iterable[RequestID]:
    """Returns claimed requests that cannot continue, or whose claim the interrupted call did not report."""
    named: list[RequestID] = []
    if call in _OF_A_REQUEST:
        yield cast("RequestID", about)
    elif call in ("maybe_reserve", "import_block_table"):
        named = [cast("RequestID", about)]
    # A `step` has its rows in `about` only if some of its requests have drafted tokens.
    elif call == "reserve_batch" or (call == "step" and about is not None):
        named = claims.names_at(as_rows(cast("Rows", about)).tolist())
    for request_id, place in claims.places.items():
        replica, _, row = claims.locate(request_id, call)
        context = claims.context_at(place)
        if context is None:  # the context's `start_idx` may already be after cached pages that the request did not get
            if replica.rows.num_pages[row] or request_id in named:
                yield request_id
        elif request_id in named and not _goes_on(replica, row, context):
            yield request_id


def _goes_on(replica: Replica, row: int, context: Context) -> bool:
    try:
        return replica.goes_on(row, computed_of(context))
    except Exception:  # noqa: BLE001 - the caller's code, or a state that a transfer writes
        return False


def _report(replicas: Replicas, claims: Claims, call: str | None, released: tuple[RequestID, ...]) -> Recovered:
    return Recovered(
        call,
        released,
        tuple(claims.places),
        tuple(lease for replica in replicas.each for lease, _ in replica.leases.held()),
        tuple(pending for replica in replicas.each for pending in replica.imports.each),
        tuple(one for replica in replicas.each for one in replica.imports.copiers.values() if not one.is_over),
        tuple(replicas.steps.open),
    )
